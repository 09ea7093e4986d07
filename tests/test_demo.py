import subprocess
import sys

from conftest import copy_code

from demo import new_name


def test_new_name_is_of_no_earlier_run_or_export(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert new_name() == "demo"
    (tmp_path / "runs/demo").mkdir(parents=True)
    (tmp_path / "exported/demo-2").mkdir(parents=True)
    assert new_name() == "demo-3"


def test_demo_started_from_another_folder_finds_its_commands(tmp_path):
    code = copy_code(tmp_path / "code")
    (code / "fineweb.py").write_text("raise SystemExit(7)")  # its first command
    assert subprocess.run([sys.executable, code / "demo.py"], cwd=tmp_path).returncode == 7
