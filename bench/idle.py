"""Trace ten steps of training on a GPU: how long does it wait for the host?

    python -m bench.idle --data-dir data/stdlib     flags of train_gpt2.py; also under torchrun

It prints the part of the time without a compute kernel on the GPU of the first process, and the
time of NCCL's kernels, which may run beside others.
"""

import os
import tempfile
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

import runtime.threads  # noqa: F401 - must be imported before torch

import torch
from torch.profiler import ProfilerActivity, profile, schedule

import train_gpt2
from runtime.cli import run_command
from runtime.files import read_json
from training.trainer import Numbers, Trainer

UNTRACED, TRACED = 4, 10  # steps; the first compiles, and starting a trace takes a while


def main() -> None:
    """Train as `train_gpt2.py` does, and trace the steps of the first process."""
    if os.environ.get("RANK", "0") == "0":
        on_gpu = torch.cuda.is_available()
        profiler = profile(  # without a GPU, for a trial: of the CPU, where no kernel is found
            activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU],
            schedule=schedule(wait=UNTRACED - 1, warmup=1, active=TRACED, repeat=1),
            on_trace_ready=report,
        )
        train_step = train_gpt2.train_step

        def traced_step(trainer: Trainer, step: int) -> Numbers:
            numbers = train_step(trainer, step)
            profiler.step()
            return numbers

        train_gpt2.train_step = traced_step
        profiler.start()
    train_gpt2.main()


def report(profiler: profile) -> None:
    """Print the idle part of the traced steps and the milliseconds of NCCL in a step."""
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = read_json(Path(folder, "trace.json"))["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    nccl_ms = sum(e["dur"] for e in kernels if "nccl" in e["name"].lower()) / 1000 / TRACED
    others = [e for e in kernels if "nccl" not in e["name"].lower()]
    if others:
        idle = idle_part((event["ts"], event["ts"] + event["dur"]) for event in others)
        print(f"idle {100 * idle:.2f} %, NCCL {nccl_ms:.2f} ms", flush=True)


def idle_part(kernels: Iterable[tuple[float, float]]) -> float:
    """Return the part of the time between the first start and the last end without a kernel.

    `kernels` has the start and end of each; they may overlap.
    """
    ordered = sorted(kernels)
    ends = [*accumulate((end for _, end in ordered), max)]  # the latest end so far
    gaps = (start - end for (start, _), end in zip(ordered[1:], ends, strict=False))
    return sum(max(0.0, gap) for gap in gaps) / (ends[-1] - ordered[0][0])


if __name__ == "__main__":
    run_command(main)
