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
from runtime.files import read_object, redact_secrets

Values = Mapping[str, float | str | Path]
PROJECT = "gpt2"  # where the environment names none
QUEUE_RECORDS = 1000  # that may wait for a tracker; further ones are left out
FINISH_SECONDS = 60  # that the end of a run waits for its trackers, all together


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
    """Whether `start` removes the steps that a resumed run repeats. If not, the tracker keeps their
    first values, and is not given them again."""

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
    """Weights & Biases, as `wandb login` and WANDB_* variables say, such as WANDB_MODE=offline."""

    package = "wandb"

    def start(self, run: TrackedRun) -> None:
        """Begin or resume the run of this id.

        Raises:
            ValueError: nobody is logged in.
        """
        import wandb

        seconds = FINISH_SECONDS // 2
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ValueError("not logged in: run `wandb login`, or set WANDB_MODE=offline")
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=os.environ.get("WANDB_DIR", run.folder),
            id=run.id,
            name=run.folder.name,
            config=dict(run.config),
            resume="allow",
            settings=wandb.Settings(console="off", init_timeout=seconds, finish_timeout=seconds),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Values) -> None:
        """Log one row, with the step as its x axis."""
        from wandb import Html, Image

        row = _converted(values, lambda text: Html(f"<pre>{html.escape(text)}</pre>"), Image)
        self._run.log({"step": step} | row)

    def finish(self) -> None:
        """Wait until all is sent, or is on disk."""
        self._run.finish()


class Trackio(Tracker):
    """Trackio: `TRACKIO_DIR=runs/NAME/trackio trackio show`, or where your TRACKIO_DIR is."""

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
    values: Values, text: Callable[[str], object], figure: Callable[[str], object]
) -> dict[str, object]:
    """Values of a step, with texts and figures as a library's own objects."""
    return {
        name: figure(str(v)) if isinstance(v, Path) else text(v) if isinstance(v, str) else v
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
        self._feeds: list[_Feed] = []
        self._last_step: int | None = None

    @contextmanager
    def follow(self, folder: Path, config: Mapping[str, Any], start_step: int) -> Iterator[None]:
        """Begin or continue the curves of the run in `folder`; finish them after the body."""
        self._feeds = [_Feed(name, folder, config, start_step) for name in self._names]
        try:
            yield
        finally:
            if self._feeds and self._last_step is not None:
                try:
                    figures = {f"figures/{path.stem}": path for path in self._draw_figures()}
                    self.log(step=self._last_step, **figures)
                except Exception as error:  # whatever a library raises: the run itself is done
                    _warn(f"no figures for the trackers: {_describe(error)}")
            for feed in self._feeds:
                feed.queue.put(None)
            deadline = time.monotonic() + FINISH_SECONDS
            for feed in self._feeds:
                feed.join(max(0.0, deadline - time.monotonic()))
                if feed.is_alive():
                    feed.warn(f"has not finished after {FINISH_SECONDS} s, and is left to itself")

    def log(self, **values: float | str | Path | None) -> None:
        """Give the trackers a record, without what is None or not finite; never waits.

        A record without a `step` belongs to no curve, and is passed over.
        """
        if not isinstance(step := values.pop("step", None), int):
            return
        self._last_step = step
        known = {
            name: value
            for name, value in values.items()
            if isinstance(value, str | Path) or (value is not None and math.isfinite(value))
        }
        for feed in self._feeds:
            if feed.queue.qsize() >= QUEUE_RECORDS:
                feed.warn(f"is too slow: records beyond {QUEUE_RECORDS:,} waiting are left out")
            elif feed.is_alive():
                feed.queue.put((step, known))


class _Feed(threading.Thread):
    """A tracker's thread, which the end of the process does not wait for, and its queue."""

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any], start_step: int) -> None:
        super().__init__(
            target=self._work, args=(folder, config, start_step), name=name, daemon=True
        )
        self._has_warned = False
        self.queue: SimpleQueue[tuple[int, Values] | None] = SimpleQueue()
        self.start()

    def warn(self, problem: str) -> None:
        """Warn, if this tracker has not been warned of."""
        if not self._has_warned:
            self._has_warned = True
            _warn(f"--logger {self.name} {problem}")

    def _work(self, folder: Path, config: Mapping[str, Any], start_step: int) -> None:
        try:
            self._track(folder, config, start_step)
        except BaseException as error:  # whatever a library raises; it ends this tracker only
            self.warn(f"has failed, and gets nothing more: {_describe(error)}")

    def _track(self, folder: Path, config: Mapping[str, Any], start_step: int) -> None:
        """Give the tracker each value of a step once, also over resumed runs.

        The last step of each name is kept in the run's folder. A value is logged twice only if the
        process was killed between logging and noting it.
        """
        tracker, path = TRACKERS[self.name](), folder / "trackers" / f"{self.name}.json"
        temporary = path.with_suffix(".tmp")
        state = {"id": secrets.token_hex(4), "steps": {}} | read_object(path)
        last: dict[str, int] = state["steps"]
        if tracker.removes_later_steps:
            last |= {name: min(step, start_step) for name, step in last.items()}
        tracker.start(TrackedRun(folder, config, start_step, state["id"], path.is_file()))
        path.parent.mkdir(exist_ok=True)
        while (record := self.queue.get()) is not None:
            step, values = record
            if values := {name: v for name, v in values.items() if step > last.get(name, -1)}:
                tracker.log(step, values)
                last |= dict.fromkeys(values, step)
                temporary.write_text(json.dumps(state))  # `write_json` would wait for the disk
                temporary.replace(path)
        tracker.finish()


def _warn(line: str) -> None:
    print0(DistInfo(), f"warning: {line}")  # only rank 0 has trackers


def _describe(error: BaseException) -> str:
    """An error in one line, without the secrets of the environment."""
    return redact_secrets(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
