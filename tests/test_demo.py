import subprocess
import sys

from conftest import copy_code


def test_demo_started_from_another_folder_finds_its_commands(tmp_path):
    code = copy_code(tmp_path / "code")
    (code / "fineweb.py").write_text("raise SystemExit(7)")  # its first command
    assert subprocess.run([sys.executable, code / "demo.py"], cwd=tmp_path).returncode == 7
