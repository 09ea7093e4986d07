"""Bad input: one line at the start names the file and the reason, and the exit code is 2."""

import io
import os
import sys

import numpy as np
import pytest
from conftest import TINY_RUN
from forked import assert_refused

from corpus.shards import Manifest, ShardWriter
from runtime.cli import run_command
from tokenizer import VOCAB_SHA256

pytestmark = pytest.mark.skipif(os.name != "posix", reason="forks")
TOKENS = (np.arange(2000) % 50257).astype(np.uint16)


def train(commands, data_dir, *flags):
    """Begin a training run on `data_dir`, in a folder of runs next to it."""
    out_dir = data_dir.parent / "runs"
    flags = (*TINY_RUN, f"--data-dir={data_dir}", f"--out-dir={out_dir}", "--run-name=a", *flags)
    return commands.run("train_gpt2", *flags)


@pytest.fixture
def data(tmp_path):
    """A finished data set: val_000000 and train_000001 to 000003, 500 tokens each."""
    writer = ShardWriter(tmp_path / "data", Manifest({"kind": "hub"}, VOCAB_SHA256, 500))
    writer.add(TOKENS)
    writer.close()
    return tmp_path / "data"


def test_preflight_finds_the_byte_that_a_start_does_not(commands, data):
    """As a disk that fails changes it: its size does not show it, only the hash does."""
    assert train(commands, data, "--preflight").code == 0
    path = data / "train_000003.npy"
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    assert_refused(train(commands, data, "--preflight"), f"{path.name} is missing or")
    flags = (*TINY_RUN, f"--data-dir={data}", f"--out-dir={data.parent}/runs", "--preflight")
    done = commands.run_ranks(2, "train_gpt2", *flags)  # each has hashed its part
    assert done.code == 2
    assert f"{path.name} is missing or" in done.stderr
    assert train(commands, data, "--max-steps=1").code == 0
    path.unlink()
    assert_refused(train(commands, data, "--run-name=b"), path.name, "No such file")


def test_resume_refuses_another_validation_split(commands, data):
    (data / "manifest.json").unlink()
    assert train(commands, data, "--max-steps=2").code == 0
    np.save(data / "val_000000.npy", TOKENS[:500][::-1])
    assert_refused(train(commands, data, "--resume=auto"), "changed since this run began")


# Printing


def test_command_prints_emoji_on_a_terminal_without_them(monkeypatch):
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    run_command(lambda: print("é🙂!"))
    assert output.getvalue() == b"??!\n"
