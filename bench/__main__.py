"""Measure training speed: configurations, peers and components, each against the others.

    python -m bench                         # the ladder: from float32 to the product's defaults
    python -m bench --peer transformers     # the defaults against Hugging Face's GPT-2, tuned
    python -m bench --peer eager            # the defaults against a plain, uncompiled trainer
    python -m bench --peer switches         # the defaults against themselves with one change
    python -m bench --component sample      # one other part: data, tokenize, hellaswag, busy, …
    python -m bench --gpu                   # all that a GPU can tell, in half an hour

Each training run calls the real `train_step` in a fresh process. Runs alternate (A B A B …),
because machines drift, and medians are compared. Results go to `bench/results/DEVICE.json` after
each run, so that the same command goes on where it was interrupted; the chart goes next to it.
Another model or batch than the default gets files of its own.
"""

if __name__ == "__main__":
    from runtime.startup import prepare_process

    prepare_process()  # the imports below take seconds

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.components import measure_component
from bench.config import BenchConfig
from bench.gpu import measure_everything
from bench.ladder import measure_training
from bench.measurement import tokenize_stdlib
from bench.report import device_label, store_section, stored_section
from corpus.shards import open_shards
from runtime.cli import parse_flags, run_command


def main() -> None:
    """Measure what the flags ask for, print it, add it to the device's results."""
    config = parse_flags(BenchConfig)
    if config.gpu:
        measure_everything(config)
        return
    label = device_label(config.torch_device)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        if config.data_dir is None:
            config = replace(config, data_dir=tokenize_stdlib(scratch / "data"))
        assert config.data_dir is not None
        open_shards(config.data_dir, "train")  # refuse a wrong folder before anything is measured
        if config.component:
            section = measure_component(config, scratch)
        else:
            store = partial(store_section, config, label, config.section, complete=False)
            earlier = stored_section(config, label, complete=False)
            section = measure_training(config, scratch, earlier, store)
    for path in store_section(config, label, config.section, section):
        print(path)


if __name__ == "__main__":
    run_command(main)
