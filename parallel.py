"""Training as a single process, with DDP or with FSDP2, behind the same methods.

`Ranks` is a single process, and its methods do almost nothing. `DDP` and `FSDP` override those in
which several processes exchange data.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from runtime.distributed import DistInfo, all_reduce_sum

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Ranks(DistInfo):
    """A single process. Every rank must call each method, because some of them exchange data."""

    def build(self, new_model: Callable[[], Model], unit: type[nn.Module]) -> Model:
        """Build a model on the device; with FSDP, shard each module of class `unit`, a block."""
        with self.device:
            return new_model()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model to train: with DDP, it averages its gradients over the ranks."""
        return model

    def accumulate(self, model: nn.Module, is_last: bool) -> AbstractContextManager[object]:
        """Run a micro-step of the wrapped model; only the last one averages over the ranks."""
        return nullcontext()

    def average(self, scalars: Iterable[Tensor | float]) -> Tensor:
        """Average scalars over the ranks in one all-reduce, without waiting for the device."""
        # Numbers are written on the device: a copy from the CPU would wait for the GPU.
        values = [
            self.gather(value.detach()).to(self.device, torch.float32)
            if isinstance(value, Tensor)
            else torch.full((), float(value), device=self.device)
            for value in scalars
        ]
        return all_reduce_sum(torch.stack(values)) / self.world_size

    def grad_norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """Return the global L2 norm of the parameters' gradients, a scalar on the device."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        return self.gather(nn.utils.get_total_norm(gradients)).to(self.device)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the full tensor of which each rank may have a shard."""
        return tensor

    def shard(self, full: Tensor, like: Tensor) -> Tensor:
        """Return this rank's shard of a tensor that every rank has, placed like `like`."""
        return full

    def gather_all(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
        """Return the full tensors on the device, cast to `dtype` if they are exchanged."""
        return tensors

    def copy_to_host(self, tensors: Mapping[str, Tensor], is_kept: bool) -> dict[str, Tensor]:
        """Gather tensors one at a time; return copies on the CPU if `is_kept`, else none."""
        copies = dict[str, Tensor]()
        for name, tensor in tensors.items():
            full = self.gather(tensor)
            if is_kept:  # not in pinned memory: torch would round each size up to a power of two
                copies[name] = full.contiguous().to("cpu", copy=True)
        return copies

    def reshard(self, model: nn.Module) -> None:
        """Free the parameters that a forward pass without a backward pass leaves gathered."""

    def sync_buffers(self, model: nn.Module) -> None:
        """Copy the buffers of rank 0, which are the ones that are saved, to every rank."""
        if self.world_size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)


SINGLE_PROCESS = Ranks()


class DDP(Ranks):
    """Every rank holds the whole model; gradients are averaged during the backward pass."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap with DistributedDataParallel; `sync_buffers` copies buffers in its place."""
        ids = [self.device.index] if self.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        wrapped.broadcast_buffers = False  # as an attribute: torch deprecates the argument
        return wrapped

    @contextmanager
    def accumulate(self, model: nn.Module, is_last: bool) -> Iterator[None]:
        """Only add up gradients on this rank, except in the last micro-step.

        A rank may not use a parameter in that micro-step, for example an expert without tokens. DDP
        would wait for its gradient, so this adds a gradient of 0. A parameter to which no rank
        added a gradient in any micro-step has none afterwards, as in a single process.
        """
        if not is_last:
            with cast(DistributedDataParallel, model).no_sync():
                yield
            return
        before = {p: p.grad for p in model.parameters() if p.requires_grad}
        yield
        # DDP has replaced the other gradients by views of its buckets, or they were views before.
        idle = [p for p, g in before.items() if p.grad is g and getattr(g, "_base", None) is None]
        without = {i: p for i, p in enumerate(before) if p.grad is None}
        counts = torch.ones(len(before), device=self.device)  # ranks with a gradient
        if idle:
            counts[[*without]] = 0
            torch.autograd.backward(idle, [torch.zeros_like(p) for p in idle])
        all_reduce_sum(counts)
        for parameter in (p for i, p in without.items() if not counts[i]):
            parameter.grad = None


@dataclass(frozen=True)
class FSDP(Ranks):
    """Every rank holds a shard of the parameters, gradients and optimizer state (FSDP2).

    A block's parameters are gathered before its forward pass. With `reshard_after_forward`, they
    are freed after it and gathered again for the backward pass (ZeRO-3; Rajbhandari et al. 2020,
    section 5); otherwise they stay gathered (ZeRO-2). Embeddings and the last LayerNorm are
    gathered once per forward pass. On GPUs, blocks are gathered in `dtype`.
    """

    reshard_after_forward: bool = True
    cpu_offload: bool = False
    dtype: torch.dtype = torch.float32

    def build(self, new_model: Callable[[], Model], unit: type[nn.Module]) -> Model:
        """Build a model, then shard each block and the rest.

        Parameters keep the values from their constructors, which must be the same on every rank.
        """
        # Imported here because the import takes more than a second.
        from torch.distributed import fsdp
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(self.device.type, (self.world_size,))
        offload = fsdp.CPUOffloadPolicy() if self.cpu_offload else fsdp.OffloadPolicy()
        # A block's inputs are not cast: `model.residual_stream` chooses their dtype. On a CPU,
        # blocks are gathered in float32: LayerNorm accepts no other gains under CPU autocast.
        mixed_precision = fsdp.MixedPrecisionPolicy(
            param_dtype=self.dtype if self.device.type == "cuda" else torch.float32,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )

        with self.device:
            model = new_model()
        for module in [*model.modules()]:
            if isinstance(module, unit):
                fsdp.fully_shard(
                    module,
                    mesh=mesh,
                    reshard_after_forward=self.reshard_after_forward,
                    mp_policy=mixed_precision,
                    offload_policy=offload,
                )
        # The root holds the tied embedding and LM head. Like an unsharded model, it is gathered in
        # float32, because HellaSwag and sampling need its logits in full precision.
        fsdp.fully_shard(model, mesh=mesh, reshard_after_forward=False, offload_policy=offload)
        fsdp.register_fsdp_forward_method(model, "hidden_states")
        return model

    def accumulate(self, model: nn.Module, is_last: bool) -> AbstractContextManager[object]:
        """Only add up gradients on this rank, except in the last micro-step."""
        root: Any = next(m for m in model.modules() if hasattr(m, "set_requires_gradient_sync"))
        root.set_requires_gradient_sync(is_last)
        if not self.reshard_after_forward:  # else parameters would be gathered in each micro-step
            root.set_reshard_after_backward(is_last)
        return nullcontext()

    def gather(self, tensor: Tensor) -> Tensor:
        """Gather a sharded tensor; buffers, among others, are not sharded."""
        return cast(Any, tensor).full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def shard(self, full: Tensor, like: Tensor) -> Tensor:
        """Return this rank's shard; on the CPU with `cpu_offload`."""
        if not hasattr(like, "device_mesh"):
            return full
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = cast(Any, like).device_mesh, cast(Any, like).placements
        return distribute_tensor(full, mesh, placements, src_data_rank=None).to(like.device)

    def gather_all(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
        """Gather all tensors of a shape together."""
        by_shape = defaultdict[torch.Size, list[int]](list)
        for index, tensor in enumerate(tensors):
            by_shape[tensor.shape].append(index)
        full = dict[int, Tensor]()
        for indices in by_shape.values():
            stack = torch.stack([tensors[index] for index in indices])
            gathered = self.gather(stack.to(self.device, dtype)).to(stack.dtype)
            full |= zip(indices, gathered, strict=True)
        return [full[index] for index in range(len(tensors))]

    def reshard(self, model: nn.Module) -> None:
        """Free gathered parameters, block by block."""
        for module in model.modules():
            if hasattr(module, "reshard"):
                cast(Any, module).reshard()
