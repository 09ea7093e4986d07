"""HellaSwag (Zellers et al. 2019): which of four endings does the model find most likely?

    python hellaswag.py --model runs/NAME
    torchrun --nproc_per_node=8 hellaswag.py --model gpt2 --output predictions.jsonl

Completion style: an ending's loss is that of its own tokens after the context. `acc` takes the
lowest summed loss, `acc_norm` the lowest mean loss. `--style harness` gives the numbers of
lm-evaluation-harness instead: its prompt, and a mean over characters (docs/evaluation.md).

Each example is one row, in which the four endings share their context:

    tokens     c0 c1 c2 | a0 a1 | b0 | d0 d1 d2 | e0 e1
    positions   0  1  2 |  3  4 |  3 |  3  4  5 |  3  4

A token attends to the context and to its own ending. The last token of an ending is predicted but
predicts nothing, so the row does not have it.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import runtime.threads  # noqa: F401 - before torch, which reads what it sets

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from formats.hub import explain_hub_errors, fetch_files
from formats.load import load_model
from model import GPT
from runtime import distributed
from runtime.cli import bad_numbers, parse_flags, run_command
from runtime.device import DeviceName, DtypeName, inference, select_dtype, to_device
from runtime.distributed import DistInfo
from runtime.files import atomic_write, sha256_of
from tokenizer import gpt2_encoding

DATA_REPO, DATA_FILE = "Rowan/hellaswag", "data/validation-00000-of-00001.parquet"
DATA_REVISION = "218ec52e09a7e7462a5400043bb9a69a41d06b76"
N_ENDINGS = 4
CONTEXT = 1  # the segment of a packed row's context; its endings are 2 to 5, padding is 0
Style = Literal["completion", "harness"]
CONTEXT_FIELDS = {"completion": ("ctx",), "harness": ("activity_label", "ctx_a", "ctx_b")}


@dataclass(frozen=True)
class HellaSwagConfig:
    """Score a model on HellaSwag."""

    model: str = "gpt2"
    """A run folder, a checkpoint, a folder in Hugging Face's format, or a GPT-2 on the hub."""
    data: Path | None = None
    """A JSONL or Parquet file of HellaSwag's; by default the validation set, downloaded once."""
    limit: int = 0
    """Score only this many examples, from the first; 0 = all."""
    style: Style = "completion"
    """The nanoGPT family's prompt and acc_norm, or those of lm-evaluation-harness."""
    output: Path | None = None
    """Write the losses and predictions of every scored example to this JSONL file."""
    batch_size: int = 16
    """Examples in one forward pass."""
    device: DeviceName = "auto"
    """Device to run on."""
    dtype: DtypeName = "auto"
    """Dtype of the matrix products; auto is float32 in the harness's style. The losses are float32
    in any case."""

    def __post_init__(self) -> None:
        if problems := bad_numbers(self, ("batch_size",)):
            raise ValueError("; ".join(problems))


@dataclass(frozen=True)
class Example:
    """One context and its four endings, as token ids."""

    ind: int
    label: int
    context: list[int]
    endings: list[list[int]]
    lengths: list[int]  # of the endings, for `acc_norm`: tokens; in the harness's style, characters

    def fits(self, block_size: int) -> bool:
        """Whether a model with a context of `block_size` tokens can score it."""
        return len(self.context) + max(map(len, self.endings)) <= block_size


@dataclass(frozen=True)
class HellaSwagResult:
    """The losses of N examples, and the accuracies that follow."""

    examples: Sequence[Example]
    summed: Tensor  # (N, 4) float32, nats per ending
    left_out: int = 0  # examples longer than the model's context, which are not among the N

    @property
    def mean(self) -> Tensor:
        """(N, 4) float32: nats per token or, in the harness's style, per character."""
        return self.summed / torch.tensor([example.lengths for example in self.examples])

    def correct(self) -> dict[str, int]:
        """How often the lowest loss, the first of equal ones, is that of the right ending."""
        labels = torch.tensor([example.label for example in self.examples])
        losses = {"acc": self.summed, "acc_norm": self.mean}
        return {name: int((each.argmin(1) == labels).sum()) for name, each in losses.items()}

    def metrics(self) -> dict[str, float]:
        """The names and values that training logs."""
        total = len(self.examples)
        metrics = {f"hellaswag_{name}": n / total for name, n in self.correct().items()}
        left_out = {"hellaswag_left_out": self.left_out} if self.left_out else {}
        return metrics | {"hellaswag_total": total} | left_out

    def __repr__(self) -> str:
        total = len(self.examples)
        parts = [f"{name} {n}/{total}={n / total:.4f}" for name, n in self.correct().items()]
        if self.left_out:
            parts.append(f"({self.left_out} left out: longer than the model's context)")
        return " ".join(parts)


def main() -> None:
    """Score a model and print its accuracy."""
    config = parse_flags(HellaSwagConfig)
    with distributed.setup_distributed(config.device) as dist_info:
        model = load_model(config.model, dist_info.device)
        path = config.data or download_hellaswag()
        examples = load_examples(path, config.limit, config.style)
        exact = config.style == "harness" and config.dtype == "auto"
        dtype = select_dtype("float32" if exact else config.dtype, dist_info.device)
        result = evaluate_hellaswag(model, examples, dist_info, dtype, batch_size=config.batch_size)
        if distributed.is_main():
            style = ", harness style" if config.style == "harness" else ""
            print(f"HellaSwag {path}, {config.model}{style}: {result}")
            if config.output is not None:
                write_predictions(config.output, result)


def load_examples(path: str | Path, limit: int = 0, style: Style = "completion") -> list[Example]:
    """Read and tokenise a JSONL or Parquet file of HellaSwag, or its first `limit` rows."""
    if str(path).endswith(".parquet"):
        import pyarrow.parquet

        rows: list[Any] = pyarrow.parquet.read_table(path).to_pylist()
    else:
        rows = Path(path).read_bytes().rstrip().splitlines()
    examples: list[Example] = []
    for number, row in enumerate(rows[: limit or None], start=1):
        try:
            values = row if isinstance(row, dict) else json.loads(row)
            examples.append(render_example(values, style))
        except (LookupError, TypeError, ValueError) as error:  # of UTF-8 and JSON too
            raise ValueError(f"{path}:{number} is no row of HellaSwag: {error!r}") from None
    if not examples:
        raise ValueError(f"{path} has no examples")
    return examples


def render_example(row: Any, style: Style = "completion") -> Example:  # noqa: ANN401 - any JSON value
    """Tokenise one row of the data set: the context, and each ending after a space."""
    texts, endings = [row[field] for field in CONTEXT_FIELDS[style]], row["endings"]
    encode = gpt2_encoding().encode_ordinary
    if style == "completion":
        context, tokens = encode(texts[0]), [encode(f" {text}") for text in endings]
        lengths = [*map(len, tokens)]
    else:  # lm-evaluation-harness's tasks/hellaswag/utils.py and, from ids on, api/model.py
        activity, ctx_a, ctx_b = texts
        prompt = _harness_text(f"{activity}: {ctx_a} {ctx_b.capitalize()}")
        choices = [_harness_text(text) for text in endings]
        context = encode(prompt.rstrip())  # the spaces at its end belong to the endings
        tokens = [encode(f"{prompt} {choice}")[len(context) :] for choice in choices]
        lengths = [*map(len, choices)]
    label = int(row["label"])  # on the hub a text
    if not context or len(endings) != N_ENDINGS or label not in range(N_ENDINGS):
        raise ValueError(f"the context is empty, or there are not {N_ENDINGS} endings and a label")
    return Example(row["ind"], label, context, tokens, lengths)


def _harness_text(text: str) -> str:
    """A text without WikiHow's marks; a doubled space becomes one, once."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def examples_or_none(path: Path | None, block_size: int, dist_info: DistInfo) -> list[Example]:
    """The examples that training scores; none, with a warning, where it cannot score any.

    Every rank must call this, and all of them get the same answer. Without `path` it takes the
    validation set, downloaded once; a given file must be there, and the same on all ranks.
    """
    examples, problem = list[Example](), ""
    if path is not None:
        with distributed.raise_on_all_ranks():
            examples = load_examples(path)
        distributed.check_same_on_all_ranks("the HellaSwag files", [sha256_of(path)])
    else:
        try:
            examples = load_examples(download_hellaswag())
        except (OSError, ValueError) as error:
            problem = str(error)
    if examples and not any(example.fits(block_size) for example in examples):
        problem = f"every example is longer than --block-size {block_size}"
    # All ranks score together: where one of them cannot, none may begin.
    problems = [text for text in distributed.gather_text(problem) if text]
    if problems:
        distributed.print0(f"warning: HellaSwag will not be scored: {problems[0]}")
    return [] if problems else examples


def evaluate_hellaswag(
    model: GPT,
    examples: Sequence[Example],
    dist_info: DistInfo | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    batch_size: int = 16,
    before_batch: Callable[[], object] = lambda: None,
) -> HellaSwagResult:
    """Score a data set; every rank must call this with the same examples, and gets the same result.

    The batches and losses are the same at every world size. Examples that are longer than the
    model's context are left out and counted. `model` is the raw one, neither compiled nor wrapped;
    `dist_info` is by default one process on its device. The matrix products are of `dtype`, except
    the LM head's, which are float32. `before_batch`: see `distributed.rank_batches`.
    """
    fitting = [example for example in examples if example.fits(model.config.block_size)]
    if not fitting:
        raise ValueError(
            f"none of the {len(examples)} HellaSwag examples fits the model's context of "
            f"{model.config.block_size} tokens: train one with a larger --block-size"
        )
    dist_info = dist_info or DistInfo(next(model.parameters()).device)
    # Equal lengths need little padding; the longest come first, so that memory runs out early.
    lengths = [len(example.context) + sum(map(len, example.endings)) for example in fitting]
    order = sorted(range(len(fitting)), key=lambda i: -lengths[i])
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    summed = torch.zeros(len(fitting), N_ENDINGS, device=dist_info.device)
    rounds = distributed.rank_batches(batches, dist_info, before_batch, "HellaSwag")
    # One autocast for all batches casts the weights once.
    with inference(model, dist_info.device, dtype):
        for batch, counts in rounds:
            losses = score_examples(model, [fitting[i] for i in batch], dist_info.device)
            if counts:
                summed[to_device(torch.tensor(batch), dist_info.device)] = losses
    # Each row is one rank's losses plus the zeros of the others.
    summed = distributed.all_reduce_sum(summed).cpu()
    return HellaSwagResult(fitting, summed, len(examples) - len(fitting))


@torch.no_grad()
def score_examples(model: GPT, examples: Sequence[Example], device: torch.device) -> Tensor:
    """(B, 4) float32 on `device`: the summed loss of each ending of B examples, in nats."""
    rows = [_pack(example.context, example.endings) for example in examples]
    tokens = pad_sequence([tokens for tokens, _ in rows], batch_first=True)  # (B, T, 3)
    idx, positions, segments = to_device(tokens.permute(2, 0, 1).contiguous(), device)
    hidden = model.hidden_states(idx, positions, _attention_mask(segments))  # (B, T, C)

    T = idx.size(1)
    queries = torch.tensor([T * i + query for i, (_, row) in enumerate(rows) for query in row])
    endings = [torch.tensor(ending) for example in examples for ending in example.endings]
    hidden = hidden.flatten(0, 1)[to_device(queries, device)]  # (N, C): N tokens in all endings
    targets = to_device(torch.cat(endings), device)
    losses = F.cross_entropy(model.logits(hidden), targets, reduction="none")  # (N,)
    by_ending = pad_sequence([*torch.split(losses, [*map(len, endings)])], batch_first=True)
    return by_ending.sum(dim=1).view(-1, N_ENDINGS)


def _pack(context: list[int], endings: list[list[int]]) -> tuple[Tensor, list[int]]:
    """Lay T tokens of a context and its endings out as the module's docstring shows.

    Returns id, position and segment of each, (T, 3) int64, and which of them predict the endings.
    """
    n_context, queries = len(context), list[int]()
    idx, positions, segments = [*context], [*range(n_context)], [CONTEXT] * n_context
    for segment, ending in enumerate(endings, start=CONTEXT + 1):
        inputs = ending[:-1]
        queries += [n_context - 1, *range(len(idx), len(idx) + len(inputs))]
        idx += inputs
        positions += range(n_context, n_context + len(inputs))
        segments += [segment] * len(inputs)
    return torch.tensor([idx, positions, segments]).T, queries


def _attention_mask(segments: Tensor) -> Tensor:
    """(B, T) segments to a (B, 1, T, T) bool mask: attend to the past of context and own segment.

    Padding attends to padding, so that no row of the mask is empty.
    """
    T = segments.size(1)
    causal = torch.ones(T, T, dtype=torch.bool, device=segments.device).tril()
    own = segments[:, :, None] == segments[:, None, :]
    return (causal & (own | (segments == CONTEXT)[:, None, :]))[:, None]


def write_predictions(path: str | Path, result: HellaSwagResult) -> None:
    """Write one JSON line per scored example, in their order, atomically."""
    with atomic_write(Path(path)) as file:
        for example, summed, mean in zip(result.examples, result.summed, result.mean, strict=True):
            line = {
                "ind": example.ind,
                "label": example.label,
                "mean_losses": [round(loss, 6) for loss in mean.tolist()],
                "summed_losses": [round(loss, 6) for loss in summed.tolist()],
                "prediction": int(summed.argmin()),
                "prediction_norm": int(mean.argmin()),
            }
            file.write((json.dumps(line) + "\n").encode())


def download_hellaswag() -> Path:
    """The validation set, from the hub once; ranks may call it at once."""
    remedy = "without network pass --data FILE (--hellaswag-data FILE in training)"
    wanted = {"repo_type": "dataset", "revision": DATA_REVISION, "allow_patterns": DATA_FILE}
    with explain_hub_errors("HellaSwag was not downloaded", remedy):
        return fetch_files(DATA_REPO, lambda f: (f / DATA_FILE).is_file(), **wanted) / DATA_FILE


if __name__ == "__main__":
    run_command(main)
