"""Bad input: one line at the start names the file and the reason, and the exit code is 2."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, TINY_RUN
from forked import assert_refused

from corpus.shards import Manifest, ShardWriter
from formats.huggingface import save_pretrained
from model import GPT, GPTConfig

pytestmark = pytest.mark.skipif(os.name != "posix", reason="forks")
TOKENS = (np.arange(2000) % 50257).astype(np.uint16)


def train(commands, data_dir, *flags):
    """Begin a training run on `data_dir`, in a folder of runs next to it."""
    out_dir = data_dir.parent / "runs"
    flags = (*TINY_RUN, f"--data-dir={data_dir}", f"--out-dir={out_dir}", "--run-name=a", *flags)
    return commands.run("train_gpt2", *flags)


def make_data(folder):
    """A finished data set: val_000000 and train_000001 to 000003, 500 tokens each."""
    writer = ShardWriter(folder, Manifest({}, "hash", 500))
    writer.add(TOKENS)
    writer.close()
    return folder


@pytest.fixture
def data(tmp_path):
    return make_data(tmp_path / "data")


def test_preflight_finds_the_byte_that_a_start_does_not(commands, data):
    """As a disk that fails changes it: neither size nor time show it, only the hash does."""
    assert train(commands, data, "--preflight").code == 0
    path = data / "train_000003.npy"
    content, times = bytearray(path.read_bytes()), path.stat()
    content[-2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert_refused(train(commands, data, "--preflight"), f"{path.name} is missing or")
    flags = (*TINY_RUN, f"--data-dir={data}", f"--out-dir={data.parent}/runs", "--preflight")
    done = commands.run_ranks(2, "train_gpt2", *flags)  # each has hashed its part
    assert done.code == 2
    assert f"{path.name} is missing or" in done.stderr
    assert train(commands, data, "--max-steps=1").code == 0
    path.unlink()
    assert_refused(train(commands, data, "--run-name=b"), path.name, "No such file")


# Manifests


def test_training_and_tokenising_refuse_a_manifest_with_the_tokens_of_another_file(commands, data):
    path = data / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["shards"][1]["tokens"] = 499
    path.write_text(json.dumps(manifest))
    before = {file: file.read_bytes() for file in data.glob("[!.]*")}
    assert_refused(train(commands, data), str(data))
    texts = data.parent / "texts.jsonl"
    texts.write_text('{"text": "once upon a time"}\n' * 300)
    done = commands.run("fineweb", f"--source={texts}", f"--data-dir={data}", "--shard-size=500")
    assert_refused(done, str(data))
    assert {file: file.read_bytes() for file in data.glob("[!.]*")} == before


def test_resume_refuses_another_validation_split(commands, data):
    (data / "manifest.json").unlink()
    assert train(commands, data, "--max-steps=2").code == 0
    np.save(data / "val_000000.npy", TOKENS[:500][::-1])
    assert_refused(train(commands, data, "--resume=auto"), "(val_fingerprint ")


# Sampling


def test_sampling_prints_emoji_on_a_terminal_without_them(tmp_path):
    """In a process from the start: an output's encoding is read when Python starts."""
    save_pretrained(GPT(GPTConfig(block_size=16, n_layer=1, n_head=1, n_embd=16)), tmp_path / "m")
    command = [sys.executable, ROOT / "sample.py", f"--model={tmp_path / 'm'}", "--prompt=é🙂!"]
    done = subprocess.run(
        [*command, "--num-samples=1", "--max-new-tokens=5"],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert b"??!" in done.stdout
