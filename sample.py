"""Generate text with a model: `python sample.py --model runs/NAME --prompt "Once upon a time"`.

    python sample.py --model runs/NAME --interactive    # type some text, the model continues it
    python sample.py --model runs/NAME --prompt - < FILE
    python sample.py --model runs/NAME --score FILE     # the loss of a text
    python sample.py --model runs/NAME --web            # a page to play with the model

The default model is runs/' newest run. In Python, call `generate(model, text)` or `text_loss`.
"""

import codecs
import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import runtime.threads  # noqa: F401 - before torch, which reads its settings

import torch
from torch import Tensor
from tqdm import tqdm

from corpus.shards import Manifest
from corpus.sources import hash_ends
from formats.load import load_with_state, newest_run
from hellaswag import score_tokens
from model import GPT
from ops import KVCache
from runtime.cli import PathOrName, bad_numbers, parse_flags, print_error, run_command
from runtime.device import DeviceName, select_device, tune_malloc
from runtime.distributed import is_main
from runtime.errors import UserError
from runtime.precision import DtypeName, inference, select_dtype
from tokenizer import END_OF_TEXT, bits_per_byte, gpt2_encoding, prompt_ids

GREETING = """Type some text; the model continues all of the text so far.
Empty line: keep going. /new: start over. Ctrl-C: stop generating. Ctrl-D: quit."""

MAX_COMPARED_TOKENS = 4096  # by `cache_agrees`: attention over 100,000 takes minutes on a CPU
SCORED_TOKENS = 2048  # per forward pass; with more, a CPU is not faster
# Largest relative difference between hidden states with and without the cache.
CACHE_TOLERANCE = {torch.float32: 1e-2, torch.float16: 2e-2, torch.bfloat16: 7e-2}
print_once = functools.cache(print_error)


@dataclass(frozen=True)
class SampleConfig:
    """Continue a text with a model."""

    model: PathOrName | None = None
    """Model to sample from: a run, a checkpoint, a Hugging Face folder, or a GPT-2 on the hub
    (gpt2); default: the newest run in runs/."""
    prompt: str = ""
    """Text to continue, or - to read it from standard input; default: start a new document."""
    interactive: bool = False
    """Type text in the terminal, and print each continuation token by token."""
    score: Path | None = None
    """Instead of sampling, print the loss of the text in this file: nats per token, bits per byte,
    tokens."""
    web: bool = False
    """Open a page on this machine that continues and scores texts, and shows how sure the model
    is."""
    compare_to: PathOrName | None = None
    """With --web, a second model beside the first."""
    port: int = 8000
    """Port of the page."""
    browser: bool = True
    """Open the page in a browser."""
    num_samples: int = 4
    """Number of continuations per prompt."""
    max_new_tokens: int = 100
    """Maximum number of tokens to generate; a sample stops earlier if its document ends."""
    temperature: float = 1.0
    """Divide the logits by this: below 1 favors likely tokens; 0 = always the most likely one."""
    top_k: int = 50
    """Sample from only this many of the most likely tokens; 0 = from all."""
    top_p: float = 1.0
    """Sample from the most likely tokens whose probabilities add up to this; 1 = from all."""
    stop: tuple[str, ...] = ()
    """End a sample before any of these texts."""
    seed: int = 1337
    """Random seed; with the same seed, the same machine prints the same samples."""
    device: DeviceName = "auto"
    """Device to run on."""
    dtype: DtypeName = "auto"
    """Dtype for matrix multiplications; auto = bfloat16 where it is fast, float16 on older NVIDIA
    GPUs, else float32."""

    def __post_init__(self) -> None:
        problems = bad_numbers(self, ("num_samples", "max_new_tokens", "top_p", "port"))
        if self.top_p > 1:
            problems.append(f"--top-p must be at most 1, not {self.top_p}")
        if sum(map(bool, (self.interactive, self.prompt, self.score, self.web))) > 1:
            problems.append("use only one of --interactive, --prompt, --score and --web")
        if self.compare_to and not self.web:
            problems.append("--compare-to requires --web")
        if "" in self.stop:  # true for any str, and for a list with an empty text
            problems.append("--stop must be a list of texts, none of them empty")
        if problems:
            raise UserError("; ".join(problems))


def main() -> None:
    """Print samples from a model, or continue typed text interactively."""
    config = parse_flags(SampleConfig)
    tune_malloc()
    device = select_device(config.device)
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "stop")
    options: dict[str, Any] = {name: getattr(config, name) for name in names}
    options["dtype"] = select_dtype(config.dtype, device)
    prompt = config.prompt
    if prompt == "-":
        prompt = sys.stdin.buffer.read().decode(errors="replace").removesuffix("\n")
    source = config.model or newest_run()
    if config.web:
        from web import Models, serve

        sources = [source, *filter(None, [config.compare_to])]
        models = Models(sources, device, options["dtype"], generate_tokens, text_loss)
        serve(models, config.port, config.browser)
        return
    model, checkpoint = load_with_state(source, device)
    if config.score is not None:
        print(describe_loss(model, config.score, options["dtype"]))
        settings = checkpoint.state.train_config if checkpoint else {}
        dataset = Manifest.load(Path(settings.get("data_dir", "")))
        files = dataset.source.get("files", ()) if dataset and config.score.is_file() else ()
        seen = {file["sha256 of head and tail"] for file in files}  # a copy may have another name
        if seen and hash_ends(config.score) in seen:
            print_error(f"note: the model was trained on {config.score}: new texts may score worse")
        return
    if config.interactive:
        generator = torch.Generator(device).manual_seed(config.seed)
        converse(functools.partial(generate_tokens, model, generator=generator, **options), device)
        return
    texts = generate(model, prompt, num_samples=config.num_samples, seed=config.seed, **options)
    for number, text in enumerate(texts, start=1):
        print(f"--- sample {number} of {len(texts)} ---\n{text}\n")


def converse(continue_tokens: Callable[..., object], device: torch.device) -> None:
    """Read lines from the terminal; after each, continue all text so far, token by token."""
    with suppress(ImportError):  # Windows does not have it
        import readline  # noqa: F401 - importing it gives `input` its history
    tokens, decoder = list[int](), codecs.getincrementaldecoder("utf-8")("replace")

    def print_token(token: Tensor) -> None:
        """Print a character whose bytes span several tokens with the last of them."""
        tokens.append(int(token))
        text = decoder.decode(gpt2_encoding().decode_single_token_bytes(tokens[-1]))
        print(text, end="", flush=True)

    print(GREETING)
    while True:
        try:
            line = input("> ")
        except KeyboardInterrupt:  # Ctrl-C came just after the text had ended
            print()
            continue
        except EOFError:
            print()
            return
        if line:
            decoder.reset()
        if line == "/new":
            tokens.clear()
            continue
        tokens.extend(gpt2_encoding().encode_ordinary(f"\n{line}" if tokens and line else line))
        print(line, end="", flush=True)
        with suppress(KeyboardInterrupt):
            prompt = torch.tensor([tokens or [END_OF_TEXT]], device=device)
            continue_tokens(prompt, on_token=print_token)
        print()


def generate(
    model: GPT,
    prompt: str,
    max_new_tokens: int = 100,
    *,
    num_samples: int = 1,
    seed: int | None = None,
    stop: tuple[str, ...] = (),
    **options: Any,  # noqa: ANN401
) -> list[str]:
    """Continue a prompt `num_samples` times; return the texts, each including the prompt.

    An empty prompt starts a new document. With the default `seed`, None, torch's global random
    state is used. `options` are passed to `generate_tokens`: temperature, top_k, top_p, dtype, …
    """
    SampleConfig(num_samples=num_samples, stop=stop)  # raises for an invalid value
    device = next(model.parameters()).device
    ids = prompt_ids(prompt)
    tokens = torch.tensor([ids] * num_samples, device=device)
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    rows = generate_tokens(model, tokens, max_new_tokens, generator=generator, stop=stop, **options)
    texts = [gpt2_encoding().decode(row[len(ids) :]) for row in rows]
    ends = [min((text.index(s) for s in stop if s in text), default=None) for text in texts]
    return [prompt + text[:end] for text, end in zip(texts, ends, strict=True)]


def describe_loss(model: GPT, path: Path, dtype: torch.dtype) -> str:
    """Return a text file's loss in nats per token and bits per byte, and its number of tokens."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        loss = text_loss(model, text, dtype)
    except (UnicodeDecodeError, UserError) as error:
        raise UserError(f"--score {path}: {error}") from None
    if "<|endoftext|>" in text:
        print_error("note: <|endoftext|> in the text is scored as text, in seven tokens")
    ids = gpt2_encoding().encode_ordinary(text)
    bits = bits_per_byte(loss, ids)
    return f"{path}: {loss:.4f} nats per token, {bits:.4f} bits per byte, {len(ids):,} tokens"


@torch.no_grad()
def text_loss(
    model: GPT,
    text: str,
    dtype: torch.dtype = torch.float32,
    on_losses: Callable[[list[float]], None] | None = None,
) -> float:
    """Return the mean cross-entropy of a text's tokens after the first, in nats per token.

    A text longer than the model's context is split into windows, and each is scored separately.
    `on_losses` is called with the losses of each window's tokens, in order.
    """
    ids, block_size = gpt2_encoding().encode_ordinary(text), model.config.block_size
    if len(ids) < 2:
        raise UserError(f"a loss needs a text of 2 tokens or more, but {text!r} has {len(ids)}")
    device, loss_sum = next(model.parameters()).device, 0.0
    windows = [ids[i : i + block_size + 1] for i in range(0, len(ids) - 1, block_size)]
    starts = range(0, len(windows), n_rows := max(1, SCORED_TOKENS // block_size))
    with inference(model, device, dtype):
        for start in tqdm(starts, "scoring", leave=False, unit="batch", disable=None):
            rows = [(window[:1], window[1:]) for window in windows[start : start + n_rows]]
            losses = score_tokens(model, rows, device)
            loss_sum += float(losses.sum())
            if on_losses is not None:
                for (_, ending), by_token in zip(rows, losses.tolist(), strict=True):
                    on_losses(by_token[: len(ending)])
    return loss_sum / (len(ids) - 1)


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
    on_token: Callable[[Tensor], None] | None = None,
    on_logits: Callable[[Tensor], None] | None = None,
) -> list[list[int]]:
    """Continue each row of (B, T) tokens, T >= 1; return the rows, each with its continuation.

    Beyond `block_size` tokens, the model sees a window that moves by half a block at a time, so the
    cache of keys and values is refilled once per half block, not for every token. The cache is not
    used if `cache_agrees` returns False.

    `model` is the raw model, neither compiled nor wrapped, on the same device as `tokens` and
    `generator`. A row ends before the first sampled `stop_token`; with None, it never ends early.
    No token is sampled once every row has ended or its continuation has a text of `stop`.
    `on_token` is called with the next token of every row, (B,), once it is sampled, and `on_logits`
    before that with the logits, (B, V) float32.
    """
    # Raise for invalid values.
    SampleConfig(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p)
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
            if on_logits is not None:
                on_logits(logits)
            next_token = sample_token(logits, temperature, top_k, top_p, generator)
            tokens = torch.cat([tokens, next_token[:, None]], dim=1)
            ended |= next_token == stop_token
            for row in range(B if stop else 0):
                text = gpt2_encoding().decode(tokens[row, T:].tolist())
                ended[row] |= any(each in text for each in stop)
            if ended.all():
                break
            if on_token is not None:
                on_token(next_token)
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
        # NaN does not differ.
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


if __name__ == "__main__":
    run_command(main, memory_flag="--num-samples")
