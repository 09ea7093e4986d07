"""A run: what is worked out once before it trains, and what its folder and signals need."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from corpus.shards import TokenShards
from formats.checkpoint import Checkpoint, CheckpointWriter
from formats.load import RUN_CONFIG_NAME, describe_best
from hellaswag import Example, examples_or_none
from model import GPTConfig
from runtime import distributed
from runtime.device import prepare_compiler
from runtime.distributed import DistInfo, is_main, print0
from runtime.files import write_json
from runtime.gpus import flops_per_token
from training.checks import check_ranks_agree
from training.config import TrainConfig
from training.folder import explain_failures, is_own, lock_run_folder, resume_hint
from training.plan import describe_plan, find_device, plan_memory, split_batch, warn_of_gpu
from training.resume import run_model_config
from training.run_log import RunLog, warn_of_write_error
from training.stopping import StopRequest

PREEMPTED_NAME = "PREEMPTED"


@dataclass(frozen=True)
class Run:
    """What is known of a run before its model is built, the same on every rank."""

    config: TrainConfig
    dist_info: DistInfo
    resumed: Checkpoint | None
    model_config: GPTConfig
    dtype: torch.dtype
    """Of matrix products."""
    compiles: bool
    micro_batch_size: int
    """Sequences of a rank in a forward pass."""
    grad_accum_steps: int
    loss_chunks: int
    train_shards: TokenShards
    val_shards: TokenShards
    hellaswag: Sequence[Example]
    folder: Path
    stop: StopRequest
    log: RunLog
    writer: CheckpointWriter

    @property
    def start_step(self) -> int:
        """Updates done before."""
        return self.resumed.state.step if self.resumed else 0

    @property
    def begins_elsewhere(self) -> bool:
        """Whether the run begins from another run's checkpoint and has none of its own."""
        return self.resumed is not None and not is_own(self.resumed, self.folder)

    def is_due(self, every: int, step: int) -> bool:
        """Whether to do now what is done `every` so many steps and after the last; 0 = never."""
        return every > 0 and (step % every == 0 or step == self.config.max_steps)

    def ends(self, step: int) -> bool:
        """Whether no update follows `step` updates."""
        return self.stop.is_agreed or step == self.config.max_steps

    def saves(self, step: int) -> bool:
        """Whether to save after `step` updates."""
        is_new = step > self.start_step
        return is_new and (self.ends(step) or self.is_due(self.config.checkpoint_every, step))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Write `config.json`, listen for signals, log and save, for the length of the body.

        Until here the folder has nothing but a lock, and goes again if the run cannot begin.
        """
        with distributed.raise_on_all_ranks():
            if is_main():
                write_json(self.folder / RUN_CONFIG_NAME, self.config.saved())
        with self.stop, self.log, self.writer:  # the writer, which logs, ends first
            self.log.start(self.train_shards.fingerprint)
            try:
                yield
            finally:
                gc.unfreeze()  # what `train` has frozen

    def finish(self, step: int) -> None:
        """Say how the run has ended; mark one that is to be resumed by `PREEMPTED`.

        Every process must call this, after `step` updates that are saved. If all is done, a signal
        came too late to matter.
        """
        self.writer.wait()
        error = self.writer.error
        reason = self.stop.signal_name()
        if step == self.config.max_steps and not self.stop.cut_evaluation:
            reason = None
        if distributed.all_reduce_max(error is not None):
            reason = "failure"
        if is_main():
            with warn_of_write_error():
                if reason is None:
                    (self.folder / PREEMPTED_NAME).unlink(missing_ok=True)
                else:
                    write_json(self.folder / PREEMPTED_NAME, {"step": step, "reason": reason})
        distributed.barrier()  # all is written
        if reason is None:
            if is_main():
                print0(f"{describe_best(self.folder)}done: {self.folder}")
            return
        if reason == "failure":  # the process that met it says what it was
            raise error or SystemExit(2)
        line = f"after step {step}; {resume_hint(self.folder)}"
        if reason == "SIGINT":
            raise KeyboardInterrupt(line) if is_main() else SystemExit(130)
        print0(f"{reason}: stopped {line}")


@contextmanager
def open_run(
    config: TrainConfig, resumed: Checkpoint | None, dist_info: DistInfo
) -> Iterator[Run | None]:
    """Work out what the run is, once all ranks agree on it, and lock its folder.

    Yields:
        The run; None if it is finished.
    """
    device = find_device(config, dist_info)
    model_config = run_model_config(config, resumed)
    splits = check_ranks_agree(config, resumed, model_config, device.dtype, dist_info)
    if is_finished(resumed, config):
        print0("the run is finished: give a larger --max-steps to train on")
        yield None
        return
    stop = StopRequest(dist_info)
    with lock_run_folder(config, resumed) as folder, explain_failures(folder, stop):
        split = split_batch(config, model_config, device, dist_info)
        memory = plan_memory(config, model_config, device.dtype, dist_info, split.loss_chunks)
        warn_of_gpu(memory.total(split.micro_batch_size * model_config.block_size), dist_info)
        if is_main():  # it measures the CPU, once
            print0(describe_plan(config, model_config, device, split, dist_info, splits[0]))
        hellaswag = list[Example]()
        if config.hellaswag_every:
            hellaswag = examples_or_none(config.hellaswag_data, model_config.block_size, dist_info)
        log = RunLog(
            folder,
            config,
            start_step=resumed.state.step if resumed else 0,
            flops_per_token=flops_per_token(model_config),
            dist_info=dist_info,
            dtype=device.dtype,
        )
        yield Run(
            config=config,
            dist_info=dist_info,
            resumed=resumed,
            model_config=model_config,
            dtype=device.dtype,
            compiles=config.compile and can_compile(dist_info),
            **split._asdict(),
            train_shards=splits[0],
            val_shards=splits[1],
            hellaswag=hellaswag,
            folder=folder,
            stop=stop,
            log=log,
            writer=CheckpointWriter(
                folder / "checkpoints" if is_main() else None,
                config.keep_checkpoints,
                on_saved=log.saved,
            ),
        )


def is_finished(resumed: Checkpoint | None, config: TrainConfig) -> bool:
    """Whether nothing is left to do: the last step is saved, and the run was not preempted there.

    It is the same on all ranks, once they agree that they see one checkpoint.
    """
    if resumed is None:
        return False
    step, mark = resumed.state.step, resumed.path.parent.parent / PREEMPTED_NAME
    return step > config.max_steps or (step == config.max_steps and not mark.is_file())


def can_compile(dist_info: DistInfo) -> bool:
    """Whether torch.compile works here; if not, a warning says why."""
    if problem := prepare_compiler(dist_info.device):
        print0(f"warning: not compiled, training will be slower: {problem}")
        return False
    print0("compiling: the first validation and the first step take longer, a minute or two")
    return True
