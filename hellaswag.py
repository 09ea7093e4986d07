"""HellaSwag (Zellers et al. 2019): which of four endings does the model find likeliest?

    python hellaswag.py --model runs/NAME
    torchrun --nproc_per_node=8 hellaswag.py --model gpt2 --output predictions.jsonl

Completion style: an ending's loss is that of its own tokens after the context. `acc` takes the
lowest summed loss, `acc_norm` the lowest mean loss.

Each example is one row, in which the four endings share their context:

    tokens     c0 c1 c2 | a0 a1 | b0 | d0 d1 d2 | e0 e1
    positions   0  1  2 |  3  4 |  3 |  3  4  5 |  3  4

An ending looks at the context and at itself only. Its last token is predicted but predicts
nothing, so it is left out of the row.
"""

if __name__ == "__main__":
    from runtime.startup import prepare_process

    prepare_process()  # the imports below take seconds

import hashlib
import http.client
import json
import math
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from model import GPT
from runtime.checkpoint import load_model
from runtime.cli import parse_flags, run_command
from runtime.device import DeviceName, DtypeName, autocast, lm_head_precision, select_dtype
from runtime.distributed import (
    DistInfo,
    all_reduce_sum,
    broadcast_int,
    check_same_on_all_ranks,
    print0,
    raise_on_all_ranks,
    setup_distributed,
)
from runtime.files import atomic_write, sha256_of
from tokenizer import gpt2_encoding

DATA_URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
DATA_BYTES = 12_246_618
DATA_SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
DATA_PATH = Path("data/hellaswag/hellaswag_val.jsonl")
DOWNLOAD_TIMEOUT_SECONDS = 30
N_ENDINGS = 4
CONTEXT, PADDING = 0, N_ENDINGS + 1  # segments of a packed row; endings are 1 to 4
QUERIES_PER_PRODUCT = 128  # rows of float32 logits at a time, 26 MB: they stay in the cache
Round = list[list[int]]  # a batch for each process: the places of its examples


@dataclass(frozen=True)
class HellaSwagConfig:
    """The flags of `hellaswag.py`."""

    model: str = "gpt2"
    """A run folder, a checkpoint, a folder in Hugging Face's format, or a GPT-2 on the hub."""
    data: Path | None = None
    """A JSONL file in HellaSwag's format; by default the validation set, downloaded once."""
    limit: int = 0
    """Score only this many examples, from the first; 0 = all."""
    output: Path | None = None
    """Write every example's losses and predictions to this JSONL file."""
    batch_size: int = 16
    """Examples in one forward pass."""
    device: DeviceName = "auto"
    """Where to run."""
    dtype: DtypeName = "auto"
    """The type of the matrix products; the losses are float32 whatever it is."""

    def __post_init__(self) -> None:
        problems = [
            f"--{name.replace('_', '-')} must be at least {least}, not {getattr(self, name)}"
            for name, least in (("limit", 0), ("batch_size", 1))
            if getattr(self, name) < least
        ]
        if problems:
            raise ValueError("; ".join(problems))


@dataclass(frozen=True)
class Example:
    """One context and its four endings, as token ids."""

    ind: int
    label: int
    context: list[int]
    endings: list[list[int]]
    origin: str
    """File and line, for messages."""

    @property
    def packed_length(self) -> int:
        """Tokens of the row that scores it."""
        return len(self.context) + sum(len(ending) - 1 for ending in self.endings)


@dataclass(frozen=True)
class HellaSwagResult:
    """The losses of N examples' endings, and what follows from them; on the CPU."""

    labels: Tensor  # (N,) int64
    summed: Tensor  # (N, 4) float32, nats of a whole ending
    mean: Tensor  # (N, 4) float32, nats a token

    @property
    def total(self) -> int:
        """How many examples were scored."""
        return len(self.labels)

    @property
    def predictions(self) -> Tensor:
        """(N,) int64: the ending with the lowest summed loss; the first of equals."""
        return self.summed.argmin(dim=1)

    @property
    def predictions_norm(self) -> Tensor:
        """(N,) int64: the ending with the lowest mean loss; the first of equals."""
        return self.mean.argmin(dim=1)

    @property
    def correct(self) -> int:
        """How many of `predictions` are right."""
        return int((self.predictions == self.labels).sum())

    @property
    def correct_norm(self) -> int:
        """How many of `predictions_norm` are right."""
        return int((self.predictions_norm == self.labels).sum())

    @property
    def acc(self) -> float:
        """The share of `predictions` that are right."""
        return self.correct / self.total

    @property
    def acc_norm(self) -> float:
        """The share of `predictions_norm` that are right."""
        return self.correct_norm / self.total

    def __str__(self) -> str:
        return (
            f"acc {self.correct}/{self.total}={self.acc:.4f} "
            f"acc_norm {self.correct_norm}/{self.total}={self.acc_norm:.4f}"
        )


def main() -> None:
    """Score a model and print its accuracy."""
    config = parse_flags(HellaSwagConfig)
    with setup_distributed(config.device) as dist_info:
        path = config.data or download_hellaswag(dist_info)
        examples = load_examples(path, config.limit)
        model = load_model(config.model, dist_info.device)
        dtype = select_dtype(config.dtype, dist_info.device)
        result = evaluate_hellaswag(
            model, examples, dist_info, dtype, batch_size=config.batch_size, progress=True
        )
        if dist_info.is_main:
            print(f"HellaSwag {path}, {config.model}: {result}")
            if config.output is not None:
                write_predictions(config.output, examples, result)


def load_examples(path: Path, limit: int = 0) -> list[Example]:
    """Read and tokenise a HellaSwag JSONL file.

    Args:
        path: one JSON object a line; see `render_example`.
        limit: read this many examples, from the first; 0 = all.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a row is not a HellaSwag example, or there is none; the message has its line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no HellaSwag file {path}")
    examples: list[Example] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if limit and len(examples) == limit:
                break
            if line.strip():
                examples.append(_parse_line(line, f"{path}:{number}"))
    if not examples:
        raise ValueError(f"{path} has no examples")
    return examples


def _parse_line(line: bytes, origin: str) -> Example:
    try:
        return render_example(json.loads(line.decode("utf-8")), origin)
    except ValueError as error:  # bad UTF-8 and bad JSON are ValueErrors too
        raise ValueError(f"{origin}: {error}") from None


def render_example(row: Any, origin: str = "") -> Example:  # noqa: ANN401 - any JSON value
    """Tokenise one row of the data set: the context, and each ending after a space.

    Args:
        row: has `ind` (int), `ctx` (text), `endings` (4 texts) and `label` (int, 0 to 3).
        origin: file and line, for later messages.

    Raises:
        ValueError: something of that is missing, empty or of another kind.
    """
    if not isinstance(row, dict):
        raise ValueError("the row is not a JSON object")
    missing = [key for key in ("ind", "ctx", "endings", "label") if key not in row]
    if missing:
        raise ValueError(f"the row has no {', '.join(missing)}")
    ind, ctx, endings, label = row["ind"], row["ctx"], row["endings"], row["label"]
    if type(ind) is not int:
        raise ValueError(f"ind is {ind!r}, not a whole number")
    if type(label) is not int or not 0 <= label < N_ENDINGS:
        raise ValueError(f"label is {label!r}, not 0, 1, 2 or 3")
    if not isinstance(endings, list) or len(endings) != N_ENDINGS:
        raise ValueError(f"endings must be a list of {N_ENDINGS} texts")
    if not all(isinstance(text, str) and text.strip() for text in (ctx, *endings)):
        raise ValueError("ctx or an ending is empty or not a text")
    encode = gpt2_encoding().encode_ordinary
    return Example(ind, label, encode(ctx), [encode(" " + text) for text in endings], origin)


def examples_or_none(path: Path | None, block_size: int, dist_info: DistInfo) -> list[Example]:
    """The examples that training scores; none, with a warning, where they cannot be had.

    Args:
        path: a HellaSwag JSONL file; by default the validation set, downloaded once.
        block_size: the most tokens that an example may have.
        dist_info: rank, world size and device of this process; every process must call this.

    Raises:
        FileNotFoundError: the given file is missing.
        ValueError: the given file is damaged, or an example is too long.
    """
    examples: list[Example] = []
    if path is not None:
        with raise_on_all_ranks(dist_info):
            examples = load_examples(path)
            check_lengths(examples, block_size)
            content = sha256_of(path)
        check_same_on_all_ranks("the HellaSwag files", [content], dist_info)
        return examples
    try:
        examples = load_examples(download_hellaswag(dist_info))
        check_lengths(examples, block_size)
    except (OSError, ValueError) as error:
        print0(dist_info, f"warning: HellaSwag will not be scored: {error}")
    # Scoring takes all processes together: where one has no examples, none may begin.
    ready = all_reduce_sum(torch.tensor(float(bool(examples)), device=dist_info.device), dist_info)
    return examples if int(ready) == dist_info.world_size else []


def check_lengths(examples: Sequence[Example], block_size: int) -> None:
    """Refuse examples that the model has not enough positions for.

    Raises:
        ValueError: a context and its longest ending are more than `block_size` tokens.
    """
    for example in examples:
        length = len(example.context) + max(map(len, example.endings))
        if length > block_size:
            raise ValueError(
                f"{example.origin}: context and ending are {length} tokens, "
                f"more than the model's block_size {block_size}"
            )


def evaluate_hellaswag(
    model: GPT,
    examples: Sequence[Example],
    dist_info: DistInfo,
    dtype: torch.dtype,
    *,
    batch_size: int = 16,
    progress: bool = False,
    watch: Callable[[Iterable[Round]], Iterable[Round]] = iter,
) -> HellaSwagResult:
    """Score a data set, shared out over all processes; every process must call it.

    The batches are the same whatever the number of processes, and so are the losses.

    Args:
        model: the raw model, neither compiled nor wrapped, on the context's device.
        examples: the same ones on every process.
        dist_info: rank, world size and device of this process.
        dtype: the type of the matrix products, the vocabulary's excepted, which is float32.
        batch_size: examples in one forward pass.
        progress: whether the main process shows a progress bar.
        watch: passes the rounds on, in each of which every process takes a batch; it may raise
            between them, on all processes alike.

    Returns:
        The losses in the order of `examples`, the same on every process.

    Raises:
        ValueError: an example is longer than the model's block.
    """
    check_lengths(examples, model.config.block_size)
    # Of one length, so that little is padding; the longest first, so that memory runs out early.
    order = sorted(range(len(examples)), key=lambda i: -examples[i].packed_length)
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    starts = range(0, len(batches), dist_info.world_size)
    rounds = [batches[start : start + dist_info.world_size] for start in starts]
    summed = torch.zeros(len(examples), N_ENDINGS, device=dist_info.device)
    bar = tqdm(total=len(examples), unit=" examples", disable=not (progress and dist_info.is_main))
    with (
        bar,
        lm_head_precision(dtype),
        autocast(dist_info.device, dtype),  # one for all batches: the weights are cast once
    ):
        for shared in watch(rounds):
            # The last round may be short; a sharded model still needs every process.
            batch = shared[dist_info.rank % len(shared)]
            losses = score_examples(model, [examples[i] for i in batch], dist_info.device)
            if dist_info.rank < len(shared):
                summed[batch] = losses
            bar.update(sum(map(len, shared)))
    # Each row is some process's losses plus the others' zeros.
    summed = all_reduce_sum(summed, dist_info).cpu()
    lengths = torch.tensor([[len(ending) for ending in e.endings] for e in examples])
    labels = torch.tensor([example.label for example in examples])
    return HellaSwagResult(labels, summed, summed / lengths)


@torch.no_grad()
def score_examples(model: GPT, examples: Sequence[Example], device: torch.device) -> Tensor:
    """The losses of all endings of a batch, in one forward pass.

    Args:
        model: the raw model; it runs in the autocast type of the caller.
        examples: B of them.
        device: where the model computes; its weights may be offloaded.

    Returns:
        (B, 4) float32: the summed loss of each ending, in nats, on the device.
    """
    rows = [_pack(example) for example in examples]
    idx = _pad([row.idx for row in rows], 0).to(device)
    positions = _pad([row.positions for row in rows], 0).to(device)
    segments = _pad([row.segments for row in rows], PADDING).to(device)
    hidden = model.encode(idx, positions, _attention_mask(segments))  # (B, T, C)

    T = idx.size(1)
    queries = torch.tensor([T * i + query for i, row in enumerate(rows) for query in row.queries])
    targets = torch.tensor([target for row in rows for target in row.targets])
    losses = _token_losses(
        model, hidden.flatten(0, 1)[queries.to(device)], targets.to(device)
    )  # (N,), all the endings one after the other

    lengths = torch.tensor([len(ending) for e in examples for ending in e.endings])
    is_token = torch.arange(int(lengths.max())) < lengths[:, None]  # (4 * B, longest ending)
    by_ending = losses.new_zeros(is_token.shape).masked_scatter_(is_token.to(device), losses)
    return by_ending.sum(dim=1).view(-1, N_ENDINGS)


class PackedRow(NamedTuple):
    """One example as a row of tokens, and where in it what is predicted."""

    idx: list[int]
    positions: list[int]
    segments: list[int]  # 0 = context, 1 to 4 = ending
    queries: list[int]  # places in the row whose next token counts
    targets: list[int]  # those next tokens: the four endings, one after the other


def _pack(example: Example) -> PackedRow:
    """Lay an example out as the module's docstring shows."""
    n_context = len(example.context)
    row = PackedRow(
        idx=list(example.context),
        positions=list(range(n_context)),
        segments=[CONTEXT] * n_context,
        queries=[],
        targets=[],
    )
    for segment, ending in enumerate(example.endings, start=1):
        n_inputs = len(ending) - 1
        start = len(row.idx)
        row.idx.extend(ending[:-1])
        row.positions.extend(range(n_context, n_context + n_inputs))
        row.segments.extend([segment] * n_inputs)
        row.queries.extend([n_context - 1, *range(start, start + n_inputs)])
        row.targets.extend(ending)
    return row


def _pad(rows: list[list[int]], value: int) -> Tensor:
    """Lists of ids as one (B, T) int64 tensor, T the longest of them."""
    return pad_sequence([torch.tensor(row) for row in rows], True, value)


def _attention_mask(segments: Tensor) -> Tensor:
    """Where each token may look: back, at the context and at its own segment.

    Args:
        segments: (B, T) int64.

    Returns:
        (B, 1, T, T) bool. Padding looks at padding too, so that no row of it is empty.
    """
    T = segments.size(1)
    causal = torch.ones(T, T, dtype=torch.bool, device=segments.device).tril()
    own = segments[:, :, None] == segments[:, None, :]
    return (causal & (own | (segments == CONTEXT)[:, None, :]))[:, None]


def _token_losses(model: GPT, hidden: Tensor, targets: Tensor) -> Tensor:
    """(N, C) hidden states and (N,) next ids to (N,) float32 cross-entropies, in nats."""
    losses = []
    # bfloat16 would round losses near 3 to steps of 0.016 and tie the endings.
    with torch.autocast(hidden.device.type, enabled=False):
        for h, t in zip(
            torch.split(hidden.float(), QUERIES_PER_PRODUCT),
            torch.split(targets, QUERIES_PER_PRODUCT),
            strict=True,
        ):
            logits = model.lm_head(h)
            # Without weight, the padding need not be cut off, which would copy the rest.
            logits[:, model.config.vocab_size :] = -math.inf
            losses.append(F.cross_entropy(logits, t, reduction="none"))
    return torch.cat(losses)


def write_predictions(path: Path, examples: Sequence[Example], result: HellaSwagResult) -> None:
    """Write one JSON line per example, in the order of `examples`, atomically."""
    with atomic_write(path) as file:
        for place, example in enumerate(examples):
            line = {
                "ind": example.ind,
                "label": example.label,
                "mean_losses": [round(x, 6) for x in result.mean[place].tolist()],
                "summed_losses": [round(x, 6) for x in result.summed[place].tolist()],
                "prediction": int(result.predictions[place]),
                "prediction_norm": int(result.predictions_norm[place]),
            }
            file.write((json.dumps(line) + "\n").encode())


def download_hellaswag(dist_info: DistInfo, path: Path = DATA_PATH, url: str = DATA_URL) -> Path:
    """Download the validation set, once; every process must call it.

    The main process downloads, the others wait for it.

    Args:
        dist_info: rank, world size and device of this process.
        path: where the file goes, or is already.
        url: where it comes from.

    Returns:
        `path`.

    Raises:
        OSError: the main process could not download it.
        FileNotFoundError: another process does not find what the main process downloaded.
    """
    failure: OSError | None = None
    if dist_info.is_main:
        try:
            fetch(url, path, DATA_BYTES, DATA_SHA256)
        except OSError as error:
            failure = error
    fetched = broadcast_int(failure is None, dist_info)  # the others wait here, whatever happens
    if failure is not None:
        raise failure
    if not fetched or not path.is_file():
        raise FileNotFoundError(
            f"process {dist_info.rank} has no {path}, which process 0 was to download from "
            f"{url}; on a machine without network, or with a disk of its own, pass --data FILE"
        )
    return path


def fetch(url: str, path: Path, size: int, sha256: str) -> None:
    """Download a file unless it is already there, whole.

    Args:
        url: where it comes from.
        path: where it goes; it appears only once it is complete and right.
        size: its bytes.
        sha256: its hash.

    Raises:
        OSError: there is no connection, or what came is not that file.
    """
    if path.is_file() and path.stat().st_size == size and sha256_of(path) == sha256:
        return
    try:
        with (
            urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_SECONDS) as response,
            atomic_write(path) as file,
        ):
            content = response.read(size + 1)
            if len(content) != size or hashlib.sha256(content).hexdigest() != sha256:
                raise OSError(f"its {len(content):,} bytes are not the {size:,} of the known file")
            file.write(content)
    except (OSError, http.client.HTTPException) as error:
        raise OSError(
            f"cannot download {url} ({error}); on a machine without network pass --data FILE "
            "(--hellaswag-data FILE in training)"
        ) from None


if __name__ == "__main__":
    run_command(main)
