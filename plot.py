"""Figures of a run from its `metrics.jsonl` alone: loss, HellaSwag, throughput over tokens.

    python plot.py runs/my-run                        # runs/my-run/figures/*.png
    python plot.py runs/a runs/b --compare ab.png     # and one figure with both losses

A run in progress can be plotted.
"""

from __future__ import annotations

if __name__ == "__main__":
    from runtime.startup import prepare_process

    prepare_process()  # the imports below take seconds

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tyro.conf import Positional

from runtime.cli import parse_flags, run_command
from runtime.files import atomic_write
from runtime.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = npt.NDArray[np.float64]

HELLASWAG_EXAMPLES = 10042  # the whole validation set, which the references were scored on
HELLASWAG_CHANCE = 0.25
# Completion style: OpenAI's weights scored by this code's method; GPT-3 paper, table H.1.
HELLASWAG_REFERENCES = {
    "GPT-2 124M": 0.2945,
    "GPT-3 124M": 0.337,
    "GPT-2 350M": 0.3752,
    "GPT-2 774M": 0.4320,
    "GPT-3 350M": 0.436,
    "GPT-2 1558M": 0.4889,
    "GPT-3 760M": 0.510,
    "GPT-3 1.3B": 0.547,
}
ALWAYS_SHOWN = 2  # references that are drawn however low the run is
SMOOTHING = 0.02  # window of the running mean, as a share of the records
FALL_SHARE = 0.02  # the loss's fall over this share of the tokens may begin above the figure
MARKED_POINTS = 40  # up to this many points are drawn as dots too

BLUE, RED, INK, GREY, PALE = "#33658a", "#d1495b", "#222222", "#767676", "#e4e4e4"
COMPARE_COLOURS = (BLUE, RED, "#e09f3e", "#5b8e7d", "#7b5ea7", GREY)


@dataclass(frozen=True)
class PlotConfig:
    """Draw the figures of one or more runs, each into its own `figures/` folder."""

    runs: Positional[tuple[Path, ...]]
    """Run folders, such as runs/my-run."""
    compare: Path | None = None
    """Draw the losses of all the runs into this one PNG too."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("no run folder given: python plot.py runs/NAME")
        if self.compare is not None and self.compare.suffix != ".png":
            raise ValueError(f"--compare {self.compare} must end in .png")


def main() -> None:
    """Draw the figures and print where they are."""
    config = parse_flags(PlotConfig)
    for run_dir in config.runs:
        for path in plot_run(run_dir):
            print(path)
    if config.compare is not None:
        plot_comparison(config.runs, config.compare)
        print(config.compare)


def plot_run(run_dir: Path) -> list[Path]:
    """Draw what a run has measured so far into `run_dir/figures/`.

    Args:
        run_dir: a folder with a `metrics.jsonl`.

    Returns:
        The PNGs drawn: `loss.png`, and `hellaswag.png` and `throughput.png` where the run has
        measured such.

    Raises:
        FileNotFoundError: there is no such folder, or no metrics in it.
        ValueError: nothing has been measured yet.
    """
    records = _read_run(run_dir)
    name, figures = run_dir.resolve().name, run_dir / "figures"
    drawn = [_draw_loss(records, name, figures / "loss.png")]
    if len(Series.of(records, "hellaswag_acc_norm").values):
        drawn.append(_draw_hellaswag(records, name, figures / "hellaswag.png"))
    if len(Series.of(records, "tokens_per_second").values):
        drawn.append(_draw_throughput(records, name, figures / "throughput.png"))
    return drawn


def plot_comparison(run_dirs: Sequence[Path], path: Path) -> None:
    """Draw the losses of several runs into one figure.

    Args:
        run_dirs: folders with a `metrics.jsonl`.
        path: the PNG. It shows validation losses if every run has some, else training losses.

    Raises:
        FileNotFoundError, ValueError: as `plot_run`.
    """
    runs = [_read_run(run_dir) for run_dir in run_dirs]
    lines = [Series.of(records, "val_loss") for records in runs]
    validated = all(len(line.values) for line in lines)
    if not validated:
        lines = [Series.of(records, "train_loss").smoothed() for records in runs]
    what = "Validation" if validated else "Training"
    canvas = Canvas(f"{what} loss, nats a token", f"{len(runs)} runs")
    for run_dir, line, colour in zip(run_dirs, lines, cycle(COMPARE_COLOURS), strict=False):
        canvas.line(line, colour, f"{run_dir.resolve().name} {{:.3f}}")
    _fit_loss(canvas.axes, lines)
    canvas.save(path)


class Series(NamedTuple):
    """One measured quantity over a run."""

    tokens: Values
    values: Values

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]], name: str) -> Series:
        """The records that have a value of that name; each step counts once, its last value."""
        points = {
            record["tokens_seen"]: record[name]
            for record in records
            if isinstance(record.get(name), int | float) and "tokens_seen" in record
        }
        tokens = sorted(points)
        return cls(np.array(tokens, float), np.array([points[token] for token in tokens], float))

    def smoothed(self) -> Series:
        """The running mean over `SMOOTHING` of the records, centred, narrower at the start."""
        index = np.arange(len(self.values))
        half = np.minimum(len(index) * SMOOTHING / 2, index).astype(int)
        first, last = index - half, np.minimum(index + half, len(index) - 1)
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        return Series(self.tokens, (sums[last + 1] - sums[first]) / (last + 1 - first))


class Canvas:
    """A figure in this project's style: title above, few lines, each labelled at its end."""

    def __init__(self, title: str, subtitle: str) -> None:
        from matplotlib.figure import Figure

        self.figure = Figure(figsize=(8, 4.5), dpi=120, facecolor="white")
        self.axes: Axes = self.figure.add_axes((0.075, 0.12, 0.735, 0.72))
        self._labels: list[tuple[float, str, str]] = []
        self._ends: list[tuple[Series, str, str]] = []
        self.figure.text(0.02, 0.935, title, color=INK, fontsize=13, fontweight="bold")
        self.figure.text(0.02, 0.885, subtitle, color=GREY, fontsize=9.5)
        self.axes.spines[["top", "right", "left"]].set_visible(False)
        self.axes.spines["bottom"].set_color(GREY)
        self.axes.grid(axis="y", color=PALE, linewidth=0.8)
        self.axes.set_axisbelow(True)
        self.axes.tick_params(colors=GREY, length=0, labelsize=9, pad=5)
        self.axes.xaxis.set_major_formatter(lambda tokens, _: format_count(tokens))
        self.axes.set_xlabel("training tokens", color=GREY, fontsize=9.5, loc="left")
        self.axes.margins(x=0)

    def line(self, series: Series, colour: str, label: str) -> None:
        """Draw a series; `label` stands at its end, its `{}` the last value."""
        marker = "o" if len(series.values) <= MARKED_POINTS else None
        self.axes.plot(*series, color=colour, linewidth=1.8, marker=marker, markersize=3.5)
        self._ends.append((series, label.format(series.values[-1]), colour))

    def label(self, height: float, text: str, colour: str) -> None:
        """Put a text beside the right edge of the axes, at a height in data units."""
        self._labels.append((float(height), text, colour))

    def note(self, text: str) -> None:
        """Put a remark below the axes, at the right."""
        self.figure.text(0.81, 0.034, text, color=GREY, fontsize=8.5, ha="right")

    def save(self, path: Path) -> Path:
        """Place the labels so that none at the edge hides another, and write the PNG."""
        right, (low, high) = self.axes.get_xlim()[1], self.axes.get_ylim()
        for series, text, colour in self._ends:
            end = (series.tokens[-1], series.values[-1])
            if end[0] > 0.9 * right:
                self.label(end[1], text, colour)
            else:  # a shorter run
                self.axes.annotate(
                    text,
                    end,
                    xytext=(6, 2),
                    textcoords="offset points",
                    color=colour,
                    fontsize=9.5,
                )
        top = -1.0  # of the label below
        for height, text, colour in sorted(self._labels):
            half = 0.026 * (1 + text.count("\n"))
            middle = max((height - low) / (high - low), top + half)
            top = middle + half
            self.axes.text(
                1.015,
                middle,
                text,
                transform=self.axes.transAxes,
                color=colour,
                fontsize=9.5,
                va="center",
            )
        with atomic_write(path) as file:
            self.figure.savefig(file, format="png")
        return path


def format_count(count: float) -> str:
    """A count to three digits, in thousands, millions or billions: `250M`, `2.46B`."""
    count = float(f"{count:.3g}")
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:g}{unit}"
    return f"{count:g}"


def _read_run(run_dir: Path) -> list[dict[str, Any]]:
    """A run's records, at least one of them with a loss."""
    if not run_dir.is_dir():
        raise FileNotFoundError(f"no run folder {run_dir}: python plot.py runs/NAME")
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{run_dir} has no metrics.jsonl, so it is not a run folder")
    places = ("step", "tokens_seen")
    records = [
        record
        for record in read_metrics(path)
        if all(isinstance(record.get(place), int) for place in places)
    ]
    if not any(len(Series.of(records, name).values) for name in ("train_loss", "val_loss")):
        raise ValueError(f"{path} has no losses yet: wait for the run's first step")
    return records


def _draw_loss(records: list[dict[str, Any]], name: str, path: Path) -> Path:
    train, val = Series.of(records, "train_loss"), Series.of(records, "val_loss")
    canvas = Canvas("Loss, nats a token", _subtitle(name, records))
    if len(train.values):
        canvas.axes.plot(*train, color=BLUE, linewidth=0.6, alpha=0.3)
        canvas.line(train.smoothed(), BLUE, "train {:.3f}")
    if len(val.values):
        canvas.line(val, RED, "validation {:.3f}")
    _fit_loss(canvas.axes, [series for series in (train.smoothed(), val) if len(series.values)])
    return canvas.save(path)


def _fit_loss(axes: Axes, lines: Sequence[Series]) -> None:
    """Set the limits; where the first fall takes a third of the height, let it begin above."""
    end = max(line.tokens[-1] for line in lines)
    whole = np.concatenate([line.values for line in lines])
    late = np.concatenate([line.values[line.tokens >= FALL_SHARE * end] for line in lines])
    shown = late if np.ptp(whole) > 1.5 * np.ptp(late) and len(late) > 1 else whole
    margin = max(0.05 * np.ptp(shown), 0.02)
    axes.set_ylim(shown.min() - margin, shown.max() + margin)
    _fit_tokens(axes, end)


def _fit_tokens(axes: Axes, end: float) -> None:
    """From no tokens to the last, with room for its dot; a run at step 0 has some room too."""
    axes.set_xlim(0, 1.012 * end or 1)


def _draw_hellaswag(records: list[dict[str, Any]], name: str, path: Path) -> Path:
    accuracy = Series.of(records, "hellaswag_acc_norm")
    totals = Series.of(records, "hellaswag_total").values
    total = int(totals[-1]) if len(totals) else HELLASWAG_EXAMPLES
    complete = total == HELLASWAG_EXAMPLES
    canvas = Canvas(
        "HellaSwag accuracy (acc_norm)", f"{_subtitle(name, records)} · {total:,} examples"
    )
    remark = "" if complete else f"; references need all {HELLASWAG_EXAMPLES:,} examples"
    canvas.note(f"band: ± 1 standard error{remark}")
    error = np.sqrt(accuracy.values * (1 - accuracy.values) / total)
    canvas.axes.fill_between(
        accuracy.tokens,
        accuracy.values - error,
        accuracy.values + error,
        color=BLUE,
        alpha=0.15,
        linewidth=0,
    )
    canvas.line(accuracy, BLUE, "this run {:.4f}")
    references = {"chance": HELLASWAG_CHANCE}
    if complete:
        references |= _references_for(accuracy.values.max())
    for reference, height in references.items():
        canvas.axes.axhline(height, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
        canvas.label(height, f"{reference} {height:g}", GREY)
    heights = [*references.values(), *(accuracy.values - error), *(accuracy.values + error)]
    margin = 0.05 * (max(heights) - min(heights))
    canvas.axes.set_ylim(min(heights) - margin, max(heights) + margin)
    _fit_tokens(canvas.axes, accuracy.tokens[-1])
    return canvas.save(path)


def _references_for(best: float) -> dict[str, float]:
    """The published models that a run has passed, and the next one above it."""
    passed = sum(height <= best for height in HELLASWAG_REFERENCES.values())
    shown = max(ALWAYS_SHOWN, passed + 1)
    return dict(list(HELLASWAG_REFERENCES.items())[:shown])


def _draw_throughput(records: list[dict[str, Any]], name: str, path: Path) -> Path:
    speed = Series.of(records, "tokens_per_second")
    utilisation = Series.of(records, "mfu").values
    median = float(np.median(speed.values))
    canvas = Canvas("Throughput, tokens a second", _subtitle(name, records))
    canvas.axes.plot(*speed, color=BLUE, linewidth=0.6, alpha=0.3)
    settled = Series(speed.tokens[1:], speed.values[1:])  # the first step compiles
    canvas.axes.plot(*settled.smoothed(), color=BLUE, linewidth=1.8)
    label = f"median {format_count(median)}"
    if len(utilisation):
        label += f"\nMFU {np.median(utilisation):.1%}"
    canvas.label(median, label, BLUE)
    canvas.axes.yaxis.set_major_formatter(lambda value, _: format_count(value))
    canvas.axes.set_ylim(0, 1.15 * np.quantile(speed.values, 0.99))
    _fit_tokens(canvas.axes, speed.tokens[-1])
    return canvas.save(path)


def _subtitle(name: str, records: list[dict[str, Any]]) -> str:
    last = records[-1]
    return f"{name} · step {last['step']:,} · {format_count(last['tokens_seen'])} tokens"


if __name__ == "__main__":
    run_command(main)
