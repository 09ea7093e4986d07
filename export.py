"""A trained model for everyone: `python export.py --model runs/NAME --out exported/NAME`."""

from dataclasses import dataclass
from pathlib import Path

from formats.huggingface import export_folder, save_pretrained
from formats.load import find_checkpoint, is_hugging_face, load_model
from formats.model_card import write_model_card
from runtime.cli import parse_flags, run_command


@dataclass(frozen=True)
class ExportConfig:
    """Write a model as a folder in Hugging Face's format."""

    model: str
    """A run folder, a checkpoint, a folder in Hugging Face's format, or a GPT-2 on the hub."""
    out: Path
    """The folder to write; an earlier export there is written over, other files stay."""
    license: str | None = None
    """Of the card: an id that the hub knows, such as mit."""


def main() -> None:
    """Write a model in Hugging Face's format, with a card."""
    config = parse_flags(ExportConfig)
    checkpoint = None
    if not is_hugging_face(config.model):  # once: a trainer may be about to save another
        checkpoint = find_checkpoint(Path(config.model))
    model = load_model(checkpoint or config.model)
    with export_folder(config.out) as folder:
        n_params = save_pretrained(model, folder)
        write_model_card(folder, config.out, model.config, n_params, checkpoint, config.license)
    print(f"exported {n_params:,} parameters to {config.out}; load it with")
    print(f'  transformers.pipeline("text-generation", "{config.out.as_posix()}")')


if __name__ == "__main__":
    run_command(main)
