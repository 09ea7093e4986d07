from copy import deepcopy

import pytest
import torch
import torch._inductor.config as inductor_config
from conftest import needs_compiler
from torch._dynamo.utils import counters
from torch.nn import functional as F

import ops
from model import GPT, GPTConfig, Loss
from ops import (
    QUERY_BLOCKS,
    BlockAttention,
    checkpoint_activations,
    mean_in_chunks,
    scaled_dot_product_attention,
    select_attention,
)
from runtime.distributed import DistInfo
from train_gpt2 import compile_by_block
from training.config import TrainConfig
from training.memory import Device
from training.run import choose_attention


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


@pytest.mark.parametrize("length", [QUERY_BLOCKS, 48])
def test_block_attention_equals_torchs_in_output_and_gradients(length):
    q, k, v = (torch.randn(6, length, 8, requires_grad=True) for _ in range(3))
    d_output = torch.randn(6, length, 8)
    ours = BlockAttention.apply(q, k, v)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (ours - theirs).abs().max() <= 1e-5
    for gradient, expected in zip(
        torch.autograd.grad(ours, (q, k, v), d_output),
        torch.autograd.grad(theirs, (q, k, v), d_output),
        strict=True,
    ):
        assert (gradient - expected).abs().max() <= 1e-5


@pytest.mark.slow
@needs_compiler
def test_block_attention_compiled_in_bfloat16_errs_at_most_1_5_times_as_much_as_torchs(monkeypatch):
    monkeypatch.setattr(ops, "cpu_attention", "blocks")
    exact = [torch.randn(2, 3, 256, 64, requires_grad=True) for _ in range(3)]
    rounded = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
    d_output = torch.randn(2, 3, 256, 64)

    def results(attend, inputs):
        output = attend(*inputs, is_causal=True)
        return output, *torch.autograd.grad(output, inputs, d_output.to(output.dtype))

    expected = results(F.scaled_dot_product_attention, exact)
    theirs = results(F.scaled_dot_product_attention, rounded)
    torch._dynamo.reset()
    ours = results(torch.compile(scaled_dot_product_attention, fullgraph=True), rounded)
    assert torch.equal(ours[0], theirs[0])  # the same forward pass
    for found, other, value in zip(ours, theirs, expected, strict=True):
        assert (found - value).norm() <= 1.5 * (other - value).norm() <= 0.01 * value.norm()


WINDOW = torch.ones(8, 8, dtype=torch.bool).tril().triu(-2)


@needs_compiler
@pytest.mark.parametrize(
    ("kv_heads", "n_keys", "arguments", "dtype", "is_fast"),
    [
        (4, 8, {"is_causal": True}, torch.bfloat16, True),
        (4, 8, {"is_causal": True}, torch.float32, False),
        (4, 8, {}, torch.bfloat16, False),
        (4, 8, {"attn_mask": WINDOW}, torch.bfloat16, False),
        (4, 8, {"is_causal": True, "scale": 0.5}, torch.bfloat16, False),
        (2, 8, {"is_causal": True, "enable_gqa": True}, torch.bfloat16, False),
        (4, 12, {"is_causal": True}, torch.bfloat16, False),
    ],
)
def test_block_attention_equals_torchs_with_any_arguments(
    monkeypatch, kv_heads, n_keys, arguments, dtype, is_fast
):
    monkeypatch.setattr(ops, "cpu_attention", "blocks")
    graphs = []
    q = torch.randn(2, 4, 8, 16, dtype=dtype)
    k, v = torch.randn(2, 2, kv_heads, n_keys, 16, dtype=dtype)
    torch._dynamo.reset()
    compiled = torch.compile(
        scaled_dot_product_attention,
        backend=lambda graph, inputs: graphs.append(graph.code) or graph.forward,
        fullgraph=True,
    )
    expected = F.scaled_dot_product_attention(q, k, v, **arguments)
    assert torch.equal(scaled_dot_product_attention(q, k, v, **arguments), expected)
    assert torch.equal(compiled(q, k, v, **arguments), expected)
    assert ("_flash_attention_for_cpu" in graphs[0]) == is_fast


EPYC = {"cpu_name": "AMD EPYC", "avx512_bf16": True, "avx512_vp2intersect": True}


@pytest.mark.parametrize(
    ("device", "cpu", "dtype", "block_size", "expected"),
    [
        ("cpu", EPYC, torch.bfloat16, 1024, "blocks"),
        ("cpu", EPYC, torch.bfloat16, 256, "torch"),  # as in recipes/demo.json
        ("cpu", EPYC, torch.bfloat16, 4096, "torch"),
        ("cpu", EPYC, torch.float32, 1024, "torch"),
        ("cuda", EPYC, torch.bfloat16, 1024, "torch"),
        ("cpu", EPYC | {"avx512_vp2intersect": False}, torch.bfloat16, 1024, "torch"),  # a Zen 4
        ("cpu", EPYC | {"cpu_name": "Intel Xeon"}, torch.bfloat16, 1024, "torch"),
        ("cpu", {}, torch.bfloat16, 1024, "torch"),
    ],
)
def test_select_attention_depends_on_flags_dtype_and_length(
    device, cpu, dtype, block_size, expected
):
    assert select_attention(device, cpu, dtype, block_size) == expected


def test_choose_attention_follows_the_setting_and_saves_what_auto_chose(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: EPYC)
    monkeypatch.setattr(ops, "cpu_attention", "torch")
    device = Device("AMD EPYC", None, torch.bfloat16, DistInfo())
    chosen = choose_attention(TrainConfig(), device)
    assert chosen.saved()["cpu_attention"] == "blocks"
    assert ops.cpu_attention == "blocks"
    chosen = choose_attention(TrainConfig(cpu_attention="torch"), device)
    assert chosen.saved()["cpu_attention"] == "torch"
    assert ops.cpu_attention == "torch"
