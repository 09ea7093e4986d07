"""Parameter groups of optimizers: their settings in a step, and a check that all is trained."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from runtime.errors import UserError


class GroupSettings:
    """Numbers in the optimizers' groups, such as `lr`: as built, and as set for this step.

    The numbers of the build are never saved, so a flag that is changed on a resume acts.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._built = [dict(group) for group in self._groups()]
        self._scaled = set[str]()  # names that `multiply` has set

    def _groups(self) -> list[dict[str, Any]]:
        """Return the groups of all optimizers; loading an optimizer's state replaces them."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def multiply(self, factors: Mapping[str, float]) -> None:
        """Multiply the built numbers of the same names; raise UserError if no group has a name."""
        if unknown := factors.keys() - {name for built in self._built for name in built}:
            names = " or ".join(sorted(unknown))
            fix = "name numbers of the groups that train_gpt2.build_optimizers builds"
            problem = f"no parameter group has a {names}, which lr_schedule.settings_at returns"
            raise UserError(f"{problem}: {fix}")
        self._scaled |= factors.keys()
        for group, built in zip(self._groups(), self._built, strict=True):
            for name in factors.keys() & built.keys():
                group[name] = built[name] * factors[name]

    def state(self) -> list[dict[str, float]]:
        """Return the numbers that something else changed, such as a schedule-free optimizer."""
        states = []
        for group, built in zip(self._groups(), self._built, strict=True):
            numbers = {n: x for n, x in group.items() if isinstance(x, int | float)}
            changed = {n: x for n, x in numbers.items() if x != built.get(n)}
            states.append({n: x for n, x in changed.items() if n not in self._scaled})
        return states

    def load_state(self, values: Sequence[Mapping[str, float]]) -> None:
        """Set what `state` returned; raise UserError if the groups are others."""
        if any(values) and len(values) != len(self._built):
            saved = f"the checkpoint has the state of {len(values)} parameter groups"
            built = f"train_gpt2.build_optimizers builds {len(self._built)}"
            raise UserError(f"{saved}, but {built}: restore its groups")
        for group, numbers in zip(self._groups(), values, strict=False):
            group.update(numbers)


def check_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise if a parameter is not in exactly one optimizer."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    counts = Counter(p for group in groups for p in group["params"])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if wrong := [f"{name} ({counts[p]} times)" for name, p in trained.items() if counts[p] != 1]:
        raise UserError(f"the optimizers must hold each parameter once: {', '.join(wrong)}")
