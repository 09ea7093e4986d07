"""Hostile files and secrets: no file runs code, leads elsewhere, or takes the memory it claims.

No test trusts a format's name: each file is what an attacker would offer under that name.
"""

import ast
import contextlib
import dataclasses
import hashlib
import importlib
import json
import os
import pickle
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY_RUN, torchrun
from forked import assert_refused
from hub_server import HubHandler, HubServer
from safetensors.torch import load_file, save_file
from test_fineweb import texts_of, write_parquet

pytestmark = pytest.mark.skipif(os.name != "posix", reason="forks")
FOLDERS = (".", "bench", "corpus", "runtime", "training")
MODULES = sorted(
    str(path.relative_to(ROOT)) for part in FOLDERS for path in (ROOT / part).glob("*.py")
)
SPARE_BYTES = 300 << 20  # how much more memory a refusal may take than that of a wrong flag


@pytest.fixture(scope="module")
def made(commands, tiny_data):
    """A finished run and its export, in one folder; the tests work on copies."""
    flags = (*TINY_RUN, "--max-steps=2", f"--data-dir={tiny_data}", "--run-name=run")
    done = commands.run("train_gpt2", *flags, f"--out-dir={commands.folder}/runs")
    assert done.code == 0, done.stderr
    run, export = commands.folder / "runs" / "run", commands.folder / "export"
    assert commands.run("export", f"--model={run}", f"--out={export}").code == 0
    return run, export


@pytest.fixture
def run_dir(made, tmp_path):
    return shutil.copytree(made[0], tmp_path / "runs" / "run")


@pytest.fixture
def exported(made, tmp_path):
    return shutil.copytree(made[1], tmp_path / "export")


@pytest.fixture
def checkpoint(run_dir):
    return run_dir / "checkpoints" / "step_00000002"


def resume(commands, tiny_data, run_dir, *flags):
    where = (f"--data-dir={tiny_data}", f"--out-dir={run_dir.parent}", "--run-name=run")
    return commands.run("train_gpt2", *TINY_RUN, *where, f"--resume={run_dir}", *flags)


def sample(commands, model):
    return commands.run("sample", f"--model={model}", "--max-new-tokens=2", "--num-samples=1")


def vouch_for(checkpoint):
    """Write the manifest again, as one who forges a checkpoint would."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    for name, entry in manifest["files"].items():
        content = (checkpoint / name).read_bytes()
        entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    path.write_text(json.dumps(manifest))


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
def test_no_shard_runs(commands, tmp_path, mark, kind, manifest):
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
    done = commands.run("train_gpt2", *TINY_RUN, f"--data-dir={data}", f"--out-dir={tmp_path}")
    assert_refused(done, "train_0.npy cannot be read as a token shard")


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("pickle", "model.safetensors", "model.safetensors is not a readable safetensors file"),
        ("torch", "model.safetensors", "model.safetensors is not a readable safetensors file"),
        ("torch", "pytorch_model.bin", "pytorch_model.bin is a pickle file, which is never loaded"),
        ("pickle", "model.safetensors.index.json", "index.json is not valid JSON"),
    ],
)
def test_no_pretrained_file_runs(commands, tiny_data, exported, mark, kind, name, said):
    if name == "pytorch_model.bin":
        (exported / "model.safetensors").unlink()
    (exported / name).write_bytes(pickled(mark, kind))
    assert_refused(sample(commands, exported), name, said)
    flags = (f"--data-dir={tiny_data}", f"--out-dir={mark.parent}", "--device=cpu")
    assert_refused(commands.run("train_gpt2", *flags, f"--init-from={exported}"), name, said)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "trainer_state.json", "manifest.json"]
)
def test_no_checkpoint_file_runs(commands, tiny_data, run_dir, checkpoint, mark, name):
    (checkpoint / name).write_bytes(pickled(mark, "torch" if "safe" in name else "pickle"))
    if name != "manifest.json":
        vouch_for(checkpoint)
    assert_refused(resume(commands, tiny_data, run_dir, "--max-steps=3"), name)
    done = sample(commands, run_dir)
    if name == "optimizer.safetensors":
        assert done.code == 0  # sampling does not read it
    else:
        assert_refused(done, name)


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
        assert unsafe_code((ROOT / module).read_text(encoding="utf-8")) is None, module
    examples = ("from torch import (nn,\n load)", "np.load(path)", "eval(text)", "import marshal")
    assert all(map(unsafe_code, (*examples, "f(shell=True)", "dist.all_gather_object(a, b)")))


# Nothing leads elsewhere


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/b", "..", "", "a\nb", "\x1b[2J", "\udcff"])
def test_run_name_is_a_plain_name(commands, tiny_data, tmp_path, name):
    before = sorted(tmp_path.rglob("*"))
    where = (f"--data-dir={tiny_data}", f"--out-dir={tmp_path}/a/runs", f"--run-name={name}")
    assert_refused(commands.run("train_gpt2", *TINY_RUN, *where), "--run-name")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", 7])
def test_pretrained_index_names_no_paths(commands, exported, name):
    shutil.copy(exported / "model.safetensors", exported.parent)  # so that `..` would find it
    index = exported / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"wte.weight": name}}))
    done = sample(commands, exported)
    assert_refused(done, f"{index.name} does not name the weights' files in its own folder")


def test_pretrained_reads_the_links_of_the_hubs_cache(commands, exported, tmp_path):
    """As `huggingface_hub` lays it out: snapshots/COMMIT/NAME leads to ../../blobs/HASH."""
    cache = tmp_path / "models--o--n"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / "abc").mkdir(parents=True)
    for number, name in enumerate(["config.json", "model.safetensors"]):
        (exported / name).rename(cache / "blobs" / str(number))
        (cache / "snapshots" / "abc" / name).symlink_to(f"../../blobs/{number}")
    assert sample(commands, cache / "snapshots" / "abc").code == 0


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl", "samples.txt"])
def test_training_follows_the_users_own_links(commands, tiny_data, run_dir, tmp_path, name):
    """As where `checkpoints` leads to scratch; a checkpoint that is a link is never deleted."""
    target = tmp_path / "elsewhere"
    if (run_dir / name).exists():
        (run_dir / name).rename(target)
    else:
        target.touch()
    (run_dir / name).symlink_to(target)
    before = contents(target)
    if name == "checkpoints":
        (target / "step_00000002").rename(tmp_path / "archived")
        (target / "step_00000002").symlink_to(tmp_path / "archived")
    flags = ("--max-steps=4", "--sample-every=1", "--keep-checkpoints=1")
    assert resume(commands, tiny_data, run_dir, *flags).code == 0
    assert (run_dir / name).is_symlink()
    assert contents(target) != before
    if name == "checkpoints":
        assert os.listdir(target) == ["step_00000004"]
        assert len(os.listdir(tmp_path / "archived")) == 4


def test_training_goes_on_where_runs_is_a_link(commands, tiny_data, run_dir, tmp_path):
    run_dir.parent.rename(tmp_path / "big disk")
    run_dir.parent.symlink_to(tmp_path / "big disk")
    assert resume(commands, tiny_data, run_dir, "--max-steps=4").code == 0
    assert (tmp_path / "big disk/run/checkpoints/step_00000004").is_dir()


def contents(path):
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {file: file.read_bytes() for file in files}


# Nothing takes the memory that it asks for


def claims(header, body=b""):
    """A safetensors file with this header."""
    data = json.dumps(header).encode()
    return struct.pack("<Q", len(data)) + data + body


ABSURD_SAFETENSORS = {
    "a header of 100 MB": struct.pack("<Q", 10**8) + b"{}",
    "a tensor of 4 TB": claims({"x": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4]}}),
}


@pytest.fixture(scope="module")
def plain_bytes(commands):
    """The memory of a process that only refuses a flag."""
    done = commands.run("sample", "--top-p=0")
    assert_refused(done, "--top-p")
    return done.peak_bytes


@pytest.mark.parametrize("file", ABSURD_SAFETENSORS)
def test_absurd_safetensors_are_refused(commands, run_dir, exported, checkpoint, plain_bytes, file):
    (exported / "model.safetensors").write_bytes(ABSURD_SAFETENSORS[file])
    (checkpoint / "model.safetensors").write_bytes(ABSURD_SAFETENSORS[file])
    vouch_for(checkpoint)
    for source in (exported, run_dir):
        done = sample(commands, source)
        assert_refused(done, "model.safetensors is not a readable safetensors file")
        assert done.peak_bytes < plain_bytes + SPARE_BYTES


ABSURD_DIMENSIONS = [
    *({"n_layer": 10**9}, {"n_layer": 10**9, "n_embd": 2, "n_head": 2}, {"n_layer": -1}),
    *({"n_embd": 10**7, "n_head": 1}, {"n_embd": 2**40, "n_head": 1}, {"n_positions": 10**10}),
]


@pytest.mark.parametrize("dimensions", ABSURD_DIMENSIONS, ids=str)
def test_absurd_dimensions_are_refused_before_a_model_is_built(
    commands, tiny_data, run_dir, exported, checkpoint, plain_bytes, dimensions
):
    path = exported / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dimensions))
    done = [sample(commands, exported)]
    path = checkpoint / "trainer_state.json"
    state = json.loads(path.read_text())
    state["model_config"] |= {
        {"n_positions": "block_size"}.get(name, name): value for name, value in dimensions.items()
    }
    path.write_text(json.dumps(state))
    vouch_for(checkpoint)
    done.append(sample(commands, run_dir))
    for source in (run_dir, exported):
        flags = (f"--data-dir={tiny_data}", f"--init-from={source}")
        done.append(commands.run("train_gpt2", *flags))
    for refusal in done:
        assert_refused(refusal)
        assert refusal.peak_bytes < plain_bytes + SPARE_BYTES


@pytest.mark.parametrize(("dtype", "bits"), [("I64", 64), ("C64", 64), ("F4", 4)])
def test_weights_that_are_no_floats_are_refused(commands, exported, dtype, bits):
    path, name = exported / "model.safetensors", "transformer.ln_f.bias"
    save_file(load_file(path) | {name: torch.zeros(32)}, path)
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    header[name] |= {"dtype": dtype, "shape": [32 * 32 // bits]}
    path.write_bytes(claims(header, content[8 + size :]))
    assert_refused(sample(commands, exported), name)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_named(
    commands, tiny_data, run_dir, exported, checkpoint, value
):
    name = "transformer.h.1.mlp.c_fc.weight"
    for path in (exported / "model.safetensors", checkpoint / "model.safetensors"):
        tensors = load_file(path)
        tensors[name][3, 5] = value
        save_file(tensors, path)
    vouch_for(checkpoint)
    for source, folder in ((exported, exported), (run_dir, checkpoint)):
        said = f"{folder}: {name} has weights that are NaN or infinite"
        where = (f"--data-dir={tiny_data}", f"--out-dir={run_dir.parent}", "--device=cpu")
        flags = (*where, f"--init-from={source}", "--run-name=new", "--hellaswag-every=0")
        assert_refused(commands.run("train_gpt2", *flags, "--no-compile"), said)
        assert not (run_dir.parent / "new").exists()
        assert_refused(sample(commands, source), said)


@pytest.mark.parametrize(
    "name",
    [
        *("export/config.json", "export/model.safetensors.index.json", "data/manifest.json"),
        *("checkpoint/trainer_state.json", "checkpoint/manifest.json", "config.json"),
    ],
)
def test_a_gigabyte_of_json_is_refused(
    commands, run_dir, exported, checkpoint, tmp_path, plain_bytes, name
):
    (tmp_path / "data").mkdir()
    (tmp_path / "checkpoint").symlink_to(checkpoint)
    path = tmp_path / name
    path.write_bytes(b"[" * 2**20)
    os.truncate(path, 10**9)  # without the disk space: the rest is a hole
    if path.parent == tmp_path:
        done = commands.run("train_gpt2", f"--config={path}")
    elif path.parent.name == "data":
        done = commands.run("train_gpt2", f"--data-dir={path.parent}", f"--out-dir={tmp_path}/runs")
    else:
        done = sample(commands, exported if path.parent == exported else run_dir)
    assert_refused(done, path.name)
    assert done.peak_bytes < plain_bytes + SPARE_BYTES


# No secret is written or printed

SECRETS = {
    "HF_TOKEN": "hf_SECRETaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "HUGGING_FACE_HUB_TOKEN": "hf_SECRETbbbbbbbbbbbbbbbbbbbbbbbbbbbbb",
    "HF_HUB_TOKEN": "hf_SECRETccccccccccccccccccccccccccccc",
    "WANDB_API_KEY": "SECRETddddddddddddddddddddddddddddddd",
}


def assert_no_secret(folder, *done):
    """No file below a folder, no file's name and no output has a secret's text."""
    told = [(command.stdout + command.stderr).encode() for command in done]
    told += [file.name.encode() for file in folder.rglob("*")]
    told += [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
    assert len(told) > len(done)
    assert not any(b"SECRET" in text for text in told)


def test_no_secret_is_written_by_training_sampling_or_export(commands, tiny_data, tmp_path):
    where = (f"--data-dir={tiny_data}", f"--out-dir={tmp_path}/runs", "--run-name=a")
    run = f"{tmp_path}/runs/a"
    done = [
        commands.run("train_gpt2", *TINY_RUN, *where, "--sample-every=4", **SECRETS),
        commands.run("train_gpt2", *where, "--max-steps=9", "--seed=3", "--resume=auto", **SECRETS),
        commands.run("sample", f"--model={run}", "--max-new-tokens=2", **SECRETS),
        commands.run("export", f"--model={run}", f"--out={tmp_path}/export", **SECRETS),
        commands.run("plot", run, **SECRETS),
    ]
    assert [command.code for command in done] == [0, 2, 0, 0, 0]
    assert_no_secret(tmp_path, *done)


@pytest.mark.parametrize(
    ("user", "status", "sent"), [("", 401, "Bearer hf_SECRET"), ("me:SECRETword@", 500, "Basic ")]
)
def test_no_secret_is_told_where_the_hub_fails(commands, tmp_path, user, status, sent):
    """The token, or the password in the hub's address, goes to the hub and nowhere else."""
    with HubServer() as hub:
        hub.fails = status
        address = {"HF_ENDPOINT": f"http://{user}127.0.0.1:{hub.server_port}"}
        secret = hub.environment(tmp_path / "hf") | SECRETS | address
        texts = commands.run("fineweb", "--source=o/n", f"--data-dir={tmp_path}/data", **secret)
        model = commands.run("sample", "--model=o/n", **secret)
    assert texts.code == model.code == 2
    (tmp_path / "there is a file").touch()
    assert_no_secret(tmp_path, texts, model)
    assert any(token.startswith(sent) for token in hub.sent)


LEAK = """
import logging, sys, threading, warnings
import train_gpt2
from runtime.cli import run_command
from runtime.distributed import DistInfo, print0
url = "https://me:SECRET@storage/x?X-Amz-Signature=SECRET&X-Amz-Credential=SECRET"
logger = logging.getLogger("of a library")
logger.addHandler(logging.StreamHandler())  # before run_command
def main():
    warnings.warn(f"WARNED {url}")
    logger.error("LOGGED %s", url)
    logger.error("Max retries exceeded with url: /x?X-Amz-Signature=SECRET (Caused by nothing)")
    thread = threading.Thread(target=open, args=[f"RAISED {url}"])
    thread.start()
    thread.join()
    print0(f"PRINTED {url}")
    raise OSError(f"FAILED {url}")
run_command(main)
"""


def test_no_message_of_any_kind_shows_a_signed_address(commands, tmp_path):
    (tmp_path / "leak.py").write_text(LEAK)
    done = commands.run(tmp_path / "leak.py")
    assert (done.code, done.stdout) == (2, "PRINTED https://storage/x\n")
    for kind in ("WARNED", "LOGGED", "FAILED"):
        assert f"{kind} https://storage/x" in done.stderr
    assert "RAISED https://storage/x" in done.stderr  # in a thread's traceback
    assert "SECRET" not in done.stderr.replace(LEAK, "")


class SigningHub(HubHandler):
    """A hub that redirects every large file to a signed address, at which it is not to be had."""

    damage = ""
    left = 0  # answers of the storage that are right

    def resolve(self, body, kind, name, repo, commit, path):
        if not path.endswith((".parquet", ".safetensors")):
            return super().resolve(body, kind, name, repo, commit, path)
        address = f"http://localhost:{self.server.server_port}/storage/{path}"  # another host
        signature = "X-Amz-Signature=SECRET&X-Amz-Credential=SECRET"
        place = {"Location": f"{address}?{signature}", "ETag": '"tag"'}
        size = str(len(repo["files"][path]))
        return self.answer(302, **place, X_Linked_Size=size, X_Repo_Commit="a" * 40)

    def storage(self, name, body):
        SigningHub.left -= 1
        files = [file for repo in self.server.repos.values() for file in repo["files"].items()]
        whole = dict(files).get(name, b"")
        if self.left >= 0:
            return self.send_file(whole, "tag")
        if self.damage == "cut off" and self.left == -1:
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        if self.damage.startswith("slow"):
            return self.drip(self.damage)
        if self.damage == "damaged":
            return self.send_file(whole[:50] + b"x" * (len(whole) - 100) + whole[-50:], "tag")
        return self.answer(404 if self.damage == "gone" else 403, b"Request has expired")

    def drip(self, part):
        """A byte now and then, until the client is gone: of the headers, or of the body."""
        start = b"HTTP/1.1 200 OK\r\n"
        start += b"X-Long: " if part == "slow headers" else b"Content-Length: 1000\r\n\r\n"
        with contextlib.suppress(OSError):
            self.wfile.write(start)
            while True:
                self.wfile.write(b"x")
                time.sleep(0.05)


@pytest.fixture(scope="module")
def signing_hub(tmp_path_factory):
    """The environment of commands whose hub is a `SigningHub` with data set and model o/n."""
    folder = tmp_path_factory.mktemp("signing")
    texts = [write_parquet(folder / "part.parquet", texts_of(1000)).read_bytes() for _ in "01"]
    with HubServer(handler=SigningHub) as server:
        server.add("model", "o/n", {"config.json": b"{}", "model.safetensors": bytes(1000)})
        server.add("dataset", "o/n", {f"{part}.parquet": text for part, text in enumerate(texts)})
        yield server.environment(folder / "hf") | {"no_proxy": "127.0.0.1,localhost"}


@pytest.mark.parametrize("damage", ["expired", "gone", "damaged"])
def test_no_signed_address_is_shown_where_a_stream_fails(commands, signing_hub, tmp_path, damage):
    """One line says that finished shards stay; the same command goes on once the hub is well."""
    SigningHub.damage, SigningHub.left = damage, 2
    flags = ("--source=o/n", f"--data-dir={tmp_path}/data", "--shard-size=1000")
    failed = commands.run("fineweb", *flags, **signing_hub)
    assert_refused(failed, "reading o/n failed (", "finished shards stay, and the same command")
    SigningHub.left = 1000
    done = commands.run("fineweb", *flags, **signing_hub)
    assert done.code == 0, done.stderr
    assert_no_secret(Path(signing_hub["HF_HOME"]), failed, done)
    assert_no_secret(tmp_path, failed, done)


def test_no_signed_address_is_shown_where_a_download_fails(
    commands, signing_hub, tmp_path, tiny_data
):
    """The hub's library logs the address itself when it tries again."""
    SigningHub.damage, SigningHub.left = "cut off", 0
    flags = (f"--data-dir={tiny_data}", f"--out-dir={tmp_path}/runs", "--init-from=o/n")
    model = commands.run("train_gpt2", *flags, "--device=cpu", **signing_hub)
    assert model.code == 2
    assert "Error while downloading from http://localhost:" in model.stderr
    assert "error: 'o/n' is not a folder, and the" in model.stderr.splitlines()[-1]
    script = tmp_path / "fetch.py"
    script.write_text(
        "import pathlib, hellaswag\nfrom runtime.cli import run_command\n"
        "url = 'http://127.0.0.1:1/x?X-Amz-Signature=SECRET'\n"
        "run_command(lambda: hellaswag.fetch(url, pathlib.Path('x'), 1, ''))\n"
    )
    data = commands.run(script, **signing_hub)
    assert_refused(data, "cannot download http://127.0.0.1:1/x (")
    script.unlink()
    (tmp_path / "empty").touch()
    assert_no_secret(tmp_path, model, data)


@pytest.mark.parametrize("damage", ["slow headers", "slow body"])
def test_download_that_drips_ends_in_one_line(commands, signing_hub, tmp_path, damage):
    """No read is late, only the whole: it would take minutes here, and hours for a real file."""
    SigningHub.damage, SigningHub.left = damage, 0
    seconds = 3 if damage == "slow body" else 1  # a byte has to come, on a busy machine too
    script = tmp_path / "short.py"
    script.write_text(
        "import pathlib, sys, hellaswag, runtime.huggingface\n"
        "from runtime.cli import run_command\n"
        "runtime.hub.DOWNLOAD_SECONDS = 1\n"
        f"hellaswag.DOWNLOAD_TIMEOUT_SECONDS = {seconds}\n"
        "if sys.argv[1:] == ['model']:\n"
        "    run_command(lambda: runtime.huggingface.load_pretrained('o/n'))\n"
        "run_command(lambda: hellaswag.fetch(sys.argv[1], pathlib.Path('x'), 1000, ''))\n"
    )
    url = signing_hub["HF_ENDPOINT"] + "/storage/x"
    data = commands.run(script, url, **signing_hub)
    said = f"cannot download {url} (not complete after {seconds} s; "
    assert_refused(data, said, "--data FILE")
    [came] = re.findall(r"; (\d+) of 1,000 bytes came\)", data.stderr)
    assert (int(came) > 0) == (damage == "slow body")
    assert not (commands.folder / "x").exists()
    model = commands.run(script, "model", **signing_hub)
    assert model.code == 2
    last = model.stderr.splitlines()[-1]  # below the library's progress bar
    assert "error: 'o/n' is not a folder" in last
    assert "(TimeoutError: not complete after 1 s)" in last


def test_no_flag_takes_a_secret():
    words = ("token", "key", "secret", "password", "credential", "auth")
    names = [module.removesuffix(".py").replace("/", ".") for module in MODULES]
    flags = {
        field.name
        for module in map(importlib.import_module, names)
        for name, kind in vars(module).items()
        if dataclasses.is_dataclass(kind) and name.endswith("Config")
        for field in dataclasses.fields(kind)
    }
    assert "run_name" in flags
    counts = {"val_tokens", "max_new_tokens"}  # numbers of text tokens
    assert not [f for f in flags - counts if any(word in f for word in words)]


# --- the network ------------------------------------------------------------------------------

LISTENING = """
import json, os, sys
sys.path.insert(0, {root!r})
import psutil, train_gpt2
from runtime.cli import run_command
train = train_gpt2.train

def train_and_list(*args):
    train(*args)
    found = psutil.Process().net_connections("inet")
    listening = [each.laddr.ip for each in found if each.status == "LISTEN"]
    names = [os.environ.get(f"{{kind}}_SOCKET_IFNAME") for kind in ("GLOO", "NCCL")]
    with open(os.environ["LISTED"] + os.environ.get("RANK", "0"), "w") as file:
        json.dump([len(found), listening, names], file)

train_gpt2.train = train_and_list
run_command(train_gpt2.main)
"""


def list_sockets(tmp_path, launch, *flags, **environment):
    """Train a step by `launch`; each process's number of sockets, addresses, and interfaces."""
    script = tmp_path / "listening.py"
    script.write_text(LISTENING.format(root=str(ROOT)))
    environment |= {"LISTED": str(tmp_path / "rank")}
    launch(script, *flags, "--max-steps=1", "--val-every=0", **environment)
    return [json.loads(path.read_text()) for path in tmp_path.glob("rank*")]


def test_run_of_one_process_has_no_socket(commands, tmp_path, tiny_flags):
    found = list_sockets(tmp_path, commands.run, *tiny_flags)
    assert [(count, listening) for count, listening, _ in found] == [(0, [])]


@pytest.mark.parametrize("chosen", [{}, {"NCCL_SOCKET_IFNAME": "eth7"}])
def test_ranks_of_one_machine_listen_on_loopback_only(tmp_path, tiny_flags, chosen):
    def launch(*command, **environment):
        own = {name: value for name, value in os.environ.items() if "SOCKET_IFNAME" not in name}
        options = {"env": own | environment, "check": True, "capture_output": True}
        subprocess.run(torchrun(*command), **options)

    found = list_sockets(tmp_path, launch, *tiny_flags, **chosen)
    assert len(found) == 2
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    for _, listening, (gloo, nccl) in found:
        assert listening
        assert set(listening) <= {"127.0.0.1", "::1"}
        assert gloo == loopback
        assert nccl == chosen.get("NCCL_SOCKET_IFNAME", loopback)
