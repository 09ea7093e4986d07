"""Measure training speed: configurations and other trainers, side by side.

    python -m bench                         # the ladder: from float32 to the defaults
    python -m bench --peer transformers     # the defaults against Hugging Face's GPT-2, tuned
    python -m bench --peer FILE.py          # the defaults against another project's script
    python -m bench --gpu                   # tests and speed on a GPU, in at most 12 minutes

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
from typing import Any, Literal

import runtime.threads  # noqa: F401 - must be imported before torch

import torch

from bench.measurement import (
    Measure,
    device_label,
    format_results,
    measure_in_turn,
    run_python,
    store_results,
)
from bench.plain import HUGGING_FACE, OPTIMIZATIONS
from corpus.shards import open_shards
from model import GPTConfig
from runtime.cli import as_flags, bad_numbers, parse_flags, run_command
from runtime.compiler import prepare_compiler
from runtime.device import DeviceName, select_device
from runtime.precision import select_dtype
from training.config import TrainConfig

DIMENSIONS = ("size", "n_layer", "n_head", "n_embd", "block_size")
GPU_SECONDS = 680.0  # 12 minutes, less the time to tokenize a text and to find a compiler
PRODUCT = "product defaults"
TRAINING = {  # constant learning rate, no evaluation, no checkpoints
    **{"max_lr": 3e-4, "min_lr": 3e-4, "warmup_steps": 0, "checkpoint_every": 0},
    **{"val_every": 0, "hellaswag_every": 0, "sample_every": 0, "shuffle": False},
}
UNIT, NUMBER = r"tok(?:ens?)?[ _]?(?:/|per)[ _]?s(?:ec(?:ond)?s?)?\b", r"(\d(?:[\d.,]*\d)?)([km]?)"
RATE = re.compile(rf"{UNIT}[^\w\n]*{NUMBER}\b|{NUMBER} ?{UNIT}(?!\s*[:=])", re.IGNORECASE)
FACTORS = {"": 1, "k": 1e3, "m": 1e6}
OTHER_UNITS = {"MFU %": r"\bmfu (\d+)%", "peak GiB": r"\btok/s.* ([\d.]+) GiB"}
SEQUENCES = 128  # per step of XL with --gpu; the long context is one sequence with as many tokens
TEST_FILE = "tests/test_cuda.py"


@dataclass(frozen=True)
class BenchConfig:
    """Measure training speed: the ladder, a comparison (--peer) or a check of a GPU (--gpu)."""

    gpu: bool = False
    """Check this machine's GPU in at most 12 minutes: ladder, defaults, Muon, GPT-2 XL, long
    context, tests."""
    peer: Literal["transformers"] | Path | None = None
    """Instead of the ladder, compare the defaults of train_gpt2.py with transformers (compiled) or
    with the training script at PATH. The script must print its tokens per second, and finds the
    shards in the folder edu_fineweb10B."""

    size: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"] = "gpt2"
    """Model size: 124M, 350M, 774M or 1558M parameters."""
    n_layer: int | None = None
    """Number of blocks; default: from --size."""
    n_head: int | None = None
    """Number of attention heads; default: from --size."""
    n_embd: int | None = None
    """Embedding width; default: from --size."""
    block_size: int = 1024
    """Context length in tokens."""

    micro_batch_size: int | None = None
    """Sequences per micro-batch of the plain trainer; default: 16 on GPUs (as in published
    figures), 4 on other devices. train_gpt2.py chooses its own."""
    steps: int | None = None
    """Timed steps per run, after one untimed step; default: 20 on GPUs, else 4. A run ends after 10
    minutes even if it has done fewer."""
    rounds: int = 3
    """Number of runs of each configuration; the configurations alternate. With --gpu, it is 1."""

    device: DeviceName = "auto"
    """Device to measure."""
    data_dir: Path | None = None
    """Folder of token shards to train on; default: Python's standard library, tokenized."""
    out_dir: Path = Path("bench/results")
    """Folder for the results."""

    def __post_init__(self) -> None:
        if isinstance(self.peer, Path) and not (self.peer.suffix == ".py" and self.peer.is_file()):
            raise ValueError(f"--peer {self.peer} is neither transformers nor a .py file")
        if self.gpu and self.peer:
            raise ValueError("--gpu and --peer are separate measurements: use one of them")
        if problems := bad_numbers(self, ("micro_batch_size", "steps", "rounds")):
            raise ValueError("; ".join(problems))
        self.model_config()

    def model_config(self) -> GPTConfig:
        """Return the model configuration that the flags select."""
        return TrainConfig(**{name: getattr(self, name) for name in DIMENSIONS}).model_config()

    @property
    def torch_device(self) -> torch.device:
        """The device to measure."""
        return select_device(self.device)

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens per micro-batch of the plain trainer."""
        sequences = self.micro_batch_size or (16 if self.torch_device.type == "cuda" else 4)
        return sequences * self.block_size

    @property
    def timed_steps(self) -> int:
        """Timed steps per run."""
        return self.steps or (20 if self.torch_device.type == "cuda" else 4)


def main() -> None:
    """Run the measurements that the flags select."""
    config = parse_flags(BenchConfig)
    if config.gpu and config.device == "auto" and config.torch_device.type != "cuda":
        raise ValueError("--gpu found no usable GPU: use --device cpu for a trial run")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        data_dir = config.data_dir or Path(folder)
        if config.data_dir is None:
            print("tokenizing Python's standard library to train on", flush=True)
            run_python("fineweb.py", "--source=stdlib", f"--data-dir={data_dir}")
        open_shards(data_dir, "train")  # raise for a wrong folder before measuring
        measure(replace(config, data_dir=data_dir.absolute()))


def measure(config: BenchConfig) -> None:
    """Measure, print a table, and add it to the device's results."""
    device, model = device_label(config.torch_device), config.model_config()
    print(f"{device}: {model}", flush=True)
    if config.gpu:
        name, measures = "gpu", gpu_check(config)
    elif config.peer:
        name, measures = f"peer_{Path(config.peer).stem}", peers(config)
    else:
        name, measures = "ladder", ladder(config)
    rounds, seconds = (1, GPU_SECONDS) if config.gpu else (config.rounds, math.inf)
    for results, failures in measure_in_turn(measures, rounds, seconds):
        measured = {"model": asdict(model), "not_measured": failures, "results": results}
        path = store_results(config.out_dir, device, name, measured)
    print(format_results(results, failures))
    print(path)


def ladder(config: BenchConfig) -> dict[str, Measure]:
    """Return the plain trainer's measurements: each row adds an optimization to the row above."""
    rows, enabled = {"float32": plain(config)}, list[str]()
    for name in available_optimizations(config.torch_device):
        enabled.append(name)
        rows[name] = plain(config, *enabled)
    return rows | {PRODUCT: product(config)}


def peers(config: BenchConfig) -> dict[str, Measure]:
    """Return the measurements of --peer and of the defaults of `train_gpt2.py`."""
    if isinstance(config.peer, Path):
        script = partial(measure_script, config, config.peer.resolve())
        return {config.peer.name: script, PRODUCT: product(config)}
    names = [*available_optimizations(config.torch_device), HUGGING_FACE]
    return {
        "transformers": plain(config, *names),
        PRODUCT: product(config, total_batch_size=config.micro_batch_tokens),
    }


def gpu_check(config: BenchConfig) -> dict[str, Measure]:
    """Return the measurements of --gpu."""
    tokens = SEQUENCES * config.block_size
    measures = ladder(config)
    for settings in (
        {"optimizer": "muon"},
        {"size": "gpt2-xl", "total_batch_size": tokens},
        {"block_size": tokens, "total_batch_size": tokens},
    ):
        measures[" ".join(as_flags(settings))] = product(config, **settings)
    return measures | {"tests": run_tests}


def available_optimizations(device: torch.device) -> list[str]:
    """Return the optimizations that this device has."""
    missing = {
        "TF32": device.type != "cuda",
        "bfloat16": select_dtype("auto", device) == torch.float32,
        "compile": prepare_compiler(device),
    }
    return [name for name in OPTIMIZATIONS if not missing.get(name)]


def plain(config: BenchConfig, *optimizations: str) -> Measure:
    """Return a measurement of the plain trainer."""
    command = ("-m", "bench.plain", ",".join(optimizations))
    return partial(
        measure_training, config, command, {"total_batch_size": config.micro_batch_tokens}
    )


def product(config: BenchConfig, **settings: object) -> Measure:
    """Return a measurement of `train_gpt2.py` with its defaults, except for `settings`.

    Without a GPU, a step is a micro-batch of the plain trainer instead of 524,288 tokens.
    """
    on_gpu = config.torch_device.type == "cuda"
    tokens = TrainConfig.total_batch_size if on_gpu else config.micro_batch_tokens
    settings = {"total_batch_size": tokens} | settings
    return partial(measure_training, config, ("train_gpt2.py",), settings)


def measure_training(
    config: BenchConfig, command: Sequence[str], settings: dict[str, Any], seconds: float
) -> dict[str, float]:
    """Measure a trainer that has the flags of `train_gpt2.py`."""
    shared = {name: getattr(config, name) for name in (*DIMENSIONS, "device", "data_dir")}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run = {"out_dir": folder, "max_steps": config.timed_steps + 1}
        flags = as_flags(shared | TRAINING | run | settings)
        return measure_speed(config, [*command, *flags], seconds)


def measure_script(config: BenchConfig, script: Path, seconds: float) -> dict[str, float]:
    """Measure another project's script, which finds the shards where build-nanogpt expects them."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Path(folder, "edu_fineweb10B").symlink_to(str(config.data_dir))
        return measure_speed(config, [str(script)], seconds, Path(folder))


def measure_speed(
    config: BenchConfig, command: Sequence[str], seconds: float, folder: Path | None = None
) -> dict[str, float]:
    """Run a trainer until it has printed the speeds of enough steps; return their median.

    The first step, which compiles, does not count. The trainer is killed after the last step,
    because its checkpoint is not needed, or at the time limit.
    """

    def is_done(output: str) -> bool:
        return len(read_rates(output)) > config.timed_steps

    output = run_python(*command, seconds=seconds, is_done=is_done, folder=folder)
    if not (rates := read_rates(output)[1:]):
        raise ValueError(
            f"printed fewer than 2 speeds such as `tok/sec: 1` (limit: {seconds:.0f} s)"
        )
    values = {"tokens/s": median(rates)}
    for unit, pattern in OTHER_UNITS.items():
        if printed := re.findall(pattern, output):
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
        raise ValueError(f"not finished after {seconds:.0f} s")
    return {outcome: float(count) for count, outcome in counts}


if __name__ == "__main__":
    run_command(main)
