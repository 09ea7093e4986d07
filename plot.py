"""Figures of a run from its `metrics.jsonl` alone: loss and HellaSwag over tokens.

    python plot.py runs/my-run                        # runs/my-run/figures/*.png
    python plot.py runs/a runs/b --compare ab.png     # and one figure with both losses
    python plot.py runs/a runs/b --report             # instead: a page, runs/a/report.html

A run in progress can be plotted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from formats.metrics import HELLASWAG_EXAMPLES, HELLASWAG_REFERENCES, Series, own_measures, read_run
from report import write_report
from runtime.cli import POSITIONAL, format_count, parse_flags, run_command
from runtime.files import atomic_write

Records = list[dict[str, Any]]

FALL_SHARE = 0.02  # the loss's fall over this share of the tokens may begin above the figure
MARKED_POINTS = 40  # up to this many points are drawn as dots too

BLUE, RED, INK, GREY, PALE = "#33658a", "#d1495b", "#222222", "#767676", "#e4e4e4"


@dataclass(frozen=True)
class PlotConfig:
    """Draw the figures of one or more runs, each into its own `figures/` folder."""

    runs: tuple[Path, ...] = field(metadata=POSITIONAL)
    """Run folders, such as runs/my-run."""
    compare: Path | None = None
    """Draw the losses of all the runs into this one file too: .png, .pdf or .svg."""
    report: bool = False
    """Instead of the figures, write a page with everything about the runs to look at in a browser:
    report.html, in the first run's folder."""


def main() -> None:
    """Draw the figures and print where they are."""
    config = parse_flags(PlotConfig)
    if config.report:
        print(write_report(config.runs))
    else:
        print(*(path for run_dir in config.runs for path in plot_run(run_dir)), sep="\n")
    if config.compare is not None:
        plot_comparison(config.runs, config.compare)
        print(config.compare)


def plot_run(run_dir: Path) -> list[Path]:
    """Draw what a run has measured so far: `figures/loss.png`, and `hellaswag.png` if it has.

    What a changed trainer logs besides is drawn as it is: a float `spread` into `own_spread.png`.
    """
    records, figures = read_run(run_dir), run_dir / "figures"
    step, tokens = records[-1]["step"], format_count(records[-1]["tokens_seen"])
    title = f"{run_dir.resolve().name} · step {step:,} · {tokens} tokens"
    drawn = [_draw_loss(records, title, figures / "loss.png")]
    if len(Series.of(records, "hellaswag_acc_norm").values):
        drawn.append(_draw_hellaswag(records, title, figures / "hellaswag.png"))
    for name in own_measures(records):
        axes, series = new_axes(title, name), Series.of(records, name)
        _plot_line(axes, series, f"{series.values[-1]:.4g}", color=BLUE)
        drawn.append(save_figure(axes, figures / f"own_{name}.png"))
    return drawn


def plot_comparison(run_dirs: Sequence[Path], path: Path) -> None:
    """Draw the validation losses of several runs into one file."""
    lines = [Series.of(read_run(run_dir), "val_loss") for run_dir in run_dirs]
    if not all(len(line.values) for line in lines):
        raise ValueError("--compare draws validation losses, and a run has none: use --report")
    axes = new_axes(f"{len(lines)} runs", "validation loss (nats per token)")
    for run_dir, line in zip(run_dirs, lines, strict=True):
        # The number first: matplotlib leaves labels that begin with "_" out of the legend.
        _plot_line(axes, line, f"{line.values[-1]:.3f} {run_dir.resolve().name}")
    _fit_loss(axes, lines)
    save_figure(axes, path)


def new_axes(title: str, quantity: str) -> Axes:
    """Axes over training tokens in this project's style, in a figure of their own."""
    axes = Figure(figsize=(8, 4.5), dpi=120, facecolor="white", layout="constrained").subplots()
    axes.set_title(title, color=INK, fontsize=12, fontweight="bold", loc="left", pad=10)
    axes.set_xlabel("training tokens", color=GREY)
    axes.set_ylabel(quantity, color=GREY)
    axes.xaxis.set_major_formatter(lambda tokens, _: format_count(tokens))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    axes.margins(x=0.012)
    axes.tick_params(colors=GREY, length=0, labelsize=9)
    return axes


def _plot_line(axes: Axes, series: Series, label: str, **style: Any) -> None:  # noqa: ANN401
    """Draw a series in full strength, with dots if there are few points."""
    marker = "o" if len(series.values) <= MARKED_POINTS else None
    axes.plot(*series, label=label, linewidth=1.8, marker=marker, markersize=3.5, **style)


def _fit_loss(axes: Axes, lines: Sequence[Series]) -> None:
    """Set the limits; where the first fall takes a third of the height, let it begin above."""
    whole = np.concatenate([line.values for line in lines])
    late = [line.values[line.tokens >= FALL_SHARE * line.tokens[-1]] for line in lines]
    low, high = whole.min(), np.concatenate(late).max()
    if whole.max() - low <= 1.5 * (high - low) or high == low:
        high = whole.max()
    margin = max(0.05 * (high - low), 0.02)
    axes.set_ylim(low - margin, high + margin)


def save_figure(axes: Axes, path: Path) -> Path:
    """Add the legend and write the file, whose ending is its format."""
    axes.set_xlim(right=max(1, axes.get_xlim()[1]))  # a run at step 0 has no width of its own
    axes.legend(fontsize=9, edgecolor="none", framealpha=1)
    with atomic_write(path) as file:
        axes.figure.savefig(file, format=path.suffix[1:])  # type: ignore[union-attr]
    return path


def _draw_loss(records: Records, title: str, path: Path) -> Path:
    axes = new_axes(title, "loss (nats per token)")
    train, val = Series.of(records, "train_loss"), Series.of(records, "val_loss")
    if len(train.values):
        axes.plot(*train, color=BLUE, linewidth=0.6, alpha=0.3)
        train = train.smoothed()
        _plot_line(axes, train, f"training {train.values[-1]:.3f}", color=BLUE)
    if len(val.values):
        label, bits = f"validation {val.values[-1]:.3f}", Series.of(records, "val_bpb").values
        label += f", {bits[-1]:.3f} bits per byte" if len(bits) else ""
        _plot_line(axes, val, label, color=RED)
    _fit_loss(axes, [series for series in (train, val) if len(series.values)])
    return save_figure(axes, path)


def _draw_hellaswag(records: Records, title: str, path: Path) -> Path:
    accuracy = Series.of(records, "hellaswag_acc_norm")
    totals = Series.of(records, "hellaswag_total").values
    total = int(totals[-1]) if len(totals) else HELLASWAG_EXAMPLES
    references = {"chance": 1 / 4}
    if total == HELLASWAG_EXAMPLES:  # the models that the run has passed, and the next one above
        passed = sum(height <= accuracy.values.max() for height in HELLASWAG_REFERENCES.values())
        references |= dict(list(HELLASWAG_REFERENCES.items())[: max(2, passed + 1)])
    else:
        title += f"\n{total:,} examples (reference scores need all {HELLASWAG_EXAMPLES:,})"
    axes = new_axes(title, "HellaSwag accuracy (acc_norm)")
    error = np.sqrt(accuracy.values * (1 - accuracy.values) / total)
    band = (accuracy.tokens, accuracy.values - error, accuracy.values + error)
    axes.fill_between(*band, color=BLUE, alpha=0.15, linewidth=0, label="± 1 standard error")
    _plot_line(axes, accuracy, f"this run {accuracy.values[-1]:.4f}", color=BLUE)
    for name, height in references.items():
        axes.axhline(height, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
        label = axes.text(1.01, height, f"{name} {height:g}", color=GREY, fontsize=9, va="center")
        label.set_transform(axes.get_yaxis_transform())  # the x is a share of the width
    return save_figure(axes, path)


if __name__ == "__main__":
    run_command(main)
