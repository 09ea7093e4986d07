"""A run, which is set up once before training, and the state of its training loop."""

import gc
import math
import sys
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from corpus.shards import TokenShards
from dataloader import ShardedDataLoader, validation_fingerprint
from formats import checkpoint
from formats.checkpoint import Checkpoint, CheckpointWriter
from formats.code_hashes import code_diff, code_hashes
from formats.load import RUN_CONFIG_NAME, describe_best, load_model
from formats.metrics import METRICS_NAME, logged_values
from hellaswag import Example, examples_or_none
from lr_schedule import settings_at, windows_at
from model import GPT, GPTConfig
from parallel import DDP, FSDP, Ranks
from runtime import distributed
from runtime.cli import shell_line
from runtime.compiler import prepare_compiler
from runtime.device import LateNumbers, tune_malloc
from runtime.distributed import DistInfo, is_main, print0
from runtime.errors import DivergedError, UserError, is_out_of_memory, is_user_error
from runtime.files import write_json
from runtime.precision import autocast, make_deterministic
from spelling import share_by_spelling
from training.checks import check_ranks_agree, run_preflight
from training.config import TrainConfig
from training.folder import explain_failures, lock_run_folder, resume_hint
from training.groups import GroupSettings, check_optimizers
from training.memory import find_device, split_batch
from training.plan import describe_plan, print_plan
from training.resume import parse_config
from training.run_log import RunLog, as_number, warn_on_write_error
from training.stopping import StopRequest

PREEMPTED_NAME = "PREEMPTED"
CODE_DIFF_NAME = "code.diff"  # changes since the last commit, if there are any
STEPS_WITHOUT_GRADIENT = 20  # a parameter that has none after as many steps is a mistake


class StepNumbers(NamedTuple):
    """Numbers of a step that the host has not read yet."""

    step: int
    """Number of updates done, this one included."""
    tokens_seen: int
    late: LateNumbers
    """`train_loss`, `grad_norm`, …, averaged over the ranks."""


class Numbers(UserDict[str, Any]):
    """Numbers to log, by name; raises UserError for a name set twice or a value that is not one."""

    def __setitem__(self, name: str, number: Tensor | float) -> None:
        if name in self:
            raise UserError(f"train_step already logs a number named {name!r}: rename yours")
        is_scalar = isinstance(number, Tensor) and not number.dim()  # stays on the device
        super().__setitem__(name, number if is_scalar else as_number(name, number))

    def __ior__(self, numbers: Any) -> Self:  # type: ignore[misc, override] # noqa: ANN401
        self.update(numbers)
        return self


@dataclass(frozen=True)
class Run:
    """All that is known before the model is built."""

    config: TrainConfig
    ranks: Ranks
    """This process among all, and how they train together."""
    resumed: Checkpoint | None
    model_config: GPTConfig
    dtype: torch.dtype
    """Dtype for matrix multiplications."""
    compiles: bool
    micro_batch_size: int
    """Sequences per forward pass on each rank."""
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
    def val_fingerprint(self) -> str:
        """Fingerprint of the validation split, with the windows if they are only a part."""
        settings = self.config
        return validation_fingerprint(self.val_shards, settings.block_size, settings.val_tokens)

    def micro_steps(self, step: int) -> int:
        """Return the number of micro-batches of each rank in the update after `step` updates."""
        return windows_at(self.config, step) // (self.micro_batch_size * self.ranks.world_size)

    def fit_micro_batch(
        self, train_step: Callable[..., StepNumbers], trainer: "Trainer", step: int
    ) -> StepNumbers:
        """Make a step; if memory runs out, repeat it with half of an `auto` micro-batch.

        The estimate of `auto` does not know the activations of an edited model. The step has the
        same windows. If the update may have begun, or with several processes, raise the error.
        """
        batches, n_complete = trainer.batches, trainer.n_complete
        position, size = batches.position, batches.micro_batch_size
        try:
            return train_step(replace(self, micro_batch_size=size), trainer, step)
        except RuntimeError as error:
            is_auto = self.config.micro_batch_size == "auto" and self.ranks.world_size == 1
            may_repeat = is_auto and size > 1 and trainer.n_complete == n_complete
            if not (may_repeat and is_out_of_memory(error)):
                raise
        half = size // 2 if size % 2 == 0 else 1
        print0(f"out of memory: repeating the step with --micro-batch-size {half}, not {size}")
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()
        trainer.batches = replace(batches, position=position, micro_batch_size=half).__enter__()
        return self.fit_micro_batch(train_step, trainer, step)

    def autocast(self) -> AbstractContextManager[object]:
        """Run matmuls of float32 parameters in the run's dtype."""
        return autocast(self.ranks.device, self.dtype)

    def copy_init_weights(self, model: GPT) -> None:
        """With `--init-from`, copy that model's weights into the model of a new run."""
        if self.config.init_from is not None and self.resumed is None:
            with distributed.raise_on_all_ranks():
                source = load_model(self.config.init_from)
            checkpoint.copy_weights(source, model, self.ranks)

    def share_by_spelling(self, model: GPT, adamw: Optimizer) -> None:
        """With `--spelling-share`, change the gradient of `wte` before AdamW uses it."""
        if self.config.spelling_share:
            wte = model.get_parameter("transformer.wte.weight")
            hook = share_by_spelling(wte, self.config.spelling_share, self.ranks)
            adamw.register_step_pre_hook(hook)

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

    @property
    def reads_late(self) -> int:
        """Number of the newest steps whose numbers are not read yet: on a CPU, none."""
        return int(self.ranks.device.type == "cuda")

    def read_numbers(self, trainer: "Trainer", keep: int = 0) -> None:
        """Read, check and log the numbers of all steps but the last `keep` ones.

        Before anything is saved or evaluated, all must be read.

        Raises:
            DivergedError: on every rank, if a loss or a gradient is not finite.
            UserError: on every rank, if a target is masked.
        """
        while len(trainer.unread) > keep:
            numbers = trainer.unread.popleft()
            metrics = Numbers(numbers.late.by_name)
            factor = settings_at(self.config, numbers.step - 1).get("lr", 1.0)
            metrics["lr"] = self.config.max_lr * factor
            if metrics.pop("stop"):
                self.stop.is_agreed = True
            if metrics.pop("masked"):
                problem = f"a target of step {numbers.step} is masked"
                fix = "apply edits/masks.patch, with which each counted target has the same weight"
                raise UserError(f"{problem}: {fix}")
            if not trainer.scaler.is_enabled():  # with float16, `train_step` has checked them
                self.is_finite(trainer, numbers)
            self.log.step(numbers.step, numbers.tokens_seen, metrics)

    def is_finite(self, trainer: "Trainer", numbers: StepNumbers) -> bool:
        """Return False for a float16 gradient that overflowed: it only halves the loss scale.

        Raise DivergedError for any other loss or gradient that is not finite. The loss scale never
        goes below 1.
        """
        step, _, late = numbers
        loss, norm = (late.by_name[name] for name in ("train_loss", "grad_norm"))
        if math.isfinite(loss) and math.isfinite(norm):
            return True
        if not math.isfinite(loss) or trainer.scaler.get_scale() <= 1:  # 1 without float16
            self.log.record(diverged_step=step)
            text = shell_line("python", "read_step.py", self.folder, "--step", step)
            numbers_and_text = f"loss {loss:.4f}, gradient norm {norm}; for its text, {text}"
            raise DivergedError(f"training diverged at step {step} ({numbers_and_text})")
        print0("a float16 gradient overflowed, normal a few times at the start: no update was made")
        return False

    @contextmanager
    def recording(self, trainer: "Trainer") -> Iterator[None]:
        """Write `config.json` and `code.diff`; log and save while the body runs.

        Before, the folder holds only a lock, and it is removed if the run cannot start.
        """
        self.stop.interrupt_evaluation()
        with distributed.raise_on_all_ranks():
            if is_main():
                write_json(self.folder / RUN_CONFIG_NAME, self.config.saved())
                if diff := code_diff():
                    (self.folder / CODE_DIFF_NAME).write_bytes(diff)
        with self.log, self.writer:  # the writer exits first, because it logs
            self.writer.check(trainer)
            self.log.start(self.train_shards.fingerprint, self.val_fingerprint)
            try:
                yield
            finally:
                gc.unfreeze()  # `Trainer.after_first_step` called gc.freeze()

    def finish(self, step: int) -> None:
        """Print how the run ended; create the file `PREEMPTED` if the run should be resumed.

        Every process must call this, after `step` updates that are saved. A signal is ignored if
        the run completed anyway.
        """
        self.writer.wait()
        error = self.writer.error
        with distributed.raise_on_all_ranks():
            if error is not None and not is_user_error(error):
                raise error  # a mistake in the code: the run is not started again by itself
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
            self.log.record(finished_step=step)
            if is_main():
                path, exported = shell_line(self.folder), Path("exported") / self.folder.name
                print0(f"sample      python sample.py --model {path}")
                print0(f"figures     python plot.py {path}")
                print0(f"export      python export.py --model {path} --out {shell_line(exported)}")
                print0(f"{describe_best(self.folder)}done: {self.folder}")
            return
        if reason == "failure":  # only the process that could not save has the error
            raise error or SystemExit(2)
        self.stop.report(f"after step {step}; {resume_hint(self.folder)}")


@dataclass
class Trainer:
    """State of the training loop: what a step changes and a checkpoint saves."""

    raw_model: GPT
    """Neither compiled nor wrapped: for HellaSwag, sampling and saving."""
    model: nn.Module
    """The same parameters, compiled and wrapped: for training and validation."""
    optimizers: Sequence[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler
    """Scales the loss; enabled for float16 only."""
    batches: ShardedDataLoader
    """This rank's micro-batches."""
    state: dict[str, Tensor | float] = field(default_factory=dict)
    """Numbers and tensors of your own, saved and resumed; a tensor is on the device and, unless it
    is sharded, the same on every rank."""
    unread: deque[StepNumbers] = field(default_factory=deque)
    """Numbers of the last steps, oldest first: see `Run.read_numbers`."""
    unused: dict[str, nn.Parameter] = field(default_factory=dict)
    """Parameters that no gradient has reached so far, during the first steps."""
    n_complete: int = 0
    """Steps of this process whose backward passes are complete."""

    def __post_init__(self) -> None:
        check_optimizers(self.raw_model, self.optimizers)
        self.settings = GroupSettings(self.optimizers)

    def load(self, resumed: Checkpoint, ranks: Ranks) -> None:
        """Restore everything from a checkpoint, except the position, which `batches` starts at."""
        checkpoint.load_checkpoint(resumed, self, ranks)
        self.settings.load_state(resumed.state.optimizer_groups)
        print0(f"resumed from {resumed.path}")

    def check_step(self, step: int, numbers: Numbers) -> None:
        """Check the first steps since this start; every process must call this in each step.

        Raise if the ranks log numbers of different names, or if a parameter never has a gradient:
        it would silently keep its initial value. An expert of a mixture may get its first token
        later, so the first step only prints a warning.
        """
        self.n_complete += 1
        if step == 0:
            distributed.check_same_on_all_ranks("the numbers of train_step", [str([*numbers])])
        found = self.unused if step else dict(self.raw_model.named_parameters())
        self.unused = {n: p for n, p in found.items() if p.requires_grad and p.grad is None}
        problem = f"no gradient reaches {', '.join(self.unused)}"
        if self.unused and step == 0:
            print0(f"warning: {problem} in the first step")
        if step == STEPS_WITHOUT_GRADIENT:
            with distributed.raise_on_all_ranks():
                if self.unused:
                    reason = "parameters of a loss function get no gradient"
                    fix = f"use the parameter in `GPT.hidden_states` ({reason})"
                    other_fix = "freeze it with requires_grad_(False)"
                    raise UserError(f"{problem} in {step} steps: {fix}, or {other_fix}")

    def after_first_step(self, writer: CheckpointWriter) -> None:
        """Raise UserError on all ranks if a resume could not restore the state."""
        with distributed.raise_on_all_ranks():
            writer.check(self)
            self.settings.state()
        # Later collections would rescan all compiled objects, for half a second on one rank while
        # the others wait.
        gc.collect()
        gc.freeze()

    def check_finite(self, step: int, run: Run) -> None:
        """Raise DivergedError on every rank if a weight or a moment is not finite."""
        if name := checkpoint.find_nonfinite(self, run.ranks):
            run.log.record(diverged_step=step)
            raise DivergedError(f"training diverged at step {step} ({name} is not finite)")

    def run_state(self, step: int, run: Run) -> checkpoint.RunState:
        """Return all that a checkpoint saves after `step` updates, except the tensors."""
        return checkpoint.RunState(
            step=step,
            position=self.batches.position,
            tokens_seen=self.batches.tokens_seen,
            model_config=asdict(self.raw_model.config),
            train_config=run.config.saved(),
            data_fingerprint=run.train_shards.fingerprint,
            val_fingerprint=run.val_fingerprint,
            rng_states=checkpoint.rng_states(),
            grad_scaler=self.scaler.state_dict(),
            optimizers=[type(optimizer).__name__ for optimizer in self.optimizers],
            optimizer_values=checkpoint.others_of(checkpoint.optimizer_state(self)),
            optimizer_groups=self.settings.state(),
            own=checkpoint.others_of(self.state),
            code=code_hashes(),
        )


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


@contextmanager
def open_run(
    config: TrainConfig, resumed: Checkpoint | None, dist_info: DistInfo
) -> Iterator[Run | None]:
    """Check that all ranks agree, lock the run's folder and choose the micro-batch.

    Yields:
        The run; None if it is already finished.
    """
    device = find_device(config, dist_info)
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
        print0(describe_plan(config, device, split, splits[0], start_step))
        log = RunLog(folder, config, resumed, device)
        ranks = choose_ranks(config, dist_info, device.dtype)
        checkpoints = folder / "checkpoints" if is_main() else None
        yield Run(
            config=config,
            ranks=ranks,
            resumed=resumed,
            model_config=config.model_config(),
            dtype=device.dtype,
            compiles=config.compile and can_compile(dist_info),
            **split._asdict(),
            train_shards=splits[0],
            val_shards=splits[1],
            hellaswag=examples_or_none(config.hellaswag_data) if config.hellaswag_every else [],
            folder=folder,
            stop=stop,
            log=log,
            writer=CheckpointWriter(
                checkpoints, config.keep_checkpoints, log.saved, ranks, stop.request
            ),
        )


def is_finished(resumed: Checkpoint | None, config: TrainConfig) -> bool:
    """Return whether the last step is saved and evaluated, which `Run.finish` records.

    All ranks get the same answer, because they have agreed on the checkpoint.
    """
    if resumed is None or resumed.state.step < config.max_steps:
        return False
    if resumed.state.step > config.max_steps:
        return True
    path = resumed.path.parent.parent / METRICS_NAME
    return path.is_file() and config.max_steps in logged_values(path, "finished_step")


def can_compile(dist_info: DistInfo) -> bool:
    """Return whether torch.compile works here; if not, print a warning with the reason."""
    if problem := prepare_compiler(dist_info.device):
        print0(f"warning: {problem}")
        return False
    print0("compiling: the first validation and the first step take a minute or two longer")
    return True
