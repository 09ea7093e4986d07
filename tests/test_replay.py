"""Steps that are made again: the same bit for bit, or what has changed."""

import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from checkpoints import write_manifest
from conftest import ROOT, TINY_RUN, copy_code

from corpus.shards import Manifest, ShardWriter
from formats.metrics import read_lines
from tokenizer import VOCAB_SHA256

pytestmark = pytest.mark.slow


def write_data(folder, seed=0):
    """Three shards with a manifest."""
    folder.mkdir(exist_ok=True)
    writer = ShardWriter(folder, Manifest({"kind": "test"}, VOCAB_SHA256, 4000))
    steps = np.random.default_rng(seed).integers(0, 3, 10_000)
    writer.add((np.cumsum(steps) % 400).astype(np.uint16))
    writer.close()


@pytest.fixture(scope="module")
def made(commands, tmp_path_factory):
    """A run of eight steps with the checkpoints of steps 4 and 8, and its data."""
    folder = tmp_path_factory.mktemp("made")
    write_data(folder / "data")
    assert train(commands, folder).code == 0
    return folder


def train(commands, folder, *flags):
    place = (f"--out-dir={folder}/runs", "--run-name=a", f"--data-dir={folder}/data")
    return commands.run(ROOT / "train_gpt2.py", *TINY_RUN, *place, *flags)


def replay(commands, folder, *flags):
    """Return the exit code and the lines without the run's folder."""
    done = commands.run(ROOT / "replay.py", folder / "runs/a", *flags)
    assert "Traceback" not in done.stderr
    return done.code, [*done.stdout.replace(f"{folder}/runs/a: ", "").splitlines(), done.stderr]


SAME = [
    "not seen: the tokens outside of the windows that these steps read",
    "changed since: nothing that the run has recorded",
]


def test_replay_is_the_same_from_a_checkpoint_or_the_beginning(commands, made, tmp_path):
    code, lines = replay(commands, made, "--from=4", "--steps=3")
    assert (code, lines[:-1]) == (0, ["same, bit for bit: steps 5 to 7", *SAME])
    shutil.copytree(made / "runs", tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs/a/checkpoints/step_00000004")  # only the last is kept
    before = sorted(path.name for path in tmp_path.rglob("*"))
    code, lines = replay(commands, tmp_path)
    assert (code, lines[0]) == (0, "same, bit for bit: steps 1 to 8")
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    code, lines = replay(commands, tmp_path, "--from=8")
    assert code == 2
    assert "has no steps after step 8: use a smaller --from" in lines[-1]
    shutil.rmtree(tmp_path / "runs")
    code, lines = replay(commands, tmp_path)
    assert code == 2
    assert "metrics.jsonl does not exist: pass a run folder" in lines[-1]


def test_replay_finds_and_names_edited_code(made, tmp_path):
    code = copy_code(tmp_path / "code")
    shutil.copytree(ROOT / "bench", code / "bench", ignore=shutil.ignore_patterns("results"))
    command = [sys.executable, code / "replay.py", made / "runs/a", "--from=4", "--steps=2"]
    (code / "ops.py").write_text((ROOT / "ops.py").read_text() + "\nUNUSED = 1\n")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("changed since: the code of ops.py\n")
    model = (ROOT / "model.py").read_text()
    (code / "model.py").write_text(model.replace('approximate="tanh"', 'approximate="none"'))
    assert (code / "model.py").read_text() != model
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert re.search(
        r"step 5 differs: train_loss is \S+ instead of \S+, a difference of ", done.stdout
    )
    assert done.stdout.endswith("changed since: the code of model.py; the code of ops.py\n")


def test_replay_finds_and_names_changed_data(commands, made, tmp_path):
    """Tokens that a step reads, without their hash; another document; a damaged checkpoint."""
    shutil.copytree(made, tmp_path / "b")
    folder, shard = tmp_path / "b", tmp_path / "b/data/train_000002.npy"
    for config in (*folder.rglob("config.json"), *folder.rglob("trainer_state.json")):
        config.write_text(config.read_text().replace(str(made), str(folder)))
    for path in folder.glob("runs/a/checkpoints/*"):
        write_manifest(path)
    tokens = np.load(shard)
    np.save(shard, (tokens + 1) % 400)
    code, lines = replay(commands, folder, "--from=4")
    assert code == 1
    assert re.match(r"step 5 differs: train_loss is \S+ instead of \S+, a difference of ", lines[0])
    assert lines[1].startswith(f"changed since: {shard} is missing or does not match its hash")
    shutil.rmtree(folder / "data")
    write_data(folder / "data", seed=1)
    code, lines = replay(commands, folder, "--from=4")
    assert code == 2
    assert f"the data in {folder}/data changed since this run began" in lines[-1]
    code, lines = replay(commands, folder, "--from=0", "--steps=1")
    assert code == 1
    assert "data_fingerprint" in lines[1]
    weights = folder / "runs/a/checkpoints/step_00000004/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-9] ^= 1
    weights.write_bytes(content)
    code, lines = replay(commands, folder, "--from=4")
    assert code == 2
    assert "model.safetensors is damaged: its size, SHA-256 or format differs" in lines[-1]


def test_replay_uses_the_flags_of_the_steps(commands, made, tmp_path):
    """Other flags from step 4 on; then three resumes without a change."""
    folder = tmp_path
    shutil.copytree(made / "data", folder / "data")
    assert train(commands, folder, "--max-steps=4", "--checkpoint-every=2").code == 0
    resume = (f"--resume={folder}/runs/a", "--max-lr=1e-3", "--checkpoint-every=2")
    assert train(commands, folder, *resume).code == 0
    code, lines = replay(commands, folder, "--from=0")
    note, same, *_ = lines
    assert (code, same) == (0, "same, bit for bit: steps 1 to 4")
    assert note.startswith("note: later steps have other flags (")
    assert "max_lr 0.0006 -> 0.001" in note
    assert note.endswith("use --from 4")
    for last in (6, 6, 4):
        for path in folder.glob("runs/a/checkpoints/*"):
            if int(path.name[-8:]) > last:
                shutil.rmtree(path)
        assert train(commands, folder, *resume).code == 0
    resumes = [
        r["resumed_from"]
        for r in read_lines(folder / "runs/a/metrics.jsonl")
        if "resumed_from" in r
    ]
    assert resumes == [4, 6, 6, 4]
    code, lines = replay(commands, folder, "--from=4")
    assert (code, lines[0]) == (0, "same, bit for bit: steps 5 to 8")


def test_replay_uses_as_many_processes(commands, made, tmp_path):
    shutil.copytree(made / "data", tmp_path / "data")
    place = (f"--out-dir={tmp_path}/runs", "--run-name=a", f"--data-dir={tmp_path}/data")
    assert commands.run_ranks(2, ROOT / "train_gpt2.py", *TINY_RUN, *place).code == 0
    code, lines = replay(commands, tmp_path, "--from=4", "--steps=2")
    assert (code, lines[0]) == (0, "same, bit for bit: steps 5 to 6")
