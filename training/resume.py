"""Flags, the checkpoint to resume from, and what may not differ from it."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint, read_state, verify_checkpoint
from formats.load import (
    find_checkpoint,
    latest_valid_checkpoint,
    list_runs,
    model_config_of,
    run_names,
)
from lr_schedule import learning_rate
from model import GPT2_SIZES, GPTConfig
from runtime.cli import as_flags, parse_flags, shell_line
from runtime.distributed import print0
from training.config import TrainConfig, config_from_settings, read_recipe

RATE_JUMP = 1.1  # a rate that is higher by this factor than the step before has jumped
# A resume refuses other values of these and of the model's; docs/reliability.md has all flags.
KEPT_SETTINGS = ("size", "init_from", "total_batch_size", "seed", "shuffle", "val_tokens")


def parse_config(args: Sequence[str]) -> tuple[TrainConfig, Checkpoint | None]:
    """The configuration, and the checkpoint to resume from, if any; its hashes are checked.

    Flags that are not given have the values of the resumed checkpoint or of `--config`, and
    `--block-size` is the context of the model of a given `--init-from`. A resumed run keeps its
    warm-up, whatever `--max-steps` becomes: the schedule so far must not change.
    """
    locate = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("config", "resume", "out-dir", "run-name", "init-from"):
        locate.add_argument(f"--{flag}", f"--{flag.replace('-', '_')}", nargs="?")
    given, _ = locate.parse_known_args(args)
    defaults, checkpoint = TrainConfig(), None
    if given.config:
        defaults = read_recipe(Path(given.config))
    if given.resume:
        out_dir = Path(given.out_dir or defaults.out_dir)
        path = _find_to_resume(given.resume, out_dir, given.run_name)
        if path is not None:
            checkpoint = Checkpoint(path, read_state(path))
            defaults = config_from_settings(checkpoint.state.train_config, path)
    if given.init_from and checkpoint is None and defaults.init_from is None:
        own = model_config_of(given.init_from).block_size
        defaults = replace(defaults, block_size=own)
    config = parse_flags(TrainConfig, args, defaults)
    if checkpoint is not None:
        if config.max_minutes is not None:  # the run has found its steps
            config = replace(config, max_steps=defaults.max_steps)
        _warn_of_jump(checkpoint, defaults, config)
        if given.config:
            meant = parse_flags(TrainConfig, args, read_recipe(Path(given.config)))
            if unused := differences(meant.saved(), config.saved()):
                print0(
                    f"warning: --config {given.config} is not used: {checkpoint.path} has the "
                    f"run's settings ({', '.join(unused)})"
                )
    return config, checkpoint


def _warn_of_jump(checkpoint: Checkpoint, saved: TrainConfig, config: TrainConfig) -> None:
    """Say so if the resumed run lifts the learning rate in one step."""
    step = checkpoint.state.step
    before = max(learning_rate(saved, max(step - 1, 0)), learning_rate(saved, step))
    if (rate := learning_rate(config, step)) > RATE_JUMP * before:
        print0(
            f"warning: the learning rate jumps at step {step} from {before:.2g} to {rate:.2g}; the "
            f"way to a smooth curve is a new run or, with wsd, a checkpoint from before its decay"
        )


def _find_to_resume(resume: str, out_dir: Path, run_name: str | None) -> Path | None:
    """The checkpoint that `--resume` means; None if it is auto and the run has to begin."""
    if resume != "auto":
        path = find_checkpoint(Path(resume))
        try:
            verify_checkpoint(path)
        except ValueError as error:
            run_dir = path.absolute().parent.parent
            place = ("--run-name", run_dir.name, "--out-dir", run_dir.parent)
            goes_back = shell_line("--resume", "auto", *place)
            raise ValueError(f"{error}: give an earlier checkpoint, or {goes_back}") from None
        return path
    if run_name is None:
        raise ValueError(f"--resume auto needs the --run-name: {list_runs(out_dir)}")
    if run_name not in run_names(out_dir):
        print0(f"no run {run_name} yet, so it begins; {list_runs(out_dir)}")
    return latest_valid_checkpoint(out_dir / run_name)


def check_resume_compatible(
    resumed: Checkpoint,
    config: TrainConfig,
    model_config: GPTConfig,
    data_fingerprint: str,
    val_fingerprint: str,
) -> None:
    """Refuse to resume with another model, batch, order or data set than the checkpoint's."""
    path, state = resumed
    found = asdict(model_config)
    found |= {"data_fingerprint": data_fingerprint, "val_fingerprint": val_fingerprint}
    expected = asdict(GPTConfig(**state.model_config))  # a field that it lacks has its default
    expected["data_fingerprint"] = state.data_fingerprint
    expected["val_fingerprint"] = state.val_fingerprint
    for name in KEPT_SETTINGS:
        found[name], expected[name] = getattr(config, name), state.train_config.get(name)
    if changes := differences(expected, found):
        raise ValueError(
            f"{path} is of another run ({', '.join(changes)}): leave these as they were, or start "
            f"a new run, with another --run-name and without --resume"
        )


def differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """What is found and not as expected, as `name expected -> found`."""
    return [
        f"{name} {expected.get(name)} -> {value}"
        for name, value in found.items()
        if expected.get(name) != value
    ]


def run_model_config(config: TrainConfig, resumed: Checkpoint | None) -> GPTConfig:
    """The model's configuration as the flags give it or, with `--init-from`, its model has it.

    That has its own dimensions, and other --size or --n-… are refused, there or by the resume. Of
    other fields that are flags, those count that were given.
    """
    flags = config.model_config()
    if config.init_from is None:
        return flags
    sizes = {n: v for n in GPT2_SIZES["gpt2"] if (v := getattr(config, n)) is not None}
    if config.size != TrainConfig.size:
        sizes = GPT2_SIZES[config.size] | sizes
    settings = TrainConfig().saved() | (resumed.state.train_config if resumed else {})
    if resumed is not None:  # --init-from may be gone by now
        own = GPTConfig(**resumed.state.model_config)
    else:
        own = model_config_of(config.init_from)
        if flags.block_size > own.block_size:
            raise ValueError(
                f"--block-size {flags.block_size} is beyond this model's {own.block_size}: "
                f"give --block-size {own.block_size} or less"
            )
        if other := differences(asdict(own), sizes):
            remedy = as_flags({name: getattr(own, name) for name in GPT2_SIZES["gpt2"]})
            raise ValueError(
                f"--init-from {config.init_from} is not of the size of the flags or of --config "
                f"({', '.join(other)}): give {shell_line(*remedy)}"
            )
    given = {
        name: value
        for name, value in asdict(flags).items()
        if name in settings and name not in GPT2_SIZES["gpt2"] and value != settings[name]
    }
    return replace(own, **given | sizes | {"block_size": flags.block_size})
