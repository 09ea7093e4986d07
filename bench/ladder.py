"""The speed ladder: the same training with one more optimization in each configuration; and peers.

Each run has a fresh process. The configurations' runs alternate, and medians are compared.
"""

import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench.config import PRODUCT, BenchConfig, train_config
from bench.measurement import Measurement
from bench.report import Section, device_label, format_table
from bench.run import RunResult, Settings, run_in_process
from bench.switches import ALL_SWITCHES, DDP_SWITCHES, SWITCHES
from runtime.device import compiler_problem, select_dtype
from runtime.distributed import DistInfo
from runtime.metrics import flops_per_token, mfu
from training.config import TrainConfig
from training.memory import plan_batch

ACCUMULATION = 4  # micro-batches per step with gradient accumulation, except on a GPU
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
            "mfu": mfu(speed.median, per_token, peak_flops, self.settings.processes),
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
    product = settings[PRODUCT]
    if config.peer in PEERS:
        peer = PEERS[config.peer]
        peer = replace(peer, compile=peer.compile and product.compile)  # if there is a compiler
        settings, left_out = {config.peer: peer, PRODUCT: product}, {}
    elif config.peer is not None:
        several = replace(product, processes=config.processes)
        changed, switches = product, SWITCHES
        settings, left_out = {PRODUCT: product}, {}
        if config.peer == "gpus":
            changed, switches = several, DDP_SWITCHES
            settings[f"{config.processes} processes"] = several
        for name, switch in switches.items():
            if switch.gpu_only and config.torch_device.type != "cuda":
                left_out[name] = "for GPUs"
            else:
                settings[name] = replace(changed, switch=name)
    configurations = [
        Configuration(name, value, configuration_flags(config, value))
        for name, value in settings.items()
    ]
    for entry in configurations:
        dist_info = DistInfo(config.torch_device, world_size=entry.settings.processes)
        try:
            plan_batch(entry.config, config.model_config(), dist_info)
        except ValueError as error:
            if not entry.settings.switch:
                raise
            entry.failure = str(error)
    return configurations, left_out


def configuration_flags(config: BenchConfig, settings: Settings) -> TrainConfig:
    """The training flags of a configuration."""
    changes: dict[str, Any] = {}
    if settings.accumulate:
        if config.total_batch_size:
            changes["total_batch_size"] = config.total_batch_size
        elif config.torch_device.type == "cuda":
            changes["total_batch_size"] = TrainConfig.total_batch_size
        elif config.peer not in PEERS:
            changes["total_batch_size"] = ACCUMULATION * config.sequences * config.block_size
    if not settings.product:  # `compile`: others are compiled by the plain torch.compile
        changes |= {"loss_chunks": 1, "dtype": settings.dtype, "compile": False}
    elif config.peer not in PEERS and not config.micro_batch_size:
        changes["micro_batch_size"] = "auto"
    return train_config(config, **changes | ALL_SWITCHES[settings.switch].flags)


def measure_training(
    config: BenchConfig, scratch: Path, earlier: Section, store: Callable[[Section], object]
) -> Section:
    """Run the configurations, print the table and the ratios; returns JSON values.

    Args:
        config: what to compare.
        scratch: a folder for files.
        earlier: what this measurement stored before it was interrupted; it is not done again.
        store: called with the results so far, after each run.
    """
    configurations, left_out = choose_configurations(config)
    results = {summary["name"]: summary for summary in earlier.get("results", [])}
    for entry in configurations:
        summary = results.get(entry.name, {})
        entry.runs = [RunResult(**run) for run in summary.get("runs", [])]
        entry.failure = summary.get("failure", entry.failure)
    model_config, steps = config.model_config(), config.timed_steps
    print(
        f"{device_label(config.torch_device)} | {model_config.n_layer} layers, "
        f"width {model_config.n_embd}, context {model_config.block_size} | "
        f"{len(configurations)} configurations x {config.rounds} runs of {steps} timed steps",
        flush=True,
    )

    def section() -> Section:
        entries = [entry for entry in configurations if entry.runs or entry.failure]
        peak_flops = median_or_none(run.device_flops for entry in entries for run in entry.runs)
        summaries = [entry.summary(per_token, peak_flops) for entry in entries]
        return {
            "model": asdict(model_config),
            "timed_steps": steps,
            "flops_per_token": per_token,
            "device_flops": peak_flops,
            "ratios": compare(summaries) if config.peer in PEERS and len(summaries) == 2 else {},
            "left_out": left_out,
            "results": summaries,
        }

    per_token = flops_per_token(model_config)
    run_alternating(configurations, steps, config.rounds, scratch, lambda: store(section()))
    done = section()
    print(training_table(done["results"], left_out, steps))
    print("batch: sequences per micro-batch x micro-batches per step")
    if peak_flops := done["device_flops"]:
        is_cpu = config.torch_device.type == "cpu"
        source = "the fastest matrix product measured" if is_cpu else "from its data sheet"
        print(f"MFU: share of the device's peak, {peak_flops / 1e9:,.0f} GFLOP/s: {source}")
    for measure, ratio in done["ratios"].items():
        print(f"{PRODUCT} / {config.peer}: {ratio:.2f}x {measure}")
    return done


def run_alternating(
    configurations: list[Configuration],
    steps: int,
    rounds: int,
    scratch: Path,
    store: Callable[[], object],
) -> None:
    """Run each configuration once per round, each run in a fresh process; print a line per run.

    The results, or the reason why there are none, go into `configurations`; `store` is called
    after each run. Compiled code goes to folders in `scratch`, so that later runs find it.
    """
    for turn in range(1, rounds + 1):
        for index, entry in enumerate(configurations):
            if entry.failure is not None or len(entry.runs) >= turn:
                continue
            cache = scratch / f"compiled_{index}"
            try:
                result = run_in_process(entry.settings, entry.config, steps, cache)
                entry.runs.append(result)
                line = f"{result.tokens_per_second:,.0f} tokens/s, loss {result.losses[-1]:.4f}"
            except ValueError as error:
                # Results are published, so they name no folders of this machine.
                entry.failure = line = re.sub(r"(/[\w.+-]+){2,}", "PATH", str(error))[:160]
            print(f"run {turn}/{rounds} | {entry.name:<26} | {line}", flush=True)
            store()


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
        "x product": ("of_product", ".3f"),
        "spread": ("spread", ".1%"),
        "MFU": ("mfu", ".1%"),
        "peak GiB": ("peak_memory_gib", ".2f"),
        "compile s": ("compile_seconds", ".1f"),
        f"loss@{steps}": ("loss", ".4f"),
    }
    rows = [["", *columns, ""]]
    base = {summary["name"]: summary.get("tokens_per_second") for summary in summaries}.get(PRODUCT)
    for summary in summaries:
        if base and "tokens_per_second" in summary:
            summary = summary | {"of_product": summary["tokens_per_second"] / base}
        values = [(summary.get(key), spec) for key, spec in columns.values()]
        cells = ["-" if value is None else format(value, spec) for value, spec in values]
        rows.append([summary["name"], *cells, summary["failure"] or ""])
    rows += [[name, *["-"] * len(columns), why] for name, why in left_out.items()]
    return format_table(rows)
