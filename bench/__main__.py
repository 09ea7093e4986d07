"""Measure training speed: configurations and other trainers, side by side.

    python -m bench                         # the ladder: from float32 to the defaults
    python -m bench --peer transformers     # the defaults against Hugging Face's GPT-2, tuned
    python -m bench --peer eager            # the defaults against a plain, uncompiled trainer
    python -m bench --peer FILE.py          # the defaults against another project's script
    python -m bench --gpu                   # tests and speed on a GPU, in at most 12 minutes

The defaults are the settings of `train_gpt2.py`. Compared configurations alternate (A B A B …),
because machine speed drifts, and medians are reported. Each training run is a fresh process. The
results are written to `bench/results/DEVICE.json` after each run.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import runtime.threads  # noqa: F401 - must be imported before torch

from bench import measurement
from bench.config import BenchConfig
from bench.gpu import check_gpu
from bench.ladder import Workspace, training_measures
from corpus.shards import open_shards
from runtime.cli import parse_flags, run_command


def main() -> None:
    """Run the measurements that the flags select."""
    config = parse_flags(BenchConfig)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        data_dir = config.data_dir or scratch / "data"
        if config.data_dir is None:
            print("tokenizing Python's standard library to train on", flush=True)
            measurement.run_python("fineweb.py", "--source=stdlib", f"--data-dir={data_dir}")
        open_shards(data_dir, "train")  # raise for a wrong folder before measuring
        config = replace(config, data_dir=data_dir.absolute())
        (check_gpu if config.gpu else measure)(config, scratch)


def measure(config: BenchConfig, scratch: Path) -> None:
    """Measure the ladder or a peer, print a table and add it to the device's results."""
    print(f"{measurement.device_label(config.torch_device)}: {config.model_config()}", flush=True)
    name = f"peer_{Path(config.peer).stem}" if config.peer else "ladder"
    measures = training_measures(config, Workspace(scratch))
    path = measurement.results_path(config)
    for measured in measurement.measure_in_turn(measures, config.rounds):
        measurement.store_results(path, config, name, *measured)
    print(measurement.format_results(*measured))
    print(path)


if __name__ == "__main__":
    run_command(main)
