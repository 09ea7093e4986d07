import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import new_trainer, run_state

from formats import code_hashes
from formats.checkpoint import CheckpointWriter, warn_if_code_changed
from formats.code_hashes import code_hash

SOURCE = '''
"""A module."""
import math

@dataclass
class Config:
    """Settings."""
    width: int = 8
    """Width of the model."""

def f(x):
    "only a docstring"
    # a comment
    return f"{x:.2f}"
'''


@pytest.mark.parametrize(
    ("text", "replacement", "is_same"),
    [
        ("# a comment", "# another", True),
        ("Settings.", "Other settings.", True),
        ('"""Width of the model."""', "", True),
        ("(x):", "(\n    x,\n):", True),
        (" = 8", " = 9", False),
        (":.2f", ":.3f", False),
        ("@dataclass", "@cache", False),
    ],
)
def test_hash_changes_if_the_code_does(text, replacement, is_same):
    assert SOURCE.count(text) == 1
    edited = SOURCE.replace(text, replacement)
    assert (code_hash(SOURCE.encode()) == code_hash(edited.encode())) == is_same


PROJECT = {
    "train_gpt2.py": "import torch\nfrom training.run import x\nimport model, runtime.cli",
    "model.py": "import importlib\nimportlib.import_module('pack.sub.late')",
    "training/__init__.py": "",
    "training/run.py": "from . import groups\nfrom .deep.rows import a, b",
    "training/groups.py": "import train_gpt2\ndef f():\n    import mine",
    "training/deep/rows.py": "from .. import memory\nfrom ... import outside",
    "training/memory.py": "",
    "mine.py": "import pack.module as m",
    "pack/module.py": "",  # a package without __init__.py
    "pack/sub/__init__.py": "",
    "pack/sub/late.py": "",
}
NOT_IMPORTED = {
    **{"runtime/cli.py": "", "web.py": "", "notes.py": "", "tests/test_model.py": ""},
    **{"torch/__init__.py": "", "torch-2.11.0.dist-info/METADATA": ""},  # all are in site-packages
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A small project, which stands for this one."""
    monkeypatch.setattr(code_hashes, "ROOT", tmp_path)
    for file, source in (PROJECT | NOT_IMPORTED).items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(source)
    code_hashes.code_hashes.cache_clear()
    yield tmp_path
    code_hashes.code_hashes.cache_clear()


def test_hashes_are_of_the_code_that_runs_and_not_of_later_edits(project):
    CheckpointWriter(None)
    (project / "model.py").write_text("x = 1\n")
    assert code_hashes.code_hashes()["model.py"] == code_hash(PROJECT["model.py"].encode())


def test_hashes_are_of_all_files_that_a_program_imports(project):
    expected = {file: code_hash(source.encode()) for file, source in sorted(PROJECT.items())}
    assert [*code_hashes.code_hashes().items()] == [*expected.items()]
    assert [*code_hashes.code_hashes("mine.py")] == ["mine.py", "pack/module.py"]


def test_hashes_of_this_project_leave_out_what_computes_nothing():
    hashes = code_hashes.code_hashes()
    assert {"training/groups.py", "formats/checkpoint.py", "generation.py"} <= hashes.keys()
    assert not {"web.py", "plot.py", "runtime/cli.py", "export.py", "demo.py"} & hashes.keys()


def test_warning_names_the_files_that_changed(capsys, monkeypatch):
    state = run_state(1, new_trainer())

    def warning(code, *program):
        warn_if_code_changed(Path("step_1"), replace(state, code=code), *program)
        return capsys.readouterr().err

    code = code_hashes.code_hashes()
    older = {"model.py GPT": "0", "ops.py cross_entropy": "0"}
    few = {file: code[file] for file in ("model.py", "lr_schedule.py", "training/config.py")}
    assert warning(code) == warning({}) == warning(older) == warning(few) == ""
    edited = {"model.py": "0", "lr_schedule.py": "0"}
    said = "warning: step_1 was saved by different code ({}): results may differ\n"
    assert warning(few | edited) == said.format("lr_schedule.py, model.py")
    assert warning(code | edited, "model.py") == said.format("model.py")
    assert warning(code | {"training/groups.py": "0"}) == said.format("training/groups.py")
    monkeypatch.setenv("RANK", "1")
    assert warning(code | edited) == ""


def test_diff_has_the_edits_since_the_last_commit_in_the_codes_own_folder(tmp_path, monkeypatch):
    def git(*args):
        identity = ("-c", "user.name=A", "-c", "user.email=a@example.com")
        subprocess.run(["git", *identity, *args], cwd=tmp_path, check=True)

    code, other = tmp_path / "code/model.py", tmp_path / "other.py"
    code.parent.mkdir()
    monkeypatch.setattr(code_hashes, "ROOT", code.parent)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for file in (code, other):
        file.write_text("x = 1\n")
    assert code_hashes.code_diff() == b""  # not a repository
    git("init", "-q")
    assert code_hashes.code_diff() == b""  # no commit
    git("add", "-A")
    git("commit", "-qm", "base")
    assert code_hashes.code_diff() == b""  # no edit
    for file in (code, other):
        file.write_text("x = 2\n")
    git("add", "-A")
    diff = code_hashes.code_diff()
    assert b"+++ b/model.py\n" in diff
    assert b"+x = 2\n" in diff
    assert b"other.py" not in diff


def test_diff_that_git_cannot_show_is_missed_aloud(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(code_hashes, "ROOT", tmp_path / "code")
    (tmp_path / "code").mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    path, said = os.environ["PATH"], "warning: code.diff is missing: "
    for folder in (tmp_path, path):  # without git, and with it
        monkeypatch.setenv("PATH", str(folder))
        assert code_hashes.code_diff() == b""  # no repository: there is nothing to miss
        assert capsys.readouterr().err == ""
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert code_hashes.code_diff() == b""  # no commit
    assert capsys.readouterr().err == f"{said}fatal: bad revision 'HEAD'\n"
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert code_hashes.code_diff() == b""
    warning = capsys.readouterr().err
    assert warning.startswith(f"{said}fatal: detected dubious ownership in repository at ")
    assert warning.endswith(f"git config --global --add safe.directory {tmp_path}\n")
    assert warning.count("\n") == 1
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code_hashes.code_diff() == b""
    assert capsys.readouterr().err == f"{said}[Errno 2] No such file or directory: 'git'\n"
