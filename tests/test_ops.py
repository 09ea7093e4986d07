from copy import deepcopy

import pytest
import torch
import torch._inductor.config as inductor_config
from conftest import needs_compiler
from torch._dynamo.utils import counters

from model import GPT, GPTConfig, Loss
from ops import checkpoint_activations, mean_in_chunks
from train_gpt2 import compile_by_block


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1337)


@pytest.mark.slow
@needs_compiler
def test_compile_by_block_makes_a_graph_for_all_blocks_and_none_for_other_shapes():
    model = GPT(GPTConfig(block_size=16, n_layer=3, n_head=2, n_embd=32), loss_chunks=2)
    idx, targets = torch.randint(50257, (2, 2, 16))
    names = [*model.state_dict()]
    expected = torch.autograd.grad(model(idx, targets).loss, [*model.parameters()])
    graphs = counters["stats"]
    compile_by_block(model)
    graphs.clear()
    found = torch.autograd.grad(model(idx, targets=targets).loss, [*model.parameters()])
    assert graphs["unique_graphs"] == 3  # one of the three blocks, one of each end
    for gradient, other in zip(found, expected, strict=True):
        assert (gradient - other).abs().max() <= 1e-5
    other = deepcopy(model)
    with torch.no_grad():
        other.transformer.wpe.weight.add_(1.0)
        with torch.compiler.set_stance("force_eager"):  # as in evaluations
            logits = [other(idx[:, :length]).logits for length in range(1, 11)]
        assert not torch.allclose(logits[0], model(idx[:, :1]).logits)  # it has its own weights
    assert [*model.state_dict()] == names


class GraphIsMade(Exception):  # noqa: N818 - it ends the compilation, whose code nobody runs
    pass


def test_compiled_loss_chunks_wait_for_the_gradient_of_the_one_before():
    """Else a GPU's compiler computes these last, and the logits of all chunks live until then."""
    N, C, V, chunks = 12, 8, 64, 3
    hidden, weight = torch.randn(N, C, requires_grad=True), torch.randn(V, C, requires_grad=True)
    graphs = []

    def keep(graph):
        graphs.append(graph)
        raise GraphIsMade

    options = {"post_grad_custom_post_pass": keep, "force_disable_caches": True}
    with torch.autocast("cpu", torch.bfloat16), inductor_config.patch(options):
        loss, targets = torch.compile(mean_in_chunks, dynamic=False), torch.randint(V, (N,))
        mean_loss = Loss(None, None, GPTConfig(vocab_size=V - 1), chunks).mean_loss
        with pytest.raises(RuntimeError, match="GraphIsMade"):
            loss(mean_loss, hidden, weight, targets, targets >= 0, chunks)

    def is_before(node, later):
        return node in later.all_input_nodes or any(
            is_before(node, n) for n in later.all_input_nodes
        )

    logits, d_weights = [], []
    for node in graphs[0].nodes:
        if node.target is torch.ops.aten.mm.default:
            shape = tuple(node.meta["val"].shape)
            if shape == (N // chunks, V):
                logits.append(node)
            elif shape == (V, C):
                d_weights.append(node)
    assert len(logits) == len(d_weights) == chunks
    assert all(is_before(*pair) for pair in zip(d_weights, logits[1:], strict=False))


class Averaging(torch.nn.Module):
    """A block that updates a buffer in its forward pass, if it has one."""

    def __init__(self, has_buffer):
        super().__init__()
        self.runs = 0
        if has_buffer:
            self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.runs += 1
        if hasattr(self, "seen"):
            self.seen += 1
        return x.sin().sin()


@pytest.mark.parametrize(("has_buffer", "runs"), [(True, 1), (False, 2)])
def test_checkpoint_activations_recomputes_no_block_that_has_buffers(has_buffer, runs):
    block = Averaging(has_buffer)
    checkpoint_activations([block], "full")
    block(torch.ones(3, requires_grad=True)).sum().backward()
    assert block.runs == runs
    assert not has_buffer or block.seen == 1
