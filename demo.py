"""Run the whole pipeline on this machine, offline, in minutes: `make demo`.

Text → shards → a small GPT-2 → samples → HellaSwag scorer → Hugging Face format → figures. Each
step is a command of this project, printed before it runs.
"""

import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from formats.metrics import read_metrics
from runtime.cli import format_duration, parse_flags, run_command
from runtime.errors import RunStopped


@dataclass(frozen=True)
class DemoConfig:
    """Train a small GPT-2 on this machine, from text to samples, scores and figures."""

    short: bool = False
    """Train for half as many steps, as a quick check that everything works."""


def main() -> None:
    """Run all commands in order and print a summary."""
    config = parse_flags(DemoConfig)
    os.chdir(Path(__file__).parent)  # the commands are here, and the run is written here
    start = time.perf_counter()
    name = new_name()
    run_dir, export_dir = Path("runs", name), Path("exported", name)
    step("Python's library → token shards", "fineweb.py", "--source=stdlib", "--no-propose")
    train = ["--config=recipes/demo.json", f"--run-name={name}"]
    train += ["--max-steps=300"] if config.short else []
    step("shards → a GPT-2 of 10M parameters", "train_gpt2.py", *train)
    step("samples", "sample.py", f"--model={run_dir}", "--prompt=def read", "--num-samples=2")
    scored = (f"--model={run_dir}", "--data=assets/hellaswag_sample.jsonl")
    step("HellaSwag scorer on 24 sample rows (NOT the benchmark)", "hellaswag.py", *scored)
    step("export for Hugging Face", "export.py", f"--model={run_dir}", f"--out={export_dir}")
    step("figures", "plot.py", str(run_dir))
    losses = [r["val_loss"] for r in read_metrics(run_dir / "metrics.jsonl") if "val_loss" in r]
    if losses[-1] > losses[0] - 1:
        raise RunStopped(f"the model did not learn: validation losses {losses}")
    print(
        f"\n=== done in {format_duration(time.perf_counter() - start)}, in {Path.cwd()}\n"
        f"validation loss  {losses[-1]:.2f} nats per token, from {losses[0]:.2f} before training\n"
        f"run, samples     {run_dir}\n"
        f"loss curve       {run_dir / 'figures' / 'loss.png'}\n"
        f"for transformers {export_dir}\n"
        f"next: source .venv/bin/activate; python sample.py --model {run_dir} --interactive"
    )


def new_name() -> str:
    """Return `demo` or the first unused name of `demo-2`, …, so that earlier runs are kept."""
    names = ["demo", *(f"demo-{number}" for number in range(2, 10_000))]
    return next(n for n in names if not Path("runs", n).exists() | Path("exported", n).exists())


def step(title: str, script: str, *flags: str) -> None:
    """Print and run one of the project's commands; if it fails, exit with its code."""
    print(f"\n=== {title}\n$ python {shlex.join([script, *flags])}", flush=True)
    with subprocess.Popen([sys.executable, script, *flags]) as child:  # lets it save on Ctrl-C
        if code := child.wait():
            raise SystemExit(code)


if __name__ == "__main__":
    run_command(main)
