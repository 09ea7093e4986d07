"""Texts, fineweb.py in this process or in one that can be killed, and the shards it made."""

import io
import json
import random
import signal
import sys
from contextlib import contextmanager, redirect_stdout

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT
from hub_server import HubServer

import fineweb
from corpus import sources
from corpus.shards import Manifest
from tokenizer import END_OF_TEXT, gpt2_encoding

# Runs fineweb.py in small batches. Before the KILL_AT-th renaming of a finished file the process
# kills itself with -9, or does what INSTEAD says.
DRIVER = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import fineweb
from corpus import sources
fineweb.BATCH_CHARS = 1000
sources.TABLE_ROWS = 16
sources.BLOCK_BYTES = 1000
replace, renamed = os.replace, 0
def kill_or_replace(*paths):
    global renamed
    renamed += 1
    if renamed == int(os.environ.get("KILL_AT", 0)):
        exec(os.environ.get("INSTEAD", "os.kill(os.getpid(), signal.SIGKILL)"))
    replace(*paths)
os.replace = kill_or_replace
fineweb.run_command(fineweb.main)
"""


def texts_of(count, seed=0):
    """Documents of random words, with an empty and a multi-script one among them."""
    rng = random.Random(seed)
    words = ["the", "quick", "fox", "état", "日本語", "🦄", "1234", "\n", "don't", "<|endoftext|>"]
    texts = [" ".join(rng.choices(words, k=rng.randrange(1, 60))) for _ in range(count)]
    texts[count // 2] = ""
    return texts


def write_texts(path, texts, field="text"):
    """A source of the kind that its name says; compressed, it has two members, cut anywhere."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"id": range(len(texts)), field: texts}), path)
        return path
    if ".json" in path.name:
        content = "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts).encode()
    else:
        content = "\n".join(texts).encode()
    if codec := {".gz": "gzip", ".zst": "zstd"}.get(path.suffix):
        halves = content[: len(content) // 2], content[len(content) // 2 :]
        content = b"".join(pa.compress(half, codec, asbytes=True) for half in halves)
    path.write_bytes(content)
    return path


def reference(texts):
    encoding = gpt2_encoding()
    documents = [[END_OF_TEXT, *encoding.encode_ordinary(text)] for text in texts if text]
    return [id for document in documents for id in document]


def contents(folder, pattern="[!.]*"):
    """Every file of a folder with its bytes, but for hidden ones, such as a lock."""
    return {path.name: path.read_bytes() for path in folder.glob(pattern)}


def tokens_of(folder):
    """All tokens in the source's order, in which blocks of the first are validation."""
    manifest = Manifest.load(folder)
    tokens = np.concatenate([np.load(folder / shard.file) for shard in manifest.shards])
    pieces = np.array_split(np.arange(manifest.val_span), 200)
    places = [*pieces[::10], *(piece for i, piece in enumerate(pieces) if i % 10)]
    if manifest.val_span:
        tokens[np.concatenate(places)] = tokens[: manifest.val_span].copy()
    return tokens.tolist()


@pytest.fixture
def drive(commands, tmp_path, monkeypatch):
    """fineweb.py in another process, to its end, in which `kill_at` and `INSTEAD` change it."""
    monkeypatch.setattr(commands, "folder", tmp_path)

    def run(*flags, kill_at=0, **environment):
        script = tmp_path / "driver.py"
        script.write_text(DRIVER)
        done = commands.run(script, *flags, KILL_AT=str(kill_at), **environment)
        if kill_at and "INSTEAD" not in environment:
            assert done.code == -signal.SIGKILL, done.stderr
        return done

    return run


@contextmanager
def fineweb_in(folder):
    """fineweb.py in this process, in small batches; returns what it prints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fineweb, "BATCH_CHARS", 1000)
        patch.setattr(sources, "TABLE_ROWS", 16)
        patch.setattr(sources, "BLOCK_BYTES", 1000)
        patch.chdir(folder)

        def run(*flags):
            patch.setattr(sys, "argv", ["fineweb.py", *map(str, flags)])
            with redirect_stdout(io.StringIO()) as output:
                fineweb.main()
            return output.getvalue().strip()

        yield run


@pytest.fixture
def make(tmp_path):
    with fineweb_in(tmp_path) as run:
        yield run


@pytest.fixture
def hub(tmp_path):
    """A hub with the data set o/n; its `texts`."""
    texts = texts_of(300)
    files = {
        "README.md": b"---\nconfigs:\n- config_name: sample-10BT\n  data_files:\n"
        b"  - split: train\n    path: sample/10BT/*\n---\n"
    }
    for part in range(2):
        some = texts[150 * part : 150 * part + 150]
        path = write_texts(tmp_path / "part.parquet", some, "content")
        files[f"sample/10BT/{part:03}.parquet"] = path.read_bytes()
    with HubServer() as server:
        server.add("dataset", "o/n", files)
        server.texts = texts
        yield server
