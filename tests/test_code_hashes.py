import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import new_trainer, run_state

from formats import code_hashes
from formats.checkpoint import CheckpointWriter, warn_if_code_changed
from formats.code_hashes import CORE_FILES, MODEL_FILES, code_hash

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


def test_hashes_are_of_the_code_that_runs_and_not_of_later_edits(tmp_path, monkeypatch):
    monkeypatch.setattr(code_hashes, "ROOT", tmp_path)
    code_hashes.code_hashes.cache_clear()
    for file in CORE_FILES:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    CheckpointWriter(None)
    (tmp_path / "model.py").write_text("x = 1\n")
    assert code_hashes.code_hashes() == dict.fromkeys(CORE_FILES, code_hash(b""))
    code_hashes.code_hashes.cache_clear()


def test_warning_names_the_files_that_changed(capsys, monkeypatch):
    state = run_state(1, new_trainer())

    def warning(code, *files):
        warn_if_code_changed(Path("step_1"), replace(state, code=code), *files)
        return capsys.readouterr().err

    code = code_hashes.code_hashes()
    older = {"model.py GPT": "0", "ops.py cross_entropy": "0"}
    assert warning(code) == warning({}) == warning(older) == ""
    edited = code | {"model.py": "0", "lr_schedule.py": "0"}
    said = "warning: step_1 was saved by different code ({}): results may differ\n"
    assert warning(edited) == said.format("model.py, lr_schedule.py")
    assert warning(edited, MODEL_FILES) == said.format("model.py")
    monkeypatch.setenv("RANK", "1")
    assert warning(edited) == ""


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
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert code_hashes.code_diff() == b""
