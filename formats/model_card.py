"""Model card (`README.md`) of an exported model: dimensions, training, results and limits."""

from pathlib import Path

from formats.checkpoint import Checkpoint
from formats.huggingface import is_from_hub, repo_name
from formats.metrics import HELLASWAG_EXAMPLES, validations
from model import GPTConfig

# Settings and results in the card. Other settings may contain paths on the user's machine.
LISTED = (
    *("max_steps", "total_batch_size", "block_size", "optimizer", "max_lr", "min_lr", "val_tokens"),
    *("lr_schedule", "weight_decay", "grad_clip", "spelling_share", "seed"),
    *("val_loss", "val_bpb", "hellaswag_acc_norm", "hellaswag_total"),
)
NOTES = f"""
val_loss is in nats per token, val_bpb in bits per byte of the validation split. HellaSwag is scored
zero-shot, which is not comparable with lm-evaluation-harness; the full benchmark has
{HELLASWAG_EXAMPLES} examples.
"""
LIMITS = """
This is a base model: it continues a text and does not follow instructions. It states falsehoods and
repeats the errors and biases of its data. Only the results listed in this card were measured.
"""


def model_card(
    name: str, config: GPTConfig, n_params: int, checkpoint: Checkpoint | None, license: str | None
) -> str:
    """Return a model's card; without a checkpoint, it has no data, settings and results.

    Only results of the checkpoint's own step are listed.
    """
    from huggingface_hub import ModelCardData

    metadata = ModelCardData(library_name="transformers", tags=["gpt2"], license=license)
    metadata.pipeline_tag = "text-generation"
    text = (
        f"# {name}\n\nA GPT-2 with {n_params:,} parameters: {config.n_layer} blocks, "
        f"{config.n_head} heads, width {config.n_embd:,}, context {config.block_size:,} tokens.\n"
    )
    if checkpoint is not None:
        state, run_dir = checkpoint.state, checkpoint.path.absolute().parent.parent
        values = state.train_config | validations(run_dir).get(state.step, {})
        if (start := values.get("init_from")) and is_from_hub(start):
            metadata.base_model = repo_name(start)
        data = Path(values.get("data_dir", "unknown")).name
        text += f"\n{state.tokens_seen:,} tokens of `{data}` in {state.step:,} steps.\n\n"
        rows = {key: values[key] for key in LISTED if values.get(key) is not None}
        text += "| setting or result | value |\n|---|---|\n"
        text += "".join(f"| {key} | {value} |\n" for key, value in rows.items()) + NOTES
    return f"---\n{metadata.to_yaml()}\n---\n{text}{LIMITS}"
