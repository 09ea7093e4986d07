import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY_MODEL, copy_code

import demo
from corpus.shards import Manifest
from corpus.sources import file_source
from runtime.files import write_json

TRAIN = """
from pathlib import Path
losses = '{"step": 0, "val_loss": 9}\\n{"step": 1, "val_loss": 6, "val_bpb": 3}'
losses += '\\n{"finished_step": 1}'
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


OWN_TRAIN = f"""
import sys
from trainer import main
if "--plan" not in sys.argv:
    main([*sys.argv[1:], *{TINY_MODEL}, "--max-steps=2", "--device=cpu", "--no-compile"])
"""
EXPORT = """
import sys
from pathlib import Path
Path(sys.argv[-1].removeprefix("--out=")).mkdir(parents=True, exist_ok=True)
"""


def test_demo_trains_on_a_text_of_ones_own_and_resumes_it(tmp_path):
    code = copy_code(tmp_path / "code")
    (code / "train_gpt2.py").rename(code / "trainer.py")
    (code / "train_gpt2.py").write_text(OWN_TRAIN)
    (code / "export.py").write_text(EXPORT)
    (code / "plot.py").write_text("")
    (tmp_path / "my play.txt").write_text("To be, or not to be: that is the question. " * 400)
    (tmp_path / "short.txt").write_text("To be.")

    def run(*args):
        command = [sys.executable, code / "demo.py", *args]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    exit_code, printed, _ = run("my play.txt")
    assert exit_code == 0
    commands = [line.split()[2:] for line in printed.splitlines() if line.startswith("$ python ")]
    names = [words[0].rpartition("/")[2] for words in commands]
    plan, train = [
        [w for w in words if w != "--plan"] for words in commands if "--max-steps" in words
    ]
    expected = "fineweb.py train_gpt2.py train_gpt2.py sample.py export.py plot.py"
    assert " ".join(names) == expected
    assert train == [*plan, "--resume=auto"]
    assert "--run-name=my-play" in train
    number = r"\d+\.\d\d"
    ending = (
        rf"held-out text    ({number}) nats per token, from 1\d\.\d\d; {number} bits per byte\n"
        rf"training text    ({number}) nats per token on as many tokens; learned by heart: "
        rf"([+-]{number})\ncopied           (\d+\.\d) % of \d{{3}} sampled tokens are in passages "
    )
    held_out, trained, learned, copied = map(float, re.search(ending, printed).groups())
    assert held_out - trained == pytest.approx(learned, abs=0.015)
    assert 0 <= copied <= 100
    assert printed.endswith("python sample.py --model runs/my-play --interactive\n")
    assert "named my-play; a changed text gets another name\n" in printed
    exit_code, again, _ = run("my play.txt")
    assert exit_code == 0
    assert "--plan" not in again
    assert "$ python export.py" in again
    for args, message in (
        (["short.txt"], "no training is proposed: the text in data/short is too small"),
        (["none.txt"], "none.txt does not exist: pass a file or a folder of text"),
        (["my play.txt", "--short"], "--short is for Python's library: leave it out"),
    ):
        exit_code, _, error = run(*args)
        assert exit_code == 2
        assert message in error
        assert "Traceback" not in error


def test_demo_passes_a_link_by_its_own_name(tmp_path):
    """The name of the file that it leads to may lack the ending that tells how to read it."""
    code = copy_code(tmp_path / "code")
    fineweb = (code / "fineweb.py").read_text()
    printed = "import sys; print(sys.argv); raise SystemExit(7)"
    (code / "fineweb.py").write_text(fineweb.replace("run_command(main)", printed))
    (tmp_path / "0a1b").write_text("id,text\n1,Some words.")
    (tmp_path / "train.csv").symlink_to("0a1b")
    (tmp_path / "texts").mkdir()
    command = [sys.executable, code / "demo.py", "train.csv", "texts/.."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    source = ["fineweb.py", "--source", str(tmp_path / "train.csv"), str(tmp_path)]
    assert str(source)[:-1] in done.stdout
    assert done.returncode == 7


STOPPED_TRAIN = """
import signal, sys
from pathlib import Path
Path("runs/demo").mkdir(parents=True)

def stop(*_):
    Path("runs/demo/PREEMPTED").touch()
    sys.exit()
signal.signal(signal.SIGTERM, stop)
Path("runs/demo/metrics.jsonl").write_text('{"finished_step": 1}')  # of a shorter run
print("training", flush=True)
signal.pause()
"""


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_demo_stops_with_its_trainer_and_exports_nothing(tmp_path):
    code = copy_code(tmp_path / "code")
    for name in ("fineweb", "export", "sample", "hellaswag", "plot"):
        (code / f"{name}.py").write_text("")
    (code / "train_gpt2.py").write_text(STOPPED_TRAIN)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, code / "demo.py"], **pipes) as program:
        while program.stdout.readline() != "training\n":
            assert program.poll() is None
        program.send_signal(signal.SIGTERM)  # only to demo.py
        printed, error = program.communicate()
    assert (code / "runs/demo/PREEMPTED").exists()  # the trainer has saved the run
    assert program.returncode == 1
    assert error.startswith("stopped: the run is not complete")
    assert "export.py" not in printed
    (code / "train_gpt2.py").write_text("")  # stopped before its first step
    shutil.rmtree(code / "runs")
    done = subprocess.run([sys.executable, code / "demo.py"], capture_output=True, text=True)
    assert (done.returncode, "export.py" in done.stdout) == (1, False)


def make_data(name, *texts):
    data = Path("data", name)
    data.mkdir(parents=True)
    Manifest(file_source(texts).identity, "", 1).save(data)
    return name


def test_find_name_keeps_the_texts_of_other_names_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in ("mine.txt", "mine.jsonl", "a/mine.txt"):
        Path(text).parent.mkdir(exist_ok=True)
        Path(text).write_text('{"text": "' + text + '"}')
    for version in (0, 1):
        Path(f"corpus-1.{version}").mkdir()
        Path(f"corpus-1.{version}/a.txt").write_text(f"version {version}")
    mine, rows, other = Path("mine.txt"), Path("mine.jsonl"), Path("a/mine.txt")
    for paths in ([mine], [rows], [other], [mine, other], [mine, rows]):
        name = demo.find_name(*paths)
        assert not Path("data", name).exists()
        make_data(name, *paths)
        assert demo.find_name(*paths) == name  # the same command continues it
    assert demo.find_name(mine) == "mine"
    names = ["mine", "mine.jsonl", "mine.txt", "mine.txt-2", "mine.txt-3"]
    assert sorted(os.listdir("data")) == names
    mine.write_text("changed")
    assert demo.find_name(mine) == "mine.txt-4"
    assert demo.find_name(Path("corpus-1.0")) == "corpus-1.0"
    make_data("corpus-1", Path("corpus-1.0/a.txt"))  # of an earlier version
    assert demo.find_name(Path("corpus-1.0")) == "corpus-1"
    assert demo.find_name(Path("corpus-1.1")) == "corpus-1.1"


def test_find_name_avoids_the_folders_of_other_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("trials", "stdlib", "demo"):
        Path(f"{name}.txt").write_text("To be.")
    assert demo.find_name(Path("demo.txt")) == "demo"
    write_json(tmp_path / "runs/demo/config.json", {"data_dir": "data/stdlib"})
    for name in ("trials", "stdlib", "demo"):
        assert demo.find_name(Path(f"{name}.txt")) == f"{name}.txt"
    write_json(tmp_path / "runs/demo/config.json", {"data_dir": "data/demo"})  # data was deleted
    assert demo.find_name(Path("demo.txt")) == "demo"


def test_step_draws_while_a_command_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "REDRAW_SECONDS", 0.01)
    (tmp_path / "draw.py").write_text(
        "open('drawn', 'w'); raise SystemExit(2)"
    )  # nothing to draw yet
    wait = "import os, time\nend = time.monotonic() + 60\nwhile not os.path.exists('drawn'):\n"
    wait += "    time.sleep(0.01)\n    assert time.monotonic() < end\n"
    (tmp_path / "train.py").write_text(wait)
    demo.step("training", "train.py", meanwhile=("draw.py",))
