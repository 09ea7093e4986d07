"""Model card (`README.md`) of an exported model: dimensions, training, results and limits."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from formats.checkpoint import RunState, read_state
from formats.metrics import HELLASWAG_EXAMPLES, METRICS_NAME, read_metrics
from model import GPT2_SIZES, GPTConfig

CARD_NAME = "README.md"
MARK = "<!-- export.py writes this card again, unless this line is taken out -->"
# Only these settings are listed: others may contain paths on the user's machine.
SETTINGS = (
    *("max_steps", "total_batch_size", "block_size", "optimizer", "max_lr", "min_lr"),
    *("warmup_steps", "lr_schedule", "weight_decay", "embedding_decay", "grad_clip"),
    *("spelling_share", "shuffle", "seed", "dtype"),
)
LIMITS = """## Limits

This is a base model: it continues a text and does not follow instructions. It states falsehoods and
repeats the errors and biases of its data. Only the results listed in this card were measured.
"""
RESULTS = "## Results\n\n| metric | result | method |\n|---|---|---|"


def write_model_card(
    folder: Path,
    out: Path,
    config: GPTConfig,
    n_params: int,
    checkpoint: Path | None,
    license_id: str | None,
) -> None:
    """Write a model's card, unless `out` has a card from which its owner has removed `MARK`.

    Args:
        folder: where to write the card.
        out: the folder to which the export will be moved.
        config: the model's dimensions.
        n_params: number of parameters in the file.
        checkpoint: the exported checkpoint; None if the model was not trained here.
        license_id: a license id of the hub, such as mit.
    """
    from huggingface_hub import ModelCardData

    path, name = out / CARD_NAME, out.resolve().name
    if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return
    metadata: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    metadata |= {"license": license_id, "tags": ["gpt2"]}
    sections = list[str]()
    if checkpoint is not None:
        state = read_state(checkpoint)
        data = Path(str(state.train_config.get("data_dir", "unknown"))).name
        if (start := state.train_config.get("init_from")) in GPT2_SIZES:
            metadata["base_model"] = f"openai-community/{start}"
        sections = [*_describe_training(state, data)]
        if results := [*_read_results(checkpoint, state)]:
            sections += [RESULTS, *results, ""]
    lines = [
        *("---", ModelCardData(**metadata).to_yaml(), "---", MARK, "", f"# {name}", ""),
        f"A GPT-2 with {n_params:,} parameters: {config.n_layer} blocks, {config.n_head} heads, "
        f"width {config.n_embd:,}, context {config.block_size:,} tokens.\n",
        *sections,
        LIMITS,
    ]
    text = "\n".join(lines).encode(errors="replace")  # a file name may not be valid UTF-8
    (folder / CARD_NAME).write_bytes(text)


def _describe_training(state: RunState, data: str) -> Iterator[str]:
    """Yield the sections about the data, named `data`, and the settings."""
    settings = state.train_config
    yield f"## Data\n\n{state.tokens_seen:,} tokens of `{data}` in {state.step:,} steps"
    yield "\n## Settings\n\n| setting | value |\n|---|---|"
    chosen = {name: settings[name] for name in SETTINGS if settings.get(name, "auto") != "auto"}
    yield from (f"| `{name}` | {value} |" for name, value in chosen.items())
    yield ""


def _read_results(checkpoint: Path, state: RunState) -> Iterator[str]:
    """Yield the rows of the results: each metric's last value up to the checkpoint's step."""
    path = checkpoint.absolute().parent.parent / METRICS_NAME
    last: dict[str, dict[str, Any]] = {}  # by metric: the last record that has it
    for record in read_metrics(path) if path.is_file() else ():
        if record["step"] <= state.step:
            last |= dict.fromkeys(record, record)
    tokens = state.train_config.get("val_tokens", 0)
    total = last.get("hellaswag_acc_norm", {}).get("hellaswag_total", 0)
    note = "" if total == HELLASWAG_EXAMPLES else ", which is NOT the full benchmark"
    methods = {
        "val_loss": f"nats per token, over at most {tokens:,} tokens of the validation split",
        "val_bpb": "bits per byte, over the same tokens",
        "hellaswag_acc_norm": f"zero-shot, lowest mean loss per token, {total:,} examples{note}; "
        "not comparable with lm-evaluation-harness",
    }
    for name in methods:
        value = last.get(name, {}).get(name)
        if value is not None and math.isfinite(value):
            yield f"| {name} at step {last[name]['step']:,} | {round(value, 4)} | {methods[name]} |"
