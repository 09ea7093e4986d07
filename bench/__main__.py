"""Measure training speed: configurations, peers and components, each against the others.

    python -m bench                         # the ladder: from float32 to the product's defaults
    python -m bench --peer transformers     # the defaults against Hugging Face's GPT-2, tuned
    python -m bench --peer eager            # the defaults against a plain, uncompiled trainer
    python -m bench --peer switches         # the defaults against themselves with one change
    python -m bench --component sample      # another part: sampling, or hellaswag
    python -m bench --gpu                   # what a GPU can tell, in an hour at the most

What is compared runs in turn (A B A B …), because machines drift, and medians are compared; a
training run is a command in a fresh process. The results go to `bench/results/DEVICE.json` after
each run.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import runtime.threads  # noqa: F401 - before torch, which reads what it sets

from bench import measurement
from bench.components import COMPONENTS
from bench.config import BenchConfig
from bench.gpu import run_gpu_commands
from bench.ladder import training_measures
from corpus.shards import open_shards
from runtime.cli import parse_flags, run_command


def main() -> None:
    """Measure what the flags ask for."""
    config = parse_flags(BenchConfig)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        data_dir = config.data_dir or scratch / "data"
        if config.data_dir is None:
            print("tokenizing Python's standard library to train on", flush=True)
            measurement.run_python("fineweb.py", "--source=stdlib", f"--data-dir={data_dir}")
        open_shards(data_dir, "train")  # refuse a wrong folder before anything is measured
        config = replace(config, data_dir=data_dir.absolute())
        (run_gpu_commands if config.gpu else measure)(config, scratch)


def measure(config: BenchConfig, scratch: Path) -> None:
    """Measure one thing, print its table, add it to the device's results."""
    print(f"{measurement.device_label(config.torch_device)}: {config.model_config()}", flush=True)
    if config.component:
        name = f"component_{config.component}"
        measures = COMPONENTS[config.component](config)
    else:
        name = f"peer_{config.peer}" if config.peer else "ladder"
        measures = training_measures(config, scratch)
    for measured in measurement.measure_in_turn(measures, config.rounds):
        measurement.store_results(config, name, *measured)
    print(measurement.format_results(*measured))
    print(measurement.results_path(config))


if __name__ == "__main__":
    run_command(main)
