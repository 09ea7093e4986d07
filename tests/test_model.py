from itertools import pairwise

import pytest
import torch
from conftest import randomize_weights
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

from model import GPT, GPT2_SIZES, IGNORE_INDEX, GPTConfig, causal_attention
from ops import KVCache

pytestmark = pytest.mark.gpt2

CPU = torch.device("cpu")
STAND_INS = {  # each size's layers to heads to head size in small, and an odd vocabulary
    "gpt2": {"n_layer": 3, "n_head": 3, "n_embd": 48},
    "gpt2-xl": {"n_layer": 12, "n_head": 25, "n_embd": 100},
}
BLOCK_SIZE, VOCAB_SIZE = 16, 193
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
PARAMETERS = {  # 50304 rows of embedding
    "gpt2": 124_475_904,
    "gpt2-medium": 354_871_296,
    "gpt2-large": 774_090_240,
    "gpt2-xl": 1_557_686_400,
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1337)


def tiny(**dimensions):
    settings = {"block_size": BLOCK_SIZE, "vocab_size": VOCAB_SIZE, **STAND_INS["gpt2"]}
    return GPT(GPTConfig(**(settings | dimensions)))


def hugging_face_twin(model):
    """A transformers GPT-2 with the same weights: matrices transposed, no padding rows."""
    config = model.config
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.block_size,
            n_embd=config.n_embd,
            n_layer=config.n_layer,
            n_head=config.n_head,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    weights = {}
    for name, value in model.state_dict().items():
        if name.endswith(TRANSPOSED):
            value = value.T
        elif name in ("transformer.wte.weight", "lm_head.weight"):
            value = value[: config.vocab_size]
        weights[name] = value.clone()
    theirs.load_state_dict(weights)
    return theirs.eval()


def random_ids(*shape):
    return torch.randint(VOCAB_SIZE, shape)


@pytest.mark.parametrize("size", STAND_INS)
def test_gpt_logits_loss_and_every_gradient_equal_hugging_face(size):
    model = randomize_weights(tiny(**STAND_INS[size]))
    theirs = hugging_face_twin(model)
    for length in range(1, BLOCK_SIZE + 1):
        idx = random_ids(2, length)
        with torch.no_grad():
            ours, expected = model(idx).logits, theirs(idx).logits
        assert ours.shape == (2, length, VOCAB_SIZE)
        assert (ours - expected).abs().max() <= 1e-4
    assert expected.std() > 0.5  # logits near zero would agree whatever the model

    tokens = random_ids(3, BLOCK_SIZE + 1)
    idx, targets = tokens[:, :-1], tokens[:, 1:]
    loss = model(idx, targets).loss
    loss.backward()
    expected = F.cross_entropy(theirs(idx).logits.flatten(0, 1), targets.flatten())
    expected.backward()
    assert abs(loss.item() - expected.item()) <= 1e-4
    gradients = dict(theirs.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = gradients[name].grad
        ours = parameter.grad.T if name.endswith(TRANSPOSED) else parameter.grad
        assert (ours[: len(gradient)] - gradient).abs().max() <= 1e-4, name
        assert gradient.abs().max() > 0, name
        assert torch.all(ours[len(gradient) :] == 0), name  # the padding of the vocabulary


@pytest.mark.parametrize("size", GPT2_SIZES)
def test_gpt_has_the_published_number_of_parameters_and_one_embedding(size):
    config = GPTConfig(**GPT2_SIZES[size])
    with torch.device("meta"):
        model = GPT(config)

    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[size]
    assert config.n_params == PARAMETERS[size]
    assert model.lm_head.weight is model.transformer.wte.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_gpt_initialisation_is_gpt2s():
    model = tiny(n_layer=8, n_head=4, n_embd=128, block_size=256)

    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert torch.all(parameter == 0), name
        elif ".ln_" in name:
            assert torch.all(parameter == 1), name
        else:
            std = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02  # 4 = sqrt(2 * 8 layers)
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(parameter.mean().item()) < std / 20, name


def test_gpt_later_tokens_do_not_change_earlier_logits():
    model = randomize_weights(tiny())
    idx, position = random_ids(1, BLOCK_SIZE), 7
    changed = idx.clone()
    changed[0, position] = (changed[0, position] + 1) % VOCAB_SIZE

    with torch.no_grad():
        before, after = model(idx).logits[0], model(changed).logits[0]

    assert torch.equal(before[:position], after[:position])
    assert (before[position:] - after[position:]).abs().amax(dim=1).min() > 1e-3


@pytest.mark.parametrize(
    "ends",  # of the pieces that pass through the model
    [[*range(5, BLOCK_SIZE + 1)], [5, 6, 9, BLOCK_SIZE]],
    ids=["a prompt, then one by one", "several at a time"],
)
def test_gpt_with_cache_equals_without(ends):
    model = randomize_weights(tiny())
    idx = random_ids(3, BLOCK_SIZE)
    cache = KVCache(
        model.config, batch_size=3, n_tokens=BLOCK_SIZE, device=CPU, dtype=torch.float32
    )

    with torch.no_grad():
        expected = model(idx).logits
        pieces = [
            model(idx[:, start:end], cache=cache).logits for start, end in pairwise([0, *ends])
        ]

    assert cache.length == BLOCK_SIZE
    assert (torch.cat(pieces, dim=1) - expected).abs().max() <= 1e-5


class OnMPS(torch.Tensor):
    device = torch.device("mps")


class Layouts(TorchDispatchMode):
    """Notes whether queries, keys and values of attention are contiguous."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "attention" in str(function):
            self.seen.append([x.is_contiguous() for x in args[:3]])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("T", "S"), [(1, 5), (5, 5)])
def test_attention_copies_queries_keys_and_values_on_mps_only(T, S):
    stacked = [torch.rand(2, n, 96).split(32, dim=2)[0] for n in (T, S, S)]  # as c_attn has them
    q, k, v = (x.view(2, -1, 4, 8).transpose(1, 2) for x in stacked)
    with torch.no_grad(), Layouts() as layouts:
        expected = causal_attention(q, k, v)
        found = causal_attention(*(x.as_subclass(OnMPS) for x in (q, k, v)))
    assert layouts.seen == [[False] * 3, [True] * 3]
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected)


def test_residual_stream_is_bfloat16_under_its_autocast_only():
    model, seen = tiny(), []
    for block in model.transformer.h:
        block.register_forward_hook(lambda _, inputs, x: seen.extend((inputs[0].dtype, x.dtype)))
    idx = torch.zeros(1, 8, dtype=torch.int64)
    model(idx)
    with torch.autocast("cpu", torch.float16):
        model(idx)
    assert {*seen} == {torch.float32}
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        model(idx)
        assert {*seen} == {torch.bfloat16}
        torch.compile(model, backend="eager", fullgraph=True)(
            idx, idx
        )  # the choice breaks no graph
    assert model.to("meta")(idx.to("meta")).logits.is_meta


def test_gpt_loss_is_float32_with_bfloat16_autocast_or_weights():
    model = tiny()
    tokens = random_ids(2, BLOCK_SIZE + 1)
    idx, targets = tokens[:, :-1], tokens[:, 1:]

    with torch.autocast("cpu", torch.bfloat16):
        assert model(idx, targets).loss.dtype == torch.float32
    assert model.bfloat16()(idx, targets).loss.dtype == torch.float32


@pytest.mark.parametrize("chunks", [5, 32])
def test_gpt_chunked_loss_and_every_gradient_equal_the_plain_ones(chunks):
    model = randomize_weights(tiny())
    tokens = random_ids(2, BLOCK_SIZE + 1)
    idx, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[:, ::3] = IGNORE_INDEX
    targets[0] = IGNORE_INDEX  # of some chunks, no target counts
    plain = model(idx, targets).loss
    (3 * plain).backward()  # a loss that is scaled, as accumulation and float16 do
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()

    model.loss_chunks = chunks
    loss = model(idx, targets).loss
    (3 * loss).backward()

    assert loss.item() == pytest.approx(plain.item(), abs=1e-6)
    counted = targets != IGNORE_INDEX
    log_probs = model(idx).logits.log_softmax(dim=-1)[counted]
    by_hand = -log_probs.gather(1, targets[counted][:, None]).mean()
    assert loss.item() == pytest.approx(by_hand.item(), abs=1e-5)
    for name, parameter in model.named_parameters():
        assert (parameter.grad - expected[name]).abs().max() <= 1e-6, name
    assert torch.all(model.lm_head.weight.grad[VOCAB_SIZE:] == 0)  # padding
    with torch.no_grad():
        assert model(idx, targets).loss.item() == pytest.approx(plain.item(), abs=1e-6)
        assert model(idx, torch.full_like(idx, IGNORE_INDEX)).loss.isnan()


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1), (torch.float16, 2**16)])
def test_gpt_chunked_gradients_in_16_bits_are_as_close_to_float32_as_the_plain_ones(dtype, scale):
    model = randomize_weights(tiny())
    tokens = random_ids(2, BLOCK_SIZE + 1)
    gradients = {}
    for name, chunks, product_dtype in (
        ("float32", 1, torch.float32),
        ("plain", 1, dtype),
        ("chunked", 4, dtype),
    ):
        model.zero_grad()
        model.loss_chunks = chunks
        with torch.autocast("cpu", product_dtype, enabled=product_dtype != torch.float32):
            loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        (loss * scale).backward()  # as the loss scaler of float16 does
        gradients[name] = torch.cat([p.grad.flatten() for p in model.parameters()]) / scale

    plain, chunked = (
        (gradients[name] - gradients["float32"]).norm() for name in ("plain", "chunked")
    )
    assert 0 < chunked <= 1.1 * plain


@pytest.mark.parametrize(
    ("dimensions", "message"),
    [
        ({"n_layer": -1}, "n_layer must be an integer of at least 1, not -1"),
        ({"n_embd": 100}, "n_embd 100 must be a multiple of n_head 12"),
    ],
)
def test_config_refuses_dimensions_that_cannot_be_and_names_a_width_that_would_do(
    dimensions, message
):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**dimensions)
