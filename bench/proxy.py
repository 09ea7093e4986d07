"""Run `train_gpt2.py` on a small model with the proportions of 124M; see `bench.recipes`.

    python -m bench.proxy WIDTH --flags-of-train_gpt2

The vocabulary consists of GPT-2's first merges, 32 ids per unit of width, so that the ratio of
embeddings to other parameters is the same as in 124M. The standard deviation of initial weights,
0.02 at width 768, is multiplied by the square root of 768 / width.
"""

import math
import sys
from typing import Any

import tiktoken
import torch

from model import GPT, GPT2_SIZES
from runtime.cli import run_command
from tokenizer import WORD_PATTERN, gpt2_encoding
from train_gpt2 import main


def vocab_size(width: int) -> int:
    """Return the number of token ids: the bytes, the first merges and, last, `<|endoftext|>`."""
    return 32 * width


def first_merges(n_vocab: int) -> tiktoken.Encoding:
    """Return GPT-2's tokenizer with only its first merges: an exact, smaller byte-level BPE."""
    gpt2 = gpt2_encoding()
    ranks = {token: gpt2.encode_single_token(token) for token in gpt2.token_byte_values()}
    return tiktoken.Encoding(
        f"gpt2-{n_vocab}",
        pat_str=WORD_PATTERN,
        mergeable_ranks={token: id for token, id in ranks.items() if id < n_vocab - 1},
        special_tokens={"<|endoftext|>": n_vocab - 1},
    )


def train_proxy() -> None:
    """Patch the settings that have no flag, then train."""
    width, *flags = sys.argv[1:]
    GPT2_SIZES["gpt2"]["vocab_size"] = vocab_size(int(width))
    construct = GPT.__init__

    @torch.no_grad()
    def construct_scaled(self: GPT, *args: Any) -> None:  # noqa: ANN401 - of the constructor
        construct(self, *args)
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(math.sqrt(768 / int(width)))

    GPT.__init__ = construct_scaled  # type: ignore[assignment, method-assign]
    main([*flags, f"--n-embd={width}"])


if __name__ == "__main__":
    run_command(train_proxy)
