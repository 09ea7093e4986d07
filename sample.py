"""Text from a trained model: `python sample.py --model runs/NAME --prompt "Once upon a time"`."""

if __name__ == "__main__":
    from runtime.startup import prepare_process

    prepare_process()  # the imports below take seconds

import math
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from model import GPT, KVCache
from runtime.checkpoint import load_model
from runtime.cli import parse_flags, run_command
from runtime.device import (
    DeviceName,
    DtypeName,
    attention_of_any_shape,
    autocast,
    lm_head_precision,
    select_device,
    select_dtype,
)
from tokenizer import END_OF_TEXT, gpt2_encoding


@dataclass(frozen=True)
class SampleConfig:
    """Continue a text with a model."""

    model: str = "gpt2"
    """A run folder, a checkpoint, a folder in Hugging Face's format, or a GPT-2 on the hub."""
    prompt: str = ""
    """The text to continue; without one, the model starts a document."""
    num_samples: int = 4
    """Number of continuations."""
    max_new_tokens: int = 100
    """The most tokens to add; a sample that ends its document stops earlier."""
    temperature: float = 1.0
    """Divides the logits: below 1 favours likely tokens, above 1 unlikely ones; 0 always takes the
    most likely token."""
    top_k: int = 50
    """Sample from this many most likely tokens only; 0 = from all."""
    top_p: float = 1.0
    """Sample from the most likely tokens that have this probability together; 1 = from all."""
    seed: int = 1337
    """The same seed gives the same samples on the same machine."""
    device: DeviceName = "auto"
    """Device to run on."""
    dtype: DtypeName = "auto"
    """Dtype of the matrix products; auto is bfloat16 where the hardware has it."""

    def __post_init__(self) -> None:
        least = {"num_samples": 1, "max_new_tokens": 1, "top_k": 0, "seed": 0}
        problems = [
            f"--{name.replace('_', '-')} must be at least {least[name]}, not {getattr(self, name)}"
            for name in least
            if getattr(self, name) < least[name]
        ]
        if not 0 <= self.temperature < math.inf:
            problems.append(f"--temperature must be 0 or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            problems.append(f"--top-p must be above 0 and at most 1, not {self.top_p}")
        if self.seed >= 2**63:
            problems.append(f"--seed {self.seed} is not below 2**63")
        if problems:
            raise ValueError("; ".join(problems))


def main() -> None:
    """Print samples from a model."""
    config = parse_flags(SampleConfig)
    device = select_device(config.device)
    model = load_model(config.model, device)
    prompt = gpt2_encoding().encode_ordinary(config.prompt) or [END_OF_TEXT]
    samples = generate(
        model,
        torch.tensor([prompt] * config.num_samples, device=device),
        config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        generator=torch.Generator(device).manual_seed(config.seed),
        dtype=select_dtype(config.dtype, device),
    )
    for number, tokens in enumerate(samples, start=1):
        print(f"--- sample {number} of {len(samples)} ---\n{decode(tokens)}\n")


@overload
def generate(model: GPT, prompt: str, *args: Any, **options: Any) -> str: ...  # noqa: ANN401
@overload
def generate(model: GPT, prompt: Tensor, *args: Any, **options: Any) -> list[list[int]]: ...  # noqa: ANN401
@torch.no_grad()
def generate(
    model: GPT,
    prompt: str | Tensor,
    max_new_tokens: int = 100,
    *,
    temperature: float = 1.0,
    top_k: int = 50,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
    dtype: torch.dtype = torch.float32,
    stop_token: int | None = END_OF_TEXT,
) -> str | list[list[int]]:
    """Continue a text, or each row of a batch of tokens, one token at a time.

    Past `block_size` tokens the model sees a window that slides by half a block at a time, so
    that the cache is refilled once per half block and not at every token.

    Args:
        model: the raw model, neither compiled nor wrapped.
        prompt: a text, in which "" starts a document; or (B, T) int64 token ids, T >= 1, on the
            model's device.
        max_new_tokens: the most tokens to add to each row.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: sample from this many most likely tokens only; 0 = from all.
        top_p: sample from the smallest set of most likely tokens with this probability (Holtzman
            et al. 2020, section 3.1), after `top_k`; 1 = from all.
        generator: source of randomness, on the model's device; by default torch's global one.
        use_cache: keep keys and values: the same result in less time.
        dtype: of the matrix products, except the LM head's, which are float32.
        stop_token: a row ends before the first such token that it samples; None = never.

    Returns:
        For a text, the text with its continuation. For tokens, B lists of ids, each the prompt
        and its continuation; a list shorter than T + max_new_tokens has ended.
    """
    if isinstance(prompt, str):
        ids = gpt2_encoding().encode_ordinary(prompt) or [END_OF_TEXT]
        tokens = torch.tensor([ids], device=next(model.parameters()).device)
    else:
        tokens = prompt
    B, T = tokens.shape
    if T == 0:
        raise ValueError("the prompt has no token: begin with <|endoftext|>, token 50256")
    start, device = 0, tokens.device
    n_cached = min(T + max_new_tokens, model.config.block_size)
    cache = KVCache(model.config, B, n_cached, device, dtype) if use_cache else None
    ended = torch.zeros(B, dtype=torch.bool, device=device)
    # One autocast for all tokens casts the weights once.
    with lm_head_precision(dtype), autocast(device, dtype), attention_of_any_shape():
        for _ in range(max_new_tokens):
            previous_start = start
            start = window_start(tokens.size(1), model.config.block_size)
            if cache is not None and start != previous_start:
                cache.length = 0  # every position has changed
            logits = next_token_logits(model, tokens[:, start:], cache)
            next_token = sample_token(logits, temperature, top_k, top_p, generator)
            tokens = torch.cat([tokens, next_token[:, None]], dim=1)
            ended |= next_token == stop_token
            if ended.all():
                break
    rows = []
    for row in tokens.tolist():
        end = row.index(stop_token, T) if stop_token in row[T:] else len(row)
        rows.append(row[:end])
    return decode(rows[0]) if isinstance(prompt, str) else rows


def window_start(n_tokens: int, block_size: int) -> int:
    """The smallest multiple of half a block that leaves at most `block_size` of the tokens."""
    stride = max(1, block_size // 2)
    return -(-max(0, n_tokens - block_size) // stride) * stride


def next_token_logits(model: GPT, window: Tensor, cache: KVCache | None) -> Tensor:
    """Logits of the token after each row of a (B, T) window, T <= block_size.

    Only the tokens whose keys and values are not in the cache yet are computed.

    Returns:
        (B, vocab_size) float32, without the padding ids.
    """
    known = 0 if cache is None else cache.length
    hidden = model.encode(window[:, known:], cache=cache)[:, -1]  # (B, C)
    with torch.autocast(window.device.type, enabled=False):  # near-equal logits tie in bfloat16
        return model.logits(hidden.float())


def sample_token(
    logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None
) -> Tensor:
    """Sample one token for each row of (B, V) float32 logits; see `generate`. Returns (B,)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    vocab_size = logits.size(-1)
    top_logits, ids = logits.topk(min(top_k or vocab_size, vocab_size))  # most likely first
    # Softmax sees differences only; with the largest logit at 0, no temperature overflows.
    probs = torch.softmax((top_logits - top_logits[:, :1]) / temperature, dim=-1)
    if top_p < 1:
        more_likely = probs.cumsum(dim=-1) - probs  # probability of all tokens before each one
        probs = probs.masked_fill(more_likely >= top_p, 0.0)
    choice = torch.multinomial(probs, 1, generator=generator)
    return ids.gather(-1, choice).squeeze(-1)


def decode(tokens: list[int]) -> str:
    """Tokens as text, without `<|endoftext|>`; bytes that are not UTF-8 become U+FFFD."""
    return gpt2_encoding().decode([t for t in tokens if t != END_OF_TEXT], errors="replace")


if __name__ == "__main__":
    run_command(main)
