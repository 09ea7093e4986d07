import pytest
import torch
from conftest import needs_compiler
from torch.nn import functional as F

import cpu_attention
from cpu_attention import QUERY_BLOCKS, BlockCausalAttention, scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1337)


@pytest.mark.parametrize("length", [QUERY_BLOCKS, 48])
def test_block_causal_attention_equals_torchs_in_output_and_gradients(length):
    q, k, v = (torch.randn(6, length, 8, requires_grad=True) for _ in range(3))
    d_output = torch.randn(6, length, 8)

    ours = BlockCausalAttention.apply(q * 8**-0.5, k, v)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    assert (ours - theirs).abs().max() <= 1e-5
    for gradient, expected in zip(
        torch.autograd.grad(ours, (q, k, v), d_output),
        torch.autograd.grad(theirs, (q, k, v), d_output),
        strict=True,
    ):
        assert (gradient - expected).abs().max() <= 1e-5


def test_block_causal_attention_in_bfloat16_errs_at_most_twice_as_much_as_torchs():
    exact = [torch.randn(6, 256, 64, requires_grad=True) for _ in range(3)]
    rounded = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
    d_output = torch.randn(6, 256, 64)

    def error(output, inputs):
        gradients = torch.autograd.grad(output, inputs, d_output.to(output.dtype))
        found = torch.cat([tensor.float().flatten() for tensor in (output, *gradients)])
        return (found - expected).norm() / expected.norm()

    reference = F.scaled_dot_product_attention(*exact, is_causal=True)
    gradients = torch.autograd.grad(reference, exact, d_output)
    expected = torch.cat([tensor.flatten() for tensor in (reference, *gradients)]).detach()
    q, k, v = rounded
    ours = error(BlockCausalAttention.apply(q * 64**-0.5, k, v), rounded)
    theirs = error(F.scaled_dot_product_attention(q, k, v, is_causal=True), rounded)

    assert ours <= 2 * theirs  # it rounds the scores, which torch's keeps in float32


WINDOW = torch.ones(8, 8, dtype=torch.bool).tril().triu(-2)


@needs_compiler
@pytest.mark.parametrize(
    ("kv_heads", "n_keys", "arguments", "is_fast"),
    [
        (4, 8, {"is_causal": True}, True),
        (4, 8, {}, False),
        (4, 8, {"attn_mask": WINDOW}, False),
        (4, 8, {"attn_mask": WINDOW, "is_causal": True}, False),
        (4, 8, {"is_causal": True, "scale": 0.5}, False),
        (2, 8, {"is_causal": True, "enable_gqa": True}, False),
        (4, 12, {"is_causal": True}, False),
    ],
)
def test_scaled_dot_product_attention_compiled_equals_torchs_with_any_arguments(
    monkeypatch, kv_heads, n_keys, arguments, is_fast
):
    calls = []  # while the function is traced, its Python runs
    monkeypatch.setattr(
        cpu_attention,
        "query_blocks",
        lambda T, f=cpu_attention.query_blocks: calls.append(T) or f(T),
    )
    q = torch.randn(2, 4, 8, 16)
    k, v = torch.randn(2, 2, kv_heads, n_keys, 16)
    torch._dynamo.reset()
    compiled = torch.compile(scaled_dot_product_attention, backend="eager", fullgraph=True)
    found = compiled(q, k, v, **arguments)
    expected = F.scaled_dot_product_attention(q, k, v, **arguments)
    assert (found - expected).abs().max() <= 1e-6
    assert bool(calls) == is_fast
