import subprocess
import sys

from conftest import copy_code


def test_demo_started_from_another_folder_finds_its_commands(tmp_path):
    code = copy_code(tmp_path / "code")
    (code / "fineweb.py").write_text("raise SystemExit(7)")  # its first command
    assert subprocess.run([sys.executable, code / "demo.py"], cwd=tmp_path).returncode == 7


TRAIN = """
from pathlib import Path
lines = [f'{{"step": {step}, "val_loss": {11 - 5 * step}}}' for step in (0, 1)]
Path("runs/demo").mkdir(parents=True)
Path("runs/demo/metrics.jsonl").write_text("\\n".join(lines))
"""


def test_demo_proposes_only_its_own_next_command(tmp_path):
    code = copy_code(tmp_path / "code")
    for name in ("fineweb", "sample", "hellaswag", "export", "plot"):
        (code / f"{name}.py").write_text("")
    (code / "train_gpt2.py").write_text(TRAIN)
    done = subprocess.run([sys.executable, code / "demo.py"], capture_output=True, text=True)
    assert "$ python fineweb.py --source=stdlib --no-propose\n" in done.stdout
    *_, last = done.stdout.splitlines()
    end = "source .venv/bin/activate; python sample.py --model runs/demo --interactive"
    assert last == f"next: {end}", done.stderr
