"""Export a model for other tools: `python export.py --model runs/NAME --out exported/NAME`."""

import filecmp
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from formats.huggingface import EXPORT_FILES, save_pretrained
from formats.load import load_with_state
from formats.model_card import model_card
from runtime.cli import PathOrName, parse_flags, run_command
from runtime.errors import UserError
from runtime.files import read_json, write_folder
from runtime.precision import DTYPES

EXPORTED = {"README.md", "merges.txt", "model.safetensors", "vocab.json", *read_json(EXPORT_FILES)}


@dataclass(frozen=True)
class ExportConfig:
    """Export a model to a folder in Hugging Face format."""

    model: PathOrName
    """Model: a run folder, a checkpoint, a folder in Hugging Face format, or a GPT-2 on the hub."""
    out: Path
    """Folder to write, which must be new or empty, except for hidden files, or an earlier export,
    which is renamed if it differs."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the weights in the file."""
    license: str | None = None
    """License for the model card, as a hub license id such as mit."""


def main() -> None:
    """Export the model with a model card, and print how to load it."""
    config = parse_flags(ExportConfig)
    out = config.out.resolve()  # a link stays
    names = {path.name for path in out.iterdir()} if out.exists() else set[str]()
    if names != EXPORTED and not all(name.startswith(".") for name in names):
        raise UserError(f"{config.out} is not empty: delete it, or choose another with --out")
    model, checkpoint = load_with_state(config.model)
    with write_folder(out) as folder:
        n_params = save_pretrained(model, folder, DTYPES[config.dtype])
        card = model_card(out.name, model.config, n_params, checkpoint, config.license)
        (folder / "README.md").write_text(card, encoding="utf-8")
        if names == EXPORTED and filecmp.cmpfiles(out, folder, names, shallow=False)[1]:
            earlier = out.rename(f"{out}.{time.strftime('%Y%m%d-%H%M%S')}")
            print(f"note: the earlier export in {config.out} differs: it is {earlier.name} now")
    print(f"exported {n_params:,} parameters to {config.out}; after pip install transformers, use")
    print(f'  transformers.pipeline("text-generation", "{config.out.as_posix()}")')


if __name__ == "__main__":
    run_command(main)
