"""Export a model for other tools: `python export.py --model runs/NAME --out exported/NAME`."""

from dataclasses import dataclass
from pathlib import Path

from formats.huggingface import save_pretrained
from formats.load import find_checkpoint, is_hugging_face, load_model
from formats.model_card import model_card
from runtime.cli import PathOrName, parse_flags, run_command
from runtime.files import write_folder


@dataclass(frozen=True)
class ExportConfig:
    """Export a model to a folder in Hugging Face format."""

    model: PathOrName
    """Model: a run folder, a checkpoint, a folder in Hugging Face format, or a GPT-2 on the hub."""
    out: Path
    """Folder to write, which must be new or empty."""
    license: str | None = None
    """License for the model card, as a hub license id such as mit."""


def main() -> None:
    """Export the model with a model card, and print how to load it."""
    config = parse_flags(ExportConfig)
    if config.out.exists() and any(config.out.iterdir()):
        raise ValueError(f"{config.out} is not empty: delete it, or choose another with --out")
    checkpoint = None
    if not is_hugging_face(config.model):  # only once: a run may save another meanwhile
        checkpoint = find_checkpoint(Path(config.model))
    model = load_model(checkpoint or config.model)
    with write_folder(config.out) as folder:
        n_params = save_pretrained(model, folder)
        name = config.out.resolve().name
        card = model_card(name, model.config, n_params, checkpoint, config.license)
        (folder / "README.md").write_text(card, encoding="utf-8")
    print(f"exported {n_params:,} parameters to {config.out}; load the model with")
    print(f'  transformers.pipeline("text-generation", "{config.out.as_posix()}")')


if __name__ == "__main__":
    run_command(main)
