"""Measure training speed: configurations and other trainers, side by side.

    python -m bench                         # the ladder: from float32 to the defaults
    python -m bench --peer transformers     # the defaults against Hugging Face's GPT-2, tuned
    python -m bench --peer FILE.py          # the defaults against another project's script
    python -m bench --gpu                   # tests and speed on GPUs, in at most 9 minutes

The defaults are the settings of `train_gpt2.py`. Each run is a command that trains in a fresh
process and prints its speed: `train_gpt2.py`, the plain trainer in `bench.plain` with some
optimizations, or another project's script. Compared commands alternate (A B A B …), because machine
speed drifts, and medians are reported. The results are written to `bench/results/DEVICE.json` after
each run.
"""

import math
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import runtime.threads  # noqa: F401 - must be imported before torch

import torch

from bench.idle import TRACED, UNTRACED
from bench.measurement import (
    ROOT,
    TORCHRUN,
    Measure,
    device_label,
    format_results,
    measure_in_turn,
    run_python,
    split_flags,
    store_results,
)
from bench.plain import HUGGING_FACE, OPTIMIZATIONS
from corpus.shards import open_shards
from runtime.cli import as_flags, check_settings, run_command
from runtime.compiler import prepare_compiler
from runtime.device import select_device
from runtime.errors import UserError
from runtime.files import read_json
from runtime.precision import select_dtype
from training.config import TrainConfig
from training.resume import parse_config

GPU_SECONDS = 460.0  # 9 minutes, less the time to tokenize a text and to find a compiler
PRODUCT = "product defaults"
TRAINING = {  # constant learning rate, no evaluation, no checkpoints
    **{"max_lr": 3e-4, "min_lr": 3e-4, "warmup_steps": 0, "checkpoint_every": 0},
    **{"val_every": 0, "hellaswag_every": 0, "sample_every": 0, "shuffle": False},
}
UNIT, NUMBER = r"tok(?:ens?)?[ _]?(?:/|per)[ _]?s(?:ec(?:ond)?s?)?\b", r"(\d(?:[\d.,]*\d)?)([km]?)"
RATE = re.compile(rf"{UNIT}[^\w\n]*{NUMBER}\b|{NUMBER} ?{UNIT}(?!\s*[:=])", re.IGNORECASE)
FACTORS = {"": 1, "k": 1e3, "m": 1e6}
OTHER_UNITS = {
    **{"MFU %": r"\bmfu (\d+)%", "peak GiB": r"\btok/s.* ([\d.]+) GiB"},
    **{"idle %": r"^idle ([\d.]+) %", "NCCL ms": r"^idle .*NCCL ([\d.]+) ms"},
}
SEQUENCES = 128  # per step of XL with --gpu; the long context is one sequence with as many tokens
BATCH_UNIT = 16  # with several GPUs, the sequences of each in a step are a multiple of this
TEST_FILE = str(ROOT / "tests/test_cuda.py")
TRAINER = str(ROOT / "train_gpt2.py")


@dataclass(frozen=True)
class BenchConfig:
    """Measure training speed; all other flags are passed to train_gpt2.py."""

    gpu: bool = False
    """Check this machine's GPUs in at most 9 minutes: defaults, tests, idle time and Muon; with one
    GPU also GPT-2 XL, long context and ladder; with several also FSDP."""
    peer: Literal["transformers"] | Path | None = None
    """Instead of the ladder, compare the defaults of train_gpt2.py with transformers (compiled) or
    with the training script at PATH. The script must print its tokens per second, and finds the
    shards in the folder edu_fineweb10B."""

    steps: int | None = None
    """Timed steps per run, after one untimed step; default: 20 on GPUs, else 4. A run ends after 10
    minutes even if it has done fewer."""
    rounds: int = 3
    """Number of runs of each configuration; the configurations alternate. With --gpu, it is 1."""
    out_dir: Path = Path("bench/results")
    """Folder for the results."""

    def __post_init__(self) -> None:
        if isinstance(self.peer, Path) and not (self.peer.suffix == ".py" and self.peer.is_file()):
            raise UserError(f"--peer {self.peer} is neither transformers nor a .py file")
        if self.gpu and self.peer:
            raise UserError("--gpu and --peer are separate measurements: use one of them")
        check_settings(self, ("steps", "rounds"))


class Setup(NamedTuple):
    """Configuration that all runs of a measurement share."""

    config: BenchConfig
    flags: tuple[str, ...]
    """Flags of `train_gpt2.py`."""
    settings: TrainConfig
    """The settings that result from the flags."""

    @property
    def device(self) -> torch.device:
        """The device to measure."""
        return select_device(self.settings.device)

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens per step of the plain trainer; by default 16 sequences on GPUs, else 4."""
        default = 16 if self.device.type == "cuda" else 4
        sequences = self.settings.micro_batch_size
        return (default if sequences == "auto" else sequences) * self.settings.block_size

    @property
    def timed_steps(self) -> int:
        """Timed steps per run."""
        return self.config.steps or (20 if self.device.type == "cuda" else 4)


def main() -> None:
    """Run the measurements that the flags select."""
    config, flags = split_flags(BenchConfig)
    settings, _ = parse_config(flags)
    if config.gpu and settings.device == "auto" and select_device("auto").type != "cuda":
        raise UserError("--gpu found no usable GPU: use --device cpu for a trial run")
    recipe = read_json(settings.config) if settings.config else {}
    names = {flag.partition("=")[0].replace("_", "-") for flag in flags}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if "--data-dir" not in names and "data_dir" not in recipe:
            print("tokenizing Python's standard library to train on", flush=True)
            run_python(ROOT / "fineweb.py", "--source=stdlib", f"--data-dir={folder}")
            settings = replace(settings, data_dir=Path(folder))
        open_shards(settings.data_dir, "train")  # raise for a wrong folder before measuring
        measure(Setup(config, (*flags, f"--data-dir={settings.data_dir.absolute()}"), settings))


def measure(setup: Setup) -> None:
    """Measure, print a table, and add it to the device's results."""
    config, model = setup.config, setup.settings.model_config()
    device = device_label(setup.device)
    print(f"{device}: {model}", flush=True)
    if config.gpu:
        name, measures = "gpu", gpu_check(setup)
    elif config.peer:
        name, measures = f"peer_{Path(config.peer).stem}", peers(setup, config.peer)
    else:
        name, measures = "ladder", ladder(setup)
    rounds, seconds = (1, GPU_SECONDS) if config.gpu else (config.rounds, math.inf)
    for results, failures in measure_in_turn(measures, rounds, seconds):
        measured = {"model": asdict(model), "not_measured": failures, "results": results}
        path = store_results(config.out_dir, device, name, measured)
    print(format_results(results, failures))
    print(path)


def ladder(setup: Setup) -> dict[str, Measure]:
    """Return the plain trainer's measurements: each row adds an optimization to the row above."""
    names = available_optimizations(setup.device)
    rows = {name: plain(setup, *names[: n + 1]) for n, name in enumerate(names)}
    return {"float32": plain(setup), **rows, PRODUCT: product(setup)}


def peers(setup: Setup, peer: str | Path) -> dict[str, Measure]:
    """Return the measurements of --peer and of the defaults of `train_gpt2.py`."""
    if isinstance(peer, Path):
        script = partial(measure_script, setup, peer.resolve())
        return {peer.name: script, PRODUCT: product(setup)}
    names = [*available_optimizations(setup.device), HUGGING_FACE]
    defaults = product(setup, total_batch_size=setup.micro_batch_tokens)
    return {"transformers": plain(setup, *names), PRODUCT: defaults}


def gpu_check(setup: Setup) -> dict[str, Measure]:
    """Return the measurements of --gpu, the most important ones first."""
    tokens, gpus = SEQUENCES * setup.settings.block_size, max(1, torch.cuda.device_count())
    muon, xl = {"optimizer": "muon"}, {"size": "gpt2-xl", "total_batch_size": tokens}
    long = {"block_size": tokens, "total_batch_size": tokens}
    others = [(gpus, {"parallel": "fsdp"})] if gpus > 1 else [(1, xl), (1, long)]
    measures = {PRODUCT: product(setup)}
    if gpus > 1:
        measures[f"{gpus} GPUs"] = product(setup, gpus)
    measures["tests"] = run_tests
    # One micro-step for each GPU, as with eight GPUs: the host has the least time.
    short = {"max_steps": UNTRACED + TRACED + 1, "total_batch_size": tokens // 2 * gpus}
    measures["idle"] = product(setup, gpus, command=("-m", "bench.idle"), **short)
    for n, settings in ((1, muon), (gpus, muon), *others):
        label = " ".join([f"{n} GPUs"] * (n > 1) + as_flags(settings))
        measures[label] = product(setup, n, **settings)
    return measures | (ladder(setup) if gpus == 1 else {})


def available_optimizations(device: torch.device) -> list[str]:
    """Return the optimizations that this device has."""
    is_float32 = select_dtype("auto", device) == torch.float32
    problem = prepare_compiler(device)
    missing = {"TF32": device.type != "cuda", "bfloat16": is_float32, "compile": problem}
    return [name for name in OPTIMIZATIONS if not missing.get(name)]


def plain(setup: Setup, *optimizations: str) -> Measure:
    """Return a measurement of the plain trainer."""
    command = ("-m", "bench.plain", ",".join(optimizations))
    return partial(measure_training, setup, command, {"total_batch_size": setup.micro_batch_tokens})


def product(
    setup: Setup, gpus: int = 1, command: Sequence[str] = (TRAINER,), **settings: object
) -> Measure:
    """Return a measurement of `train_gpt2.py` with its defaults, except for `settings`.

    Without a GPU, a step is a micro-batch of the plain trainer instead of 524,288 tokens.
    """
    on_gpu = setup.device.type == "cuda"
    tokens = TrainConfig.total_batch_size if on_gpu else setup.micro_batch_tokens * gpus
    if gpus > 1:
        unit = BATCH_UNIT * setup.settings.block_size * gpus
        tokens = max(1, tokens // unit) * unit
        command = ("-m", TORCHRUN, "--standalone", f"--nproc_per_node={gpus}", *command)
    settings = {"total_batch_size": tokens} | settings
    return partial(measure_training, setup, command, settings)


def measure_training(
    setup: Setup, command: Sequence[str], settings: dict[str, Any], seconds: float
) -> dict[str, float]:
    """Measure a trainer that has the flags of `train_gpt2.py`."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run: dict[str, Any] = {"out_dir": folder, "max_steps": setup.timed_steps + 1} | settings
        flags = (*setup.flags, *as_flags(TRAINING | run))
        return measure_speed([*command, *flags], run["max_steps"], seconds)


def measure_script(setup: Setup, script: Path, seconds: float) -> dict[str, float]:
    """Measure another project's script, which finds the shards where build-nanogpt expects them."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Path(folder, "edu_fineweb10B").symlink_to(str(setup.settings.data_dir.absolute()))
        return measure_speed([str(script)], setup.timed_steps + 1, seconds, Path(folder))


def measure_speed(
    command: Sequence[str], steps: int, seconds: float, folder: Path | None = None
) -> dict[str, float]:
    """Run a trainer until it has printed the speeds of as many steps; return their median.

    The first step, which compiles, does not count. The trainer is killed after the last step,
    because its checkpoint is not needed, or at the time limit.
    """

    def is_done(output: str) -> bool:
        return len(read_rates(output)) >= steps

    output = run_python(*command, seconds=seconds, is_done=is_done, folder=folder)
    if not (rates := read_rates(output)[1:]):
        limit = f"limit: {seconds:.0f} s"
        raise UserError(f"printed fewer than 2 speeds such as `tok/sec: 1` ({limit})")
    values = {"tokens/s": median(rates)}
    for unit, pattern in OTHER_UNITS.items():
        if printed := re.findall(pattern, output, re.MULTILINE):
            values[unit] = float(printed[-1])
    return values


def read_rates(output: str) -> list[float]:
    """Return the tokens per second that the output of a training script contains."""
    found = ((a or c, b or d) for a, b, c, d in RATE.findall(output))
    return [float(number.replace(",", "")) * FACTORS[unit.lower()] for number, unit in found]


def run_tests(seconds: float) -> dict[str, float]:
    """Run the GPU tests; return the number of tests by outcome, such as passed and skipped."""
    args = ("-m", "pytest", "-qrfE", "--tb=short", "--show-capture=no", TEST_FILE)
    counts = re.findall(r"(\d+) (passed|skipped)", run_python(*args, seconds=seconds))
    if not counts:
        raise UserError(f"not finished after {seconds:.0f} s")
    return {outcome: float(count) for count, outcome in counts}


if __name__ == "__main__":
    run_command(main)
