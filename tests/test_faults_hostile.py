"""Hostile files: none runs code, leads elsewhere, or takes the memory that it claims.

No test trusts a format's name: each file is what an attacker would offer under that name.
"""

import ast
import hashlib
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY_RUN, torchrun
from forked import assert_refused
from safetensors.torch import load_file, save_file

from runtime.checkpoint import load_model
from runtime.huggingface import save_pretrained
from train_gpt2 import main
from training.config import TrainConfig

FOLDERS = (".", "bench", "corpus", "runtime", "training")
MODULES = sorted(path for part in FOLDERS for path in (ROOT / part).glob("*.py"))
SPARE_BYTES = 300 << 20  # how much more memory a refusal may take than that of a wrong flag


@pytest.fixture(scope="module")
def made(tiny_data, tmp_path_factory):
    """A finished run and its export, in one folder; the tests work on copies."""
    folder = tmp_path_factory.mktemp("made")
    flags = (*TINY_RUN, "--max-steps=2", f"--data-dir={tiny_data}", "--run-name=run")
    main([*flags, f"--out-dir={folder}"])
    save_pretrained(load_model(folder / "run"), folder / "export")
    return folder


@pytest.fixture
def run_dir(made, tmp_path):
    return shutil.copytree(made / "run", tmp_path / "runs" / "run")


@pytest.fixture
def exported(made, tmp_path):
    return shutil.copytree(made / "export", tmp_path / "export")


@pytest.fixture
def checkpoint(run_dir):
    return run_dir / "checkpoints" / "step_00000002"


def vouch_for(checkpoint):
    """Write the manifest again, as one who forges a checkpoint would."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    for name, entry in manifest["files"].items():
        content = (checkpoint / name).read_bytes()
        entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    path.write_text(json.dumps(manifest))


def refused(said):
    """Expect an error of the kind that ends a command in one line, with these words."""
    return pytest.raises((ValueError, OSError), match=re.escape(said))


# Nothing runs


class Payload:
    """Unpickled, it makes the file `mark`."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (os.system, (f"touch '{self.mark}'",))


@pytest.fixture
def mark(tmp_path):
    """The file that the payload would make; a test fails if it is there."""
    mark = tmp_path / "the payload ran"
    yield mark
    assert not mark.exists()


def pickled(mark, kind):
    """The payload as a plain pickle, as PyTorch's archive of one, or as an array of objects."""
    path = mark.parent / "payload"
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Payload(mark)))
    elif kind == "torch":
        torch.save({"transformer.wte.weight": Payload(mark)}, path)
    else:
        with path.open("wb") as file:
            np.save(file, np.array([Payload(mark)], dtype=object), allow_pickle=True)
    content = path.read_bytes()
    path.unlink()
    return content


@pytest.mark.parametrize(
    ("kind", "load"),
    [
        ("pickle", lambda path: pickle.loads(path.read_bytes())),
        ("torch", lambda path: torch.load(path, weights_only=False)),
        ("npy", lambda path: np.load(path, allow_pickle=True)),
    ],
)
def test_the_payload_would_run(tmp_path, kind, load):
    """Otherwise the tests below would prove nothing."""
    mark, path = tmp_path / "ran", tmp_path / "file"
    path.write_bytes(pickled(mark, kind))
    assert not mark.exists()
    load(path)
    assert mark.exists()


@pytest.mark.parametrize(("kind", "manifest"), [("npy", True), ("npy", False), ("pickle", False)])
def test_no_shard_runs(tmp_path, mark, kind, manifest):
    data = tmp_path / "data"
    data.mkdir()
    entries, content = [], pickled(mark, kind)
    for split in ("val", "train"):
        (data / f"{split}_0.npy").write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        entries.append({"file": f"{split}_0.npy", "split": split, "tokens": 1, "sha256": digest})
    if manifest:
        values = {"format": 1, "source": {}, "tokenizer_sha256": "", "shard_size": 1}
        values |= {"complete": True, "shards": entries}
        (data / "manifest.json").write_text(json.dumps(values))
    with refused("train_0.npy cannot be read as a token shard"):
        main([*TINY_RUN, f"--data-dir={data}", f"--out-dir={tmp_path}"])


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("pickle", "model.safetensors", "model.safetensors is not a readable safetensors file"),
        ("torch", "model.safetensors", "model.safetensors is not a readable safetensors file"),
        ("torch", "pytorch_model.bin", "(pickle files are never loaded)"),
    ],
)
def test_no_pretrained_file_runs(tiny_data, exported, mark, kind, name, said):
    if name == "pytorch_model.bin":
        (exported / "model.safetensors").unlink()
    (exported / name).write_bytes(pickled(mark, kind))
    with refused(said):
        load_model(exported)
    with refused(said):
        flags = (f"--data-dir={tiny_data}", f"--out-dir={mark.parent}", "--device=cpu")
        main([*flags, f"--init-from={exported}"])


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "trainer_state.json", "manifest.json"]
)
def test_no_checkpoint_file_runs(tiny_data, run_dir, checkpoint, mark, name):
    (checkpoint / name).write_bytes(pickled(mark, "torch" if "safe" in name else "pickle"))
    if name != "manifest.json":
        vouch_for(checkpoint)
    with refused(name):
        main([f"--resume={run_dir}", "--max-steps=3"])
    if name == "optimizer.safetensors":
        load_model(run_dir)  # does not read it
    else:
        with refused(name):
            load_model(run_dir)


def test_no_other_file_runs(commands, tmp_path, mark):
    path = tmp_path / "file.jsonl"
    path.write_bytes(pickled(mark, "pickle"))
    assert_refused(commands.run("train_gpt2", f"--config={path}"), "file.jsonl is not valid JSON")
    done = commands.run("fineweb", f"--source={path}", f"--data-dir={tmp_path}/data")
    assert done.code == 2
    assert "file.jsonl, line 1: " in done.stderr.splitlines()[-1]  # after the progress bar
    done = commands.run("hellaswag", "--model=nothing", f"--data={path}", "--device=cpu")
    assert_refused(done, "error: ")
    (tmp_path / "run").mkdir()
    path.rename(tmp_path / "run" / "metrics.jsonl")
    assert_refused(commands.run("plot", tmp_path / "run"), "metrics.jsonl has no losses yet")


UNSAFE_CODE = re.compile(  # what could run code that came as data
    r"^\s*(import|from) .*(pickle|marshal|shelve|dill|joblib)"
    r"|^\s*from (torch|numpy|os) import .*\b(load|save|system|popen)\b"
    r"|(?<![\w.])(exec|eval|compile|__import__)\("
    r"|\b(torch(\.hub)?\.(load|save)|yaml\.load|pd\.read_pickle|os\.(system|popen))\("
    r"|(gather_object|object_list)\("
    r"|\b(np|numpy)\.load\((?!.*allow_pickle=False)"
    r"|\b(trust_remote_code|shell|allow_pickle)=(?!False)",
    re.MULTILINE,
)


def unsafe_code(source):
    """The first unsafe piece of a source, whose lines and comments do not matter."""
    return UNSAFE_CODE.search(ast.unparse(ast.parse(source)))


def test_no_module_can_run_what_came_as_data():
    for module in MODULES:
        assert unsafe_code(module.read_text(encoding="utf-8")) is None, module
    examples = ("from torch import (nn,\n load)", "np.load(path)", "eval(text)", "import marshal")
    assert all(map(unsafe_code, (*examples, "f(shell=True)", "dist.all_gather_object(a, b)")))


# Nothing leads elsewhere


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "..", "", "a\nb", "\x1b[2J", "\udcff"])
def test_run_name_is_a_plain_name(name):
    with refused("--run-name"):
        TrainConfig(run_name=name)


def test_pretrained_reads_the_links_of_the_hubs_cache(exported, tmp_path):
    """As `huggingface_hub` lays it out: snapshots/COMMIT/NAME leads to ../../blobs/HASH."""
    snapshot = tmp_path / "models--o--n" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    exported.rename(tmp_path / "models--o--n" / "blobs")
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    load_model(snapshot)


# Nothing takes the memory that it asks for


def claims(header, body=b""):
    """A safetensors file with this header."""
    data = json.dumps(header).encode()
    return struct.pack("<Q", len(data)) + data + body


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 10**8) + b"{}",  # a header of 100 MB
        claims({"x": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4]}}),  # 4 TB
    ],
    ids=["header", "tensor"],
)
def test_absurd_safetensors_are_refused(run_dir, exported, checkpoint, content):
    (exported / "model.safetensors").write_bytes(content)
    (checkpoint / "model.safetensors").write_bytes(content)
    vouch_for(checkpoint)
    for source in (exported, run_dir):
        with refused("model.safetensors is not a readable safetensors file"):
            load_model(source)


@pytest.mark.parametrize(
    "dimensions",
    [{"n_layer": 10**9}, {"n_layer": -1}, {"n_embd": 2**40, "n_head": 1}, {"n_positions": 10**10}],
    ids=str,
)
def test_absurd_dimensions_are_refused_before_a_model_is_built(
    commands, run_dir, exported, checkpoint, dimensions
):
    path = exported / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dimensions))
    path = checkpoint / "trainer_state.json"
    state = json.loads(path.read_text())
    state["model_config"] |= {
        {"n_positions": "block_size"}.get(name, name): value for name, value in dimensions.items()
    }
    path.write_text(json.dumps(state))
    vouch_for(checkpoint)
    plain_bytes = commands.run("sample", "--top-p=0").peak_bytes  # it only refuses a flag
    for source in (exported, run_dir):
        done = commands.run("sample", f"--model={source}")
        assert_refused(done)
        assert done.peak_bytes < plain_bytes + SPARE_BYTES


@pytest.mark.parametrize(("dtype", "bits"), [("I64", 64), ("C64", 64), ("F4", 4)])
def test_weights_that_are_no_floats_are_refused(exported, dtype, bits):
    path, name = exported / "model.safetensors", "transformer.ln_f.bias"
    save_file(load_file(path) | {name: torch.zeros(32)}, path)
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    header[name] |= {"dtype": dtype, "shape": [32 * 32 // bits]}
    path.write_bytes(claims(header, content[8 + size :]))
    with refused(name):
        load_model(exported)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_named(tiny_data, run_dir, exported, checkpoint, value):
    name = "transformer.h.1.mlp.c_fc.weight"
    for path in (exported / "model.safetensors", checkpoint / "model.safetensors"):
        tensors = load_file(path)
        tensors[name][3, 5] = value
        save_file(tensors, path)
    vouch_for(checkpoint)
    for source, folder in ((exported, exported), (run_dir, checkpoint)):
        said = f"{folder}: {name} has weights that are NaN or infinite"
        with refused(said):
            load_model(source)
        where = (f"--data-dir={tiny_data}", f"--out-dir={run_dir.parent}", "--device=cpu")
        with refused(said):
            main([*where, f"--init-from={source}", "--no-compile", "--hellaswag-every=0"])
        assert os.listdir(run_dir.parent) == ["run"]


# An error shows no secret


def test_no_error_shows_a_signed_address_or_a_token(commands, tmp_path):
    (tmp_path / "leak.py").write_text(
        "import os\nfrom runtime.cli import run_command\n"
        "def main():\n"
        "    url = 'https://me:SECRET@storage/x?X-Amz-Signature=SECRET'\n"
        "    raise OSError(f'{os.environ[\"HF_TOKEN\"]} is refused by {url}')\n"
        "run_command(main)\n"
    )
    done = commands.run(tmp_path / "leak.py", HF_TOKEN="hf_SECRETaaaaaaaaaaaaaaaaaaaaaaaa")
    assert (done.code, done.stderr) == (2, "error: *** is refused by https://storage/x\n")


# Nobody on the network comes in

LISTENING = """
import os, sys
sys.path.insert(0, {root!r})
import psutil, train_gpt2
from runtime.cli import run_command
train = train_gpt2.train

def train_and_list(*args):
    result = train(*args)
    for each in psutil.Process().net_connections("inet"):
        print("socket", each.status, each.laddr.ip, flush=True)
    return result

train_gpt2.train = train_and_list
run_command(train_gpt2.main)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_process_has_no_socket_and_the_ranks_of_one_machine_listen_on_loopback(
    tiny_flags, tmp_path, ranks
):
    script = tmp_path / "listening.py"
    script.write_text(LISTENING.format(root=str(ROOT)))
    flags = (*tiny_flags, "--max-steps=1", "--val-every=0", "--micro-batch-size=1")
    command = torchrun(script, *flags) if ranks > 1 else [sys.executable, script, *flags]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.findall("^socket (.*) (.*)$", output, re.MULTILINE)
    listening = {address for status, address in found if status == "LISTEN"}
    assert listening <= {"127.0.0.1", "::1"}
    assert bool(found) == bool(listening) == (ranks > 1)
