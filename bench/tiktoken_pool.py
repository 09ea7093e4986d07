"""Tokenize as the nanoGPT family does, to compare with: processes, tiktoken, `.npy`.

    python -m bench.tiktoken_pool FOLDER FILE…    (`bench.components` starts this)

The files are .parquet or .jsonl. The vocabulary is `tokenizer.py`'s, which needs no network.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from tokenizer import END_OF_TEXT, gpt2_encoding


def main(folder: str, *paths: str) -> None:
    """Write the tokens of `paths` to one file in a new `folder`."""
    os.makedirs(folder)
    gpt2_encoding()  # which processes that are forked have, too
    with multiprocessing.Pool(os.cpu_count()) as pool:
        tokens = [*pool.imap(tokenize, read(paths), chunksize=16)]
    np.save(f"{folder}/tokens.npy", np.concatenate(tokens))


def tokenize(text: str) -> npt.NDArray[np.uint16]:
    """The tokens of one document."""
    return np.array([END_OF_TEXT, *gpt2_encoding().encode_ordinary(text)]).astype(np.uint16)


def read(paths: tuple[str, ...]) -> Iterator[str]:
    """The documents of all files, without empty ones."""
    for path in paths:
        if path.endswith(".parquet"):
            with pq.ParquetFile(path) as file:
                for table in file.iter_batches(1000, columns=["text"]):
                    yield from filter(None, table.column("text").to_pylist())
        else:
            with open(path, encoding="utf-8") as lines:
                yield from filter(None, (json.loads(line)["text"] for line in lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
