"""Hostile files and networks: no file runs code or leads elsewhere, and nobody comes in."""

import os
import pickle
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from checkpoints import write_manifest
from conftest import ROOT, TINY_RUN, torchrun

from formats.huggingface import save_pretrained
from formats.load import load_model
from train_gpt2 import main
from training.config import TrainConfig


@pytest.fixture(scope="module")
def made(tiny_data, tmp_path_factory):
    """A finished run and its export, in one folder; the tests work on copies."""
    folder = tmp_path_factory.mktemp("made")
    flags = (*TINY_RUN, "--max-steps=2", f"--data-dir={tiny_data}", "--run-name=run")
    main([*flags, f"--out-dir={folder}"])
    save_pretrained(load_model(folder / "run"), folder / "export")
    return folder


@pytest.fixture
def copied(made, tmp_path):
    return shutil.copytree(made, tmp_path / "copied")


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


def write_payload(path, mark, kind):
    """The payload as a plain pickle, as PyTorch's archive of one, or as an array of objects."""
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Payload(mark)))
    elif kind == "torch":
        torch.save({"transformer.wte.weight": Payload(mark)}, path)
    else:
        with path.open("wb") as file:
            np.save(file, np.array([Payload(mark)], dtype=object), allow_pickle=True)


def test_the_payload_would_run(tmp_path):
    """Otherwise the tests below would prove nothing."""
    loaders = {
        "pickle": lambda path: pickle.loads(path.read_bytes()),
        "torch": lambda path: torch.load(path, weights_only=False),
        "npy": lambda path: np.load(path, allow_pickle=True),
    }
    for kind, load in loaders.items():
        write_payload(tmp_path / kind, tmp_path / f"{kind} ran", kind)
        load(tmp_path / kind)
        assert (tmp_path / f"{kind} ran").exists()


@pytest.mark.parametrize("kind", ["npy", "pickle"])
def test_no_shard_runs(tmp_path, mark, kind):
    for split in ("val", "train"):
        write_payload(tmp_path / f"{split}_0.npy", mark, kind)
    with refused("train_0.npy cannot be read as a token shard"):
        main([*TINY_RUN, f"--data-dir={tmp_path}", f"--out-dir={tmp_path}"])


def test_no_pretrained_file_runs(copied, mark):
    (copied / "export" / "model.safetensors").unlink()
    write_payload(copied / "export" / "pytorch_model.bin", mark, "torch")
    with refused("neither pickle nor shards are loaded"):
        load_model(copied / "export")
    write_payload(copied / "export" / "model.safetensors", mark, "torch")
    with refused("model.safetensors is not a readable safetensors file"):
        load_model(copied / "export")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "trainer_state.json", "manifest.json"]
)
def test_no_checkpoint_file_runs(copied, mark, name):
    checkpoint = copied / "run/checkpoints/step_00000002"
    write_payload(checkpoint / name, mark, "torch" if "safe" in name else "pickle")
    if name != "manifest.json":
        write_manifest(checkpoint)  # as one who forges a checkpoint would
    with refused(name):
        main([f"--resume={copied}/run", "--max-steps=3"])
    if name != "optimizer.safetensors":  # which this does not read
        with refused(name):
            load_model(copied / "run")


# Nothing leads elsewhere


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "..", "", "\x1b[2J", "\udcff"])
def test_run_name_is_a_plain_name(name):
    with refused("--run-name"):
        TrainConfig(run_name=name)


# Nobody on the network comes in

LISTENING = """
import os, sys
sys.path.insert(0, {root!r})
import psutil, train_gpt2
train = train_gpt2.train

def train_and_list(*args):
    train(*args)
    for each in psutil.Process().net_connections("inet"):
        os.write(1, f"socket {{each.laddr.ip}}\\n".encode())  # print() would mix the ranks' lines

train_gpt2.train = train_and_list
train_gpt2.main()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_process_has_no_socket_and_ranks_of_one_machine_have_them_on_loopback(
    tiny_flags, tmp_path, ranks
):
    script = tmp_path / "listening.py"
    script.write_text(LISTENING.format(root=str(ROOT)))
    flags = (*tiny_flags, "--max-steps=1", "--val-every=0", "--micro-batch-size=1")
    command = torchrun(script, *flags) if ranks > 1 else [sys.executable, script, *flags]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    addresses = {a.removeprefix("::ffff:") for a in re.findall(r"socket (\S+)", output)}
    assert addresses <= {"127.0.0.1", "::1"}
    assert bool(addresses) == (ranks > 1)
