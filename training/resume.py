"""Flags, the checkpoint to resume from, and the settings that must match it."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from formats.checkpoint import STATE_NAME, Checkpoint, read_state, verify_checkpoint
from formats.load import (
    find_checkpoint,
    latest_valid_checkpoint,
    list_runs,
    model_config_of,
    run_names,
)
from lr_schedule import learning_rate
from model import GPT2_SIZES, GPTConfig
from runtime.cli import as_flags, parse_flags, shell_line, usable_settings
from runtime.distributed import print0
from runtime.files import read_json
from training.config import TrainConfig, config_from_settings, read_recipe

LR_JUMP = 1.1  # warn if the learning rate rises by more than this factor in one step
# A resumed run must keep these settings; docs/reliability.md covers all flags.
FIXED_SETTINGS = ("size", "init_from", "total_batch_size", "seed", "shuffle", "val_tokens")
FIXED_MODEL_SETTINGS = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")


def parse_config(args: Sequence[str]) -> tuple[TrainConfig, Checkpoint | None]:
    """Return the configuration and the verified checkpoint to resume from, if any.

    Flags that are not passed keep their values from the resumed checkpoint or from `--config`. With
    `--init-from`, `--block-size` defaults to that model's context length. A resumed run keeps its
    warm-up when `--max-steps` changes, so that the schedule so far does not change.
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
        path = _find_resume_checkpoint(given.resume, out_dir, given.run_name)
        if path is not None:
            checkpoint = Checkpoint(path, read_state(path))
            settings = usable_settings(TrainConfig, checkpoint.state.train_config)
            defaults = config_from_settings(settings, path)
            _print_ignored(checkpoint, settings)
    if given.init_from and checkpoint is None and defaults.init_from is None:
        block_size = model_config_of(given.init_from).block_size
        defaults = replace(defaults, block_size=block_size)
    config = parse_flags(TrainConfig, args, defaults)
    if checkpoint is not None:
        if config.max_minutes is not None:  # the run has already set its number of steps
            config = replace(config, max_steps=defaults.max_steps)
        _warn_about_lr_jump(checkpoint, defaults, config)
        if given.config:
            requested = parse_flags(TrainConfig, args, read_recipe(Path(given.config)))
            if unused := differences(requested.saved(), config.saved()):
                print0(
                    f"warning: ignoring --config {given.config}: the run keeps its settings from "
                    f"{checkpoint.path} ({', '.join(unused)})"
                )
    return config, checkpoint


def _print_ignored(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
    """Print the values of a checkpoint that this version does not have or accept, if any."""
    path, state = checkpoint
    saved = read_json(path / STATE_NAME)
    ignored = [name for name in saved if name not in vars(state)]
    used = {**state.model_config, **settings}
    for values in (saved["model_config"], state.train_config):
        ignored += [f"{name} {value}" for name, value in values.items() if name not in used]
    if ignored:
        names = ", ".join(dict.fromkeys(ignored))  # a setting of the model is in both
        print0(f"note: {path} has values that this version ignores: {names}")


def _warn_about_lr_jump(checkpoint: Checkpoint, saved: TrainConfig, config: TrainConfig) -> None:
    """Warn if the resumed run raises the learning rate in one step."""
    step = checkpoint.state.step
    before = max(learning_rate(saved, max(step - 1, 0)), learning_rate(saved, step))
    if (after := learning_rate(config, step)) > LR_JUMP * before:
        print0(
            f"warning: the learning rate jumps at step {step} from {before:.2g} to {after:.2g}: "
            f"for a smooth curve, start a new run or, with wsd, resume from before the decay"
        )


def _find_resume_checkpoint(resume: str, out_dir: Path, run_name: str | None) -> Path | None:
    """Return the checkpoint that `--resume` names; None if it is auto and the run is new."""
    if resume != "auto":
        path = find_checkpoint(Path(resume))
        try:
            verify_checkpoint(path)
        except ValueError as error:
            run_dir = path.absolute().parent.parent
            flags = ("--run-name", run_dir.name, "--out-dir", run_dir.parent)
            auto = shell_line("--resume", "auto", *flags)
            raise ValueError(f"{error}: use an earlier checkpoint, or {auto}") from None
        return path
    if run_name is None:
        raise ValueError(f"--resume auto requires --run-name; {list_runs(out_dir)}")
    if run_name not in run_names(out_dir):
        print0(f"starting a new run: no run named {run_name} yet; {list_runs(out_dir)}")
    return latest_valid_checkpoint(out_dir / run_name)


def check_resume_compatible(
    resumed: Checkpoint,
    config: TrainConfig,
    model_config: GPTConfig,
    data_fingerprint: str,
    val_fingerprint: str,
) -> None:
    """Raise if the dimensions, batch, data order or dataset differ from the checkpoint's.

    Print the other settings of the model that differ.
    """
    path, state = resumed
    saved = asdict(GPTConfig(**state.model_config))  # missing fields get their defaults
    current = asdict(model_config)
    expected = {name: saved.pop(name) for name in FIXED_MODEL_SETTINGS}
    found = {name: current.pop(name) for name in FIXED_MODEL_SETTINGS}
    found |= {"data_fingerprint": data_fingerprint, "val_fingerprint": val_fingerprint}
    expected["data_fingerprint"] = state.data_fingerprint
    expected["val_fingerprint"] = state.val_fingerprint
    for name in FIXED_SETTINGS:
        found[name], expected[name] = getattr(config, name), state.train_config.get(name)
    if changes := differences(expected, found):
        raise ValueError(
            f"{path} belongs to another run ({', '.join(changes)}): restore these settings, or "
            f"start a new run with another --run-name and without --resume"
        )
    if changes := differences(saved, current):
        print0(f"note: {', '.join(changes)}")


def differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return the values that differ from the expected ones, as `name expected -> found`."""
    return [
        f"{name} {expected.get(name)} -> {value}"
        for name, value in found.items()
        if expected.get(name) != value
    ]


def run_model_config(config: TrainConfig, resumed: Checkpoint | None) -> GPTConfig:
    """Return the model configuration from the flags or, with `--init-from`, from that model.

    With `--init-from`, the dimensions come from that model, and conflicting --size or --n-* flags
    are errors, here or when the run is resumed. Other model flags apply only if they were passed.
    """
    flags = config.model_config()
    if config.init_from is None:
        return flags
    sizes = {n: v for n in GPT2_SIZES["gpt2"] if (v := getattr(config, n)) is not None}
    if config.size != TrainConfig.size:
        sizes = GPT2_SIZES[config.size] | sizes
    settings = TrainConfig().saved() | (resumed.state.train_config if resumed else {})
    if resumed is not None:  # the --init-from model may no longer exist
        source = GPTConfig(**resumed.state.model_config)
    else:
        source = model_config_of(config.init_from)
        if flags.block_size > source.block_size:
            raise ValueError(
                f"--block-size {flags.block_size} exceeds the model's context of "
                f"{source.block_size}: use --block-size {source.block_size} or less"
            )
        if other := differences(asdict(source), sizes):
            model_flags = as_flags({name: getattr(source, name) for name in GPT2_SIZES["gpt2"]})
            raise ValueError(
                f"--init-from {config.init_from} does not have the size of the flags or of "
                f"--config ({', '.join(other)}): use {shell_line(*model_flags)}"
            )
    given = {
        name: value
        for name, value in asdict(flags).items()
        if name in settings and name not in GPT2_SIZES["gpt2"] and value != settings[name]
    }
    return replace(source, **given | sizes | {"block_size": flags.block_size})
