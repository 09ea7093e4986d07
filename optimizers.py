"""Muon (Jordan et al. 2024), and gradients shared by tokens that are spelled alike.

An update of Adam or SGD changes a matrix mostly in a few directions. Muon gives all directions the
same length: it replaces the update U S V^T by about U V^T. For matrices of hidden layers only;
embeddings, biases and LayerNorms are AdamW's.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from runtime.distributed import DistInfo, distribute_like, full_tensor
from tokenizer import spelling_features

UPDATE_RMS = 0.2  # of AdamW's updates (Liu et al. 2025, Muon is Scalable, section 2.2)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised, with decoupled weight decay; a drop-in for AdamW's rate and decay.

    Every update has the RMS that AdamW's usually have, 0.2 times the rate, whatever the matrix's
    shape: so one `--max-lr` serves both. `torch.optim.Muon` with `match_rms_adamw` does the same,
    one matrix after another on every rank. Here matrices of one shape are orthogonalised together,
    and each rank takes its share of them.

    Source: Jordan et al. 2024 (kellerjordan.github.io/posts/muon); Liu et al. 2025, section 2.2.

    Args:
        params: matrices, (rows, columns) each, or groups of them. A group's `parts` is how many
            matrices are stacked in each along the rows: 3 for queries, keys and values.
        weight_decay: times the rate, the part of the weights that an update takes away.
        momentum: of the exponential average of gradients; the update is Nesterov's.
        dist_info: this process. Every rank has the same gradients, or its shard of them.
        dtype: of the orthogonalisation's matrix products: bfloat16 where the device has it.
        compile: orthogonalise in compiled code.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        weight_decay: float,
        momentum: float,
        dist_info: DistInfo,
        dtype: torch.dtype,
        compile: bool,
    ) -> None:
        defaults = {"lr": 0.0, "weight_decay": weight_decay, "momentum": momentum, "parts": 1}
        super().__init__(params, defaults)
        self.dist_info = dist_info
        self.dtype = dtype
        self.orthogonalize: Callable[[Tensor], Tensor] = orthogonalize
        if compile:
            self.orthogonalize = torch.compile(orthogonalize, dynamic=False)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient; all ranks must call this."""
        alike = defaultdict(list)  # of one shape, with the same settings: updated together
        for group in self.param_groups:
            settings = (group["lr"], group["weight_decay"], group["momentum"], group["parts"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.shape, *settings].append(parameter)
        updates = [self._next_updates(same, key[3]) for key, same in alike.items()]
        matrices = [  # (n * parts, rows / parts, columns)
            full_tensor(update).reshape(-1, rows // parts, columns)
            for update, ((rows, columns), *_, parts) in zip(updates, alike, strict=True)
        ]
        results = self._orthogonalize_all(matrices)
        for (key, same), update, result in zip(alike.items(), updates, results, strict=True):
            _, lr, weight_decay, *_ = key
            # (rows, columns) with orthonormal rows or columns: their squares add up to the less.
            rms = max(result.shape[1:]) ** -0.5
            own = distribute_like(result.reshape(update.shape), update).to(same[0].dtype)
            torch._foreach_mul_(same, 1 - lr * weight_decay)
            torch._foreach_add_(same, own.unbind(), alpha=-lr * UPDATE_RMS / rms)

    def _next_updates(self, parameters: list[Tensor], momentum: float) -> Tensor:
        """Nesterov's updates before they are orthogonalised: (n, rows, columns), or its shard."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        averages = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        return torch.stack(gradients).lerp_(torch.stack(averages), momentum).to(self.dtype)

    def _orthogonalize_all(self, stacks: list[Tensor]) -> list[Tensor]:
        """Orthogonalise stacks, (n, rows, columns) each; matrices of one shape together."""
        wide = [s if s.size(1) <= s.size(2) else s.mT for s in stacks]  # rows <= columns
        by_shape = defaultdict(list)  # the indices of the stacks
        for index, stack in enumerate(wide):
            by_shape[stack.shape[1:]].append(index)
        for same in by_shape.values():
            results = self._share(torch.cat([wide[index] for index in same]))
            for index in same:
                wide[index], results = results.tensor_split([len(wide[index])])
        return [w if w.shape == s.shape else w.mT for s, w in zip(stacks, wide, strict=True)]

    def _share(self, matrices: Tensor) -> Tensor:
        """Orthogonalise (n, rows, columns), each rank its share; every rank gets all."""
        world_size, rank = self.dist_info.world_size, self.dist_info.rank
        if world_size == 1:
            return self.orthogonalize(matrices)
        n = len(matrices)
        share = -(-n // world_size)  # the last ranks may do the last matrix again
        own = torch.arange(rank * share, (rank + 1) * share, device=matrices.device)
        result = self.orthogonalize(matrices[own.clamp(max=n - 1)])
        results = result.new_empty((world_size * share, *result.shape[1:]))
        dist.all_gather([*results.chunk(world_size)], result)
        return results[:n]


def share_by_spelling(embedding: nn.Parameter, strength: float) -> Callable[..., None]:
    """A hook before an optimizer's step: tokens that are spelled alike learn from each other.

    A rare token's embedding has few gradients of its own. To each token's gradient the hook adds,
    times `strength`, those of all tokens that share parts of its spelling. The model stays GPT-2's,
    and nothing is to be saved. All ranks must call it, and compute the same. `embedding` is (V, C),
    with a row for each id of GPT-2's.
    """
    pairs, weights = map(torch.from_numpy, spelling_features(len(embedding)))
    if not len(weights):
        raise ValueError(f"leave out --spelling-share: the {len(embedding)} ids are not GPT-2's")
    ids, parts = pairs
    sums = []  # over each part's ids, then over each id's parts
    for rows, columns, n in ((parts, ids, int(parts.max()) + 1), (ids, parts, len(embedding))):
        order = rows.argsort(stable=True)
        starts = torch.searchsorted(rows[order], torch.arange(n))
        sums.append([t.to(embedding.device) for t in (columns[order], starts, weights[order])])

    @torch.no_grad()
    def add_gradients(*_: object) -> None:
        if (gradient := embedding.grad) is not None:
            shared = full_tensor(gradient)  # (V, C)
            for items, starts, w in sums:  # faster than with sparse matrices
                shared = F.embedding_bag(items, shared, starts, mode="sum", per_sample_weights=w)
            gradient.add_(distribute_like(shared, gradient), alpha=strength)

    return add_gradients


def orthogonalize(matrices: Tensor) -> Tensor:
    """Bring all singular values of each matrix near 1: U S V^T becomes about U V^T.

    Five Newton-Schulz steps, with Jordan et al.'s coefficients: they bring values from about 0.01
    up between 0.7 and 1.2, and do not converge further, which training does not need.

    Args:
        matrices: (n, rows, columns), rows <= columns.

    Returns:
        (n, rows, columns), in the same dtype.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    norms = matrices.float().norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    x = (matrices / norms).to(matrices.dtype)  # singular values are at most 1 now
    for _ in range(5):
        gram = x @ x.mT  # (n, rows, rows)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b A + c A^2
        x = torch.baddbmm(x, polynomial, x, beta=a)  # a X + (b A + c A^2) X
    return x
