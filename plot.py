"""Plot a run's loss and HellaSwag accuracy over tokens, from its `metrics.jsonl` alone.

    python plot.py runs/my-run                        # write runs/my-run/figures/*.png
    python plot.py runs/a runs/b --compare ab.png     # also plot both losses in one figure
    python plot.py runs/a runs/b --report             # write a page instead: runs/a/report.html
    python plot.py read-only/a --out figures          # write figures/a/figures/*.png

A run can be plotted while it is training.
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from formats.metrics import Records, Series, find_run, hellaswag_references, read_run, user_metrics
from report import unique_names, warn_if_not_comparable, write_report
from runtime.cli import POSITIONAL, PathOrName, format_count, parse_flags, print_error, run_command
from runtime.errors import UserError
from runtime.files import atomic_write

EARLY_FRACTION = 0.02  # losses in this first fraction of the tokens lie above the figure
MAX_MARKERS = 40  # curves of at most this many points also have a marker at each point

BLUE, RED, INK, GRAY, PALE = "#33658a", "#d1495b", "#222222", "#767676", "#e4e4e4"


@dataclass(frozen=True)
class PlotConfig:
    """Plot one or more runs, each into the `figures` folder of the run."""

    runs: tuple[PathOrName, ...] = field(metadata=POSITIONAL)
    """Run folders, such as runs/my-run, or names of runs in runs/."""
    out: Path | None = None
    """Folder for the figures or the report, with a folder per run; default: each run's folder."""
    compare: Path | None = None
    """Also plot the validation losses of all runs in this one file: .png, .pdf or .svg."""
    report: bool = False
    """Instead of figures, write an HTML page with curves, settings and samples of all runs:
    report.html in the first run's folder."""


def main() -> None:
    """Write the figures or the report, and print their paths."""
    config = parse_flags(PlotConfig)
    paths = [*map(find_run, config.runs)]
    runs = [run for run in paths if not run.is_file()] or paths
    for file in set(paths) - set(runs):  # as with runs/*
        print_error(f"note: {file} is a file, not a run folder")
    if config.report or config.compare:
        warn_if_not_comparable(runs)
    folders = [config.out / name.lstrip("/") for name in unique_names(runs)] if config.out else runs
    if locked := [path for path in folders if path.is_dir() and not os.access(path, os.W_OK)]:
        raise UserError(f"{locked[0]} cannot be written: use --out FOLDER to write elsewhere")
    if config.report:
        print(write_report(runs, folders[0]))
    else:
        print(*(path for each in map(plot_run, runs, folders) for path in each), sep="\n")
    if config.compare is not None:
        print(plot_comparison(runs, config.compare))


def plot_run(run_dir: Path, folder: Path | None = None) -> list[Path]:
    """Plot a run's metrics so far: `figures/loss.png` and, if it was scored, `hellaswag.png`.

    The figures are in the run's folder, or in `folder`.

    Each additional number that a modified trainer logs gets a separate figure: `spread` is drawn in
    `own_spread.png`.
    """
    records, figures = read_run(run_dir), (folder or run_dir) / "figures"
    step, tokens = records[-1]["step"], format_count(records[-1]["tokens_seen"])
    title = f"{run_dir.resolve().name} · step {step:,} · {tokens} tokens"
    drawn = [_draw_loss(records, title, figures / "loss.png")]
    if len(Series.of(records, "hellaswag_acc_norm").values):
        drawn.append(_draw_hellaswag(records, title, figures / "hellaswag.png"))
    for name in filter(str.isidentifier, user_metrics(records)):  # the figure's file has the name
        axes, series = new_axes(title, name), Series.of(records, name)
        _plot_line(axes, series, f"{series.values[-1]:.4g}", BLUE)
        drawn.append(save_figure(axes, figures / f"own_{name}.png"))
    return drawn


def plot_comparison(run_dirs: Sequence[Path], path: Path) -> Path:
    """Plot the validation losses of several runs in one file."""
    axes, lines = new_axes(f"{len(run_dirs)} runs", "validation loss (nats per token)"), []
    for run_dir, name in zip(run_dirs, unique_names(run_dirs), strict=True):
        line = Series.of(read_run(run_dir), "val_loss")
        if not len(line.values):
            raise UserError(f"--compare plots validation losses, but {run_dir} has none")
        # The number comes first: matplotlib omits labels that begin with "_" from the legend.
        _plot_line(axes, line, f"{line.values[-1]:.3f} {plain(name)}")
        lines.append(line)
    _fit_loss(axes, lines)
    return save_figure(axes, path)


def new_axes(title: str, quantity: str) -> Axes:
    """Return axes over training tokens, in a new figure of this style."""
    figure = Figure(figsize=(8, 4.5), dpi=120, facecolor="white", layout="constrained")
    axes = figure.subplots()
    axes.set_title(plain(title), color=INK, fontsize=12, fontweight="bold", loc="left", pad=10)
    axes.set_xlabel("training tokens", color=GRAY)
    axes.set_ylabel(quantity, color=GRAY)
    axes.xaxis.set_major_formatter(lambda tokens, _: format_count(tokens))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    axes.tick_params(colors=GRAY, length=0, labelsize=9)
    return axes


def plain(text: str) -> str:
    """Escape a text in which matplotlib would read `$` as the start of a formula."""
    return text.replace("$", r"\$")


def _plot_line(axes: Axes, series: Series, label: str, color: str | None = None) -> None:
    """Draw a series as a solid curve, with markers if there are few points."""
    marker = "o" if len(series.values) <= MAX_MARKERS else None
    axes.plot(*series, label=label, color=color, linewidth=1.8, marker=marker, markersize=3.5)


def _fit_loss(axes: Axes, lines: Sequence[Series]) -> None:
    """Set the y-limits; the first losses may lie above the figure."""
    late = [line.values[line.tokens >= EARLY_FRACTION * line.tokens[-1]] for line in lines]
    low, high = min(line.values.min() for line in lines), max(values.max() for values in late)
    margin = max(0.05 * (high - low), 0.02)
    axes.set_ylim(low - margin, high + margin)


def save_figure(axes: Axes, path: Path) -> Path:
    """Add the legend and write the file, in the format of its suffix."""
    axes.set_xlim(right=max(1, axes.get_xlim()[1]))  # a run at step 0 has no width
    axes.legend(fontsize=9, edgecolor="none", framealpha=1)
    # Without a warning if the font lacks a name's characters, such as Chinese.
    with atomic_write(path) as file, warnings.catch_warnings(action="ignore"):
        axes.figure.savefig(file, format=path.suffix[1:])  # type: ignore[union-attr]
    return path


def _draw_loss(records: Records, title: str, path: Path) -> Path:
    axes = new_axes(title, "loss (nats per token)")
    train, val = Series.of(records, "train_loss"), Series.of(records, "val_loss")
    if len(train.values):
        axes.plot(*train, color=BLUE, linewidth=0.6, alpha=0.3)
        train = train.smoothed()
        _plot_line(axes, train, f"training {train.values[-1]:.3f}", BLUE)
    if len(val.values):
        _plot_line(axes, val, f"validation {val.values[-1]:.3f}", RED)
    _fit_loss(axes, [series for series in (train, val) if len(series.values)])
    return save_figure(axes, path)


def _draw_hellaswag(records: Records, title: str, path: Path) -> Path:
    accuracy = Series.of(records, "hellaswag_acc_norm")
    total = int(Series.of(records, "hellaswag_total").values[-1])
    axes = new_axes(f"{title}\n{total:,} examples", "HellaSwag accuracy (acc_norm)")
    error = np.sqrt(accuracy.values * (1 - accuracy.values) / total)
    band = (accuracy.tokens, accuracy.values - error, accuracy.values + error)
    axes.fill_between(*band, color=BLUE, alpha=0.15, linewidth=0, label="± 1 standard error")
    _plot_line(axes, accuracy, f"this run {accuracy.values[-1]:.4f}", BLUE)
    for name, height in hellaswag_references(total).items():
        axes.axhline(height, color=GRAY, linewidth=1, linestyle=(0, (4, 3)))
        label = axes.text(1.01, height, f"{name} {height:g}", color=GRAY, fontsize=9, va="center")
        label.set_transform(axes.get_yaxis_transform())  # x is a fraction of the width
        if height > accuracy.values.max():  # the first that the run has not reached
            break
    return save_figure(axes, path)


if __name__ == "__main__":
    run_command(main)
