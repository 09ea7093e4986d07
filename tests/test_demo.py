import subprocess
import sys

from conftest import copy_code

TRAIN = """
from pathlib import Path
losses = '{"step": 0, "val_loss": 9}\\n{"step": 1, "val_loss": 6}'
Path("runs/demo").mkdir(parents=True)
Path("runs/demo/metrics.jsonl").write_text(losses)
"""


def test_demo_runs_its_commands_from_another_folder_and_names_the_next(tmp_path):
    code = copy_code(tmp_path / "code")
    command = [sys.executable, code / "demo.py"]
    for name in ("fineweb", "sample", "hellaswag", "export", "plot"):
        (code / f"{name}.py").write_text("")
    (code / "train_gpt2.py").write_text(TRAIN)
    printed = subprocess.check_output(command, cwd=tmp_path, text=True)
    assert "$ python fineweb.py --source=stdlib --no-propose\n" in printed
    end = "source .venv/bin/activate; python sample.py --model runs/demo --interactive"
    assert printed.endswith(f"\nnext: {end}\n")
    (code / "fineweb.py").write_text("raise SystemExit(7)")  # its first command
    assert subprocess.run(command, cwd=tmp_path).returncode == 7
