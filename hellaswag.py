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

if __name__ == "__main__":
    from runtime.startup import prepare_process

    prepare_process()  # the imports below take seconds

import hashlib
import http.client
import itertools
import json
import math
import re
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from model import GPT
from runtime import distributed
from runtime.checkpoint import load_model
from runtime.cli import bad_numbers, parse_flags, run_command
from runtime.device import DeviceName, DtypeName, inference, select_dtype, to_device
from runtime.distributed import DistInfo
from runtime.files import atomic_write, sha256_of
from tokenizer import gpt2_encoding

DATA_URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
DATA_SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
DATA_PATH = Path("data/hellaswag/hellaswag_val.jsonl")
TIMEOUT_SECONDS = 30  # of each read
N_ENDINGS = 4
CONTEXT, PADDING = 0, N_ENDINGS + 1  # segments of a packed row; endings are 1 to 4
# Float32 logits of 128 tokens take 26 MB, which stays in a CPU's cache; GPUs need larger products.
TOKENS_PER_PRODUCT = {"cpu": 128, "cuda": 1024, "mps": 1024}
Style = Literal["completion", "harness"]
CONTEXT_FIELDS = {"completion": ("ctx",), "harness": ("activity_label", "ctx_a", "ctx_b")}


@dataclass(frozen=True)
class HellaSwagConfig:
    """Score a model on HellaSwag."""

    model: str = "gpt2"
    """A run folder, a checkpoint, a folder in Hugging Face's format, or a GPT-2 on the hub."""
    data: Path | None = None
    """A JSONL file in HellaSwag's format; by default the validation set, downloaded once."""
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
    cuts_context: bool = False  # from the left, where it is too long: the harness's style

    def fits(self, block_size: int) -> bool:
        """Whether a model with a context of `block_size` tokens can score it."""
        longest = max(map(len, self.endings))
        return longest + (0 if self.cuts_context else len(self.context)) <= block_size


@dataclass(frozen=True)
class HellaSwagResult:
    """The losses of N examples and the accuracies that follow; all tensors on the CPU."""

    labels: Tensor  # (N,) int64
    summed: Tensor  # (N, 4) float32, nats per ending
    mean: Tensor  # (N, 4) float32, nats per token or, in the harness's style, per character
    left_out: int = 0  # examples longer than the model's context, which are not among the N

    @property
    def total(self) -> int:
        """How many examples were scored: N."""
        return len(self.labels)

    @property
    def predictions(self) -> Tensor:
        """(N,) int64: the ending with the lowest summed loss, the first of equal ones."""
        return self.summed.argmin(dim=1)

    @property
    def predictions_norm(self) -> Tensor:
        """(N,) int64: the ending with the lowest mean loss, the first of equal ones."""
        return self.mean.argmin(dim=1)

    @property
    def acc(self) -> float:
        """The share of `predictions` that are right."""
        return int((self.predictions == self.labels).sum()) / self.total

    @property
    def acc_norm(self) -> float:
        """The share of `predictions_norm` that are right."""
        return int((self.predictions_norm == self.labels).sum()) / self.total

    def metrics(self) -> dict[str, float]:
        """The names and values that training logs."""
        metrics = {
            "hellaswag_acc": self.acc,
            "hellaswag_acc_norm": self.acc_norm,
            "hellaswag_total": self.total,
        }
        return metrics | ({"hellaswag_left_out": self.left_out} if self.left_out else {})

    def __str__(self) -> str:
        parts = [
            f"{name} {round(share * self.total)}/{self.total}={share:.4f}"
            for name, share in (("acc", self.acc), ("acc_norm", self.acc_norm))
        ]
        if self.left_out:
            parts.append(f"({self.left_out} left out: longer than the model's context)")
        return " ".join(parts)


def main() -> None:
    """Score a model and print its accuracy."""
    config = parse_flags(HellaSwagConfig)
    with distributed.setup_distributed(config.device) as dist_info:
        model = load_model(config.model, dist_info.device)
        path = config.data or download_hellaswag(dist_info)
        examples = load_examples(path, config.limit, config.style)
        exact = config.style == "harness" and config.dtype == "auto"
        dtype = select_dtype("float32" if exact else config.dtype, dist_info.device)
        result = evaluate_hellaswag(
            model, examples, dist_info, dtype, batch_size=config.batch_size, progress=True
        )
        if dist_info.is_main:
            style = ", harness style" if config.style == "harness" else ""
            print(f"HellaSwag {path}, {config.model}{style}: {result}")
            if config.output is not None:
                scored = [e for e in examples if e.fits(model.config.block_size)]
                write_predictions(config.output, scored, result)


def load_examples(path: str | Path, limit: int = 0, style: Style = "completion") -> list[Example]:
    """Read and tokenise a HellaSwag JSONL file.

    Args:
        path: one JSON object per line; see `render_example`. Blank lines are skipped.
        limit: read this many examples, from the first; 0 = all.
        style: of the prompt and of `acc_norm`.

    Raises:
        OSError: the file cannot be read.
        ValueError: a row is no HellaSwag example (the message names its line), or there is none.
    """
    examples: list[Example] = []
    with Path(path).open("rb") as file:
        rows = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        for number, line in itertools.islice(rows, limit or None):
            try:
                examples.append(render_example(json.loads(line.decode("utf-8")), style))
            except (ValueError, RecursionError) as error:  # of UTF-8 and JSON too
                raise ValueError(f"{path}:{number}: {error}") from None
    if not examples:
        raise ValueError(f"{path} has no examples")
    return examples


def render_example(row: Any, style: Style = "completion") -> Example:  # noqa: ANN401 - any JSON value
    """Tokenise one row of the data set: the context, and each ending after a space.

    Args:
        row: has `ind` (int), `ctx` (text), `endings` (4 texts) and `label` (0 to 3, as a number or
            a text). The harness's style takes `activity_label`, `ctx_a` and `ctx_b` for `ctx`.
        style: of the prompt and of `acc_norm`.
    """
    fields = CONTEXT_FIELDS[style]
    if not isinstance(row, dict):
        raise ValueError("the row is not a JSON object")
    missing = [key for key in ("ind", *fields, "endings", "label") if key not in row]
    if missing:
        raise ValueError(f"the row has no {', '.join(missing)}")
    ind, label, endings = row["ind"], str(row["label"]), row["endings"]
    if type(ind) is not int or label not in ("0", "1", "2", "3"):
        raise ValueError(f"ind is {ind!r}, label {label!r}: not a whole number and one of 0 to 3")
    if not isinstance(endings, list) or len(endings) != N_ENDINGS:
        raise ValueError(f"endings must be a list of {N_ENDINGS} texts")
    texts = [row[field] for field in fields]
    is_text = all(isinstance(text, str) for text in (*texts, *endings))
    if not is_text or not all(text.strip() for text in ("".join(texts), *endings)):
        raise ValueError(f"{', '.join(fields)} or an ending is empty or not a text")
    encode = gpt2_encoding().encode_ordinary
    if style == "completion":
        tokens = [encode(" " + text) for text in endings]
        return Example(ind, int(label), encode(texts[0]), tokens, [*map(len, tokens)])
    # As lm-evaluation-harness does in tasks/hellaswag/utils.py and, from ids on, in api/model.py.
    activity, ctx_a, ctx_b = texts
    prompt = _harness_text(f"{activity}: {ctx_a} {ctx_b.capitalize()}")
    choices = [_harness_text(text) for text in endings]
    context = encode(prompt.rstrip())  # the spaces at its end belong to the endings
    if not context:
        raise ValueError("the context is empty without its [notes]")
    tokens = [encode(f"{prompt} {choice}")[len(context) :] for choice in choices]
    return Example(ind, int(label), context, tokens, [*map(len, choices)], cuts_context=True)


def _harness_text(text: str) -> str:
    """A text without WikiHow's marks; a doubled space becomes one, once."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def examples_or_none(path: Path | None, block_size: int, dist_info: DistInfo) -> list[Example]:
    """The examples that training scores; none, with a warning, where it cannot score any.

    Every rank must call this, and all of them get the same answer. Without `path` it takes the
    validation set, downloaded once; a given file must be there, and the same on all ranks.
    """
    examples: list[Example] = []
    problem = ""
    if path is not None:
        with distributed.raise_on_all_ranks():
            examples = load_examples(path)
            content = sha256_of(path)
        distributed.check_same_on_all_ranks("the HellaSwag files", [content])
    else:
        try:
            examples = load_examples(download_hellaswag(dist_info))
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
    dtype: torch.dtype | None = None,
    *,
    batch_size: int = 16,
    progress: bool = False,
    between: Callable[[], object] = lambda: None,
) -> HellaSwagResult:
    """Score a data set; every rank must call this, and gets the same result.

    The batches and losses are the same at every world size. Examples that are longer than the
    model's context are left out and counted.

    Args:
        model: the raw model, neither compiled nor wrapped, on the device of `dist_info`.
        examples: the same ones on every rank.
        dist_info: by default one process on the model's device.
        dtype: of the matrix products, except the LM head's, which are float32. By default
            float32, so that scores compare between machines: bfloat16 is faster, and changes a
            few predictions between nearly equal endings.
        batch_size: examples in one forward pass.
        progress: show a bar on rank 0, if its stderr is a terminal.
        between: called before each round of batches on all ranks; it may raise to interrupt the
            evaluation, on all ranks alike.

    Returns:
        The losses of the examples that fit, in their order.
    """
    fitting = [example for example in examples if example.fits(model.config.block_size)]
    if not fitting:
        raise ValueError(
            f"none of the {len(examples)} HellaSwag examples fits the model's context of "
            f"{model.config.block_size} tokens: use a model with a larger --block-size"
        )
    dist_info = dist_info or DistInfo(next(model.parameters()).device)
    dtype = dtype or torch.float32
    # Equal lengths need little padding; the longest come first, so that memory runs out early.
    order = sorted(range(len(fitting)), key=lambda i: -_length(fitting[i]))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    summed = torch.zeros(len(fitting), N_ENDINGS, device=dist_info.device)
    title = "HellaSwag" if progress else None
    rounds = distributed.rank_batches(batches, dist_info, between, title)
    # One autocast for all batches casts the weights once.
    with inference(dist_info.device, dtype):
        for batch, counts in rounds:
            losses = score_examples(model, [fitting[i] for i in batch], dist_info.device)
            if counts:
                summed[to_device(torch.tensor(batch), dist_info.device)] = losses
    # Each row is one rank's losses plus the zeros of the others.
    summed = distributed.all_reduce_sum(summed).cpu()
    lengths = torch.tensor([example.lengths for example in fitting])
    labels = torch.tensor([example.label for example in fitting])
    return HellaSwagResult(labels, summed, summed / lengths, len(examples) - len(fitting))


@torch.no_grad()
def score_examples(model: GPT, examples: Sequence[Example], device: torch.device) -> Tensor:
    """(B, 4) float32: the summed loss of each ending of B examples, in nats.

    The model computes on `device`, even if its weights are offloaded to the CPU, in the caller's
    autocast dtype.
    """
    rows = [row for example in examples for row in _rows(example, model.config.block_size)]
    idx = to_device(_pad([row.idx for row in rows], 0), device)
    positions = to_device(_pad([row.positions for row in rows], 0), device)
    segments = to_device(_pad([row.segments for row in rows], PADDING), device)
    hidden = model.encode(idx, positions, _attention_mask(segments))  # (B, T, C)

    T = idx.size(1)
    queries = torch.tensor([T * i + query for i, row in enumerate(rows) for query in row.queries])
    endings = [torch.tensor(ending) for example in examples for ending in example.endings]
    hidden = hidden.flatten(0, 1)[to_device(queries, device)]  # (N, C): N tokens in all endings
    losses = _token_losses(model, hidden, to_device(torch.cat(endings), device))
    by_ending = pad_sequence([*torch.split(losses, [*map(len, endings)])], batch_first=True)
    return by_ending.sum(dim=1).view(-1, N_ENDINGS)


class PackedRow(NamedTuple):
    """One example as a row of tokens, and the predictions in it that count."""

    idx: list[int]
    positions: list[int]
    segments: list[int]  # 0 = context, 1 to 4 = ending
    queries: list[int]  # indices in the row that predict the endings' tokens, in their order


def _length(example: Example) -> int:
    """Tokens of the row in which an example fits."""
    return len(example.context) + sum(len(ending) - 1 for ending in example.endings)


def _rows(example: Example, block_size: int) -> list[PackedRow]:
    """An example as one row; where its context has to be cut, each ending has a row of its own."""
    context, endings = example.context, example.endings
    if len(context) + max(map(len, endings)) <= block_size:
        return [_pack(context, endings)]
    kept = [block_size + 1 - len(ending) for ending in endings]  # the last token is no input
    return [_pack(context[-n:], [ending]) for n, ending in zip(kept, endings, strict=True)]


def _pack(context: list[int], endings: list[list[int]]) -> PackedRow:
    """Lay a context and its endings out as the module's docstring shows."""
    n_context = len(context)
    row = PackedRow([*context], [*range(n_context)], [CONTEXT] * n_context, [])
    for segment, ending in enumerate(endings, start=1):
        n_inputs = len(ending) - 1
        start = len(row.idx)
        row.idx.extend(ending[:-1])
        row.positions.extend(range(n_context, n_context + n_inputs))
        row.segments.extend([segment] * n_inputs)
        row.queries.extend([n_context - 1, *range(start, start + n_inputs)])
    return row


def _pad(rows: list[list[int]], value: int) -> Tensor:
    """Lists of ids as one (B, T) int64 tensor, T the longest of them."""
    return pad_sequence([torch.tensor(row) for row in rows], True, value)


def _attention_mask(segments: Tensor) -> Tensor:
    """(B, T) segments to a (B, 1, T, T) bool mask: attend to the past of context and own segment.

    Padding attends to padding, so that no row of the mask is empty.
    """
    T = segments.size(1)
    causal = torch.ones(T, T, dtype=torch.bool, device=segments.device).tril()
    own = segments[:, :, None] == segments[:, None, :]
    return (causal & (own | (segments == CONTEXT)[:, None, :]))[:, None]


def _token_losses(model: GPT, hidden: Tensor, targets: Tensor) -> Tensor:
    """(N, C) hidden states and (N,) next ids to (N,) float32 cross-entropies, in nats."""
    size = TOKENS_PER_PRODUCT[hidden.device.type]
    parts = (torch.split(tensor, size) for tensor in (hidden.float(), targets))
    losses = []
    # bfloat16 would round losses near 3 to steps of 0.016 and tie the endings.
    with torch.autocast(hidden.device.type, enabled=False):
        for h, target in zip(*parts, strict=True):
            logits = model.lm_head(h)  # (n, padded_vocab_size)
            logits[:, model.config.vocab_size :] = -math.inf  # cutting the padding off would copy
            losses.append(F.cross_entropy(logits, target, reduction="none"))
    return torch.cat(losses)


def write_predictions(path: Path, examples: Sequence[Example], result: HellaSwagResult) -> None:
    """Write one JSON line per scored example, in their order, atomically."""

    def rounded(losses: Tensor) -> list[float | None]:
        # JSON has no infinity: the mean of an ending that is empty after its clean-up.
        return [round(x, 6) if math.isfinite(x) else None for x in losses.tolist()]

    with atomic_write(path) as file:
        for row, example in enumerate(examples):
            line = {
                "ind": example.ind,
                "label": example.label,
                "mean_losses": rounded(result.mean[row]),
                "summed_losses": rounded(result.summed[row]),
                "prediction": int(result.predictions[row]),
                "prediction_norm": int(result.predictions_norm[row]),
            }
            file.write((json.dumps(line) + "\n").encode())


def download_hellaswag(dist_info: DistInfo, path: Path = DATA_PATH, url: str = DATA_URL) -> Path:
    """Download the validation set to `path`, once, on rank 0; every rank must call this.

    Raises:
        OSError: rank 0 could not download it, or another rank does not find it.
    """
    remedy = "pass --data FILE (--hellaswag-data FILE in training)"
    try:
        if dist_info.is_main and not (path.is_file() and sha256_of(path) == DATA_SHA256):
            with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
                content = response.read()
            if hashlib.sha256(content).hexdigest() != DATA_SHA256:
                raise OSError("it is not the known file")
            with atomic_write(path) as file:
                file.write(content)
    except (OSError, http.client.HTTPException) as error:
        raise OSError(f"cannot download {url} ({error}); without network {remedy}") from None
    finally:
        distributed.barrier()  # the other ranks wait, after a failure too
    if not path.is_file():
        raise FileNotFoundError(
            f"rank {dist_info.rank} has no {path}, which rank 0 downloads from {url}; without "
            f"network, or rank 0's disk, {remedy}"
        )
    return path


if __name__ == "__main__":
    run_command(main)
