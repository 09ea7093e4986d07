"""What `bench.py` measured, kept: a JSON file and a bar chart for each kind of device.

`bench/<device>.json` has one section for each measurement (`ladder`, `peer_transformers`,
`component_sample`, …). A new measurement replaces its own section and leaves the others, so each
section says by itself when, of which commit and with which versions it was made. The files are
meant to be committed: no host names, no folders.
"""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from plot import BLUE, GREY, INK
from runtime.device import device_name
from runtime.files import atomic_write, read_json, write_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Section = dict[str, Any]  # JSON values

PACKAGES = ("torch", "transformers", "numpy", "tiktoken", "gigatoken")
CHART_SECTIONS = {
    "ladder": "One thing more in every line",
    "peer_transformers": "Against Hugging Face transformers",
    "peer_eager": "Against a plain trainer",
}
LIGHT_BLUE = "#a3bed1"
SIGNIFICANT_DIGITS = 5  # more would be noise
BAR_INCHES, HEADING_BARS = 0.3, 2.2  # heights: of a bar with its gap, of a heading in such bars


def device_label(device: torch.device) -> str:
    """The name of a device's kind, such as `NVIDIA H100 80GB HBM3` or `AMD EPYC, 2 cores`."""
    if device.type == "cuda":
        return device_name(device)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return f"{_cpu_name()}, {cores} cores" + (", MPS" if device.type == "mps" else "")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())


def store_section(folder: Path, label: str, name: str, section: Section) -> list[Path]:
    """Put a section into the device's results, with its provenance, and draw them anew.

    Args:
        folder: where results are kept.
        label: the device, as `device_label` gives it.
        name: the section's; one that is there is replaced.
        section: JSON values.

    Returns:
        The JSON file and, where there are speeds to show, the chart.

    Raises:
        ValueError: the file that is there is not such a file.
    """
    path = folder / f"{re.sub('[^a-z0-9]+', '-', label.lower()).strip('-')}.json"
    results = read_json(path) if path.exists() else {"device": label}
    if not isinstance(results, dict):
        raise ValueError(f"{path} holds no results: move it away")
    results[name] = rounded(provenance() | section)
    write_json(path, results)
    if not CHART_SECTIONS.keys() & results.keys():
        return [path]
    return [path, draw_speeds(results, path.with_suffix(".png"))]


def provenance() -> Section:
    """When and of what this is a measurement."""
    commit = _git("rev-parse", "HEAD")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit,
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", "*.py"))
        if commit
        else None,
        "versions": {"python": platform.python_version()} | _package_versions(),
    }


def _git(*args: str) -> str | None:
    """What git says of this repository; None where there is no git, or no repository."""
    command = ["git", "-C", str(Path(__file__).parent), *args]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _package_versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def rounded(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """JSON values with every float cut to the digits that mean something."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    if isinstance(value, dict):
        return {name: rounded(entry) for name, entry in value.items()}
    return [rounded(entry) for entry in value] if isinstance(value, list) else value


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns: names and remarks, first and last, to the left, the numbers between right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers, remark in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(numbers, widths[1:-1], strict=True)]
        lines.append("  ".join([f"{name:<{widths[0]}}", *cells, remark]).rstrip())
    return "\n".join(lines)


def draw_speeds(results: Mapping[str, Any], path: Path) -> Path:
    """Draw the tokens a second of the ladder and of the peers as bars, from zero.

    Args:
        results: a device's, as in its JSON file.
        path: the PNG.
    """
    from matplotlib.figure import Figure

    groups = {title: results[name] for name, title in CHART_SECTIONS.items() if name in results}
    bars = sum(len(group["results"]) for group in groups.values())
    height = 0.95 + BAR_INCHES * (bars + HEADING_BARS * len(groups))
    figure = Figure(figsize=(8, height), dpi=120, facecolor="white")
    axes: Axes = figure.add_axes((0.215, 0.3 / height, 0.6, 1 - 0.95 / height))
    figure.text(
        0.02, 1 - 0.34 / height, "Training speed", color=INK, fontsize=13, fontweight="bold"
    )
    subtitle = f"{results['device']} · tokens a second, share of the device's peak (MFU)"
    figure.text(0.02, 1 - 0.6 / height, subtitle, color=GREY, fontsize=9.5)
    place = 0.0
    for title, group in groups.items():
        _write_heading(axes, place, title, _conditions(group))
        place += HEADING_BARS
        for result in group["results"]:
            colour = BLUE if result is group["results"][-1] else LIGHT_BLUE  # the product is last
            _draw_bar(axes, place, result, colour)
            place += 1
    axes.set_ylim(place, 0)
    axes.set_xlim(left=0)
    axes.axis("off")
    with atomic_write(path) as file:
        figure.savefig(file, format="png")
    return path


def _conditions(group: Section) -> str:
    """Under which a section was measured, in a few words."""
    shape = group["model"]
    return (
        f"{shape['n_layer']} layers, width {shape['n_embd']}, context {shape['block_size']} · "
        f"{group['date'][:10]} · commit {(group['commit'] or 'unknown')[:7]}"
    )


def _write_heading(axes: "Axes", place: float, title: str, conditions: str) -> None:
    """Two lines above a group of bars, `HEADING_BARS` high."""
    transform = axes.get_yaxis_transform()  # x in shares of the axes, y in bars
    axes.text(-0.325, place + 0.95, title, transform=transform, color=INK, fontweight="bold")
    axes.text(-0.325, place + 1.6, conditions, transform=transform, color=GREY, fontsize=8.5)


def _draw_bar(axes: "Axes", place: float, result: Section, colour: str) -> None:
    """One contestant's speed, its name before the bar and the figures after it."""
    speed, share = result.get("tokens_per_second", 0), result.get("mfu")
    axes.barh(place + 0.5, speed, height=0.72, color=colour)
    text = f"{speed:,.0f}" + (f"  ·  {share:.1%}" if share else "") if speed else "failed"
    for x, offset, side, words in ((0, -6, "right", result["name"]), (speed, 5, "left", text)):
        axes.annotate(
            words,
            (x, place + 0.5),
            xytext=(offset, 0),
            textcoords="offset points",
            horizontalalignment=side,
            verticalalignment="center",
            color=INK,
            fontsize=9.5,
        )
