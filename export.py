"""Export a model for other tools: `python export.py --model runs/NAME --out exported/NAME`."""

from dataclasses import dataclass
from pathlib import Path

from formats.huggingface import EXPORTED_BY, HF_CONFIG_NAME, save_pretrained
from formats.load import find_checkpoint, is_hugging_face, load_model
from formats.model_card import MARK, model_card
from runtime.cli import parse_flags, run_command
from runtime.files import read_json, write_folder

CARD_NAME = "README.md"


@dataclass(frozen=True)
class ExportConfig:
    """Export a model to a folder in Hugging Face format."""

    model: str
    """Model: a run folder, a checkpoint, a folder in Hugging Face format, or a GPT-2 on the hub."""
    out: Path
    """Folder to write: new, empty, or an earlier export, which is replaced."""
    license: str | None = None
    """License for the model card, as a hub license id such as mit."""


def main() -> None:
    """Export the model with a model card, and print how to load it."""
    config = parse_flags(ExportConfig)
    checkpoint = None
    if not is_hugging_face(config.model):  # only once: a run may save another meanwhile
        checkpoint = find_checkpoint(Path(config.model))
    model = load_model(checkpoint or config.model)
    with write_folder(config.out) as folder:
        n_params = save_pretrained(model, folder)
        name = config.out.resolve().name
        card = model_card(name, model.config, n_params, checkpoint, config.license)
        (folder / CARD_NAME).write_text(card, encoding="utf-8")
        check_replaceable(config.out, folder)
    print(f"exported {n_params:,} parameters to {config.out}; load the model with")
    print(f'  transformers.pipeline("text-generation", "{config.out.as_posix()}")')


def check_replaceable(out: Path, new: Path) -> None:
    """Raise unless `out` is missing, empty, or an earlier export without files that `new` lacks."""
    names = sorted(path.name for path in out.iterdir()) if out.exists() else []
    others = [name for name in names if not (new / name).exists()]
    config, card = out / HF_CONFIG_NAME, out / CARD_NAME
    values = read_json(config) if config.exists() else {}
    # When transformers saves a fine-tuned export, it keeps `exported_by` and adds its version.
    if values.get("exported_by") != EXPORTED_BY or "transformers_version" in values:
        others += [HF_CONFIG_NAME] if config.exists() else names
    if card.exists() and MARK not in card.read_text(encoding="utf-8", errors="replace"):
        others.append(CARD_NAME)
    if others:
        raise ValueError(
            f"{out} has {others[0]}, which is not from an export: choose another with --out"
        )


if __name__ == "__main__":
    run_command(main)
