"""`python -m bench --gpu`: what this machine's GPUs can tell, in an hour at the most.

A list of commands, the most important first, each with a time limit. What they print goes to one
file as it comes. A command that fails or takes too long is noted, and the next one runs.
"""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import monotonic

import torch

from bench.config import ROOT, BenchConfig
from bench.measurement import provenance, results_path
from runtime.cli import as_flags

STEPS = 10  # timed, of each training run


def gpu_commands(config: BenchConfig, scratch: Path) -> list[tuple[float, list[str]]]:
    """The minutes that each command of Python may take, and its arguments.

    Runs are saved in `scratch`.
    """
    given = config.shared_settings()
    bench = ["-m", "bench", *as_flags(given), f"--out-dir={config.out_dir}", "--rounds=1"]
    bench += as_flags({"micro_batch_size": config.micro_batch_size, "steps": config.steps or STEPS})
    settings = given | {"total_batch_size": config.step_tokens, "out_dir": scratch}
    settings |= {"val_every": 20, "val_tokens": 65_536, "hellaswag_every": 0, "sample_every": 0}
    settings |= {"checkpoint_every": 20}  # what follows needs one, should the time be up
    train = ["train_gpt2.py", *as_flags(settings)]
    run = scratch / "trained"
    context = 64 * config.block_size
    long = as_flags({"block_size": context, "total_batch_size": context, "micro_batch_size": 1})
    long += ["--activation-checkpointing=full", "--loss-chunks=8", "--val-every=0"]
    evaluated = [f"--model={run}", f"--device={config.device}"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=gpu"]
    on_all = (4, [*torchrun, *train, "--run-name=all", "--max-steps=40"])
    return [
        (6, ["-m", "pytest", "-qrfE", "--tb=short", "--show-capture=no", "tests/test_cuda.py"]),
        (5, [*bench, "--peer=transformers"]),
        (12, [*bench, "--peer=switches"]),
        (9, bench),  # the ladder
        (4, [*train, f"--run-name={run.name}", "--max-steps=40"]),
        (3, ["train_gpt2.py", f"--resume={run}", "--max-steps=60"]),
        *([on_all] if torch.cuda.device_count() > 1 else ()),
        (4, [*train, *long, "--run-name=long", "--max-steps=2"]),
        (2, ["hellaswag.py", *evaluated, "--data=assets/hellaswag_sample.jsonl"]),
        (2, ["sample.py", *evaluated]),
        (2, [*bench, "--component=sample"]),
        (2, [*bench, "--component=hellaswag"]),
        (4, [*bench, "--peer=eager"]),
    ]


def run_gpu_commands(config: BenchConfig, scratch: Path) -> None:
    """Run the commands, one after the other; print what came of each."""
    if config.device == "auto" and config.torch_device.type != "cuda":
        raise ValueError("--gpu: this machine has no usable GPU; --device cpu only rehearses it")
    config = replace(config, out_dir=config.out_dir.absolute())
    path = results_path(config).with_suffix(".log")
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"what the commands print goes to {path}", flush=True)
    path.write_text(f"{provenance()}\n")
    for minutes, args in gpu_commands(config, scratch):
        print(run_limited(minutes, args, path), flush=True)


def run_limited(minutes: float, args: list[str], log: Path) -> str:
    """Run a command, with what it prints added to `log`; returns what came of it, in one line."""
    start = monotonic()
    shown = f"python {' '.join(args)}"
    with log.open("a") as file:
        print(f"\n$ {shown}", file=file, flush=True)
        child = subprocess.Popen(
            [sys.executable, *args],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,  # to end the command's own processes, too
        )
        try:
            code = child.wait(60 * minutes)
            outcome = f"FAILED ({code})" if code else f"done in {monotonic() - start:.0f} s"
        except subprocess.TimeoutExpired:
            outcome = f"STOPPED after {minutes:g} minutes"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        print(f"--- {outcome}", file=file)
    return f"{outcome}: {shown}"
