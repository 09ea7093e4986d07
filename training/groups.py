"""Parameter groups of optimizers: their settings in a step, and a check that all is trained."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer


class GroupSettings:
    """Numbers in the optimizers' groups, such as `lr`: as built, and as set for this step.

    The numbers of the build are never saved, so a flag that is changed on a resume acts.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        if any(isinstance(g.get("lr"), Tensor) for o in optimizers for g in o.param_groups):
            raise ValueError("an optimizer's lr is a tensor: pass a number, which can be scheduled")
        self._built = self._numbers()
        self._scaled = set[str]()  # names that `multiply` has set

    def _numbers(self) -> list[dict[str, float]]:
        return [
            {name: value for name, value in group.items() if isinstance(value, int | float)}
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        ]

    def _set(self, values: Iterable[Mapping[str, float]]) -> None:
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        for group, numbers in zip(groups, values, strict=True):
            group.update(numbers)

    def multiply(self, factors: Mapping[str, float]) -> None:
        """Multiply the built numbers of the same names; raise ValueError if no group has a name."""
        if unknown := factors.keys() - {name for built in self._built for name in built}:
            raise ValueError(
                f"no parameter group has a {' or '.join(sorted(unknown))}, which "
                f"lr_schedule.settings_at returns: name numbers of the groups that "
                f"train_gpt2.build_optimizers builds"
            )
        self._scaled |= factors.keys()
        self._set(
            {name: built[name] * factors[name] for name in factors.keys() & built.keys()}
            for built in self._built
        )

    def state(self) -> list[dict[str, float]]:
        """Return the numbers that something else changed, such as a schedule-free optimizer."""
        return [
            {n: v for n, v in now.items() if v != built.get(n) and n not in self._scaled}
            for now, built in zip(self._numbers(), self._built, strict=True)
        ]

    def load_state(self, values: Sequence[Mapping[str, float]]) -> None:
        """Set what `state` returned; raise ValueError if the groups are others."""
        if any(values):
            if len(values) != len(self._built):
                raise ValueError(
                    f"the checkpoint has the state of {len(values)} parameter groups, but "
                    f"train_gpt2.build_optimizers builds {len(self._built)}: restore its groups"
                )
            self._set(values)


def check_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise if a parameter is not in exactly one optimizer."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    counts = Counter(p for group in groups for p in group["params"])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if wrong := [f"{name} ({counts[p]} times)" for name, p in trained.items() if counts[p] != 1]:
        raise ValueError(f"the optimizers must hold each parameter once: {', '.join(wrong)}")
