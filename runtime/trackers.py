"""Trackers: a run's metrics, samples and figures in TensorBoard, Weights & Biases or Trackio.

Rank 0 calls them; their libraries have threads and processes of their own, so that a call does not
wait for a disk or a network. A tracker that fails costs one warning, and gets nothing more.

To add a tracker, write a class and give it a name in `TRACKERS`: the flag `--logger` takes that
name.
"""

import html
import importlib.util
import json
import math
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from runtime.distributed import print0
from runtime.files import read_json, write_json

Values = Mapping[str, float | str | Path]
PROJECT = "gpt2"  # where the environment names none
WANDB_SECONDS = 60  # that a run waits for W&B to begin, and again at its end


class Tracker(ABC):
    """Something that shows runs; making one begins the run's curves, or goes on with them.

    Args:
        run_dir: the run's folder; its name is the run's.
        settings: JSON values.
        start_step: updates done: 0, or those of the checkpoint that the run resumes from.
    """

    package: ClassVar[str | None] = None
    """The module that must be installed."""

    @abstractmethod
    def __init__(self, run_dir: Path, settings: Mapping[str, Any], start_step: int) -> None: ...

    @abstractmethod
    def log(self, step: int, values: Values) -> None:
        """Add values of a step: a number is a metric, a `str` a text, a `Path` a PNG."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until all that is left is written or sent."""


class TensorBoard(Tracker):
    """Event files in the run's folder: `tensorboard --logdir runs`.

    The steps that a resumed run does again are removed.
    """

    package = "tensorboard"

    def __init__(self, run_dir: Path, settings: Mapping[str, Any], start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = str(run_dir / "tensorboard")
        self._writer: Any = SummaryWriter(folder, purge_step=start_step + 1, flush_secs=10)
        self._writer.add_text("config", _fenced(json.dumps(settings, indent=2)), start_step)

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
    """Weights & Biases, as `wandb login` and WANDB_* variables say, such as WANDB_MODE=offline.

    A file in the run's folder keeps the random id that a resumed run goes on under.
    """

    package = "wandb"

    def __init__(self, run_dir: Path, settings: Mapping[str, Any], start_step: int) -> None:
        import wandb

        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ValueError("not logged in: run `wandb login`, or set WANDB_MODE=offline")
        id_path = run_dir / "trackers" / "wandb.json"
        if not id_path.is_file():
            write_json(id_path, {"id": secrets.token_hex(4)})
        seconds = WANDB_SECONDS
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=os.environ.get("WANDB_DIR", run_dir),
            id=read_json(id_path)["id"],
            name=run_dir.name,
            config=dict(settings),
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
    """Trackio: `TRACKIO_DIR=runs/NAME/trackio trackio show`, or where your TRACKIO_DIR is.

    A resumed run goes on under its folder's name.
    """

    package = "trackio"

    def __init__(self, run_dir: Path, settings: Mapping[str, Any], start_step: int) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run_dir.absolute() / "trackio"))
        import trackio  # reads the variable

        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=run_dir.name,
            config=dict(settings),
            resume="allow" if start_step else "never",
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
    """Refuse trackers whose package is missing, with the remedy."""
    for name in names:
        package = TRACKERS[name].package
        if package is not None and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"--logger {name} needs the package {package}, which is not installed: "
                f"pip install -r requirements-extras.txt, or give --logger without a name"
            )


class Trackers:
    """The trackers of a run, by their names in `TRACKERS`. One that fails is warned of and dropped.

    Takes what a `Tracker` takes.
    """

    def __init__(
        self, names: Iterable[str], run_dir: Path, settings: Mapping[str, Any], start_step: int
    ) -> None:
        self.working: dict[str, Tracker] = {}
        for name in names:
            with self._dropping(name):
                self.working[name] = TRACKERS[name](run_dir, settings, start_step)

    def log(self, step: int, values: Mapping[str, float | str | Path | None]) -> None:
        """Give each tracker the values of a step that are not None, NaN or infinite."""
        known = {
            name: value
            for name, value in values.items()
            if isinstance(value, str | Path) or (value is not None and math.isfinite(value))
        }
        for name, tracker in list(self.working.items()):
            with self._dropping(name):
                tracker.log(step, known)

    def finish(self) -> None:
        """Finish each tracker."""
        for name, tracker in list(self.working.items()):
            with self._dropping(name):
                tracker.finish()

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a library raises: training goes on without it
            self.working.pop(name, None)
            problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            print0(f"warning: --logger {name} has failed, and gets nothing more: {problem}")
