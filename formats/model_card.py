"""Model card (`README.md`) of an exported model: dimensions, training, results and limits."""

from pathlib import Path
from typing import Any

from formats.checkpoint import RunState, read_state
from formats.metrics import HELLASWAG_EXAMPLES, METRICS_NAME, read_metrics
from model import GPT2_SIZES, GPTConfig

MARK = "<!-- export.py writes this card again, unless this line is taken out -->"
# Only these settings are listed: others may contain paths on the user's machine.
SETTINGS = (
    *("max_steps", "total_batch_size", "block_size", "optimizer", "max_lr", "min_lr", "val_tokens"),
    *("warmup_steps", "lr_schedule", "weight_decay", "grad_clip", "spelling_share", "seed"),
)
METHODS = {
    "val_loss": "nats per token of the validation split",
    "val_bpb": "bits per byte of the validation split",
    "hellaswag_acc_norm": "zero-shot, not comparable with lm-evaluation-harness",
    "hellaswag_total": f"scored examples; the full benchmark has {HELLASWAG_EXAMPLES}",
}
LIMITS = """
## Limits

This is a base model: it continues a text and does not follow instructions. It states falsehoods and
repeats the errors and biases of its data. Only the results listed in this card were measured.
"""


def model_card(
    name: str, config: GPTConfig, n_params: int, checkpoint: Path | None, license_id: str | None
) -> str:
    """Return a model's card; without a checkpoint, it has no data, settings and results."""
    from huggingface_hub import ModelCardData

    metadata: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    metadata |= {"license": license_id, "tags": ["gpt2"]}
    lines = [
        f"# {name}\n\nA GPT-2 with {n_params:,} parameters: {config.n_layer} blocks, "
        f"{config.n_head} heads, width {config.n_embd:,}, context {config.block_size:,} tokens."
    ]
    if checkpoint is not None:
        state = read_state(checkpoint)
        settings = state.train_config
        if (start := settings.get("init_from")) in GPT2_SIZES:
            metadata["base_model"] = f"openai-community/{start}"
        data = Path(settings.get("data_dir", "unknown")).name
        lines.append(f"\n{state.tokens_seen:,} tokens of `{data}` in {state.step:,} steps.")
        lines.append("\n## Settings\n\n| setting | value |\n|---|---|")
        lines += [f"| `{key}` | {settings[key]} |" for key in SETTINGS if key in settings]
        lines += _results(checkpoint, state)
    return "\n".join(["---", ModelCardData(**metadata).to_yaml(), "---", MARK, *lines, LIMITS])


def _results(checkpoint: Path, state: RunState) -> list[str]:
    """Return a table with each metric's last value up to the checkpoint's step, if any."""
    path = checkpoint.absolute().parent.parent / METRICS_NAME
    rows = dict[str, str]()
    for record in read_metrics(path) if path.is_file() else ():
        for name in METHODS:
            if record["step"] <= state.step and record.get(name) is not None:
                value = f"{round(record[name], 4)} at step {record['step']:,}"
                rows[name] = f"| {name} | {value} | {METHODS[name]} |"
    header = "\n## Results\n\n| metric | result | method |\n|---|---|---|"
    return [header, *rows.values()] if rows else []
