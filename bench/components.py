"""What `python bench.py --component …` measures: the product's parts beside the training step.

Each part stands next to the ordinary way of doing the same thing, all taken in turn (A B A B …),
so that a machine's drift meets them alike. Nothing here changes a part to measure it: loops are
the product's own, and commands are the ones that users give.
"""

import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.nn import functional as F

from corpus.sources import stdlib_source
from dataloader import PREFETCH_BATCHES, Batch
from hellaswag import (
    Example,
    HellaSwagResult,
    evaluate_hellaswag,
    load_examples,
)
from model import GPT, GPTConfig
from runtime.device import autocast, synchronize
from runtime.distributed import DistInfo
from runtime.files import write_json
from runtime.metrics import MetricsLogger, StepTimer
from sample import generate
from tokenizer import END_OF_TEXT
from train_gpt2 import (
    StepResult,
    Trainer,
    build_trainer,
    log_step,
    save,
    train_step,
    training_loader,
)
from training.config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
LOADER_SECONDS = 1.0  # of one run of the loader alone
STEADY_COPIES = 5  # the larger input to the tokenisers, in copies of the smaller
SAMPLE_COUNT, SAMPLE_TOKENS = 4, 256
SEED = 1337
PEER_TOKENIZER = ROOT / "assets" / "tokenize_with_tiktoken.py"


@dataclass(frozen=True)
class Figure:
    """One measured quantity, over several runs."""

    label: str
    unit: str
    runs: list[float]
    better: Literal["higher", "lower"] = "higher"

    @property
    def median(self) -> float:
        """The middle run."""
        return statistics.median(self.runs)

    @property
    def spread(self) -> float:
        """How far the runs lie apart, as a share of the median."""
        return (max(self.runs) - min(self.runs)) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Setup:
    """What a component is measured with."""

    model: GPTConfig
    device: torch.device
    dtype: torch.dtype
    """Of matrix products."""
    micro_batch_size: int
    rounds: int
    """Runs of each contestant."""
    steps: int
    """Training steps in a run."""
    folder: Path
    """For scratch files."""
    data_dir: Path
    """Token shards to train on."""
    text: Path | None = None
    """A .parquet or .jsonl to tokenise; by default Python's standard library."""
    hellaswag_data: Path = ROOT / "assets" / "hellaswag_sample.jsonl"
    """The examples to score."""
    compile: bool = True
    """Compile the training step, as the product does."""

    def training(self) -> TrainConfig:
        """A training run of this setup, one micro-batch a step, that only trains."""
        return TrainConfig(
            data_dir=self.data_dir,
            n_layer=self.model.n_layer,
            n_head=self.model.n_head,
            n_embd=self.model.n_embd,
            block_size=self.model.block_size,
            total_batch_size=self.micro_batch_size * self.model.block_size,
            micro_batch_size=self.micro_batch_size,
            max_steps=1,
            val_every=0,
            hellaswag_every=0,
            sample_every=0,
            out_dir=self.folder / "runs",
            device=self.device.type,  # type: ignore[arg-type]  # a str, of the same values
            dtype=str(self.dtype).removeprefix("torch."),  # type: ignore[arg-type]
            compile=self.compile,
        )

    def trainer(self) -> Trainer:
        """The product's trainer for that run."""
        config, dist_info = self.training(), DistInfo(self.device)
        with redirect_stdout(io.StringIO()):
            return build_trainer(config, self.folder / "runs" / "bench", None, dist_info)

    def random_model(self) -> GPT:
        """A model with the weights of a first step, always the same ones."""
        torch.manual_seed(SEED)
        with self.device:
            return GPT(self.model)


def in_turn(rounds: int, *measures: Callable[[], float]) -> list[list[float]]:
    """Take each measure once in every round; returns each one's runs."""
    runs: list[list[float]] = [[] for _ in measures]
    for _ in range(rounds):
        for taken, measure in zip(runs, measures, strict=True):
            taken.append(measure())
    return runs


def seconds_of(work: Callable[[], object], device: torch.device | None = None) -> float:
    """The time that `work` takes, the device's share of it included."""
    start = time.perf_counter()
    work()
    if device is not None:
        synchronize(device)
    return time.perf_counter() - start


# --- data and logging -------------------------------------------------------------------------


class ClockedBatches:
    """An iterator over another's items that adds up the time spent waiting for them."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self.batches = batches
        self.seconds = 0.0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        start = time.perf_counter()
        try:
            return next(self.batches)
        finally:
            self.seconds += time.perf_counter() - start


def measure_data(setup: Setup) -> list[Figure]:
    """The loader's own speed, and what waiting for it and logging take of real training steps."""
    trainer = setup.trainer()
    shares = []
    with (
        MetricsLogger(trainer.run_dir / "metrics.jsonl") as logger,
        training_loader(trainer, 0) as batches,
        redirect_stdout(io.StringIO()),  # the console's lines are written, but not to be seen
    ):
        clocked = ClockedBatches(batches)
        result = one_step(trainer, clocked)  # compiles
        timer = StepTimer(0, setup.rounds * setup.steps, trainer.config.total_batch_size)
        for done in range(0, setup.rounds * setup.steps, setup.steps):
            clocked.seconds = logging_seconds = 0.0
            start = time.perf_counter()
            for step in range(done, done + setup.steps):
                result = one_step(trainer, clocked)
                before = time.perf_counter()
                log_step(trainer, logger, timer, step + 1, 6e-4, result)
                logging_seconds += time.perf_counter() - before
            synchronize(setup.device)
            total = time.perf_counter() - start
            shares.append((clocked.seconds + logging_seconds) / total)
    [alone] = in_turn(setup.rounds, lambda: _loader_tokens_per_second(trainer))
    return [
        Figure("the loader alone", "tokens/s", alone),
        Figure("waiting for data, and logging", "of a training step", shares, "lower"),
    ]


def _loader_tokens_per_second(trainer: Trainer) -> float:
    taken = 0
    with training_loader(trainer, 0) as batches:
        for _ in range(PREFETCH_BATCHES + 1):  # read ahead before the clock starts
            next(batches)
        start = time.perf_counter()
        while time.perf_counter() - start < LOADER_SECONDS:
            taken += next(batches).inputs.numel()
        synchronize(trainer.dist_info.device)
        return taken / (time.perf_counter() - start)


def one_step(trainer: Trainer, batches: Iterator[Batch]) -> StepResult:
    """The product's training step, one micro-batch long."""
    return train_step(
        trainer.model,
        trainer.optimizer,
        batches,
        grad_accum_steps=trainer.batch.grad_accum_steps,
        lr=trainer.config.max_lr,
        grad_clip=trainer.config.grad_clip,
        dtype=trainer.dtype,
        scaler=trainer.scaler,
        dist_info=trainer.dist_info,
    )


# --- tokenising -------------------------------------------------------------------------------


def measure_tokenize(setup: Setup) -> list[Figure]:
    """`fineweb.py` against a multiprocess tiktoken script: whole processes on the same text.

    The steady rate leaves start-up out: what more tokens take more time, of an input that has
    the text several times.

    Raises:
        ValueError: a command failed, or the two did not write equally many tokens.
    """
    text = setup.text or _stdlib_as_jsonl(setup.folder / "stdlib.jsonl")
    copies = [setup.folder / f"copy_{i}{text.suffix}" for i in range(STEADY_COPIES)]
    for copy in copies:
        shutil.copyfile(text, copy)
    out = setup.folder / "tokens"
    counts: dict[int, int] = {}  # tokens, by copies of the text

    def run(command: list[str | Path], sources: list[Path]) -> float:
        seconds = seconds_of(lambda: _run_script([*command, *sources]))
        tokens = sum(
            np.load(path, mmap_mode="r", allow_pickle=False).size for path in out.glob("*.npy")
        )
        shutil.rmtree(out)
        if counts.setdefault(len(sources), tokens) != tokens:
            raise ValueError(f"{text}: {command[0]} wrote {tokens} tokens, not {counts}")
        return seconds

    commands: dict[str, list[str | Path]] = {
        "fineweb.py": [ROOT / "fineweb.py", "--data-dir", out, "--source"],
        "multiprocess tiktoken": [PEER_TOKENIZER, out],
    }
    inputs = copies[:1], copies
    runs = in_turn(
        setup.rounds,
        *[partial(run, command, files) for command in commands.values() for files in inputs],
    )
    figures = []
    for label, small, large in zip(commands, runs[::2], runs[1::2], strict=True):
        few, many = counts[1], counts[STEADY_COPIES]
        steady = [(many - few) / (long - short) for short, long in zip(small, large, strict=True)]
        figures += [
            Figure(label, f"s for {few:,} tokens", small, "lower"),
            Figure(label, "tokens/s, whole process", [few / seconds for seconds in small]),
            Figure(label, "tokens/s, steady", steady),
        ]
    return figures


def _stdlib_as_jsonl(path: Path) -> Path:
    """Write the built-in corpus with one file a line; returns `path`."""
    texts = (file.read_text("utf-8", errors="replace") for file in stdlib_source().paths)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def _run_script(command: list[str | Path]) -> None:
    """Run a Python script that may import this repository's modules."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise ValueError(f"{Path(command[0]).name} failed: {last_line(done.stderr)}")


def last_line(text: str) -> str:
    """Where a program that failed says why."""
    return (text.strip().splitlines() or ["no message"])[-1]


# --- HellaSwag --------------------------------------------------------------------------------


def measure_hellaswag(setup: Setup) -> list[Figure]:
    """The batched scorer against one example at a time, and whether they say the same."""
    model, dist_info = setup.random_model(), DistInfo(setup.device)
    examples = load_examples(setup.hellaswag_data)
    score_one_at_a_time(model, examples[:1], setup.dtype)  # the device's first work is slow
    results: list[HellaSwagResult] = []

    def rate(score: Callable[[], HellaSwagResult]) -> float:
        return len(examples) / seconds_of(lambda: results.append(score()))

    ours, theirs = in_turn(
        setup.rounds,
        lambda: rate(lambda: evaluate_hellaswag(model, examples, dist_info, setup.dtype)),
        lambda: rate(lambda: score_one_at_a_time(model, examples, setup.dtype)),
    )
    batched, single = results[-2:]
    agree = (batched.predictions_norm == single.predictions_norm).float().mean().item()
    return [
        Figure("batched, context shared", "examples/s", ours),
        Figure("one example at a time", "examples/s", theirs),
        Figure("the same acc_norm predictions", "of the examples", [agree]),
    ]


@torch.no_grad()
def score_one_at_a_time(model: GPT, examples: list[Example], dtype: torch.dtype) -> HellaSwagResult:
    """Score HellaSwag as build-nanogpt does: four padded rows an example, all logits.

    Args:
        model: the raw model.
        examples: N of them.
        dtype: of matrix products, the vocabulary's included; the losses are float32.
    """
    device = model.transformer.wte.weight.device
    summed, mean = [], []
    for example in examples:
        rows = [torch.tensor(example.context + ending) for ending in example.endings]
        idx = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)  # (4, T)
        places = torch.arange(1, idx.size(1), device=device)  # of the targets
        lengths = torch.tensor([[len(row)] for row in rows], device=device)
        counts = (places >= len(example.context)) & (places < lengths)  # (4, T - 1)
        with autocast(device, dtype):
            logits, _ = model(idx)
        shifted, targets = logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten()
        losses = F.cross_entropy(shifted.float(), targets, reduction="none").view(counts.shape)
        loss = (losses * counts).sum(dim=1)
        summed.append(loss.cpu())
        mean.append((loss / counts.sum(dim=1)).cpu())
    labels = torch.tensor([example.label for example in examples])
    return HellaSwagResult(labels, torch.stack(summed), torch.stack(mean))


# --- sampling, saving, starting ---------------------------------------------------------------


def measure_sample(setup: Setup) -> list[Figure]:
    """`generate` with its cache of keys and values, and without."""
    model = setup.random_model()
    prompt = torch.full((SAMPLE_COUNT, 1), END_OF_TEXT, device=setup.device)

    def rate(use_cache: bool, max_new_tokens: int = SAMPLE_TOKENS) -> float:
        def draw() -> None:
            generate(
                model,
                prompt,
                max_new_tokens,
                generator=torch.Generator(setup.device).manual_seed(SEED),
                use_cache=use_cache,
                dtype=setup.dtype,
                stop_token=None,
            )

        return SAMPLE_COUNT * max_new_tokens / seconds_of(draw)

    rate(True, 2)
    cached, plain = in_turn(setup.rounds, lambda: rate(True), lambda: rate(False))
    return [
        Figure("with the KV cache", "tokens/s", cached),
        Figure("without", "tokens/s", plain),
    ]


def measure_checkpoint(setup: Setup) -> list[Figure]:
    """How long a save holds training up, beside a training step, and until it is complete."""
    trainer = setup.trainer()
    with redirect_stdout(io.StringIO()), trainer.writer, training_loader(trainer, 0) as batches:

        def step() -> float:
            return seconds_of(lambda: one_step(trainer, batches), setup.device)

        step()  # compiles
        blocked, alone, beside, complete = [], [], [], []
        for _ in range(setup.rounds):
            alone.append(step())
            start = time.perf_counter()
            blocked.append(seconds_of(lambda: save(trainer, 1), setup.device))
            beside.append(step())
            trainer.writer.wait()
            complete.append(time.perf_counter() - start)
    return [
        Figure("a save holds training up", "s", blocked, "lower"),
        Figure("a training step", "s", alone, "lower"),
        Figure("a training step while it is written", "s", beside, "lower"),
        Figure("until it is complete", "s, the step beside it included", complete, "lower"),
    ]


def measure_startup(setup: Setup) -> list[Figure]:
    """From the command `train_gpt2.py` to its first update: nothing compiled before, and again."""
    cache = setup.folder / "compiled"

    def cold() -> float:
        cache.mkdir(exist_ok=True)
        shutil.rmtree(cache)
        return warm()

    def warm() -> float:
        return _seconds_to_first_update(setup, cache)

    colds, warms = in_turn(setup.rounds, cold, warm)
    return [
        Figure("to the first update", "s, nothing compiled before", colds, "lower"),
        Figure("to the first update", "s, compiled by an earlier run", warms, "lower"),
    ]


def _seconds_to_first_update(setup: Setup, cache: Path) -> float:
    """Start training, read its console up to the line of step 1, end it."""
    config_path = setup.folder / "config.json"
    write_json(config_path, setup.training().saved())
    start = time.perf_counter()
    with (
        tempfile.TemporaryFile("w+", dir=setup.folder) as errors,
        subprocess.Popen(
            [sys.executable, ROOT / "train_gpt2.py", f"--config={config_path}"],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        if any(line.startswith("step 1/1 | loss") for line in process.stdout):
            seconds = time.perf_counter() - start
            process.kill()  # what it would save is not wanted
            return seconds
        process.wait()
        errors.seek(0)
        raise ValueError(f"train_gpt2.py made no update: {last_line(errors.read())}")


COMPONENTS: dict[str, Callable[[Setup], list[Figure]]] = {
    "data": measure_data,
    "tokenize": measure_tokenize,
    "hellaswag": measure_hellaswag,
    "sample": measure_sample,
    "checkpoint": measure_checkpoint,
    "startup": measure_startup,
}
