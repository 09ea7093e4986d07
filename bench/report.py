"""The results of a device: one JSON file, and a bar chart of its training speeds.

The file has the last results of each measurement (`ladder`, `peer_transformers`,
`component_sample`, …), each with its own date, commit and versions. The files are made to be
committed: they name no host and no folder.
"""

import platform
import re
import statistics
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench.config import DIMENSIONS, ROOT, BenchConfig
from bench.measurement import Results
from plot import BLUE, GREY
from runtime.device import device_name
from runtime.files import atomic_write, read_json, write_json
from runtime.startup import usable_cores

PRODUCT = "product defaults"
PACKAGES = ("torch", "transformers", "numpy", "tiktoken", "gigatoken")
CHARTS = {
    "ladder": "One more optimization in each line",
    "peer_transformers": "Compared with Hugging Face transformers",
    "peer_eager": "Compared with a plain, uncompiled trainer",
    "peer_switches": "The defaults, with one change in each line",
}
LIGHT_BLUE = "#a3bed1"


def device_label(device: torch.device) -> str:
    """The name of a device's kind, such as `NVIDIA H100 80GB HBM3` or `AMD EPYC, 2 cores`."""
    if device.type == "cuda":
        return device_name(device)
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        cpuinfo = ""
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    name = found[1].strip() if found else platform.processor() or platform.machine()
    return f"{name}, {usable_cores()} cores" + (", MPS" if device.type == "mps" else "")


def results_path(config: BenchConfig) -> Path:
    """The results file of a device.

    Another model or batch than the default has its own file, so that no file and no chart
    compares different ones.
    """
    parts = [device_label(config.torch_device)]
    for name in (*DIMENSIONS, "micro_batch_size", "total_batch_size"):
        if (value := getattr(config, name)) != getattr(BenchConfig, name):
            parts.append(f"{name}-{value}")
    file_name = re.sub("[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")
    return config.out_dir / f"{file_name}.json"


def store_results(
    config: BenchConfig, name: str, results: Results, failures: Mapping[str, str]
) -> None:
    """Put a measurement into the device's results, in place of its earlier results.

    Raises:
        ValueError: the existing file has other content.
    """
    path = results_path(config)
    file = read_json(path) if path.exists() else {"device": device_label(config.torch_device)}
    if not isinstance(file, dict):
        raise ValueError(f"{path} has no bench results: move it away")
    measured = {"model": asdict(config.model_config()), "not_measured": failures}
    file[name] = provenance() | measured | {"results": results}
    write_json(path, file)


def provenance() -> dict[str, Any]:
    """The date, the commit and the versions of a measurement."""
    describe = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty"]
    try:
        commit = subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        commit = "unknown"
    versions = {package: version(package) for package in PACKAGES if find_spec(package)}
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit,
        "versions": {"python": platform.python_version()} | versions,
    }


def draw_speeds(path: Path) -> Path:
    """Draw the training speeds of a results file as bars from zero, into a PNG next to it."""
    from matplotlib.figure import Figure

    results = read_json(path)
    measured = {name: results[name] for name in CHARTS if name in results}
    counts = [len(each["results"]) for each in measured.values()]
    size = (8, 0.8 + 0.8 * len(counts) + 0.3 * sum(counts))
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    figure.suptitle(f"Training speed on {results['device']}: tokens per second · MFU")
    panels = figure.subplots(len(counts), height_ratios=counts, sharex=True, squeeze=False).flat
    for axes, (name, each) in zip(panels, measured.items(), strict=True):
        medians = {
            label: {unit: statistics.median(runs) for unit, runs in units.items()}
            for label, units in each["results"].items()
        }
        speeds = [units["tokens/s"] for units in medians.values()]
        shares = [f" · {units['MFU']:.1%}" if "MFU" in units else "" for units in medians.values()]
        colours = [BLUE if label == PRODUCT else LIGHT_BLUE for label in medians]
        bars = axes.barh(list(medians), speeds, height=0.72, color=colours)
        labels = [f"{speed:,.0f}{share}" for speed, share in zip(speeds, shares, strict=True)]
        axes.bar_label(bars, labels, padding=5)
        axes.set_ylim(len(speeds) - 0.5, -0.5)  # from top to bottom
        axes.margins(x=0.2)  # room for the figures after the longest bar
        model = "{n_layer} layers, width {n_embd}, context {block_size}".format(**each["model"])
        made = f"{each['date'][:10]} · commit {each['commit'][:7]}"
        title = f"{CHARTS[name]}\n{model} · {made}"
        axes.set_title(title, loc="left", fontsize=10, color=GREY)
        axes.spines[:].set_visible(False)
        axes.tick_params(bottom=False, labelbottom=False, left=False)
    png = path.with_suffix(".png")
    with atomic_write(png) as file:
        figure.savefig(file, format="png")
    return png
