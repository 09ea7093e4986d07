"""What people change first, done by a small patch to a copy of the code; see README's table."""

import os
import shutil
import subprocess

import pytest
from conftest import ROOT, TINY_RUN, copy_code
from forked import Commands, assert_refused

from runtime.metrics import read_metrics

HELLASWAG = ROOT / "assets/hellaswag_sample.jsonl"


@pytest.fixture
def patched(tmp_path):
    """Commands of a copy of the code that a patch has changed."""
    opened = []

    def start(patch):
        copy = copy_code(tmp_path / "copy")
        patch = str(ROOT / "tests/patches" / patch)
        # In a repository, as that of a TMPDIR or of a hook, git would look for the files elsewhere.
        own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        own["GIT_CEILING_DIRECTORIES"] = str(tmp_path)
        subprocess.run(["git", "apply", "--unidiff-zero", patch], cwd=copy, check=True, env=own)
        opened.append(Commands(tmp_path, copy).__enter__())
        return opened[0]

    yield start
    for commands in opened:
        commands.__exit__()


def run_flags(data_dir, *flags):
    return [f"--data-dir={data_dir}", *TINY_RUN, "--max-lr=1e-2", *flags]


def series(folder, name="train_loss"):
    records = read_metrics(folder / "metrics.jsonl")
    return {record["step"]: record[name] for record in records if name in record}


def assert_trains_and_resumes(commands, flags):
    """Train, and train again in two halves: the losses are the same to the last bit."""
    for command in (
        (*flags, "--run-name=whole"),
        (*flags, "--run-name=halves"),
    ):
        done = commands.run("train_gpt2", *command)
        assert done.code == 0, done.stderr
    shutil.rmtree(commands.folder / "runs/halves/checkpoints/step_00000008")
    done = commands.run("train_gpt2", *flags, "--run-name=halves", "--resume=auto")
    assert done.code == 0, done.stderr
    assert "resumed from" in done.stdout
    whole, halves = (series(commands.folder / "runs" / name) for name in ("whole", "halves"))
    assert sorted(whole) == list(range(1, 9))
    assert halves == whole
    assert len(set(whole.values())) == 8


def test_another_optimizer_trains_saves_and_resumes_bit_for_bit(patched, tiny_data):
    commands = patched("sgd.patch")
    flags = run_flags(tiny_data, "--max-lr=0.1", "--min-lr=0.1")
    assert_trains_and_resumes(commands, flags)
    # Its state is whole in the file: sharded ranks go on from it.
    shutil.rmtree(commands.folder / "runs/halves/checkpoints/step_00000008")
    flags += ["--run-name=halves", "--resume=auto", "--micro-batch-size=2", "--parallel=fsdp"]
    done = commands.run_ranks(2, "train_gpt2", *flags)
    assert done.code == 0, done.stderr
    whole, halves = (series(commands.folder / "runs" / name) for name in ("whole", "halves"))
    assert max(abs(whole[step] - halves[step]) for step in whole) <= 1e-4


def test_another_position_embedding_trains_resumes_and_is_not_exported(patched, tiny_data):
    commands = patched("rotary.patch")
    flags = run_flags(tiny_data, "--block-size=64", "--sample-every=8", "--hellaswag-every=8")
    flags.append(f"--hellaswag-data={HELLASWAG}")
    assert_trains_and_resumes(commands, flags)
    for script, *more in (
        ("sample", "--max-new-tokens=70", "--num-samples=1"),  # beyond the context
        ("hellaswag", f"--data={HELLASWAG}"),
    ):
        done = commands.run(script, "--model=runs/whole", *more, "--device=cpu")
        assert done.code == 0, done.stderr
    model = [flag for flag in flags if not flag.startswith("--n-")]
    done = commands.run("train_gpt2", *model, "--init-from=runs/whole", "--block-size=32")
    assert done.code == 0, done.stderr
    done = commands.run("export", "--model=runs/whole", "--out=exported")
    assert_refused(done, "transformer.wpe.weight")
    assert not (commands.folder / "exported").exists()


def test_another_evaluation_is_one_function_and_one_line(patched, tiny_data):
    commands = patched("evaluation.patch")
    flags = run_flags(tiny_data)
    assert commands.run("train_gpt2", *flags, "--run-name=one").code == 0
    two = (*flags, "--run-name=two", "--micro-batch-size=2")
    done = commands.run_ranks(2, "train_gpt2", *two)
    assert done.code == 0, done.stderr
    one, two = (
        series(commands.folder / "runs" / name, "last_token_acc") for name in ("one", "two")
    )
    assert sorted(one) == [0, 4, 8]
    assert one == two


def test_another_schedule_is_one_function_and_one_line(patched, tiny_data):
    commands = patched("schedule.patch")
    done = commands.run("train_gpt2", *run_flags(tiny_data, "--lr-schedule=flat", "--run-name=a"))
    assert done.code == 0, done.stderr
    assert set(series(commands.folder / "runs/a", "lr").values()) == {1e-2}
    done = commands.run("train_gpt2", *run_flags(tiny_data, "--lr-schedule=steep"))
    assert_refused(done, "steep", "cosine", "wsd", "flat")
