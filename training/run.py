"""A run: everything that is set up once before training, its folder and its signals."""

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
from training.folder import belongs_to_run, explain_failures, lock_run_folder, resume_hint
from training.plan import describe_plan, find_device, plan_memory, split_batch, warn_about_gpu
from training.resume import run_model_config
from training.run_log import RunLog, warn_on_write_error
from training.stopping import StopRequest

PREEMPTED_NAME = "PREEMPTED"


@dataclass(frozen=True)
class Run:
    """A run before its model is built; the same on every rank."""

    config: TrainConfig
    dist_info: DistInfo
    resumed: Checkpoint | None
    model_config: GPTConfig
    dtype: torch.dtype
    """Dtype for matrix multiplications."""
    compiles: bool
    micro_batch_size: int
    """Sequences per forward pass on each rank."""
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
        """Number of updates done before this start or resume."""
        return self.resumed.state.step if self.resumed else 0

    @property
    def starts_from_other_run(self) -> bool:
        """Whether the run continues another run's checkpoint, and has no checkpoint itself yet."""
        return self.resumed is not None and not belongs_to_run(self.resumed, self.folder)

    def is_due(self, every: int, step: int) -> bool:
        """Return whether work done every `every` steps and after the last is due; 0 = never."""
        return every > 0 and (step % every == 0 or step == self.config.max_steps)

    def ends(self, step: int) -> bool:
        """Return whether training ends after `step` updates."""
        return self.stop.is_agreed or step == self.config.max_steps

    def saves(self, step: int) -> bool:
        """Return whether to save a checkpoint after `step` updates."""
        is_new = step > self.start_step
        return is_new and (self.ends(step) or self.is_due(self.config.checkpoint_every, step))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Write `config.json`; handle signals, log and save while the body runs.

        Before, the folder holds only a lock, and it is removed if the run cannot start.
        """
        with distributed.raise_on_all_ranks():
            if is_main():
                write_json(self.folder / RUN_CONFIG_NAME, self.config.saved())
        with self.stop, self.log, self.writer:  # the writer exits first, because it logs
            self.log.start(self.train_shards.fingerprint)
            try:
                yield
            finally:
                gc.unfreeze()  # `train` called gc.freeze()

    def finish(self, step: int) -> None:
        """Print how the run ended; create the file `PREEMPTED` if the run should be resumed.

        Every process must call this, after `step` updates that are saved. A signal is ignored if
        the run completed anyway.
        """
        self.writer.wait()
        error = self.writer.error
        reason = self.stop.signal_name()
        if step == self.config.max_steps and not self.stop.interrupted_evaluation:
            reason = None
        if distributed.all_reduce_max(error is not None):
            reason = "failure"
        if is_main():
            with warn_on_write_error():
                if reason is None:
                    (self.folder / PREEMPTED_NAME).unlink(missing_ok=True)
                else:
                    write_json(self.folder / PREEMPTED_NAME, {"step": step, "reason": reason})
        distributed.barrier()  # until rank 0 has written the file
        if reason is None:
            if is_main():
                print0(f"{describe_best(self.folder)}done: {self.folder}")
            return
        if reason == "failure":  # only the process that could not save has the error
            raise error or SystemExit(2)
        message = f"after step {step}; {resume_hint(self.folder)}"
        if reason == "SIGINT":
            raise KeyboardInterrupt(message) if is_main() else SystemExit(130)
        print0(f"{reason}: stopped {message}")


@contextmanager
def open_run(
    config: TrainConfig, resumed: Checkpoint | None, dist_info: DistInfo
) -> Iterator[Run | None]:
    """Check that all ranks agree, lock the run's folder and choose the micro-batch.

    Yields:
        The run; None if it is already finished.
    """
    device = find_device(config, dist_info)
    model_config = run_model_config(config, resumed)
    splits = check_ranks_agree(config, resumed, model_config, device.dtype, dist_info)
    if is_finished(resumed, config):
        print0("the run is finished: use a larger --max-steps to continue")
        yield None
        return
    stop = StopRequest(dist_info)
    with lock_run_folder(config, resumed) as folder, explain_failures(folder, stop):
        split = split_batch(config, model_config, device, dist_info)
        memory = plan_memory(config, model_config, device.dtype, dist_info, split.loss_chunks)
        warn_about_gpu(memory.total(split.micro_batch_size * model_config.block_size), dist_info)
        if is_main():  # the plan for a CPU times a matmul
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
    """Return whether the last step is saved and the run was not preempted after it.

    All ranks get the same answer, because they have agreed on the checkpoint.
    """
    if resumed is None:
        return False
    step, preempted_path = resumed.state.step, resumed.path.parent.parent / PREEMPTED_NAME
    return step > config.max_steps or (step == config.max_steps and not preempted_path.is_file())


def can_compile(dist_info: DistInfo) -> bool:
    """Return whether torch.compile works here; if not, print a warning with the reason."""
    if problem := prepare_compiler(dist_info.device):
        print0(f"warning: not compiled, training will be slower: {problem}")
        return False
    print0("compiling: the first validation and the first step take a minute or two longer")
    return True
