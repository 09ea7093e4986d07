"""What people change first, done by a patch to a copy of the code; see docs/walkthrough.md."""

import os
import shutil
import subprocess

import numpy as np
import pytest
from conftest import HELLASWAG, ROOT, TINY_RUN, copy_code, series
from forked import Commands, assert_refused

from tokenizer import END_OF_TEXT, gpt2_encoding


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


def train(commands, *flags, ranks=1):
    run = commands.run if ranks == 1 else lambda *args: commands.run_ranks(ranks, *args)
    done = run("train_gpt2", *flags)
    assert done.code == 0, done.stderr


def losses_of_a_run_and_of_one_in_halves(commands, flags, more=(), ranks=1):
    """Train, and train the second half again, with more flags and ranks."""
    runs = commands.folder / "runs"
    train(commands, *flags, "--run-name=whole")
    shutil.copytree(runs / "whole", runs / "halves")
    shutil.rmtree(runs / "halves/checkpoints/step_00000008")
    train(commands, *flags, "--run-name=halves", "--resume=auto", *more, ranks=ranks)
    whole, halves = series(runs / "whole", "train_loss"), series(runs / "halves", "train_loss")
    assert len(set(whole.values())) == 8
    assert halves.keys() == whole.keys()
    return whole, halves


@pytest.mark.parametrize("sharded", [False, True])
def test_another_optimizer_trains_saves_and_resumes(patched, tiny_data, sharded):
    commands = patched("sgd.patch")
    flags = run_flags(tiny_data, "--max-lr=0.1", "--min-lr=0.1", "--micro-batch-size=2")
    # Its state is whole in the file: sharded ranks go on from it, too.
    second_half = {"ranks": 2, "more": ["--parallel=fsdp"]} if sharded else {}
    whole, halves = losses_of_a_run_and_of_one_in_halves(commands, flags, **second_half)
    assert max(abs(whole[step] - halves[step]) for step in whole) <= (1e-4 if sharded else 0)


def test_another_position_embedding_trains_resumes_and_is_not_exported(patched, tiny_data):
    commands = patched("rotary.patch")
    flags = run_flags(tiny_data, "--block-size=64", "--sample-every=8", "--hellaswag-every=8")
    flags.append(f"--hellaswag-data={HELLASWAG}")
    whole, halves = losses_of_a_run_and_of_one_in_halves(commands, flags)
    assert halves == whole
    for script, *more in (
        ("sample", "--max-new-tokens=70", "--num-samples=1"),  # beyond the context
        ("hellaswag", f"--data={HELLASWAG}"),
    ):
        done = commands.run(script, "--model=runs/whole", *more, "--device=cpu")
        assert done.code == 0, done.stderr
    model = [flag for flag in flags if not flag.startswith("--n-")]
    train(commands, *model, "--init-from=runs/whole", "--block-size=32")
    done = commands.run("export", "--model=runs/whole", "--out=exported")
    assert_refused(done, "transformer.wpe.weight")
    assert not (commands.folder / "exported").exists()


def test_dropout_resumes_bit_for_bit_and_is_off_in_evaluations(patched, tiny_data):
    commands = patched("dropout.patch")
    flags = run_flags(tiny_data, "--block-size=64", "--sample-every=4", "--hellaswag-every=4")
    flags.append(f"--hellaswag-data={HELLASWAG}")
    whole, halves = losses_of_a_run_and_of_one_in_halves(commands, flags)
    assert halves == whole
    never = ["--val-every=0", "--sample-every=0", "--hellaswag-every=0", "--run-name=never"]
    train(commands, *flags, *never)  # an evaluation changes nothing of the training
    runs = commands.folder / "runs"
    assert series(runs / "never", "train_loss") == whole
    # The second half evaluates the step again that it resumes from.
    for name in ("val_loss", "hellaswag_acc_norm"):
        assert series(runs / "halves", name) == series(runs / "whole", name)
    texts = (runs / "halves/samples.txt").read_text(encoding="utf-8").splitlines()
    step_4 = [text for text in texts if text.startswith("step 4 ")]
    assert len(step_4) == 8
    assert step_4[:4] == step_4[4:]


def test_another_evaluation_is_one_function_and_one_line(patched, tiny_data):
    commands = patched("evaluation.patch")
    flags = run_flags(tiny_data, "--micro-batch-size=2")
    train(commands, *flags, "--run-name=one")
    train(commands, *flags, "--run-name=two", ranks=2)
    one, two = (
        series(commands.folder / "runs" / name, "last_token_acc") for name in ("one", "two")
    )
    assert sorted(one) == [0, 4, 8]
    assert one == two


def test_another_schedule_is_one_function_and_one_line(patched, tiny_data):
    commands = patched("schedule.patch")
    train(commands, *run_flags(tiny_data, "--lr-schedule=flat", "--run-name=a"))
    assert set(series(commands.folder / "runs/a", "lr").values()) == {1e-2}
    done = commands.run("train_gpt2", *run_flags(tiny_data, "--lr-schedule=steep"))
    assert_refused(done, "steep", "cosine", "wsd", "flat")


def test_another_source_is_one_function_and_one_line(patched):
    commands = patched("source.patch")
    flags = ("--source=numbers", "--shard-size=800", "--data-dir=numbers")
    for _ in range(2):  # the second time it is finished
        done = commands.run("fineweb", *flags)
        assert done.code == 0, done.stderr
    files = sorted((commands.folder / "numbers").glob("*.npy"), key=lambda path: path.stem[-6:])
    tokens = np.concatenate([np.load(file) for file in files])
    assert len(files) > 3
    texts = gpt2_encoding().decode(tokens).split("<|endoftext|>")[1:]
    assert len(texts) == 399
    assert texts[11] == "12 can be divided by 1, 2, 3, 4, 6, 12."
    assert tokens[0] == END_OF_TEXT
    done = commands.run("fineweb", "--source=letters")
    assert_refused(done, "--source letters is not fineweb-edu, fineweb, stdlib, numbers")
