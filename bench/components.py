"""What `python -m bench --component …` measures: parts of the product other than training steps.

Each part is compared with the ordinary way of doing the same thing. The loops are the product's
own, and the commands are those that users give.
"""

import io
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from torch.optim import Optimizer
from tqdm import tqdm

import train_gpt2
from bench.config import ROOT, BenchConfig, train_config
from bench.measurement import (
    Measurement,
    alternate,
    busy_loops,
    error_line,
    run_python,
    seconds_of,
)
from bench.report import Section, device_label, format_table, results_path
from bench.run import ALL_OPTIMIZATIONS, run_in_process
from corpus.sources import stdlib_source
from dataloader import Batch
from hellaswag import Example, HellaSwagResult, evaluate_hellaswag, load_examples
from model import GPT
from optimizers import Muon, orthogonalize
from plot import plot_run
from runtime.device import autocast, prepare_compiler, select_dtype
from runtime.distributed import DistInfo
from runtime.files import LockedFolder, write_json
from runtime.metrics import METRICS_NAME, MetricsLogger, StepTimer, read_metrics
from runtime.startup import usable_cores
from sample import generate
from tokenizer import END_OF_TEXT
from training.config import TrainConfig

LOADER_BATCHES = 2000  # of one run of the loader alone
STEADY_COPIES = 5  # of the text, as the tokenizers' larger input
SAMPLE_COUNT, SAMPLE_TOKENS = 4, 256
SEED = 1337
CONTEXT_POWERS = range(11)  # contexts tried, in powers of 2 of the block size
VAL_TOKENS = 1_048_576  # of a validation of the short run
STEP_TOKENS = 524_288  # of a step of the reference
LEAST_MEMORY = {"activation_checkpointing": "full", "loss_chunks": 8}
# How often OpenMP's waiting threads spin before they sleep: as this project's scripts set
# GOMP_SPINCOUNT, and libgomp's default.
SPINS, DEFAULT_SPINS = "1000", "300000"


def measure_component(config: BenchConfig, scratch: Path) -> Section:
    """Measure the config's component, with files in `scratch`; print its table, return JSON."""
    assert config.component is not None
    measurements = COMPONENTS[config.component](config, scratch)
    print(component_table(measurements))
    return {
        "model": asdict(config.model_config()),
        "micro_batch_size": config.sequences,
        "results": [
            asdict(entry) | {"median": entry.median, "spread": entry.spread}
            for entry in measurements
        ],
    }


def component_table(measurements: list[Measurement]) -> str:
    """One line per measurement, with its ratio to the first one of its unit."""
    rows = [["", "median", "spread", "ratio", ""]]
    first: dict[str, float] = {}
    for entry in measurements:
        base = first.setdefault(entry.unit, entry.median)
        ratio = f"{entry.median / base:.2f}x" if base else "-"
        median = f"{entry.median:,.4g}" if entry.median < 1000 else f"{entry.median:,.0f}"
        rows.append([entry.label, median, f"{entry.spread:.1%}", ratio, entry.unit])
    return format_table(rows)


def new_trainer(config: BenchConfig, scratch: Path) -> train_gpt2.Trainer:
    """The product's trainer, one micro-batch per step."""
    dist_info = DistInfo(config.torch_device)
    with redirect_stdout(io.StringIO()):
        folder = LockedFolder(scratch / "run")
        return train_gpt2.setup(train_config(config), None, folder, dist_info)


def new_model(config: BenchConfig) -> GPT:
    """A model with initial weights, the same in every call."""
    torch.manual_seed(SEED)
    with config.torch_device:
        return GPT(config.model_config())


# --- training on a busy machine ---------------------------------------------------------------


def measure_busy(config: BenchConfig, scratch: Path) -> list[Measurement]:
    """Training alone, and next to busy loops on all cores; by how long OpenMP threads spin."""
    cores, flags, cache = usable_cores(), train_config(config), scratch / "compiled"
    steps = config.timed_steps
    cases = {"alone": (0, SPINS)}
    cases[f"next to {cores} busy loops"] = (cores, SPINS)
    cases[f"next to {cores} busy loops, OpenMP's default spinning"] = (cores, DEFAULT_SPINS)

    def speed(loops: int, spins: str) -> float:
        with busy_loops(loops):
            result = run_in_process(ALL_OPTIMIZATIONS, flags, steps, cache, GOMP_SPINCOUNT=spins)
        return result.tokens_per_second

    runs = alternate(config.rounds, *[partial(speed, *case) for case in cases.values()])
    return [Measurement(label, "tokens/s", each) for label, each in zip(cases, runs, strict=True)]


# --- data and logging -------------------------------------------------------------------------


def timed(batches: Iterator[Batch], waits: list[float]) -> Iterator[Batch]:
    """The same batches; adds the seconds of waiting for each to `waits`."""
    while True:
        start = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - start)
        yield batch


def measure_data(config: BenchConfig, scratch: Path) -> list[Measurement]:
    """The loader's own speed; and the share of training that waits for data and logging take."""
    trainer = new_trainer(config, scratch)
    steps, lr = config.timed_steps, trainer.config.max_lr
    shares: list[float] = []
    waits: list[float] = []  # for data and for logging
    with (
        MetricsLogger(trainer.run_dir / "metrics.jsonl") as logger,
        train_gpt2.training_loader(trainer, 0) as loader,
        redirect_stdout(io.StringIO()),  # the console's lines are formatted, but not shown
        tqdm(disable=True) as bar,
    ):
        batches = timed(loader, waits)
        train_gpt2.train_step(trainer, batches, lr)  # compiles
        timer = StepTimer(0, config.rounds * steps, trainer.config.total_batch_size)
        for done in range(0, config.rounds * steps, steps):
            waits.clear()
            start = time.perf_counter()
            for step in range(done + 1, done + steps + 1):
                result = train_gpt2.train_step(trainer, batches, lr)
                log = partial(train_gpt2.log_step, trainer, logger, timer, bar, step, lr, result)
                waits.append(seconds_of(log))
            shares.append(sum(waits) / (time.perf_counter() - start))
    tokens = LOADER_BATCHES * config.sequences * config.block_size
    with train_gpt2.training_loader(trainer, 0) as loader:

        def read() -> None:
            for _ in range(LOADER_BATCHES):
                next(loader)

        speeds = [tokens / seconds_of(read, config.torch_device) for _ in range(config.rounds)]
    return [
        Measurement("the loader alone", "tokens/s", speeds),
        Measurement("waiting for data, and logging", "of a training step", shares),
    ]


# --- tokenizing -------------------------------------------------------------------------------


def measure_tokenize(config: BenchConfig, scratch: Path) -> list[Measurement]:
    """`fineweb.py` and a multiprocess tiktoken script: whole processes on the same text.

    The steady rate excludes start-up: it divides the additional tokens of an input with several
    copies of the text by the additional time.

    Raises:
        ValueError: a command failed, or the two wrote different numbers of tokens.
    """
    text = config.text or scratch / "stdlib.jsonl"
    if config.text is None:  # one document per line
        with text.open("w") as file:
            for path in stdlib_source().paths:
                row = {"text": path.read_text("utf-8", errors="replace")}
                file.write(json.dumps(row) + "\n")
    copies = [scratch / f"copy_{i}{text.suffix}" for i in range(STEADY_COPIES)]
    for copy in copies:
        shutil.copyfile(text, copy)
    out = scratch / "tokens"
    counts: dict[int, int] = {}  # tokens, by copies of the text

    def run(command: list[str | Path], sources: list[Path]) -> float:
        seconds = seconds_of(lambda: run_python(*command, *sources))
        shards = out.glob("*.npy")
        tokens = sum(np.load(path, mmap_mode="r", allow_pickle=False).size for path in shards)
        shutil.rmtree(out)
        if (expected := counts.setdefault(len(sources), tokens)) != tokens:
            raise ValueError(f"{text}: {command[0]} wrote {tokens} tokens, the other {expected}")
        return seconds

    commands: dict[str, list[str | Path]] = {
        "fineweb.py": [ROOT / "fineweb.py", "--data-dir", out, "--source"],
        "multiprocess tiktoken": [ROOT / "assets" / "tokenize_with_tiktoken.py", out],
    }
    inputs = copies[:1], copies
    runs = alternate(
        config.rounds,
        *[partial(run, command, files) for command in commands.values() for files in inputs],
    )
    measurements = []
    few, many = counts[1], counts[STEADY_COPIES]
    for label, small, large in zip(commands, runs[::2], runs[1::2], strict=True):
        steady = [(many - few) / (long - short) for short, long in zip(small, large, strict=True)]
        measurements += [
            Measurement(label, f"s for {few:,} tokens", small),
            Measurement(label, "tokens/s, steady", steady),
        ]
    return measurements


# --- HellaSwag --------------------------------------------------------------------------------


def measure_hellaswag(config: BenchConfig, scratch: Path) -> list[Measurement]:
    """The batched scorer and one example at a time, and how often their predictions agree."""
    model, dtype = new_model(config), select_dtype("auto", config.torch_device)
    examples = load_examples(config.hellaswag_data or ROOT / "assets" / "hellaswag_sample.jsonl")
    score_one_at_a_time(model, examples[:1], dtype)  # the device's first operations are slow
    results: list[HellaSwagResult] = []

    def rate(score: Callable[[], HellaSwagResult]) -> float:
        return len(examples) / seconds_of(lambda: results.append(score()))

    dist_info = DistInfo(config.torch_device)
    ours, theirs = alternate(
        config.rounds,
        lambda: rate(lambda: evaluate_hellaswag(model, examples, dist_info, dtype)),
        lambda: rate(lambda: score_one_at_a_time(model, examples, dtype)),
    )
    batched, single = results[-2:]
    agree = (batched.predictions_norm == single.predictions_norm).float().mean().item()
    return [
        Measurement("batched, context shared", "examples/s", ours),
        Measurement("one example at a time", "examples/s", theirs),
        Measurement("the same acc_norm predictions", "of the examples", [agree]),
    ]


@torch.no_grad()
def score_one_at_a_time(model: GPT, examples: list[Example], dtype: torch.dtype) -> HellaSwagResult:
    """Score HellaSwag as build-nanogpt does: four padded rows per example, all logits.

    The LM head too computes in `dtype`; the losses are float32.
    """
    device = model.transformer.wte.weight.device
    results = []
    for example in examples:
        rows = [torch.tensor(example.context + ending) for ending in example.endings]
        idx = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)  # (4, T)
        positions = torch.arange(1, idx.size(1), device=device)  # of the targets
        lengths = torch.tensor([[len(row)] for row in rows], device=device)
        in_ending = (positions >= len(example.context)) & (positions < lengths)  # (4, T - 1)
        with autocast(device, dtype):
            logits, _ = model(idx)
        shifted, targets = logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten()
        losses = F.cross_entropy(shifted.float(), targets, reduction="none").view(in_ending.shape)
        loss = (losses * in_ending).sum(dim=1)
        results.append(torch.stack([loss, loss / in_ending.sum(dim=1)]).cpu())  # (2, 4)
    labels = torch.tensor([example.label for example in examples])
    return HellaSwagResult(labels, *torch.stack(results, dim=1))


# --- sampling, saving, starting ---------------------------------------------------------------


def measure_sample(config: BenchConfig, scratch: Path) -> list[Measurement]:
    """`generate` with its cache of keys and values, and without."""
    model, device = new_model(config), config.torch_device
    prompt = torch.full((SAMPLE_COUNT, 1), END_OF_TEXT, device=device)

    def rate(use_cache: bool, max_new_tokens: int = SAMPLE_TOKENS) -> float:
        sample = partial(
            generate,
            model,
            prompt,
            max_new_tokens,
            generator=torch.Generator(device).manual_seed(SEED),
            use_cache=use_cache,
            dtype=select_dtype("auto", device),
            stop_token=None,
        )
        return SAMPLE_COUNT * max_new_tokens / seconds_of(sample, device)

    rate(True, 2)  # the device's first operations are slow
    cached, plain = alternate(config.rounds, partial(rate, True), partial(rate, False))
    return [
        Measurement("with the KV cache", "tokens/s", cached),
        Measurement("without", "tokens/s", plain),
    ]


def measure_checkpoint(config: BenchConfig, scratch: Path) -> list[Measurement]:
    """How long a save blocks training, a step during the write, and the time to completion."""
    trainer, device = new_trainer(config, scratch), config.torch_device
    with (
        redirect_stdout(io.StringIO()),
        trainer.writer,
        train_gpt2.training_loader(trainer, 0) as batches,
    ):
        step = partial(train_gpt2.train_step, trainer, batches, trainer.config.max_lr)
        step()  # compiles
        blocked, alone, during, complete = [], [], [], []
        trainer.run_dir.mkdir(exist_ok=True)
        for number in range(config.rounds):
            save = partial(train_gpt2.save, trainer, number, MetricsLogger(None))
            alone.append(seconds_of(step, device))
            start = time.perf_counter()
            blocked.append(seconds_of(save, device))
            during.append(seconds_of(step, device))
            trainer.writer.wait()
            complete.append(time.perf_counter() - start)
    return [
        Measurement("a save blocks training", "s", blocked),
        Measurement("a training step", "s", alone),
        Measurement("a training step during the write", "s", during),
        Measurement("until the save is complete", "s, including that step", complete),
    ]


def measure_optimizer(config: BenchConfig, scratch: Path) -> list[Measurement]:
    """An update by AdamW and by Muon, and what Muon adds to a step of 524,288 tokens."""
    trainer, device = new_trainer(config, scratch), config.torch_device
    for parameter in trainer.raw_model.parameters():
        parameter.grad = torch.randn_like(parameter)

    def update(optimizers: Sequence[Optimizer]) -> Callable[[], float]:
        def seconds() -> float:
            return sum(seconds_of(optimizer.step, device) for optimizer in optimizers)

        seconds()  # makes the state, compiles
        return seconds

    with_muon = replace(trainer.config, optimizer="muon")
    build = partial(train_gpt2.build_optimizers, trainer.raw_model, with_muon, trainer.dist_info)
    (muon, adamw), (eager, _), (compiled, _) = build(), build(), build()
    assert isinstance(eager, Muon)
    assert isinstance(compiled, Muon)
    eager.orthogonalize = orthogonalize
    compiled.orthogonalize = torch.compile(orthogonalize, dynamic=False)
    matrices = [p for group in muon.param_groups for p in group["params"]]
    torchs = torch.optim.Muon(matrices, lr=0.0, adjust_lr_fn="match_rms_adamw")
    micro_batch = torch.zeros(config.sequences, config.block_size, dtype=torch.int64, device=device)

    def passes() -> None:
        with autocast(device, trainer.dtype):
            trainer.model(micro_batch, micro_batch).loss.backward()

    passes()  # compiles
    updates = {
        "AdamW": trainer.optimizers,
        "Muon": (muon, adamw),
        "Muon, not compiled": (eager, adamw),
        "torch.optim.Muon": (torchs, adamw),
    }
    if not prepare_compiler(device):
        updates["Muon, compiled"] = (compiled, adamw)
    timed = [update(optimizers) for optimizers in updates.values()]
    *runs, step = alternate(config.rounds, *timed, partial(seconds_of, passes, device))
    step_seconds = STEP_TOKENS / micro_batch.numel() * statistics.median(step)
    added = [100 * (m - a) / (step_seconds + a) for a, m in zip(runs[0], runs[1], strict=True)]
    what = f"Muon adds to a step of {STEP_TOKENS:,} tokens, computed"
    return [
        *(Measurement(f"update by {n}", "s", r) for n, r in zip(updates, runs, strict=True)),
        Measurement(f"passes over {micro_batch.numel():,} tokens", "s", step),
        Measurement(what, "% of its time", added),
    ]


def measure_startup(config: BenchConfig, scratch: Path) -> list[Measurement]:
    """From the command `train_gpt2.py` to its first update, with and without compiled code."""
    warm = partial(_seconds_to_first_update, config, scratch)

    def cold() -> float:
        shutil.rmtree(scratch / "compiled", ignore_errors=True)
        return warm()

    colds, warms = alternate(config.rounds, cold, warm)
    return [
        Measurement("to the first update", "s, nothing compiled before", colds),
        Measurement("to the first update", "s, compiled by an earlier run", warms),
    ]


def _seconds_to_first_update(config: BenchConfig, scratch: Path) -> float:
    """Start training, read its console until the line of the first step, end it."""
    path = scratch / "config.json"
    write_json(path, train_config(config, out_dir=scratch / "runs").saved())
    command = [sys.executable, str(ROOT / "train_gpt2.py"), "--config", str(path)]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(scratch / "compiled")}
    line, start = "", time.perf_counter()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            if line.startswith("step") and "| loss " in line:
                process.kill()  # its checkpoint is not needed
                return time.perf_counter() - start
    raise ValueError(f"train_gpt2.py made no update: {line.strip() or 'no error message'}")


# --- what needs a GPU -------------------------------------------------------------------------


def measure_tests(config: BenchConfig, scratch: Path) -> list[Measurement]:
    """The tests that need CUDA: how many passed, failed and were skipped, and which failed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short", ROOT / "tests/test_cuda.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, flush=True)
    if done.returncode not in (0, 1):  # not even tests that failed
        raise ValueError(f"pytest: {error_line(done.stderr or done.stdout)}")
    *_, summary = done.stdout.strip().splitlines()
    counts = re.findall(r"(\d+) (passed|failed|skipped|errors?)", summary)
    failed = re.findall(r"^(?:FAILED|ERROR) \S*?(\w+\.py::\S+)", done.stdout, re.MULTILINE)
    return [
        *(Measurement(label, "tests", [float(count)]) for count, label in counts),
        *(Measurement(f"failed: {name}", "tests", [1.0]) for name in failed),
    ]


def measure_context(config: BenchConfig, scratch: Path) -> list[Measurement]:
    """The longest context that fits, by bisection: each is a process that takes two steps.

    Raises:
        ValueError: not even the first one fits, or has another fault.
    """
    powers = CONTEXT_POWERS if config.torch_device.type == "cuda" else CONTEXT_POWERS[:2]
    lengths = [config.block_size * 2**power for power in powers]
    fitting, too_long, why_not, measurements = 0, len(lengths), "", []  # lengths[:fitting] fit
    while fitting < too_long:
        middle = (fitting + too_long) // 2
        tokens, label = lengths[middle], f"context {lengths[middle]:,}"
        batch = {"block_size": tokens, "micro_batch_size": 1, "total_batch_size": tokens}
        flags = train_config(config, **batch | LEAST_MEMORY)
        try:
            result = run_in_process(ALL_OPTIMIZATIONS, flags, 1, scratch / "compiled")
        except ValueError as error:  # out of memory, or a limit of a kernel's
            too_long, why_not = middle, f"; {label}: {error!s:.60}"
            continue
        fitting = middle + 1
        measurements += [
            Measurement(label, "tokens/s", [result.tokens_per_second]),
            Measurement(label, "GiB", [result.peak_memory_gib or 0.0]),
        ]
    if not fitting:
        raise ValueError(f"no context fits{why_not}")
    label, longest = f"the longest context that fits{why_not}", float(lengths[fitting - 1])
    return [Measurement(label, "tokens", [longest]), *measurements]


def measure_train(config: BenchConfig, scratch: Path) -> list[Measurement]:
    """A short run of `train_gpt2.py` on the shards given, in `runs/`, and the figure of its loss.

    An interrupted run is resumed.
    """
    run_dir = Path("runs") / f"bench-{config.key()}"
    changes = {"micro_batch_size": "auto", "max_steps": config.train_steps, "val_every": 50}
    changes |= {"total_batch_size": config.total_batch_size or TrainConfig.total_batch_size}
    changes |= {"val_tokens": VAL_TOKENS, "checkpoint_every": 50, "warmup_steps": None}
    flags = train_config(config, **changes)
    write_json(scratch / "config.json", flags.saved())
    run_python(
        *(ROOT / "train_gpt2.py", f"--config={scratch / 'config.json'}", "--keep-checkpoints=1"),
        *(f"--run-name={run_dir.name}", "--resume=auto"),
    )
    loss, *_ = plot_run(run_dir)
    figure = results_path(config, device_label(config.torch_device)).with_suffix(".loss.png")
    figure.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(loss, figure)
    records = read_metrics(run_dir / METRICS_NAME)

    def values(name: str) -> list[float]:
        return [record[name] for record in records if record.get(name) is not None]

    steps = f"after {config.train_steps:,} steps of {flags.total_batch_size:,} tokens"
    return [
        Measurement(f"validation loss {steps}", "nats per token", values("val_loss")[-1:]),
        Measurement("training", "tokens/s", [statistics.median(values("tokens_per_second"))]),
        *(Measurement("training", "MFU", [statistics.median(v)]) for v in [values("mfu")] if v),
    ]


COMPONENTS: dict[str, Callable[[BenchConfig, Path], list[Measurement]]] = {
    "busy": measure_busy,
    "checkpoint": measure_checkpoint,
    "context": measure_context,
    "data": measure_data,
    "hellaswag": measure_hellaswag,
    "optimizer": measure_optimizer,
    "sample": measure_sample,
    "startup": measure_startup,
    "tests": measure_tests,
    "tokenize": measure_tokenize,
    "train": measure_train,
}
