import pytest
import torch
from torch.nn import functional as F

from ops import QUERY_BLOCKS, BlockCausalAttention


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1337)


@pytest.mark.parametrize("length", [QUERY_BLOCKS, 16, 48])
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
