"""Generate text with a model: `python sample.py --model runs/NAME --prompt "Once upon a time"`.

    python sample.py --model runs/NAME --interactive    # type some text, the model continues it
    python sample.py --model runs/NAME --prompt - < FILE
    python sample.py --model runs/NAME --score FILE     # the loss of a text
    python sample.py --model runs/NAME --copies         # also how much is copied from its text
    python sample.py --model runs/NAME --web            # a page to play with the model

The default model is runs/' newest run. In Python, call `generate(model, text)`.
"""

import codecs
import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import runtime.threads  # noqa: F401 - before torch, which reads its settings

import torch
from torch import Tensor

from corpus.overlap import PASSAGE_TOKENS, find_copies, open_training_text, quote
from corpus.shards import Manifest, TokenShards
from corpus.sources import hash_ends
from formats.load import load_with_state, newest_run
from generation import generate_tokens, text_loss
from model import GPT
from runtime.cli import PathOrName, check_settings, parse_flags, print_error, run_command
from runtime.device import DeviceName, select_device, tune_malloc
from runtime.errors import UserError
from runtime.precision import DtypeName, select_dtype
from tokenizer import END_OF_TEXT, bits_per_byte, gpt2_encoding, prompt_ids

GREETING = """Type some text; the model continues all of the text so far.
Empty line: keep going. /new: start over. Ctrl-C: stop generating. Ctrl-D: quit."""


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
    stride: int | None = None
    """With --score, number of tokens by which the window moves; default: half of the context."""
    copies: bool = False
    """After the samples, print how much of them is copied from the run's training text, and the
    longest passage; with --web, search a training text of any size."""
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
        problems = list[str]()
        if sum(map(bool, (self.interactive, self.prompt, self.score, self.web))) > 1:
            problems.append("use only one of --interactive, --prompt, --score and --web")
        if self.copies and (self.interactive or self.score or self.stop):
            problems.append("--copies cannot be combined with --interactive, --score or --stop")
        if self.compare_to and not self.web:
            problems.append("--compare-to requires --web")
        if "" in self.stop:  # true for any str, and for a list with an empty text
            problems.append("--stop must be a list of texts, none of them empty")
        above_zero = ("num_samples", "max_new_tokens", "top_p", "port", "stride")
        check_settings(self, above_zero, *problems, at_most_1=("top_p",))


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
        models = Models(sources, device, options["dtype"], config.copies)
        serve(models, config.port, config.browser)
        return
    model, checkpoint = load_with_state(source, device)
    if config.score is not None:
        print(describe_loss(model, config.score, options["dtype"], config.stride))
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
    training_text = open_training_text(checkpoint) if config.copies else None
    rows = sample_rows(model, prompt, config.num_samples, config.seed, **options)
    for number, text in enumerate(decode_rows(rows, prompt, config.stop), start=1):
        print(f"--- sample {number} of {len(rows)} ---\n{text}\n")
    if training_text is not None:
        print(describe_copies(rows, prompt, training_text))


def converse(continue_tokens: Callable[..., object], device: torch.device) -> None:
    """Read lines from the terminal; after each, continue all text so far, token by token."""
    with suppress(ImportError):  # Windows does not have it
        import readline  # noqa: F401 - importing it gives `input` its history
    tokens, decoder = list[int](), codecs.getincrementaldecoder("utf-8")("replace")

    def print_token(token: Tensor, _: Tensor | None = None) -> None:
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
    options |= {"max_new_tokens": max_new_tokens, "stop": stop}
    return decode_rows(sample_rows(model, prompt, num_samples, seed, **options), prompt, stop)


def sample_rows(
    model: GPT,
    prompt: str,
    num_samples: int,
    seed: int | None,
    **options: Any,  # noqa: ANN401
) -> list[list[int]]:
    """Continue a prompt as `generate` does; return the ids of each row, including the prompt's."""
    device = next(model.parameters()).device
    tokens = torch.tensor([prompt_ids(prompt)] * num_samples, device=device)
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    return generate_tokens(model, tokens, generator=generator, **options)


def decode_rows(rows: Sequence[Sequence[int]], prompt: str, stop: Sequence[str]) -> list[str]:
    """Return the prompt and the text of each row after it, up to the first text of `stop`."""
    start = len(prompt_ids(prompt))
    texts = [gpt2_encoding().decode(list(row[start:])) for row in rows]
    ends = [min((text.index(s) for s in stop if s in text), default=None) for text in texts]
    return [prompt + text[:end] for text, end in zip(texts, ends, strict=True)]


def describe_copies(rows: Sequence[Sequence[int]], prompt: str, training_text: TokenShards) -> str:
    """Return how much of the sampled tokens is copied, and the longest passage in its place."""
    start = len(prompt_ids(prompt))
    fraction, passages = find_copies(rows, start, training_text)
    n_sampled = sum(len(row) - start for row in rows)
    text = f"copied: {100 * fraction:.1f} % of {n_sampled:,} sampled tokens are in passages of "
    text += f"{PASSAGE_TOKENS} tokens or more that the training text has"
    for longest in passages[:1]:
        before, copied, after = quote(training_text, longest)
        text += f"\nlongest: {longest.n_tokens} tokens, in the training text:\n"
        text += f"{before}>>>{copied}<<<{after}"
    return text


def describe_loss(model: GPT, path: Path, dtype: torch.dtype, stride: int | None = None) -> str:
    """Return a text file's loss in nats per token and bits per byte, and its number of tokens."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        loss = text_loss(model, text, dtype, stride=stride)
    except (UnicodeDecodeError, UserError) as error:
        raise UserError(f"--score {path}: {error}") from None
    if "<|endoftext|>" in text:
        print_error("note: <|endoftext|> in the text is scored as text, in seven tokens")
    ids = gpt2_encoding().encode_ordinary(text)
    bits = bits_per_byte(loss, ids)
    return f"{path}: {loss:.4f} nats per token, {bits:.4f} bits per byte, {len(ids):,} tokens"


if __name__ == "__main__":
    run_command(main, memory_flag="--num-samples")
