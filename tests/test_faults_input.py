"""Bad input: one line at the start names the file and the reason, and the exit code is 2."""

import io
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY_RUN
from forked import assert_refused

from corpus.shards import Manifest, ShardWriter
from model import GPT, GPTConfig
from runtime.huggingface import save_pretrained
from runtime.metrics import read_metrics

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


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def with_id(token_id, place=321):
    tokens = TOKENS[:500].copy()
    tokens[place] = token_id
    return npy(tokens)


WHOLE = npy(TOKENS[1000:1500])  # train_000002.npy as it should be
BAD_SHARDS = {
    "truncated": (WHOLE[:-1], "cannot be read as a token shard"),
    "big-endian": (npy(TOKENS[:500].astype(">u2")), "found >u2 of shape (500,)"),
    "2-D": (npy(TOKENS[:500].reshape(2, 250)), "found uint16 of shape (2, 250)"),
    "objects": (npy(np.array([{}] * 500)), "Python objects"),
}


@pytest.mark.parametrize("damage", BAD_SHARDS)
def test_training_refuses_a_shard_that_is(commands, data, damage):
    content, reason = BAD_SHARDS[damage]
    (data / "train_000002.npy").write_bytes(content)
    if damage != "truncated":
        (data / "manifest.json").unlink()
    assert_refused(train(commands, data), "train_000002.npy", reason)
    assert not (data.parent / "runs").exists()  # the same command works once it is repaired


def test_training_refuses_an_id_beyond_the_vocabulary(commands, data):
    (data / "manifest.json").unlink()
    (data / "train_000002.npy").write_bytes(with_id(50257))
    assert_refused(train(commands, data), "train_000002.npy, offset 321: token id 50257")
    (data / "train_000002.npy").write_bytes(WHOLE)
    (data / "val_000000.npy").write_bytes(with_id(65535, place=100))
    done = train(commands, data, "--run-name=b")
    assert_refused(done, "val_000000.npy, offset 100: token id 65535")


def test_training_refuses_a_missing_split_or_folder(commands, data):
    (data / "manifest.json").unlink()
    (data / "val_000000.npy").unlink()
    assert_refused(train(commands, data), f"{data} has no val shards")
    done = train(commands, data.parent / "othr")
    assert_refused(done, "no data folder", "python fineweb.py --source stdlib makes data/stdlib")


def test_training_refuses_data_shorter_than_a_step(commands, data):
    done = train(commands, data, "--total-batch-size=2048")
    assert_refused(done, "has 1,500 tokens", "one step needs 2,049", "--total-batch-size")
    done = train(commands, data, "--block-size=512", "--total-batch-size=1024", "--val-tokens=512")
    assert_refused(done, "validation split has 500 tokens", "--block-size 512")


def test_preflight_finds_the_byte_that_a_start_does_not(commands, data):
    """As a disk that fails changes it: neither size nor time show it, only the hash does."""
    assert train(commands, data, "--preflight").code == 0
    path = data / "train_000003.npy"
    content, times = bytearray(path.read_bytes()), path.stat()
    content[-2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert_refused(train(commands, data, "--preflight"), "data: ", f"{path.name} has changed since")
    flags = (*TINY_RUN, f"--data-dir={data}", f"--out-dir={data.parent}/runs", "--preflight")
    done = commands.run_ranks(2, "train_gpt2", *flags)  # each has hashed its part
    assert done.code == 2
    assert f"{path.name} has changed since" in done.stderr
    assert train(commands, data, "--max-steps=1").code == 0
    path.unlink()
    assert_refused(train(commands, data, "--run-name=b"), path.name, "No such file")


def test_training_reads_links_by_their_content(commands, data, tmp_path):
    """Shards may lie on another disk; a link to what is no shard is refused by its content."""
    path, elsewhere = data / "train_000002.npy", tmp_path / "another disk" / "x.npy"
    elsewhere.parent.mkdir()
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert train(commands, data).code == 0
    shutil.rmtree(tmp_path / "runs")
    path.unlink()
    path.symlink_to("/etc/passwd")
    done = train(commands, data)
    assert_refused(done, "train_000002.npy cannot be read as a token shard")
    assert "/bin" not in done.stderr  # no more of it is shown than numpy does, 6 bytes


def test_two_ranks_refuse_a_bad_shard(commands, data):
    (data / "train_000002.npy").write_bytes(npy(TOKENS[:500].reshape(2, 250)))
    flags = (*TINY_RUN, f"--data-dir={data}", f"--out-dir={data.parent}/runs")
    done = commands.run_ranks(2, "train_gpt2", *flags)
    assert done.code == 2
    refusals = [line for line in done.stderr.splitlines() if "train_000002.npy is not a" in line]
    assert len(refusals) == 1
    assert not (data.parent / "runs").exists()


def test_training_reads_bin_files_as_the_same_tokens_in_npy(commands, data):
    (data / "manifest.json").unlink()
    theirs = data.parent / "theirs"
    theirs.mkdir()
    for path in data.glob("*.npy"):
        np.load(path).tofile(theirs / f"{path.stem}.bin")
    losses = []
    for name in (data, theirs):
        assert train(commands, name, f"--run-name={name.name}").code == 0
        records = read_metrics(data.parent / "runs" / name.name / "metrics.jsonl")
        losses.append([record.get("train_loss", record.get("val_loss")) for record in records])
    assert losses[0] == losses[1]
    assert len(losses[0]) > 8


# Manifests


BAD_MANIFESTS = {
    "a path upwards": {"file": "../val_000000.npy"},
    "tokens of another file": {"tokens": 499},
    "a field too many": {"surprise": 1},
}


@pytest.mark.parametrize("change", BAD_MANIFESTS)
def test_training_and_tokenising_refuse_a_manifest_with(commands, data, change):
    path = data / "manifest.json"
    manifest = json.loads(path.read_text())
    values = BAD_MANIFESTS[change]
    place = manifest["shards"][1] if values.keys() <= {"file", "tokens"} else manifest
    place |= values
    path.write_text(json.dumps(manifest))
    before = {file: file.read_bytes() for file in data.glob("[!.]*")}
    assert_refused(train(commands, data), str(data))
    texts = data.parent / "texts.jsonl"
    texts.write_text('{"text": "once upon a time"}\n' * 300)
    done = commands.run("fineweb", f"--source={texts}", f"--data-dir={data}", "--shard-size=500")
    assert_refused(done, str(data))
    assert {file: file.read_bytes() for file in data.glob("[!.]*")} == before


def test_training_refuses_an_empty_manifest_and_what_is_none(commands, data):
    path = data / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"shards": []}))
    assert_refused(train(commands, data), f"{data} has no train shards")
    for content in (b"", b"[]", b"[" * 10**6):
        path.write_bytes(content)
        assert_refused(train(commands, data), "manifest.json is not")


def test_resuming_without_the_manifest_says_that_it_may_be_lost(commands, data):
    path = data / "manifest.json"
    content = path.read_bytes()
    assert train(commands, data, "--max-steps=2").code == 0
    path.unlink()
    done = train(commands, data, "--resume=auto")
    assert_refused(done, "data_fingerprint", f"if {path} was lost since")
    done = train(commands, data, "--resume=auto", "--seed=7")  # another cause
    assert_refused(done, "seed 1337 -> 7")
    assert "was lost" not in done.stderr
    path.write_bytes(content)
    assert train(commands, data, "--resume=auto").code == 0


# Sampling


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("exported") / "model"
    save_pretrained(GPT(GPTConfig(block_size=16, n_layer=1, n_head=1, n_embd=16)), folder)
    return folder


PROMPTS = {
    "empty": ("", ""),
    "longer than the block": ("word " * 200, "word " * 200),
    "emoji": ("🙂👩‍👩‍👧‍👦é", "🙂👩‍👩‍👧‍👦é"),
    "no UTF-8": (os.fsdecode(b"a\xff\xfe\xffb"), "a\ufffd\ufffd\ufffdb"),
    "<|endoftext|>": ("<|endoftext|>", "<|endoftext|>"),
    "only spaces": (" " * 100_000, " " * 100_000),
}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_sampling_continues_a_prompt_that_is(commands, exported, prompt):
    given, shown = PROMPTS[prompt]
    flags = (f"--model={exported}", "--num-samples=2", "--max-new-tokens=5")
    done = commands.run("sample", *flags, "--prompt", given)
    assert (done.code, done.stderr) == (0, "")
    first, second = done.stdout.split("--- sample ")[1:]
    assert all(shown in part for part in (first, second))


def test_sampling_prints_emoji_on_a_terminal_without_them(exported):
    """In a process from the start: an output's encoding is read when Python starts."""
    command = [sys.executable, ROOT / "sample.py", f"--model={exported}", "--prompt=é🙂!"]
    done = subprocess.run(
        [*command, "--num-samples=1", "--max-new-tokens=5"],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert b"??!" in done.stdout
