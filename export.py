"""A trained model for everyone: `python export.py --model runs/NAME --out exported/NAME`.

With `--push-to-hub OWNER/NAME`, the folder goes to the Hugging Face hub, too.
"""

from dataclasses import dataclass
from pathlib import Path

from runtime.checkpoint import find_checkpoint, is_hugging_face, load_model
from runtime.cli import parse_flags, run_command
from runtime.hub import check_repo_name, push_folder
from runtime.huggingface import export_folder, save_pretrained
from runtime.model_card import write_model_card


@dataclass(frozen=True)
class ExportConfig:
    """Write a model as a folder in Hugging Face's format."""

    model: str
    """A run folder, a checkpoint, a folder in Hugging Face's format, or a GPT-2 on the hub."""
    out: Path
    """The folder to write; an earlier export there is written over."""
    push_to_hub: str | None = None
    """OWNER/NAME of a hub model: upload the folder; a new repository is private."""
    license: str | None = None
    """Of the card: an id that the hub knows, such as mit."""

    def __post_init__(self) -> None:
        if self.push_to_hub is not None:
            check_repo_name("--push-to-hub", self.push_to_hub)


def main() -> None:
    """Write a model in Hugging Face's format, with a card."""
    config = parse_flags(ExportConfig)
    checkpoint = None
    if not is_hugging_face(config.model):  # once: a trainer may be about to save another
        checkpoint = find_checkpoint(Path(config.model))
    model = load_model(checkpoint or config.model)
    name = config.push_to_hub or config.out.resolve().name
    with export_folder(config.out) as folder:
        n_params = save_pretrained(model, folder)
        write_model_card(folder, name, model.config, checkpoint, config.license)
    print(f"exported {n_params:,} parameters to {config.out}; load it with")
    print(f'  transformers.pipeline("text-generation", "{config.out.as_posix()}")')
    if config.push_to_hub is not None:
        print(f"uploaded to {push_folder(config.out, config.push_to_hub, 'model')}")


if __name__ == "__main__":
    run_command(main)
