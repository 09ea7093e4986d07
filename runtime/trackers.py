"""Trackers: a run's metrics, samples and figures in TensorBoard, Weights & Biases or Trackio.

Rank 0 feeds each tracker from a thread and a bounded queue of its own. A tracker that fails, hangs
or is slow loses records, and one warning says so; training does not wait for it.

To add a tracker, write a class and give it a name in `TRACKERS`: the flag `--logger` takes that
name.
"""

import html
import importlib.util
import json
import math
import os
import re
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from runtime.distributed import DistInfo, print0
from runtime.files import read_json, redact_secrets

Values = Mapping[str, float | str | Path]
PROJECT = "gpt2"  # where the environment names none
QUEUE_RECORDS = 1000  # that may wait for a tracker; further ones are left out
FINISH_SECONDS = 60  # that the end of a run waits for its trackers, all together
SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSWORD")  # of an environment variable


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run when it starts."""

    folder: Path
    config: Mapping[str, Any]
    """The settings, as JSON values."""
    start_step: int
    """Updates done: 0, or those of the checkpoint that the run resumes from."""
    id: str
    """Random; a resumed run keeps it."""
    is_known: bool
    """Whether the tracker has a part of this run already."""


class Tracker(ABC):
    """Something that shows runs; all its methods are called from one thread."""

    package: ClassVar[str | None] = None
    """The module that must be installed."""
    removes_later_steps: ClassVar[bool] = False
    """Whether `start` removes what a resumed run does again. If not, the tracker keeps the first
    values of these steps, and is not given them again."""

    @abstractmethod
    def start(self, run: TrackedRun) -> None:
        """Begin the run's curve, or continue it."""

    @abstractmethod
    def log(self, step: int, values: Values) -> None:
        """Add values of a step: a number is a metric, a `str` a text, a `Path` a PNG."""

    @abstractmethod
    def finish(self) -> None:
        """Write or send what is left."""


class TensorBoard(Tracker):
    """Event files in the run's folder: `tensorboard --logdir runs`."""

    package = "tensorboard"
    removes_later_steps = True

    def start(self, run: TrackedRun) -> None:
        """Write the settings as text."""
        from torch.utils.tensorboard import SummaryWriter

        folder, purged = str(run.folder / "tensorboard"), run.start_step + 1
        self._writer: Any = SummaryWriter(folder, purge_step=purged, flush_secs=10)
        self._writer.add_text("config", _fenced(json.dumps(run.config, indent=2)), run.start_step)

    def log(self, step: int, values: Values) -> None:
        """Add scalars (in float32), texts and images."""
        for name, value in values.items():
            if isinstance(value, Path):
                from matplotlib.image import imread

                self._writer.add_image(name, imread(value), step, dataformats="HWC")
            elif isinstance(value, str):
                self._writer.add_text(name, _fenced(value), step)
            else:
                self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandB(Tracker):
    """Weights & Biases, where `wandb login` or the environment leads; `WANDB_MODE=offline` too."""

    package = "wandb"

    def start(self, run: TrackedRun) -> None:
        """Begin or resume the run of this id.

        Raises:
            ValueError: nobody is logged in.
        """
        import wandb

        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ValueError("not logged in: run `wandb login`, or set WANDB_MODE=offline")
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=os.environ.get("WANDB_DIR", run.folder),
            id=run.id,
            name=run.folder.name,
            config=dict(run.config),
            resume="allow",
            settings=wandb.Settings(console="off", finish_timeout=FINISH_SECONDS - 10),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Values) -> None:
        """Log one row, with the step as its x axis."""
        import wandb

        def text(value: str) -> wandb.Html:
            return wandb.Html(f"<pre>{html.escape(value)}</pre>")

        self._run.log({"step": step} | _converted(values, text, lambda png: wandb.Image(str(png))))

    def finish(self) -> None:
        """Wait until all is sent, or is on disk."""
        self._run.finish()


class Trackio(Tracker):
    """Trackio: `TRACKIO_DIR=runs/NAME/trackio trackio show`, or where the environment leads."""

    package = "trackio"

    def start(self, run: TrackedRun) -> None:
        """Begin or resume the run of this name."""
        os.environ.setdefault("TRACKIO_DIR", str(run.folder.absolute() / "trackio"))
        import trackio  # reads the variable

        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=run.folder.name,
            config=dict(run.config),
            resume="allow" if run.is_known else "never",
        )

    def log(self, step: int, values: Values) -> None:
        """Log one row."""
        from trackio import Image, Markdown

        row = _converted(values, lambda text: Markdown(_fenced(text)), Image)
        self._run.log(row, step=step)

    def finish(self) -> None:
        """Wait until all is stored, or is sent."""
        self._run.finish()


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
}

if TYPE_CHECKING:  # mypy takes no computed Literal
    TrackerName = str
else:
    TrackerName = Literal[*TRACKERS]


def _converted(
    values: Values, text: Callable[[str], object], figure: Callable[[Path], object]
) -> dict[str, object]:
    """Values of a step, with texts and figures as a library's own objects."""
    return {
        name: figure(v) if isinstance(v, Path) else text(v) if isinstance(v, str) else v
        for name, v in values.items()
    }


def _fenced(text: str) -> str:
    """Text as Markdown that shows it as it is."""
    return f"```text\n{text}\n```"


def check_installed(names: Iterable[str]) -> None:
    """Refuse trackers whose package is missing.

    Raises:
        ValueError: naming the first of them, and the remedy.
    """
    for name in names:
        package = TRACKERS[name].package
        if package is not None and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"--logger {name} needs the package {package}, which is not installed: "
                f"pip install -r requirements-extras.txt, or give --logger without a name"
            )


class Trackers:
    """The trackers of a run.

    Args:
        names: of `TRACKERS`; only rank 0 has some at work.
        dist_info: this process.
        draw_figures: draws the run's figures at its end, and returns their PNGs.
    """

    def __init__(
        self, names: Iterable[str], dist_info: DistInfo, draw_figures: Callable[[], list[Path]]
    ) -> None:
        self._names = dict.fromkeys(names) if dist_info.is_main else {}
        self._draw_figures = draw_figures
        self._warn: Callable[[str], None] = lambda line: print0(dist_info, f"warning: {line}")
        self._feeds: list[_Feed] = []
        self._last_step: int | None = None

    @contextmanager
    def follow(self, folder: Path, config: Mapping[str, Any], start_step: int) -> Iterator[None]:
        """Begin or continue the curves of the run in `folder`; finish them after the body."""
        self._feeds = [_Feed(name, folder, config, start_step, self._warn) for name in self._names]
        try:
            yield
        finally:
            if self._feeds and self._last_step is not None:
                self._log_figures(self._last_step)
            deadline = time.monotonic() + FINISH_SECONDS
            for feed in self._feeds:
                feed.end()
            for feed in self._feeds:
                feed.join(deadline)

    def log(self, **values: float | str | Path | None) -> None:
        """Give the trackers a record, without what is None or not finite; never waits.

        A record without a `step` belongs to no curve, and is passed over.
        """
        step = values.pop("step", None)
        if not isinstance(step, int):
            return
        self._last_step = step
        known = {
            name: value
            for name, value in values.items()
            if value is not None and not (isinstance(value, float) and not math.isfinite(value))
        }
        for feed in self._feeds:
            feed.put(step, known)

    def _log_figures(self, step: int) -> None:
        try:
            figures = {f"figures/{path.stem}": path for path in self._draw_figures()}
            self.log(step=step, **figures)
        except Exception as error:  # whatever a library raises: the run itself is done
            self._warn(f"no figures for the trackers: {_describe(error)}")


@dataclass
class _Feed:
    """A tracker in a thread, which the end of the process does not wait for, and its queue."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    start_step: int
    warn: Callable[[str], None]

    def __post_init__(self) -> None:
        self._has_warned = False
        self._queue: SimpleQueue[tuple[int, Values] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def put(self, step: int, values: Values) -> None:
        """Hand a record over, or leave it out if too many wait or the tracker has failed."""
        if self._queue.qsize() >= QUEUE_RECORDS:
            self._warn_once(f"is too slow: records beyond {QUEUE_RECORDS:,} waiting are left out")
        elif self._thread.is_alive():
            self._queue.put((step, values))

    def end(self) -> None:
        """Let the tracker finish after the records that wait."""
        self._queue.put(None)

    def join(self, deadline: float) -> None:
        """Wait for the tracker until `deadline`, by `time.monotonic`."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn_once(f"has not finished after {FINISH_SECONDS} s, and is left to itself")

    def _warn_once(self, problem: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self.warn(f"--logger {self.name} {problem}")

    def _work(self) -> None:
        try:
            self._track(TRACKERS[self.name]())
        except BaseException as error:  # whatever a library raises; it ends this tracker only
            self._warn_once(f"has failed, and gets nothing more: {_describe(error)}")

    def _track(self, tracker: Tracker) -> None:
        """Give the tracker every record, but for those that it had before a resume.

        Which these are is kept in the run's folder. A record is logged twice only if the process
        was killed between logging and noting it.
        """
        path = self.folder / "trackers" / f"{self.name}.json"
        is_known, temporary = path.is_file(), path.with_suffix(".tmp")
        had = read_json(path) if is_known else {"id": secrets.token_hex(4), "step": -1, "names": []}
        tracker.start(
            TrackedRun(self.folder, self.config, self.start_step, str(had["id"]), is_known)
        )
        path.parent.mkdir(exist_ok=True)
        last = dict(had)
        while (record := self._queue.get()) is not None:
            step, values = record
            if not tracker.removes_later_steps:
                values = _not_logged(step, values, had, self.start_step)
            if not values:
                continue
            tracker.log(step, values)
            if step > last["step"]:
                last |= {"step": step, "names": []}
            if step == last["step"]:
                last["names"] = [*last["names"], *values]
            temporary.write_text(json.dumps(last))  # not `write_json`, which waits for the disk
            temporary.replace(path)
        tracker.finish()


def _not_logged(step: int, values: Values, had: Mapping[str, Any], start_step: int) -> Values:
    """The values that are not of the steps that a tracker `had` beyond the resumed one."""
    if start_step < step < had["step"]:
        return {}
    known = had["names"] if step == had["step"] else ()
    return {name: value for name, value in values.items() if name not in known}


def _describe(error: BaseException) -> str:
    """An error in one line, without the secrets of the environment."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    for name, value in os.environ.items():
        if SECRET_NAME.search(name) and len(value) >= 8:  # others may be a part of any message
            line = line.replace(value, "***")
    return redact_secrets(line)[:300]
