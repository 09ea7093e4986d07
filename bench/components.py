"""What `python -m bench --component …` measures: parts of the product other than training.

Each is compared with the ordinary way of doing the same thing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from bench.config import ROOT, BenchConfig
from bench.measurement import Measure
from hellaswag import Example, evaluate_hellaswag, load_examples
from model import GPT
from runtime.device import autocast, select_dtype, synchronize
from sample import generate_tokens
from tokenizer import END_OF_TEXT

SAMPLE_COUNT, SAMPLE_TOKENS = 4, 256
SEED = 1337


def hellaswag_measures(config: BenchConfig) -> dict[str, Measure]:
    """One example at a time, and the batched scorer; how many predictions equal the latter's."""
    model, dtype = new_model(config), select_dtype("auto", config.torch_device)
    examples = load_examples(ROOT / "assets/hellaswag_sample.jsonl")
    examples = [example for example in examples if example.fits(config.block_size)]

    def batched() -> Tensor:
        return evaluate_hellaswag(model, examples, dtype=dtype).mean.argmin(dim=1)

    expected = batched()
    score_one_at_a_time(model, examples[:1], dtype)  # the device's first operations are slow

    def measure(score: Callable[[], Tensor]) -> dict[str, float]:
        start = perf_counter()
        same = (score() == expected).float().mean().item()
        rate = len(examples) / (perf_counter() - start)
        return {"examples/s": rate, "share of equal predictions": same}

    single = partial(score_one_at_a_time, model, examples, dtype)
    return {
        "one example at a time": partial(measure, single),
        "batched, context shared": partial(measure, batched),
    }


@torch.no_grad()
def score_one_at_a_time(model: GPT, examples: Sequence[Example], dtype: torch.dtype) -> Tensor:
    """Score HellaSwag as build-nanogpt does: four padded rows per example, all logits.

    The LM head too computes in `dtype`; the losses are float32. Returns (N,) int64, the
    predictions of acc_norm.
    """
    device = model.transformer.wte.weight.device
    predictions = []
    for example in examples:
        rows = [torch.tensor(example.context + ending) for ending in example.endings]
        idx = pad_sequence(rows, batch_first=True).to(device)  # (4, T)
        positions = torch.arange(1, idx.size(1), device=device)  # of the targets
        lengths = torch.tensor([[len(row)] for row in rows], device=device)
        in_ending = (positions >= len(example.context)) & (positions < lengths)  # (4, T - 1)
        with autocast(device, dtype):
            logits, _ = model(idx)
        shifted, targets = logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten()
        losses = F.cross_entropy(shifted.float(), targets, reduction="none").view(in_ending.shape)
        means = (losses * in_ending).sum(dim=1) / in_ending.sum(dim=1)
        predictions.append(means.argmin().cpu())
    return torch.stack(predictions)


def sample_measures(config: BenchConfig) -> dict[str, Measure]:
    """`generate_tokens` without its cache of keys and values, and with it."""
    model, device = new_model(config), config.torch_device
    prompt = torch.full((SAMPLE_COUNT, 1), END_OF_TEXT, device=device)
    dtype = select_dtype("auto", device)
    sample = partial(generate_tokens, model, prompt, dtype=dtype, stop_token=None)
    sample(2)  # the device's first operations are slow

    def rate(use_cache: bool) -> dict[str, float]:
        start = perf_counter()
        sample(SAMPLE_TOKENS, use_cache=use_cache)
        synchronize(device)
        return {"tokens/s": SAMPLE_COUNT * SAMPLE_TOKENS / (perf_counter() - start)}

    return {"without a cache": partial(rate, False), "with the KV cache": partial(rate, True)}


def new_model(config: BenchConfig) -> GPT:
    """A model with initial weights."""
    torch.manual_seed(SEED)
    with config.torch_device:
        return GPT(config.model_config())


COMPONENTS = {
    "hellaswag": hellaswag_measures,
    "sample": sample_measures,
}
