"""Flags, the checkpoint to resume from, and the settings that must match it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from formats import load
from formats.checkpoint import STATE_NAME, Checkpoint, read_state, verify_checkpoint
from formats.metrics import BEST_SUFFIX, RUNS, find_run, is_run
from model import GPTConfig
from runtime.cli import name_help, read_flags, usable_settings
from runtime.distributed import print0
from runtime.errors import UserError
from runtime.files import read_json
from training.config import TrainConfig
from training.recipe import config_from_settings, read_recipe

# A resumed run must keep these settings; docs/reliability.md covers all flags.
FIXED_SETTINGS = ("size", "init_from", "total_batch_size", "seed", "shuffle", "val_tokens")
FIXED_MODEL_SETTINGS = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")


def parse_config(args: Sequence[str]) -> tuple[TrainConfig, Checkpoint | None]:
    """Return the configuration and the verified checkpoint to resume from, if any.

    Flags that are not passed keep their values from the resumed checkpoint or from `--config`. With
    `--init-from`, the size and context length are that model's; a shorter `--block-size` crops its
    context. A resumed run keeps its warm-up when `--max-steps` changes, so that the schedule so far
    does not change.
    """
    flags = read_flags(TrainConfig, args)
    checkpoint, source, recipe = None, None, flags.get("config")
    defaults = read_recipe(recipe) if recipe else TrainConfig()
    out_dir, init_from = flags.get("out_dir", defaults.out_dir), flags.get("init_from")
    if resume := flags.get("resume"):
        path = _find_resume_checkpoint(resume, out_dir, flags.get("run_name"))
        if path is not None:
            checkpoint = Checkpoint(path, read_state(path))
            defaults = _saved_config(checkpoint)
    if init_from and out_dir != RUNS:
        name = init_from.removesuffix(BEST_SUFFIX)
        if is_run(run := find_run(name, out_dir)) and run != Path(name):
            init_from = flags["init_from"] = f"{run}{init_from.removeprefix(name)}"
    init_from = init_from or defaults.init_from
    if init_from in ("scratch", "resume"):  # nanoGPT's values
        fix = "leave it out for new weights, or use --resume auto to continue a run"
        raise UserError(f"--init-from {init_from} is not a model: {fix}")
    is_new_size = init_from != defaults.init_from or defaults.n_layer is None
    if checkpoint is None and init_from and is_new_size:
        source = load.model_config_of(init_from)
        defaults = _with_model_settings(defaults, source)
    with name_help():
        config = replace(defaults, **flags)
    if source is not None:
        _check_size(config, source)
    if checkpoint is not None:
        if config.max_minutes is not None and config.max_steps != defaults.max_steps:
            print0(f"note: ignoring --max-steps {config.max_steps}: leave out --max-minutes")
            config = replace(config, max_steps=defaults.max_steps)  # set by an earlier start
        if config.warmup_steps is None and config.warmup != defaults.warmup < config.max_steps:
            config = replace(config, warmup_steps=defaults.warmup)
        if recipe:
            _note_unused(recipe, config, flags)
    return config, checkpoint


def _note_unused(path: Path, config: TrainConfig, flags: Collection[str]) -> None:
    """Print the settings in `--config` that a resumed run does not use, unless flags replace them.

    With `--max-minutes` and `--init-from`, a new run does not use all of them either.
    """
    replaced = {*flags}
    if config.max_minutes is not None:
        replaced.add("max_steps")
    if config.init_from is not None:
        replaced |= asdict(GPTConfig()).keys()
    recipe = vars(read_recipe(path))
    names = [n for n in read_json(path) if recipe.get(n) is not None and n not in replaced]
    if changes := differences(recipe, {name: getattr(config, name) for name in names}):
        note = f"note: ignoring settings in --config {path}, because the run has other values"
        print0(f"{note}: {', '.join(changes)}")


def _saved_config(checkpoint: Checkpoint) -> TrainConfig:
    """Return a checkpoint's settings; print the values that this version does not accept."""
    path, state = checkpoint
    settings = usable_settings(TrainConfig, state.train_config)
    ignored = [name for name in read_json(path / STATE_NAME) if name not in vars(state)]
    ignored += [f"{n} {value}" for n, value in state.train_config.items() if n not in settings]
    if ignored:
        print0(f"note: {path} has values that this version ignores: {', '.join(ignored)}")
    # Earlier versions only had torch's attention.
    config = config_from_settings({"cpu_attention": "torch"} | settings, path)
    if config.init_from is not None:  # earlier versions did not save the size with it
        config = _with_model_settings(config, GPTConfig(**state.model_config))
    return config


def _with_model_settings(config: TrainConfig, source: GPTConfig) -> TrainConfig:
    """Return the configuration with the size and all other settings that a model also has."""
    shared = {name: v for name, v in asdict(source).items() if hasattr(config, name)}
    return replace(config, **shared)


def _check_size(config: TrainConfig, source: GPTConfig) -> None:
    """Raise if the flags do not have the size of the `--init-from` model."""
    found = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "block_size")}
    found["block_size"] = max(found["block_size"], source.block_size)  # a longer one is cropped
    if changes := differences(asdict(source), found):
        problem = f"--init-from {config.init_from} has another size ({', '.join(changes)})"
        raise UserError(f"{problem}: leave out --n-layer, --n-head, --n-embd and --block-size")


def _find_resume_checkpoint(resume: str, out_dir: Path, run_name: str | None) -> Path | None:
    """Return the checkpoint that `--resume` names; None if it is auto and the run is new."""
    if resume != "auto":
        path = load.find_checkpoint(resume, out_dir)
        try:
            verify_checkpoint(path)
        except UserError as error:
            raise UserError(f"{error}: use an earlier checkpoint") from None
        return path
    if run_name is None:
        raise UserError(f"--resume auto requires --run-name; {load.list_runs(out_dir)}")
    if run_name not in load.run_names(out_dir):
        print0(f"starting a new run: no run named {run_name} yet; {load.list_runs(out_dir)}")
    return load.latest_valid_checkpoint(out_dir / run_name)


def check_resume_compatible(resumed: Checkpoint, config: TrainConfig, data: str, val: str) -> None:
    """Raise if the dimensions, batch, data order or dataset differ from the checkpoint's.

    Print the other settings of the model that differ. `data` and `val` are the fingerprints of the
    training split and of the validation. Earlier versions validated on the first windows of the
    split: such a run now validates on windows that are spread over it, which a note says.
    """
    path, state = resumed
    saved_model = asdict(GPTConfig(**state.model_config))  # missing fields get their defaults
    saved = state.train_config | vars(state) | saved_model
    model = asdict(config.model_config())
    fixed = {name: model.pop(name) for name in FIXED_MODEL_SETTINGS}
    if val.startswith(f"{state.val_fingerprint} ("):
        print0(
            "note: val_loss is measured on windows spread over the split from now on, no longer on "
            "its first ones: figures and @best leave out the earlier values"
        )
        val = state.val_fingerprint
    fixed |= {name: getattr(config, name) for name in FIXED_SETTINGS}
    other_fix = "start a new run with another --run-name and without --resume"
    if changes := differences(saved, fixed):  # they may also change `val`
        problem = f"{path} belongs to another run ({', '.join(changes)})"
        raise UserError(f"{problem}: restore these settings, or {other_fix}")
    if (data, val) != (state.data_fingerprint, state.val_fingerprint):
        problem = f"the data in {config.data_dir} changed since this run began"
        raise UserError(f"{problem}: restore the data, use its --data-dir, or {other_fix}")
    if changes := differences(saved, model):
        print0(f"note: {', '.join(changes)}")


def differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return the values that differ from the expected ones, as `name expected -> found`."""
    changed = {name: value for name, value in found.items() if expected.get(name) != value}
    return [f"{name} {expected.get(name)} -> {value}" for name, value in changed.items()]
