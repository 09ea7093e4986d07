"""The `README.md` of an exported model: what it is, how it was trained and measured, its limits."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from model import GPT2_SIZES, GPTConfig
from runtime.checkpoint import TrainerState, read_state
from runtime.metrics import HELLASWAG_EXAMPLES, METRICS_NAME, read_metrics

CARD_NAME = "README.md"
MARK = "<!-- export.py writes this card again, unless this line is taken out -->"
# No others: a setting may be a path of the user's machine.
SETTINGS = (
    *("max_steps", "total_batch_size", "block_size", "optimizer", "max_lr", "min_lr"),
    *("warmup_steps", "lr_schedule", "weight_decay", "grad_clip", "shuffle", "seed", "dtype"),
)
USE = """## Use

```python
import transformers

generate = transformers.pipeline("text-generation", "{name}")
print(generate("The list", max_new_tokens=40)[0]["generated_text"])
```
"""
LIMITS = """## Intended use and limits

This is a base model: it continues a text. It was not trained to follow instructions or to refuse
anything. It states falsehoods, and repeats the errors and prejudices of its data. It is meant for
research, teaching and further training. Nothing was measured but what this card lists. The model
sees at most {block_size:,} tokens of GPT-2's tokenizer. Its owner has to say under which licence it
may be used.
"""


def write_model_card(
    folder: Path, name: str, config: GPTConfig, n_params: int, checkpoint: Path | None
) -> None:
    """Write a model's card, unless the folder has one that its owner has made his own.

    The name is what transformers loads the model by: OWNER/NAME, or the folder's name. A model
    without a checkpoint was not trained here.
    """
    path = folder / CARD_NAME
    if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return
    front, sections = ["library_name: transformers", "pipeline_tag: text-generation"], list[str]()
    if checkpoint is not None:
        state = read_state(checkpoint)
        if (start := state.train_config.get("init_from")) in GPT2_SIZES:
            front.append(f"base_model: openai-community/{start}")
        sections = [*_describe_training(state), *_describe_results(checkpoint, state)]
    lines = [
        *("---", *front, "tags:", "- gpt2", "---", MARK, "", f"# {name.rpartition('/')[2]}", ""),
        f"A GPT-2 of {n_params:,} parameters: {config.n_layer} blocks, {config.n_head} heads, "
        f"width {config.n_embd:,}, context {config.block_size:,} tokens.\n",
        USE.format(name=name),
        *sections,
        LIMITS.format(block_size=config.block_size),
    ]
    path.write_bytes("\n".join(lines).encode(errors="replace"))  # a name may be no UTF-8


def _describe_training(state: TrainerState) -> Iterator[str]:
    """The sections on data and settings."""
    settings = state.train_config
    yield "## Data\n"
    yield f"- `{Path(str(settings.get('data_dir', 'unknown'))).name}`, tokenised with GPT-2's BPE"
    yield f"- fingerprint of the training tokens: `{state.data_fingerprint}`"
    yield f"- {state.tokens_seen:,} tokens seen in {state.step:,} steps"
    if settings.get("init_from") is not None:
        yield "- training began with the weights of another model"
    yield "\n## Settings\n\n| setting | value |\n|---|---|"
    chosen = {name: settings[name] for name in SETTINGS if settings.get(name, "auto") != "auto"}
    yield from (f"| `{name}` | {value} |" for name, value in chosen.items())


def _describe_results(checkpoint: Path, state: TrainerState) -> Iterator[str]:
    """The section on what the run measured last, up to the checkpoint's step."""
    path = checkpoint.absolute().parent.parent / METRICS_NAME
    last: dict[str, dict[str, Any]] = {}  # by metric, the last record that has it
    for record in read_metrics(path) if path.is_file() else ():
        if record["step"] <= state.step:
            last |= dict.fromkeys(record, record)
    yield "\n## Results\n\n| measure | result | how measured |\n|---|---|---|"
    validation, hellaswag = last.get("val_loss", {}), last.get("hellaswag_total", {})
    if (loss := validation.get("val_loss")) is None or not math.isfinite(loss):
        yield "| validation loss | not measured | |"
    else:
        tokens = state.train_config.get("val_tokens", 0)
        how = f"the mean over at most {tokens:,} tokens of the data set's validation split"
        at = f"validation loss at step {validation['step']:,}"
        yield f"| {at} | {loss:.4f} nats per token | {how} |"
    if (score := hellaswag.get("hellaswag_acc_norm")) is None:
        yield "| HellaSwag | not measured | |\n"
    else:
        total = hellaswag["hellaswag_total"]
        how = "completion style, zero-shot: the ending of the lowest mean loss per token counts; "
        how += f"not comparable with lm-evaluation-harness; {total:,} examples"
        how += "" if total == HELLASWAG_EXAMPLES else ", which is NOT the whole benchmark"
        at = f"HellaSwag, acc_norm at step {hellaswag['step']:,}"
        yield f"| {at} | {score:.4f} | {how} |\n"
