"""Make steps of a run again, and compare: `python replay.py runs/NAME --from 500 --steps 10`.

`train_gpt2.py` starts from a checkpoint of the run in a temporary folder, with the run's own flags,
micro-batch and number of processes, but without evaluations. It is ended once it has logged the
steps, because a smaller `--max-steps` would change the schedule. On the same machine, with the same
versions, code and data, each loss and gradient norm is the same bit for bit.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.measurement import ROOT, TORCHRUN, run_python
from corpus.shards import Manifest, verify_shards
from formats.checkpoint import complete_checkpoints, read_state
from formats.code_hashes import code_hashes
from formats.load import RUN_CONFIG_NAME
from formats.metrics import METRICS_NAME, find_run, read_lines, read_run
from runtime.cli import POSITIONAL, PathOrName, as_flags, check_settings, parse_flags, run_command
from runtime.errors import UserError
from runtime.files import read_json
from training.resume import differences

RECORDED = ("environment", "cpu", "micro_batch_size", "data_fingerprint")  # at each start
LEFT_OUT = dict.fromkeys(("val_every", "hellaswag_every", "sample_every", "checkpoint_every"), 0)
Record = dict[str, Any]  # values that a step logged in metrics.jsonl, and the start before it


@dataclass(frozen=True)
class ReplayConfig:
    """Make steps of runs again, and compare losses and gradient norms bit for bit."""

    runs: tuple[PathOrName, ...] = field(metadata=POSITIONAL)
    """Run folders, such as runs/my-run, or names of runs in runs/."""
    from_: int | None = None
    """Step after which to compare, from the last checkpoint until then; default: the newest
    checkpoint before the last step, or else the beginning."""
    steps: int = 10
    """Number of steps after it."""

    def __post_init__(self) -> None:
        check_settings(self, ("steps",))


def main() -> None:
    """Replay steps of each run; exit with 1 if a step differs."""
    config = parse_flags(ReplayConfig)
    results = [replay(find_run(run), config.from_, config.steps) for run in config.runs]
    raise SystemExit(not all(results))


def replay(run_dir: Path, after: int | None, n_steps: int) -> bool:
    """Make the steps after `after` again; print whether they are the same, and return it."""
    read_run(run_dir)  # raises if it is no run, or has no losses
    logged = read_steps(run_dir)
    last = max(logged, default=0)
    if last <= (after or 0):
        raise UserError(f"{run_dir} has no steps after step {after or 0}: use a smaller --from")
    paths = [*reversed(complete_checkpoints(run_dir / "checkpoints"))]
    states = [(path, read_state(path)) for path in paths]
    newest = last - 1 if after is None else after
    path, start = max(((p, s.step) for p, s in states if s.step <= newest), default=(None, 0))
    stop = min(last, max(start, after or 0) + n_steps)
    # A checkpoint has the flags of the steps before it, and config.json has the last ones.
    later = [state for _, state in states if state.step > start]
    flags = [*(state.train_config for state in later), read_json(run_dir / RUN_CONFIG_NAME)]
    for state, others in zip(later, flags[1:], strict=True):
        if state.step < stop and (changes := differences(flags[0], others)):
            stop = state.step
            print(f"note: later steps have other flags ({', '.join(changes)}): use --from {stop}")
    begun = logged[start + 1]
    size = begun.get("micro_batch_size", flags[0]["micro_batch_size"])
    settings = flags[0] | LEFT_OUT | {"micro_batch_size": size, "logger": [], "resume": path}
    replayed = make_steps(settings, begun, stop)
    different = [
        (step, name, logged[step][name], replayed[step][name])
        for step in range(start + 1, stop + 1)
        for name in ("train_loss", "grad_norm")
        if logged[step][name] != replayed[step][name]
    ]
    if not different:
        print(f"{run_dir}: same, bit for bit: steps {start + 1} to {stop}")
        print("not seen: the tokens outside of the windows that these steps read")
    for step, name, old, new in different[:1]:
        difference = f"{name} is {new} instead of {old}, a difference of {abs(new - old):.2g}"
        if not (settings["deterministic"] or " x cpu" in begun["environment"]):
            again = make_steps(settings, begun, stop)[step][name]
            difference += f" (two replays differ by {abs(again - new):.2g})"
        print(f"{run_dir}: step {step} differs: {difference}")
    changes = find_changes(begun, replayed[stop], later[0].code if later else {}, settings)
    print("changed since:", "; ".join(changes) or "nothing that the run has recorded")
    return not different


def read_steps(run_dir: Path) -> dict[int, Record]:
    """Return the last record of each step, with the values recorded at the start before it."""
    steps, begun = dict[int, Record](), Record()
    for record in read_lines(run_dir / METRICS_NAME):
        begun = record if "environment" in record else begun
        if isinstance(start := record.get("resumed_from"), int):
            steps = {step: earlier for step, earlier in steps.items() if step <= start}
        if "train_loss" in record:
            steps[record["step"]] = begun | record
    return steps


def make_steps(settings: Mapping[str, Any], begun: Record, stop: int) -> dict[int, Record]:
    """Train with these settings until the step `stop` is logged; return the steps."""
    processes, launcher = int(begun["environment"].partition(" x ")[0]), list[str]()
    if processes > 1:
        launcher = ["-m", TORCHRUN, "--standalone", f"--nproc_per_node={processes}"]
    with tempfile.TemporaryDirectory() as folder:
        flags = as_flags({**settings, "out_dir": folder, "run_name": "replay"})
        command, run = [*launcher, str(ROOT / "train_gpt2.py"), *flags], Path(folder, "replay")
        run_python(*command, is_done=lambda _: stop in read_steps(run))
        return read_steps(run)


def find_changes(
    begun: Record, replayed: Record, code: Mapping[str, str], settings: Mapping[str, Any]
) -> list[str]:
    """Return what has changed since the steps were made: code, versions, machine and data."""
    now = code_hashes() if code else {}
    changes = [
        f"the code of {file}" for file in sorted({**code, **now}) if code.get(file) != now.get(file)
    ]
    names = [name for name in RECORDED if name in begun]
    changes += differences(begun, {name: replayed[name] for name in names})
    manifest = Manifest.load(data_dir := Path(settings["data_dir"]))
    try:
        verify_shards(data_dir, manifest.shards if manifest else ())
    except UserError as error:
        changes.append(str(error))
    return changes


if __name__ == "__main__":
    run_command(main)
