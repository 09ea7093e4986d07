"""Text from a trained model: `python sample.py --model runs/NAME --prompt "Once upon a time"`."""

if __name__ == "__main__":
    from runtime.startup import prepare_process

    prepare_process()  # the imports below take seconds

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from model import GPT, KVCache
from runtime.checkpoint import load_model
from runtime.cli import parse_flags, run_command
from runtime.device import (
    DeviceName,
    DtypeName,
    autocast,
    lm_head_precision,
    select_device,
    select_dtype,
)
from tokenizer import END_OF_TEXT, gpt2_encoding


@dataclass(frozen=True)
class SampleConfig:
    """The flags of `sample.py`."""

    model: str = "gpt2"
    """A run folder, a checkpoint, a folder in Hugging Face's format, or a GPT-2 on the hub."""
    prompt: str = ""
    """The text to continue; without one, the model starts a document."""
    num_samples: int = 4
    """Continuations to draw."""
    max_new_tokens: int = 100
    """The most tokens to add; a sample that ends its document stops earlier."""
    temperature: float = 1.0
    """Below 1 plays safe, above 1 takes risks; 0 always takes the likeliest token."""
    top_k: int = 50
    """Draw from this many likeliest tokens only; 0 = from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that make up this probability only; 1 = from all."""
    seed: int = 1337
    """The same seed gives the same samples on the same machine."""
    device: DeviceName = "auto"
    """Where to run."""
    dtype: DtypeName = "auto"
    """The type of the matrix products; auto is the fastest that the device is good at."""

    def __post_init__(self) -> None:
        problems = [
            f"--{name.replace('_', '-')} must be at least {least}, not {getattr(self, name)}"
            for name, least in (
                ("num_samples", 1),
                ("max_new_tokens", 1),
                ("top_k", 0),
                ("seed", 0),
            )
            if getattr(self, name) < least
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
    print_samples(samples)


@torch.no_grad()
def generate(
    model: GPT,
    idx: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 50,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
    dtype: torch.dtype = torch.float32,
    stop_token: int | None = END_OF_TEXT,
) -> list[list[int]]:
    """Continue each row of `idx`, one token at a time.

    Past `block_size` tokens the model sees a window that slides by half a block at a time, so
    that the cache is refilled once in half a block rather than at every token.

    Args:
        model: the raw model, neither compiled nor wrapped.
        idx: (B, T) int64 prompts, T >= 1, on the model's device.
        max_new_tokens: the most tokens to add to each row.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from this many likeliest tokens only; 0 = from all.
        top_p: draw from the smallest set of likeliest tokens with this probability (Holtzman et
            al. 2020, section 3.1), after `top_k`; 1 = from all.
        generator: where the randomness comes from, on the model's device; by default the global
            one.
        use_cache: keep keys and values instead of computing them anew for each token. The
            result is the same, the time is not.
        dtype: the type of the matrix products, the vocabulary's excepted, which is float32.
        stop_token: a row ends before the first such token that it draws; None = never.

    Returns:
        B lists of token ids: the prompt and its continuation. One that is shorter than
        T + max_new_tokens has ended.
    """
    B, T = idx.shape
    assert T >= 1, "a prompt needs a token to start from"
    cache = KVCache(model.config, B, idx.device, dtype) if use_cache else None
    tokens, start = idx, 0
    ended = torch.zeros(B, dtype=torch.bool, device=idx.device)
    # One for all tokens: the weights are cast once.
    with lm_head_precision(dtype), autocast(idx.device, dtype):
        for _ in range(max_new_tokens):
            previous_start = start
            start = window_start(tokens.size(1), model.config.block_size)
            if cache is not None and start != previous_start:
                cache.length = 0  # every position has changed
            logits = next_token_logits(model, tokens[:, start:], cache)
            next_token = draw_token(logits, temperature, top_k, top_p, generator)
            tokens = torch.cat([tokens, next_token[:, None]], dim=1)
            ended |= next_token == stop_token
            if ended.all():
                break
    return [_until_stop(row, T, stop_token) for row in tokens.tolist()]


def window_start(n_tokens: int, block_size: int) -> int:
    """Where the model's view of a sequence begins.

    Returns:
        The smallest multiple of half a block that leaves at most `block_size` tokens.
    """
    stride = max(1, block_size // 2)
    return -(-max(0, n_tokens - block_size) // stride) * stride


def next_token_logits(model: GPT, window: Tensor, cache: KVCache | None) -> Tensor:
    """Logits of the token after each row.

    Args:
        model: the model.
        window: (B, T) int64, T <= block_size.
        cache: holds the window's first tokens, or none; all are in it afterwards.

    Returns:
        (B, vocab_size) float32: no padding id is among them.
    """
    known = 0 if cache is None else cache.length
    hidden = model.encode(window[:, known:], cache=cache)[:, -1]  # (B, C)
    with torch.autocast(window.device.type, enabled=False):  # near-equal logits tie in bfloat16
        return model.logits(hidden.float())


def draw_token(
    logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None
) -> Tensor:
    """Choose one token for each row of (B, V) float32 logits; see `generate`. Returns (B,)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    vocab_size = logits.size(-1)
    top_logits, ids = logits.topk(min(top_k or vocab_size, vocab_size))  # likeliest first
    # Only differences count; the largest is made 0 so that no temperature overflows.
    probs = torch.softmax((top_logits - top_logits[:, :1]) / temperature, dim=-1)
    if top_p < 1:
        likelier = probs.cumsum(dim=-1) - probs  # of the tokens before each one
        probs = probs.masked_fill(likelier >= top_p, 0.0)
    choice = torch.multinomial(probs, 1, generator=generator)
    return ids.gather(-1, choice).squeeze(-1)


def _until_stop(tokens: list[int], prompt_length: int, stop_token: int | None) -> list[int]:
    """Cut a row before the first stop token that follows its prompt."""
    continuation = tokens[prompt_length:]
    if stop_token in continuation:
        return tokens[: prompt_length + continuation.index(stop_token)]
    return tokens


def print_samples(samples: list[list[int]]) -> None:
    """Print token lists as text, each under a heading."""
    encoding = gpt2_encoding()
    for number, tokens in enumerate(samples, start=1):
        text = encoding.decode([t for t in tokens if t != END_OF_TEXT], errors="replace")
        print(f"--- sample {number} of {len(samples)} ---\n{text}\n")


if __name__ == "__main__":
    run_command(main)
