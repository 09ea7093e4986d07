"""The speed ladder: the same training with one more optimization in each configuration; and peers.

Each run has a fresh process. The configurations' runs alternate, and medians are compared.
"""

import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench.config import BenchConfig, train_config
from bench.measurement import Measurement
from bench.report import Section, device_label, format_table
from bench.run import RunResult, Settings, run_in_process
from runtime.device import compiler_problem, select_dtype
from runtime.distributed import DistInfo
from runtime.metrics import flops_per_token, mfu
from training.config import TrainConfig
from training.memory import plan_batch

ACCUMULATION = 4  # micro-batches per step with gradient accumulation, except on a GPU
PRODUCT = "product defaults"
LADDER: dict[str, dict[str, Any]] = {  # what each configuration adds to the one before it
    "float32": {},
    "TF32": {"tf32": True},
    "bfloat16": {"dtype": "bfloat16"},
    "compile": {"compile": True},
    "flash attention": {"flash_attention": True},
    "padded vocabulary": {"padded_vocabulary": True},
    "fused AdamW": {"fused_adamw": True},
    "gradient accumulation": {"accumulate": True},
    PRODUCT: {"product": True},
}
# "eager" is a plain trainer: autocast, torch's attention, AdamW with its default arguments.
EAGER = Settings(tf32=True, dtype="auto", flash_attention=True, accumulate=True)
PEERS = {
    "eager": EAGER,
    # As its users would tune it.
    "transformers": replace(EAGER, compile=True, fused_adamw=True, hugging_face=True),
}


def available_ladder(device: torch.device) -> tuple[dict[str, Settings], dict[str, str]]:
    """The settings of each configuration; and why this device does not have the others."""
    left_out = {}
    if device.type != "cuda":
        left_out["TF32"] = "a number format of NVIDIA GPUs"
    if select_dtype("auto", device) != torch.bfloat16:
        left_out["bfloat16"] = "this device has no native bfloat16"
    if problem := compiler_problem(device):
        left_out["compile"] = problem
    settings, ladder = Settings(), {}
    for name, added in LADDER.items():
        if name not in left_out:
            settings = ladder[name] = replace(settings, **added)
    return ladder, left_out


def median_or_none(values: Iterable[float | None]) -> float | None:
    """The median of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


@dataclass
class Configuration:
    """A name, the settings it runs with, and what its runs measured."""

    name: str
    settings: Settings
    config: TrainConfig
    runs: list[RunResult] = field(default_factory=list)
    failure: str | None = None
    """Why it could not run, in one line."""

    def summary(self, per_token: int, peak_flops: float | None) -> dict[str, Any]:
        """Medians over the runs, from the FLOPs per token and the device's peak in FLOP/s."""
        if not self.runs:
            return {"name": self.name, "failure": self.failure}
        speed = Measurement(self.name, "tokens/s", [run.tokens_per_second for run in self.runs])
        return {
            "name": self.name,
            "failure": self.failure,
            "tokens_per_second": speed.median,
            "spread": speed.spread,
            "mfu": mfu(speed.median, per_token, peak_flops),
            "peak_memory_gib": median_or_none(run.peak_memory_gib for run in self.runs),
            # Later runs use the first one's compiled code.
            "compile_seconds": self.runs[0].compile_seconds if self.settings.compile else None,
            "loss": statistics.median(run.losses[-1] for run in self.runs),
            "batch": f"{self.runs[0].micro_batch_size} x {self.runs[0].grad_accum_steps}",
            "settings": asdict(self.settings),
            "runs": [asdict(run) for run in self.runs],
        }


def choose_configurations(config: BenchConfig) -> tuple[list[Configuration], dict[str, str]]:
    """The configurations to run; and the names of those left out, with the reason.

    Raises:
        ValueError: the batch does not divide.
    """
    settings, left_out = available_ladder(config.torch_device)
    if config.peer is not None:
        peer, product = PEERS[config.peer], settings[PRODUCT]
        peer = replace(peer, compile=peer.compile and product.compile)  # if there is a compiler
        settings, left_out = {config.peer: peer, PRODUCT: product}, {}
    configurations = [
        Configuration(name, value, configuration_flags(config, value))
        for name, value in settings.items()
    ]
    for configuration in configurations:
        plan_batch(configuration.config, config.model_config(), DistInfo(config.torch_device))
    return configurations, left_out


def configuration_flags(config: BenchConfig, settings: Settings) -> TrainConfig:
    """The training flags of a configuration."""
    changes: dict[str, Any] = {}
    if settings.accumulate:
        if config.total_batch_size:
            changes["total_batch_size"] = config.total_batch_size
        elif config.torch_device.type == "cuda":
            changes["total_batch_size"] = TrainConfig.total_batch_size
        elif config.peer is None:
            changes["total_batch_size"] = ACCUMULATION * config.sequences * config.block_size
    if not settings.product:  # `compile`: others are compiled by the plain torch.compile
        changes |= {"loss_chunks": 1, "dtype": settings.dtype, "compile": False}
    elif not config.peer and not config.micro_batch_size:
        changes["micro_batch_size"] = "auto"
    return train_config(config, **changes)


def measure_training(config: BenchConfig, scratch: Path) -> Section:
    """Run the configurations, print the table and the ratios; returns JSON values."""
    configurations, left_out = choose_configurations(config)
    model_config, steps = config.model_config(), config.timed_steps
    print(
        f"{device_label(config.torch_device)} | {model_config.n_layer} layers, "
        f"width {model_config.n_embd}, context {model_config.block_size} | "
        f"{len(configurations)} configurations x {config.rounds} runs of {steps} timed steps",
        flush=True,
    )
    run_alternating(configurations, steps, config.rounds, scratch)
    runs = [run for entry in configurations for run in entry.runs]
    peak_flops = median_or_none(run.device_flops for run in runs)
    per_token = flops_per_token(model_config)
    summaries = [entry.summary(per_token, peak_flops) for entry in configurations]
    ratios = compare(summaries) if config.peer else {}
    print(training_table(summaries, left_out, steps))
    print("batch: sequences per micro-batch x micro-batches per step")
    if peak_flops:
        is_cpu = config.torch_device.type == "cpu"
        source = "the fastest matrix product measured" if is_cpu else "from its data sheet"
        print(f"MFU: share of the device's peak, {peak_flops / 1e9:,.0f} GFLOP/s: {source}")
    for measure, ratio in ratios.items():
        print(f"{PRODUCT} / {config.peer}: {ratio:.2f}x {measure}")
    return {
        "model": asdict(model_config),
        "timed_steps": steps,
        "flops_per_token": per_token,
        "device_flops": peak_flops,
        "ratios": ratios,
        "left_out": left_out,
        "results": summaries,
    }


def run_alternating(
    configurations: list[Configuration], steps: int, rounds: int, scratch: Path
) -> None:
    """Run each configuration once per round, each run in a fresh process; print a line per run.

    The results, or the reason why there are none, go into `configurations`. Compiled code goes to
    folders in `scratch`, so that later runs of a configuration find it.
    """
    for turn in range(1, rounds + 1):
        for index, entry in enumerate(configurations):
            if entry.failure is not None:
                continue
            cache = scratch / f"compiled_{index}"
            try:
                result = run_in_process(entry.settings, entry.config, steps, cache)
                entry.runs.append(result)
                line = f"{result.tokens_per_second:,.0f} tokens/s, loss {result.losses[-1]:.4f}"
            except ValueError as error:
                # Results are published, so they name no folders of this machine.
                entry.failure = line = re.sub(r"(/[\w.+-]+){2,}", "PATH", str(error))[:160]
            print(f"run {turn}/{rounds} | {entry.name:<21} | {line}", flush=True)


def compare(summaries: list[dict[str, Any]]) -> dict[str, float]:
    """The product's medians divided by its peer's, where both were measured."""
    peer, product = summaries
    return {
        measure: product[measure] / peer[measure]
        for measure in ("tokens_per_second", "peak_memory_gib")
        if product.get(measure) and peer.get(measure)
    }


def training_table(summaries: list[dict[str, Any]], left_out: Mapping[str, str], steps: int) -> str:
    """One line per configuration, and per configuration that was left out."""
    columns = {
        "batch": ("batch", ""),
        "tokens/s": ("tokens_per_second", ",.0f"),
        "spread": ("spread", ".1%"),
        "MFU": ("mfu", ".1%"),
        "peak GiB": ("peak_memory_gib", ".2f"),
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
