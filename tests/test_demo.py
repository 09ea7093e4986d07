import subprocess
import sys

from conftest import copy_code


def test_demo_started_from_another_folder_finds_its_commands_and_hides_their_proposals(tmp_path):
    code = copy_code(tmp_path / "code")
    (code / "fineweb.py").write_text(
        "print('next: x\\ny'); raise SystemExit(7)"
    )  # its first command
    command = [sys.executable, code / "demo.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 7
    assert done.stdout.splitlines()[-1] == "y"
    assert "next: " not in done.stdout
