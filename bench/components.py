"""Time scoring, sampling and tokenizing next to a plain way: `python -m bench.components`.

It takes minutes on a CPU, needs no network, and adds the seconds to `bench/results/DEVICE.json`.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter

from runtime.threads import usable_cores

import torch

from bench.measurement import ROOT, device_label, store_results
from corpus.encoding import encode_documents
from corpus.sources import stdlib_source
from hellaswag import evaluate_hellaswag, load_examples
from model import GPT, GPTConfig
from runtime.cli import run_command
from runtime.device import select_device, synchronize
from runtime.precision import select_dtype
from sample import generate_tokens
from tokenizer import gpt2_encoding

ROUNDS = 3
N_SAMPLES, N_TOKENS = 4, 256  # sampled


def main() -> None:
    """Time a new 124M model, and the encoding of Python's standard library."""
    device = select_device("auto")
    with device:
        model = GPT(GPTConfig())
    texts = [document.text for document in stdlib_source().documents(None)]
    for name, (plain, used) in components(model, device, texts).items():
        seconds = {"plain": list[float](), "used": list[float]()}
        for _ in range(ROUNDS):
            for label, work in (("plain", plain), ("used", used)):
                start = perf_counter()
                work()
                synchronize(device)
                seconds[label].append(perf_counter() - start)
        print(f"{name}: {median(seconds['plain']) / median(seconds['used']):.2f} times as fast")
        label = device_label(device)
        print(store_results(ROOT / "bench/results", label, f"component_{name}", seconds))


def components(
    model: GPT, device: torch.device, texts: list[str]
) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Return, for each component, a plain way to do some work, and the way that is used."""
    dtype, encoding = select_dtype("auto", device), gpt2_encoding()
    examples = load_examples(ROOT / "assets/hellaswag_sample.jsonl")
    prompt = torch.zeros(N_SAMPLES, 1, dtype=torch.int64, device=device)
    score = partial(evaluate_hellaswag, model, examples, dtype=dtype)
    sample = partial(generate_tokens, model, prompt, N_TOKENS, dtype=dtype, stop_token=None)
    tiktoken = partial(encoding.encode_ordinary_batch, num_threads=usable_cores())
    return {
        "hellaswag": (partial(score, batch_size=1), score),
        "sample": (partial(sample, use_cache=False), sample),
        "tokenize": (
            partial(tiktoken, texts),
            lambda: list(encode_documents([texts], usable_cores())),
        ),
    }


if __name__ == "__main__":
    run_command(main)
