"""Trackers: a run's metrics in TensorBoard, Weights & Biases or Trackio.

Rank 0 calls them. Their libraries write and send in separate threads or processes, so a call does
not wait for a disk or a network. A tracker that fails prints one warning and is disabled.

To add a tracker, write a function and add its name to `TrackerName` and `TRACKERS`: the flag
`--logger` then accepts that name.
"""

import contextlib
import importlib.util
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from formats.metrics import METRICS_NAME, read_lines
from runtime.distributed import print0
from runtime.errors import UserError
from runtime.files import read_json, write_json

Log = Callable[[int, Mapping[str, float]], object]
TrackerName = Literal["tensorboard", "wandb", "trackio"]
PROJECT = "gpt2"  # in W&B, unless WANDB_PROJECT names another
PACKAGES = ("tensorboard", "wandb", "trackio")  # trackers that need the package of the same name
WANDB_SECONDS = 60  # maximum time that a run waits for W&B at its end


class Tracker(NamedTuple):
    """Functions that report a run to a tracker."""

    log: Log
    """Adds the metrics of a step."""
    finish: Callable[[], object]
    """Waits until everything is written or sent."""


def tracker_id(run_dir: Path, tracker: str, given: str | None = None) -> str:
    """Return the id of a run in a tracker: the given one, or else the id in the run's folder.

    A new run has a new id, and so has a copy of a run's folder while the original exists.
    """
    path = run_dir / "trackers" / f"{tracker}.json"
    saved = read_json(path) if path.is_file() else {}
    original = Path(saved.get("folder", run_dir), "trackers", path.name)
    if original.is_file() and not original.samefile(path) and read_json(original) == saved:
        saved = {}
    run_id = given or saved.get("id") or secrets.token_hex(4)
    is_new = run_id != saved.get("id")
    write_json(path, {"id": run_id, "folder": str(run_dir.resolve()), "is_new": is_new})
    return str(run_id)


def skip_sent(run_dir: Path, tracker: str, log: Log) -> Log:
    """Return `log` without values that earlier starts logged, unless the tracker's id is new.

    For trackers that would show both values of a step which a resumed run repeats.
    """
    is_new = read_json(run_dir / "trackers" / f"{tracker}.json")["is_new"]
    records = () if is_new else read_lines(run_dir / METRICS_NAME)
    sent = {(r["step"], name) for r in records if "step" in r for name in r if r[name] is not None}

    def log_new(step: int, values: Mapping[str, float]) -> None:
        if new := {name: value for name, value in values.items() if (step, name) not in sent}:
            log(step, new)

    return log_new


def start_tensorboard(run_dir: Path, settings: Mapping[str, Any], start_step: int) -> Tracker:
    """Write event files to the run's folder; `tensorboard --logdir runs` shows them.

    Scalars are float32. Steps that a resumed run repeats are removed.
    """
    from torch.utils.tensorboard import SummaryWriter

    folder = run_dir / "tensorboard"
    writer: Any = SummaryWriter(folder, purge_step=start_step + 1, flush_secs=10)
    writer.add_text("config", f"```json\n{json.dumps(settings, indent=2)}\n```", start_step)

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker(log, writer.close)


def start_wandb(run_dir: Path, settings: Mapping[str, Any], _: int) -> Tracker:
    """Report to Weights & Biases, configured with `wandb login` and WANDB_* environment variables.

    A resumed run continues under its id. W&B keeps the first values of steps that it repeats.
    """
    import wandb

    run: Any = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        dir=os.environ.get("WANDB_DIR", run_dir),
        id=tracker_id(run_dir, "wandb", os.environ.get("WANDB_RUN_ID")),
        name=os.environ.get("WANDB_NAME", run_dir.name),
        config=dict(settings),
        resume="allow",
        settings=wandb.Settings(console="off", finish_timeout=WANDB_SECONDS),
    )
    run.define_metric("*", step_metric="step")
    log = skip_sent(run_dir, "wandb", lambda step, values: run.log({"step": step, **values}))
    return Tracker(log, run.finish)


def start_trackio(run_dir: Path, settings: Mapping[str, Any], _: int) -> Tracker:
    """Report to Trackio; a resumed run continues under its name, which ends with its id.

    Trackio keeps the first values of steps that a resumed run repeats.
    """
    import trackio

    name = f"{run_dir.name}-{tracker_id(run_dir, 'trackio')}"
    run: Any = trackio.init(project=PROJECT, name=name, config=dict(settings), resume="allow")
    log = skip_sent(run_dir, "trackio", lambda step, values: run.log(dict(values), step=step))
    return Tracker(log, run.finish)


# Arguments: the run's folder (its name is the run's name), the settings as JSON values, and the
# number of updates done (0, or the step of the checkpoint that the run resumes from).
TRACKERS: dict[str, Callable[[Path, Mapping[str, Any], int], Tracker]] = {
    "tensorboard": start_tensorboard,
    "wandb": start_wandb,
    "trackio": start_trackio,
}


def check_installed(names: Iterable[str]) -> None:
    """Raise if the package of a tracker is not installed."""
    for name in names:
        if name in PACKAGES and importlib.util.find_spec(name) is None:
            problem = f"--logger {name} needs the package {name}, which is not installed"
            fix = "pip install -r requirements-extras.txt, or use --logger without a name"
            raise UserError(f"{problem}: {fix}")


class Trackers:
    """The trackers of a run, by their names in `TRACKERS`.

    A tracker that fails is disabled with a warning. The other arguments are passed to the
    functions in `TRACKERS`.
    """

    def __init__(
        self, names: Iterable[str], run_dir: Path, settings: Mapping[str, Any], start_step: int
    ) -> None:
        self.active: dict[str, Tracker] = {}
        for name in names:
            with self._disable_on_error(name):
                self.active[name] = TRACKERS[name](run_dir, settings, start_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Pass the metrics of a step to each tracker."""
        for name, tracker in list(self.active.items()):
            with self._disable_on_error(name):
                tracker.log(step, values)

    def finish(self) -> None:
        """Finish each tracker."""
        for name, tracker in list(self.active.items()):
            with self._disable_on_error(name):
                tracker.finish()

    @contextlib.contextmanager
    def _disable_on_error(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a library may raise anything; training continues
            self.active.pop(name, None)
            problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            print0(f"warning: --logger {name} failed and is now disabled: {problem}")
