"""Export a model for other tools: `python export.py --model runs/NAME --out exported/NAME`."""

from dataclasses import dataclass
from pathlib import Path

from formats.huggingface import export_folder, save_pretrained
from formats.load import find_checkpoint, is_hugging_face, load_model
from formats.model_card import write_model_card
from runtime.cli import parse_flags, run_command


@dataclass(frozen=True)
class ExportConfig:
    """Export a model to a folder in Hugging Face format."""

    model: str
    """Model: a run folder, a checkpoint, a folder in Hugging Face format, or a GPT-2 on the hub."""
    out: Path
    """Folder to write: an earlier export is overwritten, other files are kept."""
    license: str | None = None
    """License for the model card, as a hub license id such as mit."""


def main() -> None:
    """Export the model with a model card, and print how to load it."""
    config = parse_flags(ExportConfig)
    checkpoint = None
    if not is_hugging_face(config.model):  # only once: a run may save another meanwhile
        checkpoint = find_checkpoint(Path(config.model))
    model = load_model(checkpoint or config.model)
    with export_folder(config.out) as folder:
        n_params = save_pretrained(model, folder)
        write_model_card(folder, config.out, model.config, n_params, checkpoint, config.license)
    print(f"exported {n_params:,} parameters to {config.out}; load the model with")
    print(f'  transformers.pipeline("text-generation", "{config.out.as_posix()}")')


if __name__ == "__main__":
    run_command(main)
