from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import new_trainer, run_state

from formats import code_hashes
from formats.checkpoint import CheckpointWriter, warn_if_code_changed
from formats.code_hashes import MODEL_FILES, definition_hashes

SOURCE = '''
"""A module."""
import math
from dataclasses import dataclass

WIDTH, DEPTH = 8, 2.5e-3
NAMES: dict[str, tuple[int, ...]] = {"é\\n": (), **{}}
NAMES["b"] = (1,)

@dataclass(frozen=True)
class Config:
    """Settings."""
    width: int = 8
    """Width of the model."""

    @property
    def text(self):
        return f"{self.width!r:>{WIDTH}} of {DEPTH:.2f}" "all"

async def f(x: float, /, *more, y=None, **rest) -> "float":
    # a comment
    first, *others = [a for a in more if (b := a) is not ...]
    with open(x) as file, file: pass
    try:
        match x:
            case {"a": [1, *_]} | Config(width=3): return -x
    except (ValueError, OSError):
        raise
    return lambda z: z @ x[1:, ::2] if x < y <= 1j else b"\\x00"

if __name__ == "__main__":
    main()
'''


def test_hashes_are_the_same_in_every_version_of_python():
    """Checkpoints have them: these values must not change."""
    assert definition_hashes(SOURCE.encode()) == {
        "WIDTH": "8a0f963c",
        "DEPTH": "8a0f963c",
        "NAMES": "af3144f0",
        "Config": "41f53ea4",
        "f": "c9ab6f98",
    }


EDITS = {  # text, its replacement, and the names whose hash changes
    "comment": ("# a comment", "# another", []),
    "docstring": ("Settings.", "Other settings.", []),
    "docstring of a field": ('"""Width of the model."""', "", []),
    "line breaks": ("8, 2.5e-3", "(\n    8,\n    0.0025,\n)", []),
    "import": ("import math", "import os", []),
    "constant": ("2.5e-3", "2.5e-4", ["WIDTH", "DEPTH"]),
    "later entry": ('NAMES["b"]', 'NAMES["c"]', ["NAMES"]),
    "new field": ("    @property", "    depth: int = 3\n    @property", ["Config"]),
    "f-string": (":.2f", ":.3f", ["Config"]),
    "new name": ("async def f", "async def g", ["f", "g"]),
}


@pytest.mark.parametrize(("text", "replacement", "changed"), EDITS.values(), ids=EDITS)
def test_hash_changes_if_the_code_does(text, replacement, changed):
    assert SOURCE.count(text) == 1
    before = definition_hashes(SOURCE.encode())
    after = definition_hashes(SOURCE.replace(text, replacement).encode())
    assert [name for name in before | after if before.get(name) != after.get(name)] == changed


def test_hashes_cover_the_core():
    hashes = code_hashes.code_hashes()
    assert {"train_gpt2.py train_step", "training/config.py TrainConfig"} <= hashes.keys()
    assert {name.split()[0] for name in hashes} == set(code_hashes.CORE_FILES)


@pytest.fixture
def edited_root(tmp_path, monkeypatch):
    """A folder that has the hashed files."""
    monkeypatch.setattr(code_hashes, "ROOT", tmp_path)
    code_hashes._read_hashes.cache_clear()
    (tmp_path / "training").mkdir()
    for file in code_hashes.CORE_FILES:
        (tmp_path / file).touch()
    (tmp_path / "model.py").write_text("def one(): pass\ndef two(): pass\n")
    (tmp_path / "train_gpt2.py").write_text("def three(): pass\n")
    yield tmp_path
    code_hashes._read_hashes.cache_clear()


def test_hashes_are_of_the_code_that_runs_and_not_of_later_edits(edited_root):
    CheckpointWriter(None)
    (edited_root / "model.py").write_text("def one(): return 1\n")
    assert list(code_hashes.code_hashes()) == [
        "train_gpt2.py three",
        "model.py one",
        "model.py two",
    ]


def test_warning_names_what_changed_was_added_or_is_gone(edited_root, capsys, monkeypatch):
    state = replace(run_state(1, new_trainer()), code=code_hashes.code_hashes())

    def warning(code, *files):
        warn_if_code_changed(Path("step_1"), replace(state, code=code), *files)
        return capsys.readouterr().err.removesuffix("\n")

    assert warning(state.code) == ""
    assert warning({}) == ""  # an older checkpoint
    saved = state.code | {"model.py two": "0", "model.py gone": "0", "train_gpt2.py four": "0"}
    del saved["model.py one"]
    said = "warning: step_1 was saved by different code ({}): results may differ"
    model = "model.py one, model.py two, model.py gone"
    assert warning(saved, MODEL_FILES) == said.format(model)
    many = saved | {f"ops.py f{i}": "0" for i in range(30)}
    assert "model.py gone" in warning(many)
    assert len(warning(many)) < 400
    monkeypatch.setenv("RANK", "1")
    assert warning(many) == ""
