"""The `README.md` of an exported model: what it is, how it was trained and measured, its limits."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from formats.checkpoint import RunState, read_state
from formats.metrics import HELLASWAG_EXAMPLES, METRICS_NAME, read_metrics
from model import GPT2_SIZES, GPTConfig

CARD_NAME = "README.md"
MARK = "<!-- export.py writes this card again, unless this line is taken out -->"
# No others: a setting may be a path of the user's machine.
SETTINGS = (
    *("max_steps", "total_batch_size", "block_size", "optimizer", "max_lr", "min_lr"),
    *("warmup_steps", "lr_schedule", "weight_decay", "embedding_decay", "grad_clip"),
    *("spelling_share", "shuffle", "seed", "dtype"),
)
LIMITS = """## Limits

This is a base model: it continues a text and does not follow instructions. It states falsehoods and
repeats the errors and prejudices of its data. Only the results listed in this card were measured.
"""
RESULTS = "## Results\n\n| measure | result | how measured |\n|---|---|---|"


def write_model_card(
    folder: Path,
    out: Path,
    config: GPTConfig,
    n_params: int,
    checkpoint: Path | None,
    licence: str | None,
) -> None:
    """Write a model's card, unless `out`, where it is to be, has one that its owner has changed.

    A model without a checkpoint was not trained here. The licence is an id of the hub's.
    """
    from huggingface_hub import ModelCardData

    path, name = out / CARD_NAME, out.resolve().name
    if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    front |= {"license": licence, "tags": ["gpt2"]}
    sections = list[str]()
    if checkpoint is not None:
        state = read_state(checkpoint)
        data = Path(str(state.train_config.get("data_dir", "unknown"))).name
        if (start := state.train_config.get("init_from")) in GPT2_SIZES:
            front["base_model"] = f"openai-community/{start}"
        sections = [*_describe_training(state, data)]
        if results := [*_read_results(checkpoint, state)]:
            sections += [RESULTS, *results, ""]
    lines = [
        *("---", ModelCardData(**front).to_yaml(), "---", MARK, "", f"# {name}", ""),
        f"A GPT-2 of {n_params:,} parameters: {config.n_layer} blocks, {config.n_head} heads, "
        f"width {config.n_embd:,}, context {config.block_size:,} tokens.\n",
        *sections,
        LIMITS,
    ]
    text = "\n".join(lines).encode(errors="replace")  # a name may be no UTF-8
    (folder / CARD_NAME).write_bytes(text)


def _describe_training(state: RunState, data: str) -> Iterator[str]:
    """The sections on data, which have a name, and settings."""
    settings = state.train_config
    yield f"## Data\n\n{state.tokens_seen:,} tokens of `{data}` in {state.step:,} steps"
    yield "\n## Settings\n\n| setting | value |\n|---|---|"
    chosen = {name: settings[name] for name in SETTINGS if settings.get(name, "auto") != "auto"}
    yield from (f"| `{name}` | {value} |" for name, value in chosen.items())
    yield ""


def _read_results(checkpoint: Path, state: RunState) -> Iterator[str]:
    """The table's rows: what the run measured last, up to the checkpoint's step, and how."""
    path = checkpoint.absolute().parent.parent / METRICS_NAME
    last: dict[str, dict[str, Any]] = {}  # by metric, the last record that has it
    for record in read_metrics(path) if path.is_file() else ():
        if record["step"] <= state.step:
            last |= dict.fromkeys(record, record)
    tokens = state.train_config.get("val_tokens", 0)
    total = last.get("hellaswag_acc_norm", {}).get("hellaswag_total", 0)
    part = "" if total == HELLASWAG_EXAMPLES else ", which is NOT the whole benchmark"
    how = {
        "val_loss": f"nats per token, over at most {tokens:,} tokens of the validation split",
        "val_bpb": "bits per byte, over the same tokens",
        "hellaswag_acc_norm": f"zero-shot, lowest mean loss per token, {total:,} examples{part}; "
        "not comparable with lm-evaluation-harness",
    }
    for name in how:
        value = last.get(name, {}).get(name)
        if value is not None and math.isfinite(value):
            yield f"| {name} at step {last[name]['step']:,} | {round(value, 4)} | {how[name]} |"
