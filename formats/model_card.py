"""Model card (`README.md`) of an exported model: dimensions, training, results and limits."""

from pathlib import Path

from formats.checkpoint import Checkpoint
from formats.huggingface import is_from_hub, repo_name
from formats.metrics import HELLASWAG_EXAMPLES, LOG_METRICS, validations
from model import GPTConfig

# The card lists all numbers, except for settings of the machine. Other values may be paths on it.
LISTED = {"optimizer", "lr_schedule", "shuffle"}
UNLISTED = {"micro_batch_size", "loss_chunks", "step_timeout", "keep_checkpoints", "samples"}
NOTES = {
    "val_loss": "val_loss is in nats per token of the validation split.",
    "val_bpb": "val_bpb is in bits per byte of the validation split.",
    "hellaswag_acc_norm": "HellaSwag is scored zero-shot, which is not comparable with "
    f"lm-evaluation-harness; the full benchmark has {HELLASWAG_EXAMPLES} examples.",
}
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
        f"# {name}\n\nA GPT-2 with {n_params:,} parameters: n_layer {config.n_layer}, "
        f"n_head {config.n_head}, n_embd {config.n_embd}, block_size {config.block_size}.\n"
    )
    if checkpoint is not None:
        state, run_dir = checkpoint.state, checkpoint.path.absolute().parent.parent
        values = state.train_config | validations(run_dir).get(state.step, {})
        if (start := values.get("init_from")) and is_from_hub(start):
            metadata.base_model = repo_name(start)
        data = Path(values.get("data_dir", "unknown")).name
        text += f"\n{state.tokens_seen:,} tokens of `{data}`, until step {state.step:,}.\n\n"
        numbers = {k for k, v in values.items() if type(v) in (int, float) and "every" not in k}
        listed = numbers - UNLISTED - LOG_METRICS | LISTED
        if values.get("optimizer") != "muon":
            listed.discard("momentum")
        rows = {key: value for key, value in values.items() if key in listed}
        text += "| setting or result | value |\n|---|---|\n"
        text += "".join(f"| {key} | {value} |\n" for key, value in rows.items())
        text += "\n" + "".join(f"{note}\n" for key, note in NOTES.items() if key in rows)
    return f"---\n{metadata.to_yaml()}\n---\n{text}{LIMITS}"
