"""The results of a device: one JSON file, and a bar chart of its training speeds.

The file has one section per measurement (`ladder`, `peer_transformers`, `component_sample`, …). A
new measurement replaces its own section and leaves the others, so each section has its own date,
commit and versions. The files are made to be committed: they name no host and no folder.
"""

import json
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.config import PRODUCT, ROOT, BenchConfig
from plot import BLUE, GREY, INK
from runtime.device import device_name
from runtime.files import atomic_write, read_json, write_json
from runtime.startup import usable_cores

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Section = dict[str, Any]  # JSON values

PACKAGES = ("torch", "transformers", "numpy", "tiktoken", "gigatoken")
CHART_SECTIONS = {
    "ladder": "One more optimization in each line",
    "peer_transformers": "Compared with Hugging Face transformers",
    "peer_eager": "Compared with a plain, uncompiled trainer",
    "peer_switches": "The defaults, with one change in each line",
    "peer_gpus": "On one GPU, on all, and on all with one change in each line",
}
LIGHT_BLUE = "#a3bed1"
SIGNIFICANT_DIGITS = 5  # more would be noise


def device_label(device: torch.device) -> str:
    """The name of a device's kind, such as `NVIDIA H100 80GB HBM3` or `AMD EPYC, 2 cores`."""
    if device.type == "cuda":
        return device_name(device)
    suffix = ", MPS" if device.type == "mps" else ""
    return f"{_cpu_name()}, {usable_cores()} cores{suffix}"


def _cpu_name() -> str:
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        cpuinfo = ""
    name = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return name[1].strip() if name else platform.processor() or platform.machine()


def results_path(config: BenchConfig, label: str) -> Path:
    """The results file of the device `label`."""
    file_name = config.results_name(re.sub("[^a-z0-9]+", "-", label.lower()).strip("-"))
    return config.out_dir / f"{file_name}.json"


def read_results(config: BenchConfig, label: str) -> dict[str, Any]:
    """What was measured on the device `label` so far.

    Raises:
        ValueError: the existing file has other content.
    """
    path = results_path(config, label)
    results = read_json(path) if path.exists() else {"device": label}
    if not isinstance(results, dict):
        raise ValueError(f"{path} has no bench results: move it away")
    return results


def stored_section(config: BenchConfig, label: str, complete: bool) -> Section:
    """What is stored of the measurement, by the same code and settings; else nothing."""
    section = read_results(config, label).get(config.section, {})
    fits = section.get("key") == config.key() and section.get("complete") is complete
    return section if fits else {}


def store_section(
    config: BenchConfig, label: str, name: str, section: Section, complete: bool = True
) -> list[Path]:
    """Put a section into the results of the device `label`, and draw the chart if it is complete.

    An earlier section of that name is replaced. The section's date, commit and versions are added.

    Returns:
        The JSON file and, if there are training speeds, the chart.

    Raises:
        ValueError: the existing file has other content.
    """
    path, results = results_path(config, label), read_results(config, label)
    added = provenance() | {"key": config.key(), "complete": complete}
    results[name] = round_floats(added | section)
    write_json(path, results)
    if not complete or not CHART_SECTIONS.keys() & results.keys():
        return [path]
    return [path, draw_speeds(results, path.with_suffix(".png"))]


def provenance() -> Section:
    """The date, the commit and the versions of a measurement."""
    versions = {package: version(package) for package in PACKAGES if find_spec(package)}
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", "*.py")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit,
        "uncommitted_changes": None if changes is None else bool(changes),
        "versions": {"python": platform.python_version()} | versions,
    }


def _git(*args: str) -> str | None:
    """What git prints about this repository; None without git, or outside a repository."""
    try:
        command = ["git", "-C", str(ROOT), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def round_floats(section: Section) -> Section:
    """JSON values with each float rounded to `SIGNIFICANT_DIGITS`."""
    return json.loads(
        json.dumps(section), parse_float=lambda text: float(f"{float(text):.{SIGNIFICANT_DIGITS}g}")
    )


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns: the first and the last, names and remarks, left; the numbers right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers, remark in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(numbers, widths[1:-1], strict=True)]
        lines.append("  ".join([f"{name:<{widths[0]}}", *cells, remark]).rstrip())
    return "\n".join(lines)


def markdown_tables(results: Mapping[str, Any]) -> str:
    """A device's results for docs/benchmarks.md: its training speeds, and its other parts."""
    sections = {name: value for name, value in results.items() if isinstance(value, dict)}
    tables = {
        "| training | tokens/s | MFU | peak GiB | loss | batch | command |": _training_rows,
        "| what | median | unit | spread | command |": _component_rows,
    }
    lines = [f"### {results['device']}"]
    for head, rows_of in tables.items():
        lines += ["", head, "|---" * (head.count("|") - 1) + "|"]
        lines += [
            f"| {' | '.join(row)} | `{_command(name)}` |"
            for name, section in sections.items()
            if name.startswith("component_") == (rows_of is _component_rows)
            for row in rows_of(section)
        ]
    stamps = {
        f"torch {section['versions']['torch']}, commit {(section['commit'] or 'unknown')[:7]}"
        for section in sections.values()
    }
    return "\n".join([*lines, "", *sorted(stamps), ""])


def _command(name: str) -> str:
    """What measured a section."""
    kind, _, value = name.partition("_")
    return "python -m bench" + (f" --{kind} {value}" if value else "")


def _training_rows(section: Section) -> Iterator[list[str]]:
    for result in section["results"]:
        if result.get("failure"):
            yield [result["name"], f"not measured: {result['failure']}", "", "", "", ""]
            continue
        mfu, peak = result["mfu"], result["peak_memory_gib"]
        yield [
            result["name"],
            f"{result['tokens_per_second']:,.0f}",
            "n/a" if mfu is None else f"{mfu:.1%}",
            "n/a" if peak is None else f"{peak:.1f}",
            f"{result['loss']:.4f}",
            result["batch"],
        ]
    for name, why in section["left_out"].items():
        yield [name, f"not measured: {why}", "", "", "", ""]


def _component_rows(section: Section) -> Iterator[list[str]]:
    for result in section["results"]:
        median = (
            f"{result['median']:,.4g}" if result["median"] < 1000 else f"{result['median']:,.0f}"
        )
        yield [result["label"], median, result["unit"], f"{result['spread']:.1%}"]


def draw_speeds(results: Mapping[str, Any], path: Path) -> Path:
    """Draw a device's tokens per second as bars from zero: the ladder's and the peers'."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    names = [name for name in CHART_SECTIONS if name in results]
    bars = [len(results[name]["results"]) for name in names]
    height = 0.8 + 0.8 * len(names) + 0.3 * sum(bars)
    layout = ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1)
    figure = Figure(figsize=(8, height), dpi=120, layout=layout)
    title = f"Training speed on {results['device']}: tokens per second · MFU"
    figure.suptitle(title, color=INK, fontweight="bold")
    panels = figure.subplots(len(names), height_ratios=bars, sharex=True, squeeze=False).flat
    for name, axes in zip(names, panels, strict=True):
        _draw_section(axes, CHART_SECTIONS[name], results[name])
    axes.set_xlim(right=axes.get_xlim()[1] * 1.15)  # room for the figures after the longest bar
    with atomic_write(path) as file:
        figure.savefig(file, format="png")
    return path


def _draw_section(axes: "Axes", title: str, section: Section) -> None:
    """One bar per configuration; the product's is darker."""
    results, model = section["results"], section["model"]
    speeds = [result.get("tokens_per_second", 0) for result in results]
    shares = [f" · {result['mfu']:.1%}" if result.get("mfu") else "" for result in results]
    colours = [BLUE if result["name"] == PRODUCT else LIGHT_BLUE for result in results]
    bars = axes.barh([result["name"] for result in results], speeds, height=0.72, color=colours)
    labels = [
        f"{speed:,.0f}{share}" if speed else "failed"
        for speed, share in zip(speeds, shares, strict=True)
    ]
    axes.bar_label(bars, labels, padding=5, color=INK)
    title += (
        f"\n{model['n_layer']} layers, width {model['n_embd']}, context {model['block_size']} · "
        f"{section['date'][:10]} · commit {(section['commit'] or 'unknown')[:7]}"
    )
    axes.set_title(title, loc="left", fontsize=10, color=GREY)
    axes.set_ylim(len(results) - 0.5, -0.5)  # from top to bottom, bars of one height everywhere
    axes.spines[:].set_visible(False)
    axes.tick_params(bottom=False, labelbottom=False, left=False, labelcolor=INK)
