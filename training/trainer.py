"""State of training, and all that acts on it around a step: numbers, checks, saving, the end."""

import gc
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from dataloader import ShardedDataLoader
from formats import checkpoint
from formats.checkpoint import Checkpoint, CheckpointWriter, Contents
from formats.code_hashes import code_diff, code_hashes
from formats.load import RUN_CONFIG_NAME
from model import GPT
from parallel import Ranks
from runtime import distributed
from runtime.cli import shell_line
from runtime.distributed import is_main, print0
from runtime.errors import DivergedError, UserError, is_out_of_memory, is_user_error
from runtime.files import write_json
from training.folder import print_next_commands, resume_hint
from training.groups import GroupSettings, check_optimizers
from training.run import Run
from training.run_log import RunLog, as_number, warn_on_write_error

PREEMPTED_NAME = "PREEMPTED"
CODE_DIFF_NAME = "code.diff"  # changes since the last commit, if there are any
STEPS_WITHOUT_GRADIENT = 20  # a parameter that has none after as many steps is a mistake


class Numbers:
    """The numbers of one step, by name, from the loss to the log.

    They are added up on the device, averaged over the ranks, and read by the host later, so that a
    GPU does not wait for it. `step` is the number of updates done, this one included; `known` are
    numbers that need no device, the same on every rank.

    Raises UserError if a name is used twice, or for a value that is not a number.
    """

    def __init__(self, step: int, **known: float) -> None:
        self.step = step
        self._known = known
        self.values = dict[str, Tensor | float]()
        """Scalars so far, by name."""
        self._times_added = Counter[str]()
        self._metrics: dict[str, float] | None = None

    def add(self, micro_steps: int, **scalars: Any) -> None:  # noqa: ANN401
        """Add a micro-step's numbers: their means over all `micro_steps` are logged."""
        for name, value in scalars.items():
            if name in self._known or self._times_added[name] >= micro_steps:
                raise UserError(f"train_step already logs a number named {name!r}: rename yours")
            if isinstance(value, Tensor) and not value.dim():
                value = value.detach()  # it stays on the device
            elif not isinstance(value, int | float):
                value = as_number(name, value)
            mean = value / micro_steps if micro_steps > 1 else value
            self.values[name] = self.values[name] + mean if name in self.values else mean
            self._times_added[name] += 1

    def set(self, **scalars: Any) -> None:  # noqa: ANN401
        """Set numbers of the whole step: scalar tensors, or any other numbers."""
        self.add(1, **scalars)

    def average(self, ranks: Ranks) -> None:
        """Average over the ranks in one all-reduce, without waiting for the device.

        This also queues a copy to the host: `Tensor.tolist` would wait for later work.
        """
        self._averages = averages = ranks.average(self.values.values())
        if averages.is_cuda:
            self._averages = torch.empty_like(averages, device="cpu", pin_memory=True)
            self._averages.copy_(averages, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> dict[str, float]:
        """Return the numbers by name; waits for the device if it has not computed them yet."""
        if self._metrics is None:
            if hasattr(self, "_copied"):
                self._copied.synchronize()
            averages = zip(self.values, self._averages.tolist(), strict=True)
            self._metrics = dict(averages) | self._known
        return self._metrics


@dataclass
class Trainer:
    """A run's state, which a step changes and a checkpoint saves, and what acts on it."""

    run: Run
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
    start_step: int = 0
    """Number of updates done before this start or resume."""

    def __post_init__(self) -> None:
        check_optimizers(self.raw_model, self.optimizers)
        run = self.run
        self.settings = GroupSettings(self.optimizers)
        self.run_log = RunLog(run.folder, run.config, run.device, self.raw_model.loss.config)
        self.writer = CheckpointWriter(
            run.folder / "checkpoints" if is_main() else None,
            run.config.keep_checkpoints,
            self.run_log.saved,
            run.ranks,
            run.stop.request,
            expand=dict if run.vocabulary is None else run.vocabulary.expand,
        )
        self._unread = deque[tuple[Numbers, int]]()  # numbers of the last steps, tokens seen
        self._unused = dict[str, nn.Parameter]()  # parameters without a gradient so far
        self._n_checked = 0  # steps whose backward passes are complete

    def restore(self, resumed: Checkpoint) -> None:
        """Continue where a checkpoint ended, with everything that a step depends on."""
        self.start_step, self.batches.position = resumed.state.step, resumed.state.position
        self.run_log.start_at(self.start_step, self.batches.tokens_seen)
        model, own, ranks = self.raw_model, self.state, self.run.ranks
        select = dict if self.run.vocabulary is None else self.run.vocabulary.select
        checkpoint.load_checkpoint(resumed, model, self.optimizers, self.scaler, own, ranks, select)
        self.settings.load_state(resumed.state.optimizer_groups)
        print0(f"resumed from {resumed.path}")

    def __enter__(self) -> Self:
        """Write `config.json` and `code.diff`; log, save and read batches until the exit."""
        run = self.run
        run.stop.raise_if_requested()
        with distributed.raise_on_all_ranks():
            if is_main():
                write_json(run.folder / RUN_CONFIG_NAME, run.config.saved())
                if diff := code_diff():
                    (run.folder / CODE_DIFF_NAME).write_bytes(diff)
        with ExitStack() as stack:
            stack.enter_context(self.run_log)
            stack.enter_context(self.writer)  # exits before the log, in which it writes
            self.writer.check(self.contents())
            fingerprints = run.train_shards.fingerprint, run.val_fingerprint
            self.run_log.start(*fingerprints, run.micro_batch_size)
            stack.callback(gc.unfreeze)  # `_after_first_step` calls gc.freeze()
            stack.enter_context(self.batches)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    def steps(self) -> range:
        """Return the numbers of updates done at the start of each turn, one more than updates."""
        return range(self.start_step, self.run.config.max_steps + 1)

    def is_due(self, every: int, step: int) -> bool:
        """Return whether work done every `every` steps and after the last is due; 0 = never."""
        return every > 0 and (step % every == 0 or step == self.run.config.max_steps)

    def ends(self, step: int) -> bool:
        """Return whether training ends after `step` updates."""
        return self.run.stop.is_agreed or step == self.run.config.max_steps

    def saves(self, step: int) -> bool:
        """Return whether to save a checkpoint after `step` updates that is not saved yet."""
        is_new = step not in (self.start_step, self.writer.saved_step)
        return is_new and (self.ends(step) or self.is_due(self.run.config.checkpoint_every, step))

    def make(self, train_step: Callable[["Trainer", int], Numbers], step: int) -> Numbers:
        """Make a step; if memory runs out, repeat it with half of an `auto` micro-batch.

        The estimate of `auto` does not know an edited model's activations. The windows stay. If the
        update may have begun, or with several processes, raise the error.
        """
        run, n_checked, position = self.run, self._n_checked, self.batches.position
        try:
            return train_step(self, step)
        except RuntimeError as error:
            is_auto = run.config.micro_batch_size == "auto" and run.ranks.world_size == 1
            may_repeat = is_auto and run.micro_batch_size > 1 and self._n_checked == n_checked
            if not (may_repeat and is_out_of_memory(error)):
                raise
        size = run.micro_batch_size
        half = size // 2 if size % 2 == 0 else 1
        print0(f"out of memory: repeating the step with --micro-batch-size {half}, not {size}")
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.run = replace(run, micro_batch_size=half)
        self.batches.start_at(position, half)
        return self.make(train_step, step)

    def log(self, numbers: Numbers) -> None:
        """Log what `train_step` returns: on a GPU, once the next step is queued."""
        self._unread.append((numbers, self.batches.tokens_seen))
        self.read_numbers(keep=self.steps_unread)
        if numbers.step == self.start_step + 1:
            self._after_first_step()

    @property
    def steps_unread(self) -> int:
        """Number of steps whose numbers are not read yet when a step is logged: none on a CPU."""
        return int(self.run.ranks.device.type == "cuda")

    def read_numbers(self, keep: int = 0) -> None:
        """Read, check and log the numbers of all steps but the last `keep` ones.

        Before anything is saved or evaluated, all must be read.

        Raises:
            DivergedError: on every rank, if a loss or a gradient is not finite.
            UserError: on every rank, if a target is masked.
        """
        while len(self._unread) > keep:
            numbers, tokens_seen = self._unread.popleft()
            metrics = dict(numbers.read())
            if metrics.pop("stop"):
                self.run.stop.is_agreed = True
            if metrics.pop("masked"):
                problem = f"a target of step {numbers.step} is masked"
                fix = "apply edits/masks.patch, with which each counted target has the same weight"
                raise UserError(f"{problem}: {fix}")
            if not self.scaler.is_enabled():  # with float16, `train_step` has checked them
                self.is_finite(numbers)
            self.run_log.step(numbers.step, tokens_seen, metrics)

    def check_step(self, step: int, numbers: Numbers) -> None:
        """Check the first steps since this start; every process must call this in each step.

        Raise if the ranks log numbers of different names, or if a parameter never has a gradient.
        An expert of a mixture may get its first token later, so the first step only warns.
        """
        self._n_checked += 1
        steps_done = step - self.start_step
        if steps_done and not self._unused:
            return
        if steps_done == 0:
            distributed.check_same_on_all_ranks(
                "the numbers of train_step", [str([*numbers.values])]
            )
        found = self._unused if steps_done else dict(self.raw_model.named_parameters())
        self._unused = {n: p for n, p in found.items() if p.requires_grad and p.grad is None}
        problem = f"no gradient reaches {', '.join(self._unused)}"
        if self._unused and steps_done == 0:
            print0(f"warning: {problem} in the first step")
        if steps_done == STEPS_WITHOUT_GRADIENT:
            with distributed.raise_on_all_ranks():
                if self._unused:
                    reason = "parameters of a loss function get no gradient"
                    fix = f"use the parameter in `GPT.hidden_states` ({reason})"
                    other_fix = "freeze it with requires_grad_(False)"
                    raise UserError(f"{problem} in {steps_done} steps: {fix}, or {other_fix}")

    def _after_first_step(self) -> None:
        """Raise UserError on all ranks if a resume could not restore the state."""
        with distributed.raise_on_all_ranks():
            self.writer.check(self.contents())
            self.settings.state()
        # Later collections would rescan all compiled objects, for half a second on one rank while
        # the others wait.
        gc.collect()
        gc.freeze()

    def is_finite(self, numbers: Numbers) -> bool:
        """Return False for a float16 gradient that overflowed: it only halves the loss scale.

        Raise DivergedError for any other loss or gradient that is not finite. The loss scale never
        goes below 1.
        """
        loss, norm = (numbers.read()[name] for name in ("train_loss", "grad_norm"))
        if math.isfinite(loss) and math.isfinite(norm):
            return True
        if not math.isfinite(loss) or self.scaler.get_scale() <= 1:  # 1 without float16
            text = shell_line("python", "read_step.py", self.run.folder, "--step", numbers.step)
            reason = f"loss {loss:.4f}, gradient norm {norm}; for its text, {text}"
            self._raise_diverged(numbers.step, reason)
        print0("a float16 gradient overflowed, normal a few times at the start: no update was made")
        return False

    def check_finite(self, step: int, contents: Contents) -> None:
        """Raise DivergedError on every rank if a weight or a moment is not finite."""
        if name := checkpoint.find_nonfinite_on_ranks(contents):
            self._raise_diverged(step, f"{name} is not finite")

    def _raise_diverged(self, step: int, reason: str) -> NoReturn:
        self.run_log.record(diverged_step=step)
        raise DivergedError(f"training diverged at step {step} ({reason})")

    def contents(self) -> Contents:
        """Return all that training changes in the model, the optimizers and `state`, by name."""
        return checkpoint.collect(self.raw_model, self.optimizers, self.state)

    def state_after(self, step: int, contents: Contents) -> checkpoint.TrainerState:
        """Return all that a checkpoint saves after `step` updates, except the tensors."""
        return checkpoint.TrainerState(
            step=step,
            position=self.batches.position,
            tokens_seen=self.batches.tokens_seen,
            model_config=asdict(self.raw_model.config),
            train_config=self.run.config.saved(),
            data_fingerprint=self.run.train_shards.fingerprint,
            val_fingerprint=self.run.val_fingerprint,
            rng_states=checkpoint.rng_states(),
            grad_scaler=self.scaler.state_dict(),
            optimizers=[type(optimizer).__name__ for optimizer in self.optimizers],
            optimizer_values=checkpoint.plain_values(contents.optimizer),
            optimizer_groups=self.settings.state(),
            own=checkpoint.plain_values(self.state),
            code=code_hashes(),
        )

    def finish(self, step: int) -> None:
        """Print how the run ended; create the file `PREEMPTED` if the run should be resumed.

        Every process must call this. A signal is ignored if the run completed anyway.
        """
        folder, stop = self.run.folder, self.run.stop
        self.writer.wait()
        error = self.writer.error
        with distributed.raise_on_all_ranks():
            if error is not None and not is_user_error(error):
                raise error  # a mistake in the code: the run is not started again by itself
        reason = stop.signal_name()
        if step == self.run.config.max_steps and not stop.interrupted_evaluation:
            reason = None
        if distributed.all_reduce_max(error is not None):
            reason = "failure"
        if is_main():
            with warn_on_write_error():
                if reason is None:
                    (folder / PREEMPTED_NAME).unlink(missing_ok=True)
                else:
                    write_json(folder / PREEMPTED_NAME, {"step": step, "reason": reason})
        distributed.barrier()  # until rank 0 has written the file
        if reason is None:
            self.run_log.record(finished_step=step)
            print_next_commands(folder)
            return
        if reason == "failure":  # only the process that could not save has the error
            raise error or SystemExit(2)
        stop.report(f"after step {step}; {resume_hint(folder)}")
