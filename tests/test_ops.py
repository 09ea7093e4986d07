import pytest
import torch
import torch._inductor.config as inductor_config
from conftest import needs_compiler
from torch._dynamo.utils import counters

from model import GPT, GPTConfig
from ops import CompiledBlocks, checkpoint_activations, lm_head_loss


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1337)


@pytest.mark.slow
@needs_compiler
def test_compiled_blocks_leave_the_model_itself_eager():
    model = GPT(GPTConfig(block_size=16, n_layer=3, n_head=2, n_embd=32), loss_chunks=2)
    idx, targets = torch.randint(50257, (2, 2, 16))
    names, blocks = [*model.state_dict()], [*model.transformer.h]
    expected = torch.autograd.grad(model(idx, targets).loss, [*model.parameters()])
    trained, graphs = CompiledBlocks(model), counters["stats"]
    graphs.clear()
    found = torch.autograd.grad(trained(idx, targets=targets).loss, [*model.parameters()])
    assert graphs["unique_graphs"] == 3  # one of the three blocks, one of each end
    for gradient, other in zip(found, expected, strict=True):
        assert (gradient - other).abs().max() <= 1e-5
    with torch.no_grad():  # an evaluation's shapes compile nothing
        for length in range(1, 16):
            model(idx[:, :length])
    trained(idx, targets=targets)
    assert graphs["unique_graphs"] == 3
    assert [*model.state_dict()] == names
    assert [*model.transformer.h] == blocks
    assert len({*trained.parameters()}) == len({*model.parameters()})


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
        loss = torch.compile(lm_head_loss, dynamic=False)
        with pytest.raises(RuntimeError, match="GraphIsMade"):
            loss(hidden, weight, torch.randint(V, (N,)), GPTConfig(vocab_size=V - 1), chunks, False)

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
