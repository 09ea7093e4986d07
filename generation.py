"""Compute with a model: sample tokens, and measure the losses of given tokens."""

import functools
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from model import GPT, IGNORE_INDEX
from ops import KVCache
from runtime.cli import check_settings, print_error
from runtime.device import to_device
from runtime.distributed import is_main
from runtime.errors import UserError
from runtime.precision import inference
from tokenizer import END_OF_TEXT, gpt2_encoding

MAX_COMPARED_TOKENS = 4096  # by `cache_agrees`: attention over 100,000 takes minutes on a CPU
SCORED_TOKENS = 2048  # per forward pass; with more, a CPU is not faster
# Largest relative difference between hidden states with and without the cache.
CACHE_TOLERANCE = {torch.float32: 1e-2, torch.float16: 2e-2, torch.bfloat16: 7e-2}
Row = tuple[list[int], list[int]]  # token ids of a context and of its ending
print_once = functools.cache(print_error)


@torch.no_grad()
def generate_tokens(
    model: GPT,
    tokens: Tensor,
    max_new_tokens: int = 100,
    *,
    temperature: float = 1.0,
    top_k: int = 50,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
    dtype: torch.dtype = torch.float32,
    stop_token: int | None = END_OF_TEXT,
    stop: Sequence[str] = (),
    on_token: Callable[[Tensor, Tensor], None] | None = None,
) -> list[list[int]]:
    """Continue each row of (B, T) tokens, T >= 1; return the rows, each with its continuation.

    Beyond `block_size` tokens, the model sees a window that moves by half a block at a time, so the
    cache of keys and values is refilled once per half block, not for every token. The cache is not
    used if `cache_agrees` returns False.

    `model` is the raw model, neither compiled nor wrapped, on the same device as `tokens` and
    `generator`. A row ends before the first sampled `stop_token`; with None, it never ends early.
    No token is sampled once every row has ended or its continuation has a text of `stop`.
    `on_token` is called with the next token of every row, (B,), once it is sampled, and with its
    logits, (B, V) float32.
    """
    numbers = SimpleNamespace(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p
    )
    check_settings(numbers, ("max_new_tokens", "top_p"), at_most_1=("top_p",))
    B, T = tokens.shape
    start, device, block_size = 0, tokens.device, model.config.block_size
    cache = None
    ended = torch.zeros(B, dtype=torch.bool, device=device)
    # With a single autocast for all tokens, the weights are cast only once.
    with inference(model, device, dtype):
        n_tokens = min(T + max_new_tokens, block_size)
        if use_cache and cache_agrees(weakref.ref(model), n_tokens.bit_length(), device, dtype):
            cache = KVCache(model.config, B, n_tokens, device, dtype)
        for _ in range(max_new_tokens):
            while tokens.size(1) - start > block_size:
                start += max(1, block_size // 2)
                if cache is not None:
                    cache.length = 0  # all positions have changed
            # Only tokens whose keys and values are not in the cache yet pass through the model.
            n_cached = 0 if cache is None else cache.length
            hidden = model.hidden_states(tokens[:, start + n_cached :], cache)[:, -1]  # (B, C)
            logits = model.logits(hidden)  # (B, vocab_size)
            next_token = sample_token(logits, temperature, top_k, top_p, generator)
            tokens = torch.cat([tokens, next_token[:, None]], dim=1)
            ended |= next_token == stop_token
            for row in range(B if stop else 0):
                text = gpt2_encoding().decode(tokens[row, T:].tolist())
                ended[row] |= any(each in text for each in stop)
            if ended.all():
                break
            if on_token is not None:
                on_token(next_token, logits)
    rows = tokens.tolist()
    return [row[: row.index(stop_token, T)] if stop_token in row[T:] else row for row in rows]


@functools.lru_cache
def cache_agrees(
    model_ref: "weakref.ref[GPT]", n_bits: int, device: torch.device, dtype: torch.dtype
) -> bool:
    """Return whether a token's hidden state is the same with and without the cache.

    It is not if the model mixes neighboring tokens outside attention, because the cache has only
    keys and values of earlier tokens, or if attention depends on the distance of tokens in training
    only. Every rank must call this, under `inference`.

    The results are cached, because they depend on the model's code. After training, call
    `cache_agrees.cache_clear`: a part whose weights were 0 may make a difference.

    Args:
        model_ref: reference that does not keep the model in memory.
        n_bits: the comparison is for samples of less than 2**n_bits tokens, prompt included.
        device: the model's device.
        dtype: the autocast dtype, else float32.
    """
    model = model_ref()
    assert model is not None
    n_tokens = min(2**n_bits, model.config.block_size, MAX_COMPARED_TOKENS)
    # A mean over many different tokens is the same at any distance, so half of a text repeats one
    # token, and the other half another.
    halves = [0] * (n_tokens // 2) + [1] * ((n_tokens - 1) // 2) + [2]
    # With a single token, the cache is always empty.
    for ids in ([*range(min(8, n_tokens))], halves) if n_tokens > 1 else ():
        idx = torch.tensor([ids], device=device) % model.config.vocab_size
        cache = KVCache(model.config, 1, len(ids), device, dtype)
        model.hidden_states(idx[:, :-1], cache)
        cached = model.hidden_states(idx[:, -1:], cache)[0, -1].float()  # (C,)
        expected = model.hidden_states(idx)[0, -1].float()
        # If the model computes NaN, the comparison is false, and the cache is not to blame.
        if (cached - expected).norm() > CACHE_TOLERANCE[dtype] * expected.norm():
            if is_main():
                print_once(
                    "warning: sampling without the cache of keys and values, which is slower: the "
                    "model computes different hidden states with it"
                )
            return False
    return True


def sample_token(
    logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None
) -> Tensor:
    """Sample one token for each row of (B, V) float32 logits: (B,).

    `top_p` (Holtzman et al. 2020, section 3.1) applies to the tokens that `top_k` keeps.
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    vocab_size = logits.size(-1)
    top_logits, ids = logits.topk(min(top_k or vocab_size, vocab_size))  # most likely first
    # Softmax depends only on differences. With the largest logit at 0, it cannot overflow.
    probs = torch.softmax((top_logits - top_logits[:, :1]) / temperature, dim=-1)
    if top_p < 1:
        more_likely = probs.cumsum(dim=-1) - probs  # total probability of all more likely tokens
        probs = probs.masked_fill(more_likely >= max(top_p, 1e-30), 0.0)
    choice = torch.multinomial(probs, 1, generator=generator)
    return ids.gather(-1, choice).squeeze(-1)


# --- losses ------------------------------------------------------------------------------------


@torch.no_grad()
def text_loss(
    model: GPT,
    text: str,
    dtype: torch.dtype = torch.float32,
    on_losses: Callable[[list[float]], None] | None = None,
    stride: int | None = None,
) -> float:
    """Return the mean cross-entropy of a text's tokens after the first, in nats per token.

    A text longer than the model's context is scored in windows of this length. Each window scores
    the `stride` tokens after the previous one, by default half of the context, so that only the
    first tokens of the text are predicted from fewer than the other half. `on_losses` is called
    with the losses of each window's tokens, in order.
    """
    ids, block_size = gpt2_encoding().encode_ordinary(text), model.config.block_size
    stride = stride or max(1, block_size // 2)
    if stride > block_size:
        raise UserError(f"--stride {stride} is above the context: use at most {block_size}")
    if len(ids) < 2:
        raise UserError(f"a loss needs a text of 2 tokens or more, but {text!r} has {len(ids)}")
    device, loss_sum = next(model.parameters()).device, 0.0
    ends = range(block_size + 1, len(ids), stride)
    later = [(ids[end + stride - 1 - block_size : end], ids[end : end + stride]) for end in ends]
    windows: list[Row] = [(ids[:1], ids[1 : block_size + 1]), *later]
    starts = range(0, len(windows), n_rows := max(1, SCORED_TOKENS // block_size))
    with inference(model, device, dtype):
        for start in tqdm(starts, "scoring", leave=False, unit="batch", disable=None):
            rows = windows[start : start + n_rows]
            losses = score_tokens(model, rows, device)
            loss_sum += float(losses.sum())
            if on_losses is not None:
                for (context, ending), by_token in zip(rows, losses.tolist(), strict=True):
                    on_losses(by_token[len(context) - 1 :][: len(ending)])
    return loss_sum / (len(ids) - 1)


@torch.no_grad()
def score_tokens(model: GPT, rows: Sequence[Row], device: torch.device) -> Tensor:
    """Return the loss of each token of the endings of B rows: (B, T) float32 on `device`.

    A loss is at the place of the input before its token; everything else is 0.
    """
    n = model.config.block_size  # only the last n inputs of a row are used
    inputs = [torch.tensor((context + ending)[-n - 1 : -1]) for context, ending in rows]
    labels = [torch.tensor(([IGNORE_INDEX] * (len(c) - 1) + ending)[-n:]) for c, ending in rows]
    idx = pad_sequence(inputs, batch_first=True)  # (B, T)
    targets = pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX).flatten()
    queries = (targets != IGNORE_INDEX).nonzero().squeeze(1)  # (N,): N tokens in all endings
    targets, queries = to_device(targets[queries], device), to_device(queries, device)

    hidden = model.hidden_states(to_device(idx, device)).flatten(0, 1)[queries]  # (N, C)
    losses = F.cross_entropy(model.logits(hidden), targets, reduction="none")  # (N,)
    by_token = losses.new_zeros(idx.numel()).index_copy(0, queries, losses)
    return by_token.view(idx.shape)
