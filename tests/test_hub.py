"""Uploads to a hub and downloads from it: the hub's own client against a server on the loopback."""

import errno
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from conftest import save_run
from fineweb_runs import texts_of, write_texts
from forked import Commands
from hub_server import HubServer

from corpus.shards import open_shards
from formats.hub import explain_hub_errors

TOKEN = "hf_SECRETaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"


@pytest.fixture
def server():
    with HubServer(TOKEN) as server:
        yield server


class HubCommands(NamedTuple):
    """Commands whose hub is a `HubServer`."""

    commands: Commands
    environment: dict[str, str]

    def run(self, script, *flags, **environment):
        return self.commands.run(script, *flags, **(self.environment | environment))


@pytest.fixture
def hub(commands, server, tmp_path):
    return HubCommands(commands, server.environment(tmp_path / "hf") | {"HF_TOKEN": TOKEN})


def contents(folder):
    """The files of a folder, without hidden ones."""
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")
    }


def assert_refused(done, *parts):
    """One line of error, at the end, that has all parts and no secret."""
    assert done.code == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") or "error: " in last
    for part in parts:
        assert part in last
    assert "Traceback" not in done.stderr
    assert "SECRET" not in done.stdout + done.stderr


@pytest.fixture
def pushed(hub, server, tmp_path):
    """A data set of five shards, and its copy on the hub."""
    write_texts(tmp_path / "a.jsonl", texts_of(200))
    flags = (f"--source={tmp_path}/a.jsonl", f"--data-dir={tmp_path}/made", "--shard-size=1000")
    done = hub.run("fineweb", *flags, "--push-to-hub=o/shards")
    assert done.code == 0, done.stderr
    assert done.stdout.splitlines()[-3].startswith("uploaded to http://")
    assert "%|" not in done.stderr  # no bar, for it is no terminal
    return tmp_path / "made"


def test_fineweb_uploads_shards_that_another_machine_downloads(hub, server, pushed, tmp_path):
    repo = server.repos["dataset", "o/shards"]
    assert repo["visibility"] == "private"
    assert repo["files"] == contents(pushed)
    assert len(repo["files"]) > 4
    flags = ("--source=hub:o/shards", f"--data-dir={tmp_path}/copy", "--revision=v1")
    done = hub.run("fineweb", *flags)
    assert done.code == 0, done.stderr
    assert contents(tmp_path / "copy") == contents(pushed)
    ours, theirs = (open_shards(tmp_path / name, "train") for name in ("made", "copy"))
    assert ours.fingerprint == theirs.fingerprint
    server.asked.clear()
    assert hub.run("fineweb", *flags).code == 0
    assert contents(tmp_path / "copy") == contents(pushed)
    assert not server.requests("GET", r"\.npy$")


@pytest.mark.parametrize("token", ["", TOKEN + "x"])
@pytest.mark.parametrize("source", ["hub:o/shards", "o/texts"])
def test_fineweb_of_a_private_repository_says_how_to_log_in(hub, tmp_path, source, token):
    flags = (f"--source={source}", f"--data-dir={tmp_path}/copy")
    done = hub.run("fineweb", *flags, HF_TOKEN=token)
    assert_refused(done, "asking the Hugging Face hub for o/", "401", "log in by `hf auth login`")


def test_fineweb_refuses_shards_that_have_changed_on_the_hub(hub, server, pushed, tmp_path):
    """Of the same names and sizes, so that only their hashes tell them apart."""
    flags = ("--source=hub:o/shards", f"--data-dir={tmp_path}/copy")
    assert hub.run("fineweb", *flags).code == 0
    before = contents(tmp_path / "copy")
    files = server.repos["dataset", "o/shards"]["files"]
    last = max(name for name in files if name.endswith(".npy"))
    files[last] = files[last][:-2] + b"\0\0"
    manifest = json.loads(files["manifest.json"])
    manifest["shards"][-1]["sha256"] = hashlib.sha256(files[last]).hexdigest()
    files["manifest.json"] = json.dumps(manifest).encode()
    server.head = "b" * 40
    assert_refused(hub.run("fineweb", *flags), "copy holds other data than o/shards at commit bbb")
    assert contents(tmp_path / "copy") == before


def test_fineweb_uploads_only_what_is_missing(hub, server, tmp_path):
    write_texts(tmp_path / "a.jsonl", texts_of(200))
    flags = (f"--source={tmp_path}/a.jsonl", f"--data-dir={tmp_path}/made", "--shard-size=1000")
    server.uploads_left = 2
    failed = hub.run("fineweb", *flags, "--push-to-hub=o/shards")
    assert_refused(failed, "was not uploaded to o/shards", "the same command resumes")
    arrived = len(server.large)
    shards = len(list((tmp_path / "made").glob("*.npy")))
    assert 0 < arrived < shards
    server.asked.clear()
    server.uploads_left = 100
    done = hub.run("fineweb", *flags, "--push-to-hub=o/shards")
    assert done.code == 0, done.stderr
    assert len(server.requests("PUT", "")) == shards - arrived
    assert server.repos["dataset", "o/shards"]["files"] == contents(tmp_path / "made")
    commits = server.repos["dataset", "o/shards"]["commits"]
    assert hub.run("fineweb", *flags, "--push-to-hub=o/shards").code == 0
    assert server.repos["dataset", "o/shards"]["commits"] == commits  # nothing has changed


@pytest.mark.parametrize(
    ("fault", "said"),
    [("cut", "o/shards were not downloaded"), ("damaged", "or only this shard if it was")],
)
def test_fineweb_goes_on_after_a_shard_that_was_cut_off_or_damaged(
    hub, server, pushed, tmp_path, fault, said
):
    """Of the third shard, the connection ends in its midst each time, or its bytes are wrong."""
    third = sorted(path.name for path in pushed.glob("train*"))[1]
    flags = ("--source=hub:o/shards", f"--data-dir={tmp_path}/copy")
    setattr(server, fault, third)
    assert_refused(hub.run("fineweb", *flags), said)
    (tmp_path / "copy" / third).unlink(missing_ok=True)
    with pytest.raises(ValueError, match="is not finished"):
        open_shards(tmp_path / "copy", "train")
    arrived = {path.name for path in (tmp_path / "copy").glob("*.npy")}
    setattr(server, fault, None)
    server.asked.clear()
    done = hub.run("fineweb", *flags)
    assert done.code == 0, done.stderr
    assert contents(tmp_path / "copy") == contents(pushed)
    fetched = {path.rpartition("/")[2] for path in server.requests("GET", r"\.npy$")}
    assert third in fetched
    assert not arrived & fetched


def test_fineweb_refuses_what_is_no_finished_data_set(hub, server, pushed, tmp_path):
    files = server.repos["dataset", "o/shards"]["files"]
    manifest = json.loads(files["manifest.json"])
    flags = ("--source=hub:o/shards", f"--data-dir={tmp_path}/copy")
    script, every, outside = (
        {"shards": [{**shard, "file": file} for shard in manifest["shards"]]}
        for file in ("train_gpt2.py", "*.npy", "../a.npy")
    )
    for change, message in (
        ({"complete": False}, "o/shards has no finished shards of GPT-2's tokens"),
        ({"tokenizer_sha256": "0" * 64}, "o/shards has no finished shards of GPT-2's tokens"),
        (script, "lists other files than .npy shards"),
        (every, "lists other files than .npy shards"),
        (outside, "'../a.npy' is not the plain name of a file"),
    ):
        files["manifest.json"] = json.dumps(manifest | change).encode()
        server.head = hashlib.sha1(repr(change).encode()).hexdigest()
        assert_refused(hub.run("fineweb", *flags), message)
    del files["manifest.json"]
    server.head = "b" * 40
    for source, more, message in (
        ("o/shards", (), "if it has texts and no shards, give --source o/shards"),
        ("o/none", (), "asking the Hugging Face hub for o/none failed (RepositoryNotFoundError"),
        ("o/shards", ("--revision=v9",), "for --revision v9 of o/shards failed (RevisionNotFound"),
        ("shards", (), "--source hub: shards is not OWNER/NAME"),
        ("o/shards", ("--shard-size=500",), "takes no other flags than --data-dir and --revision"),
    ):
        done = hub.run("fineweb", f"--source=hub:{source}", *flags[1:], *more)
        assert_refused(done, message)
    assert not list((tmp_path / "copy").glob("[!.]*"))


def test_fineweb_of_other_programs_shards_says_the_line_that_downloads_them(hub, server, tmp_path):
    def llm_c(tokens):
        return np.array([20240520, 1, len(tokens), *[0] * 253], "<i4").tobytes() + tokens.tobytes()

    tokens = np.arange(50_000, 50_100, dtype="<u2")
    names = ("fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin")
    files = {name: llm_c(tokens[i:]) for i, name in enumerate(names)} | {"README.md": b"shards"}
    server.add("dataset", "o/shards", files)
    done = hub.run("fineweb", "--source=hub:o/shards", f"--data-dir={tmp_path}/data")
    assert_refused(done, f"--local-dir {tmp_path}/data, for --data-dir {tmp_path}/data")
    assert "log in" not in done.stderr
    command = re.search("hf (download .*), for", done.stderr)[1].split()
    hf = Path(sys.executable).parent / "hf"
    subprocess.run([hf, *command], env=os.environ | hub.environment, check=True)
    assert open_shards(tmp_path / "data", "val").read(0, 100).tolist() == tokens.tolist()
    assert open_shards(tmp_path / "data", "train").total_tokens == 99 + 98


def test_fineweb_download_refuses_a_folder_with_other_data(hub, pushed, tmp_path):
    (tmp_path / "b.txt").write_text("one two three four five")
    other = f"--data-dir={tmp_path}/other"
    made = hub.run("fineweb", f"--source={tmp_path}/b.txt", other, "--shard-size=1000")
    assert made.code == 0, made.stderr
    before = contents(tmp_path / "other")
    done = hub.run("fineweb", "--source=hub:o/shards", other)
    assert_refused(done, "other holds other data than o/shards")
    assert contents(tmp_path / "other") == before
    (tmp_path / "theirs").mkdir()
    np.save(tmp_path / "theirs" / "train.npy", np.zeros(5, np.uint16))
    done = hub.run("fineweb", "--source=hub:o/shards", f"--data-dir={tmp_path}/theirs")
    assert_refused(done, "holds .npy files that fineweb.py did not make")


@pytest.fixture
def export(hub, tmp_path):
    """What exports a run and uploads it, in an environment."""
    save_run(tmp_path / "run")
    flags = (f"--model={tmp_path}/run", f"--out={tmp_path}/out")
    return lambda repo="me/tiny", **environment: hub.run(
        "export", *flags, f"--push-to-hub={repo}", **environment
    )


def test_export_uploads_a_folder_with_its_card(export, server, tmp_path):
    done = export()
    assert done.code == 0, done.stderr
    repo = server.repos["model", "me/tiny"]
    assert repo["visibility"] == "private"
    assert repo["files"] == contents(tmp_path / "out")
    assert {"README.md", "config.json", "model.safetensors"} <= repo["files"].keys()
    assert b'"me/tiny")' in repo["files"]["README.md"]
    assert "SECRET" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        ({"HF_TOKEN": ""}, ("401", "log in by `hf auth login`")),
        ({"HF_TOKEN": TOKEN + "x"}, ("401", "log in by `hf auth login`")),
        ({}, ("403", "with a token that may write")),
        ({"HF_ENDPOINT": "http://127.0.0.1:1"}, ("the same command resumes",)),
        ({"HF_HUB_OFFLINE": "1"}, ("unset the `HF_HUB_OFFLINE`",)),
    ],
)
def test_export_that_cannot_upload_says_what_to_do(export, server, tmp_path, environment, parts):
    server.may_write = False
    assert_refused(export(**environment), "was not uploaded to me/tiny", *parts)
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert not server.repos


def test_export_refuses_a_name_that_is_no_repository_before_it_exports(export, tmp_path):
    assert_refused(export("tiny"), "--push-to-hub tiny is not OWNER/NAME")
    assert not (tmp_path / "out").exists()


def test_explain_hub_errors_does_not_blame_the_hub_for_a_full_disk():
    problem = r"x was not downloaded \(OSError: \[Errno 28\] .*\); once that is mended, the same "
    with pytest.raises(OSError, match=problem), explain_hub_errors("x was not downloaded"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
