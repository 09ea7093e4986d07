"""Tokenize as the nanoGPT family does, to compare with: processes, tiktoken, `.npy`.

    python -m bench.tiktoken_pool FOLDER FILE…    (`bench.components` starts this)

The files are .parquet or .jsonl. The vocabulary is `tokenizer.py`'s, which needs no network.
"""

import multiprocessing
import os
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from corpus.sources import file_source
from tokenizer import END_OF_TEXT, gpt2_encoding


def main(folder: str, *paths: str) -> None:
    """Write the tokens of `paths` to one file in a new `folder`."""
    os.makedirs(folder)
    gpt2_encoding()  # which processes that are forked have, too
    documents = file_source([Path(path) for path in paths]).documents(None)
    texts = (document.text for document in documents if document.text)
    with multiprocessing.Pool(os.cpu_count()) as pool:
        tokens = [*pool.imap(tokenize, texts, chunksize=16)]
    np.save(f"{folder}/tokens.npy", np.concatenate(tokens))


def tokenize(text: str) -> npt.NDArray[np.uint16]:
    """The tokens of one document."""
    return np.array([END_OF_TEXT, *gpt2_encoding().encode_ordinary(text)]).astype(np.uint16)


if __name__ == "__main__":
    main(*sys.argv[1:])
