"""Muon (Jordan et al. 2024).

An update by Adam or SGD changes a matrix mostly in a few directions. Muon changes it equally in all
directions: it replaces the update U S V^T with approximately U V^T. It is only for the matrices of
hidden layers; AdamW updates embeddings, biases and LayerNorms.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import Ranks

UPDATE_RMS = 0.2  # typical of AdamW (Liu et al. 2025, Muon is Scalable, section 2.2)


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum with decoupled weight decay; uses AdamW's learning rate and decay.

    For every matrix shape, updates have the RMS that is typical of AdamW, 0.2 times the learning
    rate, so that one `--max-lr` is right for both optimizers. `torch.optim.Muon` with
    `match_rms_adamw` computes the same updates, but one matrix after another and all of them on
    every rank. Here, parameters of the same shape are updated together, and each rank
    orthogonalizes a slice of their matrices.

    Source: Jordan et al. 2024 (kellerjordan.github.io/posts/muon); Liu et al. 2025, section 2.2.

    Args:
        params: groups of parameters, (rows, columns) each. If a parameter stacks several matrices
            along its rows, such as queries, keys and values, the group's `rows` has their sizes.
        lr: the learning rate.
        weight_decay: times the learning rate, the fraction of the weights that an update removes.
        momentum: decay of the exponential average of gradients; updates are Nesterov's.
        ranks: the processes. Every rank has the same gradients, or its shard of them.
        dtype: dtype for the matmuls of the orthogonalization, bfloat16 where it is fast.
        compile: whether to compile the orthogonalization.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        ranks: Ranks,
        dtype: torch.dtype,
        compile: bool,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "rows": ()}
        super().__init__(params, defaults)
        self.ranks = ranks
        self.dtype = dtype
        self.orthogonalize: Callable[[Tensor], Tensor] = orthogonalize
        if compile:
            self.orthogonalize = torch.compile(orthogonalize, dynamic=False)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient; all ranks must call this."""
        rows, updates, by_settings = {}, dict[Tensor, Tensor](), defaultdict(list)
        for group in self.param_groups:
            settings = (group["lr"], group["weight_decay"], group["momentum"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_settings[settings].append(parameter)
                    rows[parameter] = [*group["rows"]] or [len(parameter)]  # one matrix
        for (_, _, momentum), parameters in by_settings.items():
            updates |= zip(parameters, self._next_updates(parameters, momentum), strict=True)
        full = self.ranks.gather_all([*updates.values()], self.dtype)
        split = map(torch.split, full, (rows[parameter] for parameter in updates))
        self._orthogonalize([matrix for matrices in split for matrix in matrices])
        for parameter, update in zip(updates, full, strict=True):
            updates[parameter] = self.ranks.shard(update, parameter)
        for (lr, weight_decay, _), parameters in by_settings.items():
            torch._foreach_mul_(parameters, 1 - lr * weight_decay)
            torch._foreach_add_(parameters, [updates[p] for p in parameters], alpha=-lr)

    def _next_updates(self, parameters: list[Tensor], momentum: float) -> Sequence[Tensor]:
        """Return Nesterov's updates before orthogonalization, like the parameters."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        averages = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        return torch._foreach_lerp(gradients, averages, momentum)

    def _orthogonalize(self, matrices: list[Tensor]) -> None:
        """Replace each matrix by its update: orthogonal, with an RMS of `UPDATE_RMS`.

        All matrices of a shape are one batch, such as queries, keys, values and `attn.c_proj` of
        all layers. Matrices with more rows than columns are transposed for it.
        """
        by_shape, batches = defaultdict(list), defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.shape].append(matrix)
        for shape in by_shape:
            batches[min(shape), max(shape)].append(shape)
        for shapes in batches.values():
            stacks = [torch.stack(by_shape[shape]) for shape in shapes]
            wide = torch.cat([each if each.size(1) <= each.size(2) else each.mT for each in stacks])
            batch = self._orthogonalize_batch(wide.to(self.dtype))
            parts = torch.split(batch, [len(stack) for stack in stacks])
            for shape, part in zip(shapes, parts, strict=True):
                result = part if part.shape[1:] == shape else part.mT.contiguous()
                torch._foreach_copy_(by_shape[shape], result.unbind())
        # Rows or columns are orthonormal, so the squares add up to min(rows, columns).
        scales = [UPDATE_RMS * max(matrix.shape) ** 0.5 for matrix in matrices]
        torch._foreach_mul_(matrices, scales)

    def _orthogonalize_batch(self, matrices: Tensor) -> Tensor:
        """Orthogonalize (n, rows, columns), a slice on each rank; every rank gets all results."""
        world_size, rank = self.ranks.world_size, self.ranks.rank
        if world_size == 1:
            return self.orthogonalize(matrices)
        n = len(matrices)
        n_per_rank = -(-n // world_size)  # the last ranks may repeat the last matrix
        indices = torch.arange(rank * n_per_rank, (rank + 1) * n_per_rank, device=matrices.device)
        result = self.orthogonalize(matrices[indices.clamp(max=n - 1)])
        results = result.new_empty((world_size * n_per_rank, *result.shape[1:]))
        # torch 2.13 has a new name for all_gather_into_tensor.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(results, result.contiguous())
        return results[:n]


def orthogonalize(matrices: Tensor) -> Tensor:
    """Bring all singular values of each matrix near 1: U S V^T becomes approximately U V^T.

    Five Newton-Schulz steps with the coefficients of Jordan et al. bring singular values above
    about 0.01 to between 0.7 and 1.2. They do not converge further, which training does not need.

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
