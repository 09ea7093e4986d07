"""A run's log: `metrics.jsonl`, the console, samples and trackers.

`metrics.jsonl` has one JSON object per event, on its own line, and is append-only.
"""

import json
import math
import platform
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import torch

from formats.metrics import LOG_METRICS, METRICS_NAME, STANDARD_METRICS
from model import GPTConfig
from runtime.cli import format_count, format_duration, shell_line
from runtime.device import peak_memory_gib, synchronize
from runtime.distributed import is_main, print0
from runtime.errors import UserError
from runtime.files import append_atomically, open_lines
from runtime.flops import flops_per_token, mfu, peak_flops
from training.config import TrainConfig
from training.memory import Device
from training.trackers import Trackers


@dataclass
class RunLog:
    """Log of a run's metrics, and the clock that times its steps; a context manager.

    Every rank enters it and calls its methods; only rank 0 writes, prints and calls the trackers.
    The clock starts on entry.
    """

    run_dir: Path
    config: TrainConfig
    device: Device
    model_config: GPTConfig
    """Dimensions of the model that a step computes, for its MFU."""

    def __post_init__(self) -> None:
        self.start_at(0, 0)
        self._owners = dict.fromkeys(LOG_METRICS, "the log")
        self._file: FileIO | None = None

    def start_at(self, step: int, tokens_seen: int) -> None:
        """Set the updates and tokens before this start or resume."""
        self.start_step, self.tokens_seen = step, tokens_seen

    def __enter__(self) -> Self:
        if is_main():
            self._file = open_lines(self.run_dir / METRICS_NAME)
        self._lock = threading.Lock()  # the thread that writes checkpoints calls `saved`
        names = self.config.logger if is_main() else ()
        settings = self.config.saved() | {"warmup_steps": self.config.warmup}
        self._trackers = Trackers(names, self.run_dir, settings, self.start_step)
        flops = flops_per_token(self.model_config)
        peak = peak_flops(self.device.name, float32=self.device.dtype == torch.float32)
        world = self.device.dist_info.world_size
        self._mfu = partial(mfu, flops_per_token=flops, device_peak_flops=peak, world_size=world)
        self._step_begun = self._first_step_end = perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._trackers.finish()
        if self._file is not None:
            self._file.close()

    def start(self, data_fingerprint: str, val_fingerprint: str, micro_batch_size: int) -> None:
        """Print how to follow the run; record where it resumes, the machine and the data."""
        path = shell_line(self.run_dir)
        print0(f"run folder  {path}")
        print0(f"figures     python plot.py {path}, at any time")
        print0("to stop     Ctrl-C or SIGTERM; the run saves a checkpoint first")
        print0(f"to resume   the same command with {shell_line('--resume', self.run_dir)}")
        if self.config.resume is not None:
            self.record(resumed_from=self.start_step)
        dtype = str(self.device.dtype).removeprefix("torch.")
        device = f"{self.device.dist_info.world_size} x {self.device.name}, {dtype}"
        versions = f"torch {torch.__version__}, Python {platform.python_version()}"
        threads = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
        self.record(
            environment=f"{device}, {versions}",
            cpu=threads,
            micro_batch_size=micro_batch_size,
            data_fingerprint=data_fingerprint,
            val_fingerprint=val_fingerprint,
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the step clock during evaluation and saving."""
        # The pause must not include work of the last step.
        synchronize(self.device.dist_info.device)
        begun = perf_counter()
        yield
        self._step_begun += perf_counter() - begun

    def step(self, step: int, tokens_seen: int, metrics: Mapping[str, float]) -> None:
        """Log a step that the device has finished, the `step`-th update.

        `tokens_seen` are the tokens of all updates so far, and `metrics` the numbers of
        the step: at least `train_loss`, `lr` and `grad_norm`. The time of a step is that since the
        last call: on a GPU, until the next step was queued and this one was finished.
        """
        now = perf_counter()
        seconds, self._step_begun = now - self._step_begun, now
        tokens_per_second = (tokens_seen - self.tokens_seen) / seconds
        self.tokens_seen = tokens_seen
        self.claim_names("train_step", metrics)
        record: dict[str, Any] = {"step": step, "tokens_seen": tokens_seen, **metrics}
        record |= {"step_time_ms": 1000 * seconds, "tokens_per_second": tokens_per_second}
        memory = peak_memory_gib(self.device.dist_info.device)
        record |= {"mfu": self._mfu(tokens_per_second), "peak_memory_gib": memory}
        self.record(**record)
        timed_steps = step - self.start_step - 1  # without the first, which compiles
        if not timed_steps:
            self._first_step_end = now
        max_steps = self.config.max_steps
        if step % self.config.log_every == 0 or step == max_steps:
            seconds = now - self._first_step_end  # evaluations and saves included
            eta = (max_steps - step) * seconds / timed_steps if timed_steps else None
            print0(format_step(record, max_steps, eta))

    def claim_names(self, function: str, names: Iterable[str]) -> None:
        """Raise UserError if another function has already logged a metric with the same name."""
        for name in names:
            if (owner := self._owners.setdefault(name, function)) != function:
                raise UserError(f"{function} and {owner} both log {name!r}: rename one of them")

    @contextmanager
    def evaluation(self, step: int) -> Iterator[dict[str, float]]:
        """Stop the step clock; log what the body measures after `step` updates.

        Yields:
            The record to fill. If the evaluation is interrupted, its entries so far are logged.
        """
        metrics = dict[str, float]()
        self._evaluated_step = step
        step_begun = self._step_begun
        with self.paused():
            yield metrics
        if not metrics:
            return
        values = {name: as_number(name, value) for name, value in metrics.items()}
        values["evaluation_seconds"] = self._step_begun - step_begun
        self.record(step=step, tokens_seen=self.tokens_seen, **values)
        print0(" | ".join([f"step {step}", *(f"{n} {value:.5g}" for n, value in values.items())]))

    def samples(self, texts: Sequence[str]) -> None:
        """Print the texts that the current evaluation sampled, and append them to `samples.txt`.

        On the console, they are indented, so that no line of a text looks like a line of the log.
        """
        if not is_main():
            return
        step = f"step {self._evaluated_step} | sample:"
        lines = "\n".join(f"{step} {text!r}" for text in texts)
        with warn_on_write_error(), open_lines(self.run_dir / "samples.txt") as file:
            append_atomically(file, f"{lines}\n".encode())
        for text in texts:
            shown = [line if line.isprintable() else repr(line)[1:-1] for line in text.splitlines()]
            print0("\n    ".join([step, *shown]))

    def saved(self, step: int, path: Path) -> None:
        """Log that the checkpoint of a step is complete."""
        print0(f"step {step} | saved {path}")
        self.record(saved_step=step)

    def record(self, **values: float | str | None) -> None:
        """Append one record to `metrics.jsonl` atomically, and pass it to the trackers.

        A float that is not finite becomes null, because JSON has no NaN. Records of a step have
        `step` and `tokens_seen`; other records go to `metrics.jsonl` only. A resumed run first
        records `resumed_from`; a complete checkpoint is recorded as `saved_step`.
        """
        if self._file is None:
            return
        bad = [n for n, x in values.items() if isinstance(x, float) and not math.isfinite(x)]
        finite = values | dict.fromkeys(bad)
        line = json.dumps(finite, allow_nan=False) + "\n"
        with warn_on_write_error(), self._lock:
            append_atomically(self._file, line.encode())
        numbers = {name: x for name, x in finite.items() if isinstance(x, int | float)}
        if "step" in numbers:
            self._trackers.log(int(numbers.pop("step")), numbers)


def as_number(name: str, value: Any) -> float:  # noqa: ANN401 - what a modified trainer logs
    """Return a logged number, which may be of NumPy, torch or `decimal`, as an int or a float."""
    try:
        number = value.item() if hasattr(value, "item") else value
        return number if isinstance(number, int) else float(number)
    except (TypeError, ValueError, RuntimeError):  # such as a tensor of several numbers
        problem = f"{name} is logged as {value!r:.80}, which is not a number"
        raise UserError(f"{problem}: use one number for each name, such as a mean") from None


@contextmanager
def warn_on_write_error() -> Iterator[None]:
    """If the body cannot write a file, print a warning and continue."""
    try:
        yield
    except OSError as error:
        print0(f"warning: {error}")


def format_step(record: Mapping[str, Any], max_steps: int, eta_seconds: float | None) -> str:
    """Return the console line of a training record, without values that are None.

    Numbers that an edit logs follow the standard ones.
    """
    device = [f"{format_count(record['tokens_per_second'])} tok/s"]
    if record["mfu"] is not None:
        device.append(f"mfu {record['mfu']:.0%}")
    if record["peak_memory_gib"] is not None:
        device.append(f"{record['peak_memory_gib']:.3g} GiB")
    lr = f"{record['lr']:.1e}".replace("e-0", "e-")
    step = f"step {record['step']:>{len(str(max_steps))}}/{max_steps}"
    learning = f"loss {record['train_loss']:.4f} | lr {lr}, norm {record['grad_norm']:.3g}"
    own = [f"{n} {value:.4g}" for n, value in record.items() if n not in STANDARD_METRICS]
    eta = f"eta {format_duration(eta_seconds)}"
    return " | ".join([step, learning, *own, ", ".join(device), eta])
