"""Parameter groups of optimizers: their settings in a step, and a check that all is trained."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map_only

from runtime.errors import UserError

# Types of attributes in which an optimizer may keep state.
STATE_TYPES = (int, float, Tensor, list, tuple, dict, deque)


class GroupSettings:
    """Numbers in the optimizers' groups, such as `lr`: as built, and as set for this step.

    The numbers of the build are never saved, so a flag that is changed on a resume acts.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._built = tree_map_only(Tensor, _copy, self._settings())
        self._scaled = set[str]()  # names that `multiply` has set

    def _groups(self) -> list[dict[str, Any]]:
        """Return the groups of all optimizers; loading an optimizer's state replaces them."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _settings(self) -> list[dict[str, Any]]:
        """Return each group without its parameters, then each optimizer's attributes.

        They are its public numbers, tensors and containers, and the state of an inner optimizer.
        """
        settings = [{n: v for n, v in group.items() if n != "params"} for group in self._groups()]
        for optimizer in self._optimizers:
            kind, saved = type(optimizer), (id(optimizer.state), id(optimizer.param_groups))
            public = {n: v for n, v in vars(optimizer).items() if not n.startswith("_")}
            values = {n: v.state if isinstance(v, Optimizer) else v for n, v in public.items()}
            state = {n: v for n, v in values.items() if isinstance(v, STATE_TYPES)}
            new = {f"{kind.__name__}.{n}": v for n, v in state.items() if id(v) not in saved}
            settings.append(new)
        return settings

    def multiply(self, factors: Mapping[str, float]) -> None:
        """Multiply the built numbers of the same names.

        Raise UserError if no group has a name, or if a torch scheduler also sets the learning rate.
        """
        groups = self._groups()
        if any("initial_lr" in group for group in groups):  # a scheduler of torch.optim adds it
            problem = "lr_schedule.settings_at replaces what a torch scheduler sets"
            raise UserError(f"{problem}: add the schedule to lr_schedule.SCHEDULES instead")
        if unknown := factors.keys() - {name for group in groups for name in group}:
            names = " or ".join(sorted(unknown))
            fix = "name numbers of the groups that train_gpt2.build_optimizers builds"
            problem = f"no parameter group has a {names}, which lr_schedule.settings_at returns"
            raise UserError(f"{problem}: {fix}")
        self._scaled |= factors.keys()
        for group, built in zip(groups, self._built, strict=False):
            for name in factors.keys() & built.keys():
                group[name] = built[name] * factors[name]

    def state(self) -> list[dict[str, float]]:
        """Return the numbers in groups that something else changed, as schedule-free AdamW does.

        Raise UserError if anything else changed that a step may use: a resume would lose it.
        """
        changed = [
            {n: v for n, v in now.items() if n not in self._scaled and not _equal(v, built.get(n))}
            for now, built in zip(self._settings(), self._built, strict=True)
        ]
        found = [(name, value) for each in changed for name, value in each.items()]
        if lost := [n for n, v in found if "." in n or not isinstance(v, int | float)]:
            problem = f"a checkpoint cannot hold {', '.join(lost)}, which the optimizer changed"
            fix = "keep numbers in parameter groups, and tensors in the state of a parameter"
            raise UserError(f"{problem}: {fix}")
        return changed[: len(self._groups())]

    def load_state(self, values: Sequence[Mapping[str, float]]) -> None:
        """Set what `state` returned; raise UserError if the groups are others."""
        groups = self._groups()
        if any(values) and len(values) != len(groups):
            saved = f"the checkpoint has the state of {len(values)} parameter groups"
            built = f"train_gpt2.build_optimizers builds {len(groups)}"
            raise UserError(f"{saved}, but {built}: restore its groups")
        for group, numbers in zip(groups, values, strict=False):
            group.update(numbers)


def _copy(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()


def _equal(a: object, b: object) -> bool:
    """Return whether two values, or all values in two containers, are the same."""
    (leaves, spec), (others, other_spec) = tree_flatten(a), tree_flatten(b)
    return spec == other_spec and all(map(_is_same, leaves, others))


def _is_same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or torch.equal(a, b)
    return a is b or (type(a) is type(b) and repr(a) == repr(b))


def check_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise if a parameter is not in exactly one optimizer, or not in the model."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    counts = Counter(p for group in groups for p in group["params"])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if wrong := [f"{name} ({counts[p]} times)" for name, p in trained.items() if counts[p] != 1]:
        raise UserError(f"the optimizers must hold each parameter once: {', '.join(wrong)}")
    if other := [tuple(p.shape) for p in counts.keys() - set(model.parameters())]:
        problem = f"the optimizers hold parameters of shape {other} that the model does not have"
        fix = "assign them to a module of the model"
        raise UserError(f"{problem}, so that they would not be saved: {fix}")
