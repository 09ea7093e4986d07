"""A trained model for everyone: `python export.py --model runs/NAME --out exported/NAME`."""

if __name__ == "__main__":
    from runtime.startup import prepare_process

    prepare_process()  # the imports below take seconds

from dataclasses import dataclass
from pathlib import Path

from runtime.checkpoint import load_model
from runtime.cli import parse_flags, run_command
from runtime.huggingface import save_pretrained


@dataclass(frozen=True)
class ExportConfig:
    """The flags of `export.py`."""

    model: str
    """A run folder, a checkpoint, a folder in Hugging Face's format, or a GPT-2 on the hub."""
    out: Path
    """The folder to write; an earlier export there is written over."""


def main() -> None:
    """Write a model in Hugging Face's format."""
    config = parse_flags(ExportConfig)
    model = load_model(config.model)
    save_pretrained(model, config.out)
    print(f"exported {model.config.n_params:,} parameters to {config.out}; load it with")
    print(f'  transformers.pipeline("text-generation", "{config.out.as_posix()}")')


if __name__ == "__main__":
    run_command(main)
