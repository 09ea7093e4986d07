"""The hub's own client, against a server on the loopback: what it downloads, and its errors."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY_RUN
from forked import assert_refused
from hub_server import HubServer

from corpus.shards import open_shards
from formats.hub import explain_hub_errors
from runtime.errors import UserError
from train_gpt2 import main

TOKEN = "hf_SECRETaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"


@pytest.fixture
def server():
    with HubServer(TOKEN) as server:
        yield server


def test_data_set_of_the_hub_opens_as_hf_leaves_it_and_preflight_checks_it(
    commands, server, tmp_path, capsys
):
    (tmp_path / "a.txt").write_text("once upon a time " * 500)
    made, copy = tmp_path / "made", tmp_path / "copy"
    flags = (f"--source={tmp_path}/a.txt", f"--data-dir={made}", "--shard-size=500")
    assert commands.run("fineweb", *flags).code == 0
    files = {path.name: path.read_bytes() for path in made.glob("[!.]*")}
    server.add("dataset", "o/shards", files)
    with pytest.raises(UserError, match=f"hf download .* --local-dir {copy}") as missing:
        open_shards(copy, "train")
    command = re.search("hf (download .*)", str(missing.value))[1].replace("OWNER/NAME", "o/shards")
    environment = os.environ | server.environment(tmp_path / "hf") | {"HF_TOKEN": TOKEN}
    hf = Path(sys.executable).parent / "hf"
    subprocess.run([hf, *command.split()], env=environment, check=True, capture_output=True)
    assert (copy / ".cache").is_dir()
    ours, theirs = (open_shards(folder, "train").fingerprint for folder in (made, copy))
    assert ours == theirs
    preflight = [*TINY_RUN, f"--data-dir={copy}", f"--out-dir={tmp_path}/runs", "--preflight"]
    main(preflight)
    assert f"hashes of all {len(files) - 1} shards match" in capsys.readouterr().out


@pytest.mark.parametrize("token", ["", TOKEN + "x"])
def test_fineweb_of_a_private_repository_says_how_to_log_in(commands, server, tmp_path, token):
    environment = server.environment(tmp_path / "hf") | {"HF_TOKEN": token}
    flags = ("--source=o/texts", f"--data-dir={tmp_path}/data")
    done = commands.run("fineweb", *flags, **environment)
    assert_refused(done, "could not look up o/", "401", "log in with `hf auth login`")
    assert "SECRET" not in done.stdout + done.stderr


def test_explain_hub_errors_does_not_blame_the_hub_for_a_full_disk():
    problem = r"x was not downloaded \(OSError: \[Errno 28\] .*\); fix this and rerun the command "
    with pytest.raises(UserError, match=problem), explain_hub_errors("x was not downloaded"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
