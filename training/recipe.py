"""Settings in a file: a recipe, or a run's `config.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.cli import as_flags, parse_flags
from runtime.errors import UserError
from runtime.files import read_json
from training.config import TrainConfig


def config_from_settings(settings: Mapping[str, Any], source: Path) -> TrainConfig:
    """Return the configuration whose `saved()` is `settings`; missing fields get their defaults."""
    try:
        return parse_flags(TrainConfig, as_flags(settings))
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


def read_recipe(path: Path) -> TrainConfig:
    """Return the configuration in a recipe or in a run's `config.json`, for a new run.

    A recipe's `about` describes the recipe and is not a setting.
    """
    if not path.is_file():
        fix = "use a recipe from recipes/ or a run's config.json"
        raise UserError(f"--config {path} is not a file: {fix}")
    if not isinstance(settings := read_json(path), dict):
        raise UserError(f"--config {path} is neither a recipe nor a run's config.json")
    settings.pop("about", None)
    return config_from_settings(settings, path)
