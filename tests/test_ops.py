from functools import partial

import pytest
import torch
import torch._inductor.config as inductor_config
from conftest import needs_compiler
from torch._dynamo.utils import counters

import model as model_module
from model import GPT, Block, GPTConfig
from ops import CompiledBlocks, lm_head_loss
from runtime.compiler import prepare_compiler


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1337)


@pytest.mark.slow
@needs_compiler
def test_compiled_blocks_leave_the_model_itself_eager():
    model = GPT(GPTConfig(block_size=16, n_layer=3, n_head=2, n_embd=32))
    idx, targets = torch.randint(50257, (2, 2, 16))
    names, blocks = [*model.state_dict()], [*model.transformer.h]
    expected = torch.autograd.grad(model(idx, targets).loss, [*model.parameters()])
    trained, graphs = CompiledBlocks(model), counters["stats"]
    graphs.clear()
    found = torch.autograd.grad(trained(idx, targets=targets).loss, [*model.parameters()])
    assert graphs["unique_graphs"] == 2  # one of the three blocks, one of the loss
    for gradient, other in zip(found, expected, strict=True):
        assert (gradient - other).abs().max() <= 1e-5
    with torch.no_grad():  # an evaluation's shapes compile nothing
        for length in range(1, 16):
            model(idx[:, :length])
    with pytest.raises(IndexError):
        trained(idx + 50304, targets)
    assert graphs["unique_graphs"] == 2
    assert [*model.state_dict()] == names
    assert [*model.transformer.h] == blocks
    assert len({*trained.parameters()}) == len({*model.parameters()})


@needs_compiler
def test_blocks_that_all_differ_are_all_compiled_for_training_and_validation(monkeypatch):
    class ScaledBlock(Block):
        def __init__(self, config, layer):
            super().__init__(config, layer)
            self.scale = 1 / (layer + 1)  # a number, which compiled code has as a constant

        def forward(self, x, cache=None):
            return self.scale * super().forward(x, cache)

    assert prepare_compiler(torch.device("cpu")) is None
    monkeypatch.setattr(model_module, "Block", ScaledBlock)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    model = GPT(GPTConfig(block_size=16, n_layer=12, n_head=2, n_embd=32))
    trained, idx = CompiledBlocks(model), torch.zeros(1, 16, dtype=torch.int64)
    counters["stats"].clear()
    trained(idx, idx)
    with torch.no_grad():
        trained(idx, idx)
    assert counters["stats"]["unique_graphs"] == 2 * (12 + 1)  # and the loss


@needs_compiler
def test_compiled_loss_chunks_wait_for_the_gradient_of_the_one_before():
    """Else a GPU's compiler computes these last, and the logits of all chunks live until then."""
    N, C, V, chunks = 12, 8, 64, 3
    hidden, weight = torch.randn(N, C, requires_grad=True), torch.randn(V, C, requires_grad=True)
    graphs = []
    options = {"post_grad_custom_post_pass": graphs.append, "force_disable_caches": True}
    with torch.autocast("cpu", torch.bfloat16), inductor_config.patch(options):
        loss = torch.compile(lm_head_loss, dynamic=False)
        loss(hidden, weight, torch.randint(V, (N,)), GPTConfig(vocab_size=V - 1), chunks, False)

    def is_before(node, later):
        return node in later.all_input_nodes or any(
            is_before(node, n) for n in later.all_input_nodes
        )

    products = [node for node in graphs[0].nodes if node.target is torch.ops.aten.mm.default]
    shapes = [tuple(node.meta["val"].shape) for node in products]
    logits = [
        node for node, shape in zip(products, shapes, strict=True) if shape == (N // chunks, V)
    ]
    d_weights = [node for node, shape in zip(products, shapes, strict=True) if shape == (V, C)]
    assert len(logits) == len(d_weights) == chunks
    assert all(is_before(*pair) for pair in zip(d_weights, logits[1:], strict=False))
