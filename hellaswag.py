"""HellaSwag (Zellers et al. 2019): which of four endings does the model find most likely?

    python hellaswag.py --model runs/NAME
    torchrun --nproc_per_node=8 hellaswag.py --model gpt2 --output predictions.jsonl

In completion style, the loss of an ending is the loss of its tokens after the context. `acc` picks
the ending with the lowest summed loss, `acc_norm` the one with the lowest mean loss. `--style
harness` scores as lm-evaluation-harness does: with its prompt, and a mean over characters
(docs/evaluation.md). Published scores are in assets/published.json, where figures read them.

Each ending is scored in a separate row, of which the model sees the context, the ending except for
its last token, and padding:

    inputs     c0 c1 c2 e0 e1  0  0
    targets           e0 e1 e2

Attention is causal, so the padding on the right does not change the losses.

The default model is runs/' newest run.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import runtime.threads  # noqa: F401 - before torch, which reads its settings

import torch
from torch import Tensor

from formats.hub import explain_hub_errors, fetch_files
from formats.load import load_model, newest_run
from generation import score_tokens
from model import GPT
from runtime import distributed
from runtime.cli import PathOrName, check_settings, parse_flags, run_command
from runtime.device import DeviceName, to_device, tune_malloc
from runtime.errors import UserError
from runtime.files import atomic_write
from runtime.precision import DtypeName, inference, select_dtype
from tokenizer import gpt2_encoding

DATA_REPO, DATA_FILE = "Rowan/hellaswag", "data/validation-00000-of-00001.parquet"
DATA_REVISION = "218ec52e09a7e7462a5400043bb9a69a41d06b76"
N_ENDINGS = 4
Style = Literal["completion", "harness"]


@dataclass(frozen=True)
class HellaSwagConfig:
    """Score a model on HellaSwag."""

    model: PathOrName | None = None
    """Model to score: a run, a checkpoint, a Hugging Face folder, or a GPT-2 on the hub (gpt2);
    default: the newest run in runs/."""
    data: Path | None = None
    """HellaSwag file, JSONL or Parquet; default: the validation set, downloaded once."""
    limit: int = 0
    """Score only this many examples, from the first on; 0 = all."""
    style: Style = "completion"
    """completion: prompt and acc_norm as in nanoGPT-style projects; harness: as in
    lm-evaluation-harness."""
    output: Path | None = None
    """Write the losses and predictions of each scored example to this JSONL file."""
    batch_size: int = 16
    """Number of examples per forward pass, in four rows each."""
    device: DeviceName = "auto"
    """Device to run on."""
    dtype: DtypeName = "auto"
    """Dtype for matrix multiplications; auto = float32 with `--style harness`, otherwise
    bfloat16 where it is fast, float16 on older NVIDIA GPUs, else float32. Losses are always
    float32."""

    def __post_init__(self) -> None:
        check_settings(self, ("batch_size",))


@dataclass(frozen=True)
class Example:
    """One context and its four endings, as token ids."""

    ind: int
    label: int
    context: list[int]
    endings: list[list[int]]
    lengths: list[int]  # ending lengths for `acc_norm`: tokens or, in harness style, characters


class HellaSwagResult(NamedTuple):
    """Losses of N examples, and the accuracies computed from them."""

    examples: Sequence[Example]
    summed: Tensor  # (N, 4) float32, nats per ending

    @property
    def mean(self) -> Tensor:
        """Mean losses, (N, 4) float32: nats per token or, in harness style, per character."""
        return self.summed / torch.tensor([example.lengths for example in self.examples])

    def correct(self) -> dict[str, int]:
        """Count the examples whose lowest loss (the first, if tied) is the correct ending's."""
        labels = torch.tensor([example.label for example in self.examples])
        losses = {"acc": self.summed, "acc_norm": self.mean}
        return {name: int((loss.argmin(1) == labels).sum()) for name, loss in losses.items()}

    def metrics(self) -> dict[str, float]:
        """Return the metrics that training logs."""
        total = len(self.examples)
        metrics = {f"hellaswag_{name}": n / total for name, n in self.correct().items()}
        return metrics | {"hellaswag_total": total}

    def __repr__(self) -> str:
        total = len(self.examples)
        return " ".join(f"{name} {n}/{total}={n / total:.4f}" for name, n in self.correct().items())


def main() -> None:
    """Score a model and print its accuracy."""
    config = parse_flags(HellaSwagConfig)
    tune_malloc()
    source = config.model or newest_run()
    with distributed.setup_distributed(config.device) as dist_info:
        model = load_model(source, dist_info.device)
        path = config.data or download_hellaswag()
        examples = load_examples(path, config.limit, config.style)
        use_float32 = config.style == "harness" and config.dtype == "auto"
        dtype = select_dtype("float32" if use_float32 else config.dtype, dist_info.device)
        result = evaluate_hellaswag(model, examples, dist_info, dtype, batch_size=config.batch_size)
        if distributed.is_main():
            scored = f"HellaSwag {path}, {source}, {config.style} style"
            print(f"{scored}: {result} (chance: {1 / N_ENDINGS})")
            if config.output is not None:
                write_predictions(config.output, result)


def load_examples(path: str | Path, limit: int = 0, style: Style = "completion") -> list[Example]:
    """Read and tokenize the first `limit` rows (0 = all) of a HellaSwag JSONL or Parquet file."""
    if str(path).endswith(".parquet"):
        import pyarrow.parquet

        try:
            rows: list[Any] = pyarrow.parquet.read_table(path).to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{path} is not a readable Parquet file: {error}") from None
    else:
        rows = Path(path).read_bytes().rstrip().splitlines()
    examples: list[Example] = []
    for number, row in enumerate(rows[: limit or None], start=1):
        try:
            values = row if isinstance(row, dict) else json.loads(row)
            if not isinstance(values, dict):
                raise ValueError("it is not a JSON object")
            examples.append(render_example(values, style))
        except (LookupError, TypeError, ValueError) as error:  # also UTF-8 and JSON errors
            problem = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise UserError(f"{path}:{number} is not a HellaSwag row: {problem}") from None
    if not examples:
        raise UserError(f"{path} has no examples: pass a HellaSwag file")
    return examples


def render_example(row: Any, style: Style = "completion") -> Example:  # noqa: ANN401 - JSON
    """Tokenize one row of the dataset: the context, and each ending after a space."""
    encode, endings = gpt2_encoding().encode_ordinary, row["endings"]
    if style == "completion":
        context = encode(row["ctx"])
        tokens = [encode(f" {text}") for text in endings]
        lengths = [*map(len, tokens)]
    else:  # as in lm-evaluation-harness: tasks/hellaswag/utils.py; from `context` on, api/model.py
        ctx = f"{row['ctx_a']} {row['ctx_b'].capitalize()}"
        prompt = _harness_text(f"{row['activity_label']}: {ctx}")
        choices = [_harness_text(text) for text in endings]
        context = encode(prompt.rstrip())  # spaces at the end belong to the endings
        tokens = [encode(f"{prompt} {choice}")[len(context) :] for choice in choices]
        lengths = [*map(len, choices)]
    if row.get("label") in ("", None):
        raise ValueError("it has no label, like all of the test split: use the validation split")
    label = int(row["label"])  # a string on the hub
    if not context or len(endings) != N_ENDINGS or label not in range(N_ENDINGS):
        raise ValueError(f"expected a context, {N_ENDINGS} endings and a label below {N_ENDINGS}")
    return Example(row["ind"], label, context, tokens, lengths)


def _harness_text(text: str) -> str:
    """Remove WikiHow's markup, then replace each pair of spaces by one space, in one pass."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def examples_or_none(path: Path | None) -> list[Example]:
    """Load the examples that training scores; if they cannot be downloaded, warn and return none.

    Every rank must call this, and all ranks get the same result. The default for `path` is the
    validation set, downloaded once. If `path` is passed, the file must exist on all ranks.
    """
    if path is not None:
        with distributed.raise_on_all_ranks():
            return load_examples(path)
    examples, problem = list[Example](), ""
    try:
        examples = load_examples(download_hellaswag())
    except (OSError, UserError) as error:
        problem = str(error)
    # All ranks score together, so if one of them has a problem, none may start.
    if problem := next(filter(None, distributed.gather_text(problem)), ""):
        distributed.print0(f"warning: HellaSwag will not be scored: {problem}")
    return [] if problem else examples


def evaluate_hellaswag(
    model: GPT,
    examples: Sequence[Example],
    dist_info: distributed.DistInfo | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    batch_size: int = 16,
    before_batch: Callable[[], object] = lambda: None,
) -> HellaSwagResult:
    """Score a dataset; every rank must call this with the same examples, and gets the same result.

    The batches and losses do not depend on the world size. If an example is longer than the model's
    context, its start is cut off, as in lm-evaluation-harness.

    Args:
        model: the raw model, neither compiled nor wrapped.
        examples: see `load_examples`.
        dist_info: the processes; default: a single process on the model's device.
        dtype: dtype for matrix multiplications, except the LM head's, which is float32.
        batch_size: examples per forward pass, in four rows each.
        before_batch: see `distributed.rank_batches`.
    """
    dist_info = dist_info or distributed.DistInfo(next(model.parameters()).device)
    rows = [(each.context, ending) for each in examples for ending in each.endings]
    # Sort by length to save padding, longest first, so that a lack of memory shows at the start.
    order = sorted(range(len(rows)), key=lambda i: -sum(map(len, rows[i])))
    n_rows = N_ENDINGS * batch_size
    batches = [order[start : start + n_rows] for start in range(0, len(order), n_rows)]
    summed = torch.zeros(len(rows), device=dist_info.device)
    rounds = distributed.rank_batches(batches, dist_info, before_batch, "HellaSwag")
    # With a single autocast for all batches, the weights are cast only once.
    with inference(model, dist_info.device, dtype):
        for batch, is_counted in rounds:
            losses = score_tokens(model, [rows[i] for i in batch], dist_info.device)  # (B, T)
            if is_counted:
                summed[to_device(torch.tensor(batch), dist_info.device)] = losses.sum(dim=1)
    # Each row has its loss on one rank and zero on the other ranks.
    summed = distributed.all_reduce_sum(summed).cpu().view(-1, N_ENDINGS)
    return HellaSwagResult(examples, summed)


def write_predictions(path: str | Path, result: HellaSwagResult) -> None:
    """Write one line of JSON per scored example, in order, atomically."""
    with atomic_write(Path(path)) as file:
        for example, summed, mean in zip(result.examples, result.summed, result.mean, strict=True):
            line: dict[str, Any] = {"ind": example.ind, "label": example.label}
            for name, losses in (("mean_losses", mean), ("summed_losses", summed)):
                line[name] = [round(loss, 6) for loss in losses.tolist()]
            line |= {"prediction": int(summed.argmin()), "prediction_norm": int(mean.argmin())}
            file.write((json.dumps(line) + "\n").encode())


def download_hellaswag() -> Path:
    """Return the path of the validation set, downloaded once; ranks may call this concurrently."""
    remedy = "without a network, pass --data FILE (--hellaswag-data FILE in training)"
    wanted = {"repo_type": "dataset", "revision": DATA_REVISION, "allow_patterns": DATA_FILE}
    with explain_hub_errors("HellaSwag was not downloaded", remedy):
        return fetch_files(DATA_REPO, DATA_FILE, **wanted) / DATA_FILE


if __name__ == "__main__":
    run_command(main, memory_flag="--batch-size")
