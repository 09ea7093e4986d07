"""A run: all that is fixed before the model is built, and how a run starts."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import ops
from corpus.shards import TokenShards
from dataloader import validation_fingerprint
from formats.checkpoint import Checkpoint
from formats.metrics import METRICS_NAME, logged_values
from hellaswag import Example, examples_or_none
from model import GPTConfig
from parallel import DDP, FSDP, Ranks
from runtime import distributed
from runtime.compiler import prepare_compiler
from runtime.device import tune_malloc
from runtime.distributed import DistInfo, print0
from runtime.precision import make_deterministic
from training.checks import check_ranks_agree, run_preflight
from training.config import TrainConfig
from training.folder import explain_failures, lock_run_folder
from training.memory import Device, find_device, split_batch
from training.plan import describe_plan, print_plan
from training.resume import parse_config
from training.stopping import StopRequest
from vocabulary import Vocabulary, text_vocabulary


@dataclass(frozen=True)
class Run:
    """All that is fixed before the model is built."""

    config: TrainConfig
    ranks: Ranks
    """This process among all, and how they train together."""
    resumed: Checkpoint | None
    model_config: GPTConfig
    device: Device
    dtype: torch.dtype
    """Dtype for matrix multiplications."""
    compiles: bool
    micro_batch_size: int
    """Sequences per forward pass on each rank."""
    loss_chunks: int
    train_shards: TokenShards
    val_shards: TokenShards
    vocabulary: Vocabulary | None
    """Rows of the running model with `--vocabulary text`; None: GPT-2's."""
    hellaswag: Sequence[Example]
    folder: Path
    stop: StopRequest
    """Signals that this process received."""

    @property
    def val_fingerprint(self) -> str:
        """Fingerprint of the validation split, with the windows if they are only a part."""
        config = self.config
        return validation_fingerprint(self.val_shards, config.block_size, config.val_tokens)


@contextmanager
def start_run(args: Sequence[str] | None) -> Iterator[Run | None]:
    """Parse the flags, join `torchrun`'s processes and open the run, while the body runs.

    Yields:
        The run; None if there is nothing to train: the run is finished, or the flags only ask for
        its plan (`--plan`) or for a check of the machines (`--preflight`).
    """
    config, resumed = parse_config(sys.argv[1:] if args is None else args)
    if config.plan:
        print_plan(config, resumed.state.step if resumed else 0)
        yield None
        return
    if config.deterministic:
        make_deterministic()  # before the process group, because it changes how NCCL sums
    with distributed.setup_distributed(
        config.device, config.cpu_offload, config.step_timeout
    ) as dist_info:
        if config.preflight:
            run_preflight(config, resumed, dist_info)
            yield None
            return
        with open_run(config, resumed, dist_info) as run:
            yield run


def choose_ranks(config: TrainConfig, dist_info: DistInfo, dtype: torch.dtype) -> Ranks:
    """Return how the processes train together: `--parallel`, or as a single process."""
    if config.parallel == "fsdp":
        return FSDP(
            **vars(dist_info),
            reshard_after_forward=config.reshard_after_forward,
            cpu_offload=config.cpu_offload,
            dtype=dtype,
        )
    return (DDP if dist_info.world_size > 1 else Ranks)(**vars(dist_info))


def choose_attention(config: TrainConfig, device: Device) -> TrainConfig:
    """Turn attention in blocks on or off; return the settings with the choice, to be saved."""
    name = config.cpu_attention
    if name == "auto":
        cpu: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # new in torch
        kind = device.dist_info.device.type
        name = ops.select_attention(kind, cpu, device.dtype, config.block_size)
    ops.cpu_attention = name
    return replace(config, cpu_attention=name)


@contextmanager
def open_run(
    config: TrainConfig, resumed: Checkpoint | None, dist_info: DistInfo
) -> Iterator[Run | None]:
    """Check that all ranks agree, lock the run's folder and choose the micro-batch.

    Yields:
        The run; None if it is already finished.
    """
    device = find_device(config, dist_info)
    config = choose_attention(config, device)
    splits = check_ranks_agree(config, resumed, device)
    if is_finished(resumed, config):
        print0("the run is finished: use a larger --max-steps to continue")
        yield None
        return
    if dist_info.device.type == "cpu":
        make_deterministic()
        tune_malloc()
    stop = StopRequest()
    with stop, lock_run_folder(config, resumed) as folder, explain_failures(folder, config, stop):
        split = split_batch(config, device)
        start_step = resumed.state.step if resumed else 0
        model_config, is_text = config.model_config(), config.vocabulary == "text"
        print0(describe_plan(config, device, split, splits[0], start_step))
        yield Run(
            config=config,
            ranks=choose_ranks(config, dist_info, device.dtype),
            resumed=resumed,
            model_config=model_config,
            device=device,
            dtype=device.dtype,
            compiles=config.compile and can_compile(dist_info),
            **split._asdict(),
            train_shards=splits[0],
            val_shards=splits[1],
            vocabulary=text_vocabulary(splits[0], model_config) if is_text else None,
            hellaswag=examples_or_none(config.hellaswag_data) if config.hellaswag_every else [],
            folder=folder,
            stop=stop,
        )


def is_finished(resumed: Checkpoint | None, config: TrainConfig) -> bool:
    """Return whether the last step is saved and evaluated, which `Trainer.finish` records.

    All ranks get the same answer, because they have agreed on the checkpoint.
    """
    if resumed is None or resumed.state.step < config.max_steps:
        return False
    finished = logged_values(resumed.path.parent.parent / METRICS_NAME, "finished_step")
    return resumed.state.step > config.max_steps or config.max_steps in finished


def can_compile(dist_info: DistInfo) -> bool:
    """Return whether torch.compile works here; if not, print a warning with the reason."""
    if problem := prepare_compiler(dist_info.device):
        print0(f"warning: {problem}")
        return False
    print0("compiling: the first validation and the first step take a minute or two longer")
    return True
