"""Measure training side by side: the ladder of speed, the peers, the parts.

    python bench.py                         # from float32 to the product's defaults, rung by rung
    python bench.py --peer transformers     # the defaults against Hugging Face's GPT-2, tuned
    python bench.py --peer eager            # the defaults against a plain trainer, not compiled
    python bench.py --component sample      # another part: data, tokenize, hellaswag, …

Every contestant runs the real `train_step`, each run in a fresh process, all in turn (A B A B …),
since machines drift; medians are compared. Results go to `bench/<device>.json` and `.png`.
"""

if __name__ == "__main__":
    from runtime.startup import prepare_process

    prepare_process()  # the imports below take seconds

import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from bench.components import COMPONENTS, Figure, Setup
from bench.report import Section, device_label, format_table, store_section
from bench.run import RungResult, Settings
from corpus.shards import Manifest, open_shards
from fineweb import FineWebConfig, open_source, write_shards
from model import GPTConfig
from runtime.cli import parse_flags, run_command
from runtime.device import DeviceName, compiler_problem, select_device, select_dtype
from runtime.distributed import DistInfo
from runtime.files import write_json
from runtime.metrics import flops_per_token, mfu
from tokenizer import VOCAB_SHA256
from training.config import TrainConfig
from training.memory import plan_batch

ROOT = Path(__file__).resolve().parent.parent
ACCUMULATION = 4  # micro-batches of an accumulating step, where the device is no GPU
WARMUP_STEPS = 10  # of the learning rate, so that a few steps already learn


@dataclass(frozen=True)
class BenchConfig:
    """Measure this device: the ladder of speed or, if asked to, a peer or one component."""

    peer: Literal["transformers", "eager"] | None = None
    """Run the product's defaults against this trainer, instead of the ladder."""
    component: (
        Literal["data", "tokenize", "hellaswag", "sample", "checkpoint", "startup"] | None
    ) = None
    """Measure this part of the product, instead of the ladder."""

    size: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"] = "gpt2"
    """Model size: 124M, 350M, 774M or 1558M parameters."""
    n_layer: int | None = None
    """Number of blocks, instead of the size's."""
    n_head: int | None = None
    """Number of attention heads, instead of the size's."""
    n_embd: int | None = None
    """Width, instead of the size's."""
    block_size: int = 1024
    """Context length in tokens."""

    micro_batch_size: int | None = None
    """Sequences at once; by default 16 on a GPU and 4 elsewhere (as the published figures that
    the ladder is compared with), and on its last rung what train_gpt2.py would choose."""
    total_batch_size: int | None = None
    """Tokens of a step that accumulates; by default 524,288 on a GPU. Elsewhere the ladder
    accumulates four micro-batches, and peers are compared on one."""
    steps: int | None = None
    """Timed optimizer steps of a run, after one that is not; by default 20 on a GPU, else 4."""
    rounds: int = 3
    """Runs of each contestant, in turn with the others."""

    device: DeviceName = "auto"
    """Device to measure."""
    data_dir: Path | None = None
    """Folder of token shards to train on; by default Python's standard library, tokenised."""
    text: Path | None = None
    """A .parquet or .jsonl file for --component tokenize; by default the standard library."""
    hellaswag_data: Path | None = None
    """A HellaSwag JSONL for --component hellaswag; by default a sample of our own."""
    out_dir: Path = Path("bench/results")
    """Where the results go."""

    def __post_init__(self) -> None:
        if self.peer and self.component:
            raise ValueError("--peer and --component are two measurements: give one of them")
        if self.peer == "transformers" and not importlib.util.find_spec("transformers"):
            raise ValueError("transformers is missing: pip install -r requirements-dev.txt")
        for name in ("micro_batch_size", "total_batch_size", "steps", "rounds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        self.model_config()

    def model_config(self) -> GPTConfig:
        """The dimensions that the flags give."""
        dimensions = ("size", "n_layer", "n_head", "n_embd", "block_size")
        return TrainConfig(**{name: getattr(self, name) for name in dimensions}).model_config()


def main() -> None:
    """Measure what the flags ask for, print it, add it to the device's results."""
    config = parse_flags(BenchConfig)
    device = select_device(config.device)
    label = device_label(device)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        data_dir = config.data_dir or tokenise_stdlib(scratch / "data")
        open_shards(data_dir, "train")  # a wrong folder is to be told at once
        if config.component:
            name = f"component_{config.component}"
            section = measure_component(config, device, scratch, data_dir)
        else:
            name = f"peer_{config.peer}" if config.peer else "ladder"
            section = measure_training(config, device, scratch, data_dir)
    for path in store_section(config.out_dir, label, name, section):
        print(path)


def tokenise_stdlib(folder: Path) -> Path:
    """Shards of five million tokens of real text, which every machine has."""
    flags = FineWebConfig(source=("stdlib",), data_dir=folder)
    source = open_source(flags, None)
    manifest = Manifest(source.identity, VOCAB_SHA256, flags.shard_size)
    write_shards(source, manifest, folder, flags.workers)
    return folder


# --- the contestants --------------------------------------------------------------------------


@dataclass(frozen=True)
class Rung:
    """A step up the ladder: what it adds to all that came before."""

    name: str
    changes: Mapping[str, Any]


LADDER = (
    Rung("float32", {}),
    Rung("TF32", {"tf32": True}),
    Rung("bfloat16", {"dtype": "bfloat16"}),
    Rung("compile", {"compile": True}),
    Rung("flash attention", {"flash_attention": True}),
    Rung("padded vocabulary", {"padded_vocabulary": True}),
    Rung("fused AdamW", {"fused_adamw": True}),
    Rung("gradient accumulation", {"accumulate": True}),
    Rung("product defaults", {"product": True}),
)
PRODUCT = LADDER[-1].name
PEERS = {
    # As its users would tune it.
    "transformers": Settings(
        tf32=True,
        dtype="auto",
        compile=True,
        flash_attention=True,
        fused_adamw=True,
        accumulate=True,
        hugging_face=True,
    ),
    # A plain trainer: autocast, torch's attention and AdamW as they come.
    "eager": Settings(tf32=True, dtype="auto", flash_attention=True, accumulate=True),
}


def climb(device: torch.device) -> tuple[dict[str, Settings], dict[str, str]]:
    """Every rung's settings; and of the rungs that this device does not have, why."""
    settings, rungs, left_out = Settings(), {}, {}
    for rung in LADDER:
        if reason := obstacle(rung, device):
            left_out[rung.name] = reason
            continue
        settings = replace(settings, **rung.changes)
        rungs[rung.name] = settings
    return rungs, left_out


def obstacle(rung: Rung, device: torch.device) -> str | None:
    """Why a rung cannot be had on this device, in a few words; None if it can."""
    if "tf32" in rung.changes and device.type != "cuda":
        return "a number format of NVIDIA GPUs"
    if "dtype" in rung.changes and select_dtype("auto", device) != torch.bfloat16:
        return "this device has no bfloat16 of its own"
    return compiler_problem(device) if "compile" in rung.changes else None


# --- the race ---------------------------------------------------------------------------------


@dataclass
class Contestant:
    """A name, what it runs with, and what its runs measured."""

    name: str
    settings: Settings
    config: TrainConfig
    runs: list[RungResult] = field(default_factory=list)
    failure: str | None = None
    """Why it could not run, in one line."""

    def summary(self, per_token: int, flops: float | None) -> dict[str, Any]:
        """Medians over the runs.

        Args:
            per_token: FLOPs to train on a token.
            flops: the device's peak in FLOP/s.
        """
        if not self.runs:
            return {"name": self.name, "failure": self.failure}
        speed = Figure(self.name, "tokens/s", [run.tokens_per_second for run in self.runs])
        memory = [run.peak_memory_gib for run in self.runs if run.peak_memory_gib is not None]
        return {
            "name": self.name,
            "failure": self.failure,
            "tokens_per_second": speed.median,
            "spread": speed.spread,
            "mfu": mfu(speed.median, per_token, flops),
            "peak_memory_gib": statistics.median(memory) if memory else None,
            # The first run found no compiled code of an earlier one.
            "compile_seconds": self.runs[0].compile_seconds if self.settings.compile else None,
            "loss": statistics.median(run.losses[-1] for run in self.runs),
            "batch": f"{self.runs[0].micro_batch_size} x {self.runs[0].grad_accum_steps}",
            "settings": asdict(self.settings),
            "runs": [asdict(run) for run in self.runs],
        }


def enter_contestants(
    config: BenchConfig, device: torch.device, data_dir: Path
) -> tuple[list[Contestant], dict[str, str]]:
    """Who runs, and which rungs do not and why.

    Raises:
        ValueError: the batch does not divide.
    """
    rungs, left_out = climb(device)
    if config.peer is not None:
        peer, product = PEERS[config.peer], rungs[PRODUCT]
        peer = replace(peer, compile=peer.compile and product.compile)  # if there is a compiler
        rungs, left_out = {config.peer: peer, PRODUCT: product}, {}
    return [
        Contestant(name, settings, train_config(config, settings, device, data_dir))
        for name, settings in rungs.items()
    ], left_out


def train_config(
    config: BenchConfig, settings: Settings, device: torch.device, data_dir: Path
) -> TrainConfig:
    """The training flags of a contestant, its batch checked."""
    shape = config.model_config()
    micro_batch_size = config.micro_batch_size or default_micro_batch(device)
    total_batch_size = micro_batch_size * shape.block_size
    if settings.accumulate:
        if device.type == "cuda":
            total_batch_size = TrainConfig.total_batch_size
        elif config.peer is None:
            total_batch_size *= ACCUMULATION
        total_batch_size = config.total_batch_size or total_batch_size
    chosen_by_product = settings.product and not config.peer and not config.micro_batch_size
    result = TrainConfig(
        data_dir=data_dir,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        n_embd=shape.n_embd,
        block_size=shape.block_size,
        total_batch_size=total_batch_size,
        micro_batch_size="auto" if chosen_by_product else micro_batch_size,
        loss_chunks=None if settings.product else 1,
        warmup_steps=WARMUP_STEPS,
        val_every=0,
        hellaswag_every=0,
        device=config.device,
        dtype="auto" if settings.product else settings.dtype,
        compile=settings.product,  # others are compiled by the plain torch.compile
    )
    plan_batch(result, shape, DistInfo(device))
    return result


def default_micro_batch(device: torch.device) -> int:
    """Sequences at once: as many as the published figures took that one would compare with."""
    return 16 if device.type == "cuda" else 4


def default_steps(device: torch.device) -> int:
    """Timed steps of a run: seconds on a GPU, a minute elsewhere."""
    return 20 if device.type == "cuda" else 4


def race(contestants: list[Contestant], steps: int, rounds: int, scratch: Path) -> None:
    """Give every contestant its runs, in turn, each in a fresh process; one line a run.

    Args:
        contestants: get their runs, or the reason why there are none.
        steps: timed steps of a run.
        rounds: runs of each.
        scratch: where compiled code is kept from a contestant's first run to its later ones.
    """
    for turn in range(rounds):
        for place, contestant in enumerate(contestants):
            if contestant.failure is not None:
                continue
            outcome = run_in_process(contestant, steps, scratch / f"compiled_{place}")
            if isinstance(outcome, str):
                contestant.failure = line = outcome
            else:
                contestant.runs.append(outcome)
                line = f"{outcome.tokens_per_second:,.0f} tokens/s, loss {outcome.losses[-1]:.4f}"
            print(f"run {turn + 1}/{rounds} | {contestant.name:<21} | {line}", flush=True)


def run_in_process(contestant: Contestant, steps: int, cache: Path) -> RungResult | str:
    """One run in a fresh process: what it measured, or why it could not."""
    settings = json.dumps(asdict(contestant.settings))
    config_path = cache.with_suffix(".json")
    write_json(config_path, contestant.config.saved())
    child = subprocess.run(
        [sys.executable, "-m", "bench.run", settings, str(steps), f"--config={config_path}"],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode == 0:
        return RungResult(**json.loads(child.stdout.splitlines()[-1]))
    if child.returncode < 0:
        return f"ended by signal {-child.returncode}: out of memory?"
    reason = (child.stderr.strip().splitlines() or ["no reason given"])[-1].removeprefix("error: ")
    return re.sub(r"(/[\w.+-]+){2,}", "PATH", reason)[:160]  # results name no machine's folders


# --- the report -------------------------------------------------------------------------------


def measure_training(
    config: BenchConfig, device: torch.device, scratch: Path, data_dir: Path
) -> Section:
    """Race, print the table and the ratios, return them as JSON values."""
    contestants, left_out = enter_contestants(config, device, data_dir)
    steps = config.steps or default_steps(device)
    shape = config.model_config()
    print(
        f"{device_label(device)} | {shape.n_layer} layers, width {shape.n_embd}, "
        f"context {shape.block_size} | {len(contestants)} contestants x {config.rounds} runs"
    )
    race(contestants, steps, config.rounds, scratch)
    peaks = [run.device_flops for contestant in contestants for run in contestant.runs]
    known = [peak for peak in peaks if peak is not None]
    flops = statistics.median(known) if known else None
    per_token = flops_per_token(shape.n_params, shape.n_layer, shape.n_embd, shape.block_size)
    summaries = [contestant.summary(per_token, flops) for contestant in contestants]
    ratios = compare(summaries) if config.peer else {}
    print(training_table(summaries, left_out, steps))
    print(f"device peak: {f'{flops / 1e9:,.0f} GFLOP/s' if flops else 'n/a'}")
    for measure, ratio in ratios.items():
        print(f"{PRODUCT} / {config.peer}: {ratio:.2f}x {measure}")
    return {
        "model": asdict(shape),
        "timed_steps": steps,
        "flops_per_token": per_token,
        "device_flops": flops,
        "ratios": ratios,
        "left_out": left_out,
        "results": summaries,
    }


def compare(summaries: list[dict[str, Any]]) -> dict[str, float]:
    """The product's medians over its peer's, where both have them."""
    peer, product = summaries
    return {
        measure: product[measure] / peer[measure]
        for measure in ("tokens_per_second", "peak_memory_gib")
        if product.get(measure) and peer.get(measure)
    }


def training_table(summaries: list[dict[str, Any]], left_out: Mapping[str, str], steps: int) -> str:
    """A line for every contestant, and for every rung that was left out.

    A batch is sequences at once x micro-batches in a step.
    """
    columns = {
        "batch": ("batch", ""),
        "tokens/s": ("tokens_per_second", ",.0f"),
        "spread": ("spread", ".1%"),
        "MFU": ("mfu", ".1%"),
        "GiB": ("peak_memory_gib", ".2f"),
        "compile s": ("compile_seconds", ".1f"),
        f"loss@{steps}": ("loss", ".4f"),
    }
    rows = [["", *columns, ""]]
    for summary in summaries:
        values = [(summary.get(key), spec) for key, spec in columns.values()]
        cells = ["-" if value is None else format(value, spec) for value, spec in values]
        rows.append([summary["name"], *cells, summary["failure"] or ""])
    rows += [[name, *["-"] * len(columns), why] for name, why in left_out.items()]
    return format_table(rows)


def measure_component(
    config: BenchConfig, device: torch.device, scratch: Path, data_dir: Path
) -> Section:
    """Measure one component, print its figures, return them as JSON values."""
    assert config.component is not None
    setup = Setup(
        model=config.model_config(),
        device=device,
        dtype=select_dtype("auto", device),
        micro_batch_size=config.micro_batch_size or default_micro_batch(device),
        rounds=config.rounds,
        steps=config.steps or default_steps(device),
        folder=scratch / "component",
        data_dir=data_dir,
        text=config.text,
    )
    if config.hellaswag_data is not None:
        setup = replace(setup, hellaswag_data=config.hellaswag_data)
    setup.folder.mkdir()
    figures = COMPONENTS[config.component](setup)
    print(component_table(figures))
    return {
        "model": asdict(setup.model),
        "micro_batch_size": setup.micro_batch_size,
        "results": [
            asdict(figure) | {"median": figure.median, "spread": figure.spread}
            for figure in figures
        ],
    }


def component_table(figures: Sequence[Figure]) -> str:
    """A line for every figure, beside the first one of its unit."""
    rows = [["", "median", "spread", "ratio", ""]]
    first: dict[str, float] = {}
    for figure in figures:
        base = first.setdefault(figure.unit, figure.median)
        ratio = f"{figure.median / base:.2f}x" if base else "-"
        median = f"{figure.median:,.4g}" if figure.median < 1000 else f"{figure.median:,.0f}"
        rows.append([figure.label, median, f"{figure.spread:.1%}", ratio, figure.unit])
    return format_table(rows)


if __name__ == "__main__":
    run_command(main)
