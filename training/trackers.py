"""Trackers: a run's metrics and samples in TensorBoard, Weights & Biases or Trackio.

Rank 0 calls them; their libraries have threads and processes of their own, so that a call does not
wait for a disk or a network. A tracker that fails costs one warning, and gets nothing more.

To add a tracker, write a function and give it a name in `TrackerName` and `TRACKERS`: the flag
`--logger` takes that name.
"""

import contextlib
import html
import importlib.util
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from runtime.distributed import print0
from runtime.files import read_json, write_json

TrackerName = Literal["tensorboard", "wandb", "trackio"]
Values = Mapping[str, float | str]
PROJECT = "gpt2"  # where the environment names none
PACKAGES = ("tensorboard", "wandb", "trackio")  # of the trackers of these names
WANDB_SECONDS = 60  # that a run waits at its end for W&B


class Tracker(NamedTuple):
    """What shows a run."""

    log: Callable[[int, Values], object]
    """Adds values of a step: a number is a metric, a `str` a text."""
    finish: Callable[[], object]
    """Waits until all that is left is written or sent."""


def start_tensorboard(run_dir: Path, settings: Mapping[str, Any], start_step: int) -> Tracker:
    """Event files in the run's folder, with scalars in float32: `tensorboard --logdir runs`.

    The steps that a resumed run does again are removed.
    """
    from torch.utils.tensorboard import SummaryWriter

    folder = run_dir / "tensorboard"
    writer: Any = SummaryWriter(folder, purge_step=start_step + 1, flush_secs=10)
    writer.add_text("config", _fenced(json.dumps(settings, indent=2)), start_step)

    def log(step: int, values: Values) -> None:
        for name, value in values.items():
            if isinstance(value, str):
                writer.add_text(name, _fenced(value), step)
            else:
                writer.add_scalar(name, value, step)

    return Tracker(log, writer.close)


def start_wandb(run_dir: Path, settings: Mapping[str, Any], _: int) -> Tracker:
    """Weights & Biases, as `wandb login` and WANDB_* variables say, such as WANDB_MODE=offline.

    A file in the run's folder keeps the id, random or given, that a resumed run goes on under.
    """
    import wandb

    id_path, run_id = run_dir / "trackers" / "wandb.json", os.environ.get("WANDB_RUN_ID")
    if run_id or not id_path.is_file():
        write_json(id_path, {"id": run_id or secrets.token_hex(4)})
    run: Any = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        dir=os.environ.get("WANDB_DIR", run_dir),
        id=read_json(id_path)["id"],
        name=os.environ.get("WANDB_NAME", run_dir.name),
        config=dict(settings),
        resume="allow",
        settings=wandb.Settings(console="off", finish_timeout=WANDB_SECONDS),
    )
    run.define_metric("*", step_metric="step")

    def log(step: int, values: Values) -> None:
        shown = _with_texts(values, lambda text: wandb.Html(f"<pre>{html.escape(text)}</pre>"))
        run.log({"step": step} | shown)

    return Tracker(log, run.finish)


def start_trackio(run_dir: Path, settings: Mapping[str, Any], start_step: int) -> Tracker:
    """Trackio; a resumed run goes on under its folder's name."""
    import trackio

    run: Any = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", PROJECT),
        name=run_dir.name,
        config=dict(settings),
        resume="allow" if start_step else "never",
    )

    def log(step: int, values: Values) -> None:
        run.log(_with_texts(values, lambda text: trackio.Markdown(_fenced(text))), step=step)

    return Tracker(log, run.finish)


# Each takes the run's folder, whose name is the run's; its settings as JSON values; and the updates
# done: 0, or those of the checkpoint that the run resumes from.
TRACKERS: dict[str, Callable[[Path, Mapping[str, Any], int], Tracker]] = {
    "tensorboard": start_tensorboard,
    "wandb": start_wandb,
    "trackio": start_trackio,
}


def _with_texts(values: Values, text: Callable[[str], object]) -> dict[str, object]:
    """Values of a step, with texts as a library's own objects."""
    return {name: text(v) if isinstance(v, str) else v for name, v in values.items()}


def _fenced(text: str) -> str:
    """Text as Markdown that shows it as it is."""
    return f"```text\n{text}\n```"


def check_installed(names: Iterable[str]) -> None:
    """Refuse trackers whose package is missing, with the remedy."""
    for name in names:
        if name in PACKAGES and importlib.util.find_spec(name) is None:
            raise ValueError(
                f"--logger {name} needs the package {name}, which is not installed: "
                f"pip install -r requirements-extras.txt, or give --logger without a name"
            )


class Trackers:
    """The trackers of a run, by their names in `TRACKERS`. One that fails is warned of and dropped.

    Takes what the functions in `TRACKERS` take.
    """

    def __init__(
        self, names: Iterable[str], run_dir: Path, settings: Mapping[str, Any], start_step: int
    ) -> None:
        self.working: dict[str, Tracker] = {}
        for name in names:
            with self._dropping(name):
                self.working[name] = TRACKERS[name](run_dir, settings, start_step)

    def log(self, step: int, values: Mapping[str, float | str | None]) -> None:
        """Give each tracker the values of a step that are not None."""
        known = {name: value for name, value in values.items() if value is not None}
        for name, tracker in list(self.working.items()):
            with self._dropping(name):
                tracker.log(step, known)

    def finish(self) -> None:
        """Finish each tracker."""
        for name, tracker in list(self.working.items()):
            with self._dropping(name):
                tracker.finish()

    @contextlib.contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a library raises: training goes on without it
            self.working.pop(name, None)
            problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            print0(f"warning: --logger {name} has failed, and gets nothing more: {problem}")
