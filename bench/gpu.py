"""`python -m bench --gpu`: test and measure this machine's GPU in at most 12 minutes.

Each part has a time limit, and results are stored after each run. If a part fails or runs out of
time, its reason is stored, and the next part runs.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic

from bench import ladder, measurement
from bench.config import BenchConfig
from bench.ladder import Workspace
from bench.measurement import Measure, Results
from plot import BLUE, GRAY, INK, new_axes
from runtime.files import atomic_write, read_json

TOTAL_SECONDS = 700  # 12 minutes, less 20 seconds for tokenizing a text
PART_SECONDS = {  # time limits of the parts, in order
    **{"environment": 5, "tests": 135, "ladder": 205},
    **{"defaults": 100, "muon": 80, "xl": 90, "context": 85},
}
PEER_SECONDS = 450  # added to the limit of `defaults` for a peer
FEW_STEPS = 4  # timed steps for XL and the long context
SEQUENCES = 128  # per step of XL; the long context is one sequence with as many tokens
TEST_FILE = "tests/test_cuda.py"


def check_gpu(config: BenchConfig, scratch: Path) -> None:
    """Measure the parts in order, store and plot their results, and print what is missing."""
    if config.device == "auto" and config.torch_device.type != "cuda":
        raise ValueError("--gpu found no usable GPU: use --device cpu for a trial run")
    path, end = measurement.results_path(config), monotonic() + TOTAL_SECONDS
    log = path.with_suffix(".log").absolute()
    print(measurement.device_label(config.torch_device), measurement.provenance(), flush=True)
    missing = list[str]()
    for part in [config.only] if config.only else PART_SECONDS:
        print(f"--- {part}", flush=True)
        has_peer = part == "defaults" and config.peer is not None
        limit = monotonic() + PART_SECONDS[part] + PEER_SECONDS * has_peer
        work = Workspace(scratch, log, min(limit, end))
        part_config = config_of(part, config)
        results, failures = Results(), dict[str, str]()
        measurement.store_results(path, part_config, part, results, failures)
        measures = part_measures(part, part_config, work)
        with suppress(ValueError):  # nothing was measured: `failures` has the reasons
            for results, failures in measurement.measure_in_turn(measures, rounds=1 + has_peer):
                measurement.store_results(path, part_config, part, results, failures)
        missing += [f"not measured: {part}: {label}: {why}" for label, why in failures.items()]
        if part == "ladder" and results:
            print(draw_ladder(path), flush=True)
    print(*missing, log, path, sep="\n")


def config_of(part: str, config: BenchConfig) -> BenchConfig:
    """Return the configuration with the model and the number of steps of a part."""
    short = replace(config, steps=config.steps or FEW_STEPS)
    if part == "xl":
        return replace(short, size="gpt2-xl")
    return replace(short, block_size=SEQUENCES * config.block_size) if part == "context" else config


def part_measures(part: str, config: BenchConfig, work: Workspace) -> dict[str, Measure]:
    """Return the measurements of a part, by name."""
    if part == "environment":  # stored with the results of every part
        return {}
    if part == "tests":
        return {part: partial(run_tests, work)}
    if part == "ladder":
        rows = ladder.ladder_rows(config.torch_device)
        compile_ahead(config, work, {n: row for n, row in rows.items() if "compile" in row[-1]})
        return ladder.ladder_measures(config, work, rows)
    if part == "defaults" and config.peer:
        return ladder.training_measures(config, work)
    train = partial(ladder.measure_training, config, work, ladder.TRAIN_GPT2)
    tokens = {"xl": SEQUENCES * config.block_size, "context": config.block_size}
    flags = ("--optimizer=muon",) if part == "muon" else ()
    return {part: partial(train, tokens.get(part, config.step_tokens), ladder.AUTO, *flags)}


def compile_ahead(config: BenchConfig, work: Workspace, rows: ladder.Rows) -> None:
    """Fill the compile cache: train all rows for two steps in parallel, in half the time left."""
    halfway = work._replace(deadline=(monotonic() + work.deadline) / 2)
    measures = ladder.ladder_measures(replace(config, steps=1), halfway, rows)
    with ThreadPoolExecutor() as pool:
        for measure in measures.values():
            pool.submit(measure)  # the timed runs report the errors


def run_tests(work: Workspace) -> dict[str, float]:
    """Run the GPU tests; return the number of tests by outcome, such as passed and skipped."""
    args = ("-qrfE", "--tb=short", "--show-capture=no", TEST_FILE)
    summary = work.run("-m", "pytest", *args).splitlines()[-1]  # 13 passed, 2 skipped in 9.87s
    return {outcome: float(count) for count, outcome in re.findall(r"(\d+) ([a-z]+)", summary)}


def draw_ladder(path: Path) -> Path:
    """Plot the ladder of a results file as bars, in a PNG file next to it."""
    file = read_json(path)
    rows = {row: median(runs["tokens/s"]) for row, runs in file["ladder"]["results"].items()}
    title = f"GPT-2 training on one {file['device']}, commit {file['ladder']['commit'][:7]}"
    axes = new_axes(title, "")
    axes.set_xlabel("tokens per second; each row adds one optimization", color=GRAY)
    axes.grid(visible=False)
    bars = axes.barh([*rows], [*rows.values()], color=BLUE)
    axes.bar_label(bars, fmt="{:,.0f}", padding=4, color=INK)
    axes.margins(x=0.12)  # room for the numbers
    axes.invert_yaxis()
    figure = path.with_name(f"{path.stem}-ladder.png")
    with atomic_write(figure) as png:
        axes.figure.savefig(png, format="png")  # type: ignore[union-attr]
    return figure
