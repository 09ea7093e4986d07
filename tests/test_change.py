"""What people change first, done by a patch to a copy of the code; see docs/walkthrough.md."""

import json
import math
import os
import shutil
import subprocess

import numpy as np
import pytest
import torch
from conftest import HELLASWAG, ROOT, TINY_RUN, copy_code, needs_compiler, series
from forked import Commands, assert_refused
from safetensors.torch import load_file

from formats.checkpoint import code_logits
from model import GPTConfig
from tokenizer import END_OF_TEXT, gpt2_encoding


@pytest.fixture
def patched(tmp_path):
    """Commands of a copy of the code that patches have changed."""
    opened = []

    def start(*patches):
        copy = copy_code(tmp_path / "copy")
        # In a repository, as that of a TMPDIR or of a hook, git would look for the files elsewhere.
        own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        own["GIT_CEILING_DIRECTORIES"] = str(tmp_path)
        for name in patches:
            patch = str(ROOT / "tests/patches" / f"{name}.patch")
            subprocess.run(["git", "apply", patch], cwd=copy, check=True, env=own)
        opened.append(Commands(tmp_path, copy).__enter__())
        return opened[0]

    start.runs = tmp_path / "runs"
    yield start
    for commands in opened:
        commands.__exit__()


def run_flags(data_dir, *flags):
    return [f"--data-dir={data_dir}", *TINY_RUN, "--max-lr=1e-2", *flags]


def train(commands, *flags, ranks=1):
    run = commands.run if ranks == 1 else lambda *args: commands.run_ranks(ranks, *args)
    done = run("train_gpt2", *flags)
    assert done.code == 0, done.stderr
    assert "different code" not in done.stderr


def losses_of_a_run_and_of_one_in_halves(commands, flags, more=(), ranks=1, then_ranks=None):
    """Train, and train the second half again, with more flags and as many ranks or others."""
    runs = commands.folder / "runs"
    train(commands, *flags, "--run-name=whole", ranks=ranks)
    shutil.copytree(runs / "whole", runs / "halves")
    shutil.rmtree(runs / "halves/checkpoints/step_00000008")
    again = [*flags, "--run-name=halves", "--resume=auto", *more]
    train(commands, *again, ranks=then_ranks or ranks)
    whole, halves = series(runs / "whole", "train_loss"), series(runs / "halves", "train_loss")
    assert len(set(whole.values())) == 8
    assert halves.keys() == whole.keys()
    return whole, halves


def final_state(commands, run, step=8):
    return load_file(commands.folder / f"runs/{run}/checkpoints/step_{step:08d}/model.safetensors")


def test_another_loss_is_trained_on_in_any_chunks_and_validation_stays_what_it_was(
    commands, patched, tiny_data
):
    flags = run_flags(tiny_data, "--loss-chunks=4", f"--out-dir={patched.runs}")
    train(commands, *flags, "--run-name=plain")
    changed = patched("loss")
    whole, halves = losses_of_a_run_and_of_one_in_halves(changed, flags)
    assert halves == whole
    train(changed, *flags, "--run-name=one", "--loss-chunks=1")
    runs = patched.runs
    one, plain = series(runs / "one", "train_loss"), series(runs / "plain", "train_loss")
    assert max(abs(one[step] - whole[step]) for step in one) < 1e-5
    assert whole[1] > plain[1] + 1e-3
    first = [series(runs / name, "val_loss")[0] for name in ("plain", "whole", "one")]
    assert first == pytest.approx([first[0]] * 3, abs=1e-6)
    state = json.loads((runs / "one/checkpoints/step_00000008/trainer_state.json").read_text())
    assert state["model_config"]["z_loss"] == 1e-4  # the loss reads its coefficient from there


def test_other_logits_are_those_of_every_use_and_are_not_exported(patched, tiny_data):
    commands = patched("logits")
    flags = run_flags(tiny_data, "--block-size=64", "--sample-every=8", "--hellaswag-every=8")
    flags.append(f"--hellaswag-data={HELLASWAG}")
    whole, halves = losses_of_a_run_and_of_one_in_halves(commands, flags)
    assert halves == whole
    # With a cap of nearly nothing, every use sees equal logits.
    ops = commands.folder / "copy/ops.py"
    ops.write_text(ops.read_text().replace("15 *", "1e-9 *"))
    with Commands(commands.folder, commands.folder / "copy") as capped:
        train(capped, *flags, "--run-name=capped", "--max-steps=1")
        for name in ("train_loss", "val_loss"):
            losses = series(commands.folder / "runs/capped", name).values()
            assert all(abs(loss - math.log(50257)) < 1e-4 for loss in losses)
        done = capped.run("hellaswag", "--model=runs/whole", f"--data={HELLASWAG}", "--device=cpu")
        labels = [json.loads(line)["label"] for line in HELLASWAG.read_text().splitlines()]
        assert f"acc_norm {labels.count(0)}/{len(labels)}" in done.stdout
        done = capped.run("sample", "--model=runs/whole", "--device=cpu", "--temperature=0")
        assert len(set(done.stdout.split("\n")[1])) < 5  # always the same token
    done = commands.run("export", "--model=runs/whole", "--out=exported")
    assert_refused(done, "this model's logits are not GPT-2's")


def test_a_rate_of_its_own_is_lr_scale(patched, tiny_data):
    commands = patched("lr_scale")
    whole, halves = losses_of_a_run_and_of_one_in_halves(commands, run_flags(tiny_data))
    assert halves == whole
    flags = run_flags(tiny_data, "--max-steps=1", "--run-name=one", "--optimizer=muon")
    train(commands, *flags)
    after = final_state(commands, "one", 1)
    # Adam's first update is its rate, Muon's has an RMS of 0.2 times its rate.
    assert after["transformer.ln_f.bias"].abs().max() == pytest.approx(0.1 * 1e-2, rel=1e-3)
    train(commands, *flags, "--run-name=none", "--max-lr=1e-9", "--min-lr=0")
    before = final_state(commands, "none", 1)
    name = "transformer.h.1.mlp.c_fc.weight"
    rms = (after[name] - before[name]).square().mean().sqrt()
    assert rms == pytest.approx(2 * 1e-2 * 0.2, rel=0.2)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_new_parameter_keeps_its_own_initial_value(patched, tiny_data, parallel):
    commands = patched("parameter")
    flags = run_flags(tiny_data, "--micro-batch-size=2", f"--parallel={parallel}")
    train(commands, *flags, "--run-name=one", "--max-steps=1", "--max-lr=1e-3", ranks=2)
    gate = final_state(commands, "one", 1)["transformer.h.0.mlp.gate"]
    assert gate.abs().item() == pytest.approx(1e-3, rel=1e-3)  # 0, and Adam's first update
    whole, halves = losses_of_a_run_and_of_one_in_halves(commands, flags, ranks=2)
    assert halves == whole


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_buffer_is_saved_resumed_sharded_and_loaded(patched, tiny_data, parallel):
    commands = patched("buffer")
    flags = run_flags(tiny_data, "--micro-batch-size=2", "--block-size=64")
    train(commands, *flags, "--run-name=alone")
    flags.append(f"--parallel={parallel}")
    whole, halves = losses_of_a_run_and_of_one_in_halves(commands, flags, ranks=2)
    assert halves == whole
    runs = commands.folder / "runs"
    assert final_state(commands, "whole")["rms"] != 0.5
    alone, two = series(runs / "alone", "val_loss"), series(runs / "whole", "val_loss")
    assert two[0] == pytest.approx(alone[0], abs=1e-5)
    init = [flag for flag in flags if not flag.startswith(("--n-", "--parallel"))]
    train(
        commands,
        *init,
        "--init-from=runs/whole",
        "--run-name=more",
        "--max-lr=1e-9",
        "--min-lr=0",
        "--max-steps=1",
    )
    # The loaded model is the trained one, with its buffer.
    assert series(runs / "more", "val_loss")[0] == pytest.approx(two[8], abs=1e-5)
    done = commands.run("hellaswag", "--model=runs/whole", f"--data={HELLASWAG}", "--device=cpu")
    assert done.code == 0, done.stderr


EDITS = ("loss", "logits", "lr_scale", "parameter", "buffer", "dropout")


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, ["--optimizer=muon"]),
        (2, ["--parallel=fsdp", "--optimizer=muon"]),
        pytest.param(1, ["--compile"], marks=needs_compiler),
        pytest.param(2, ["--compile"], marks=needs_compiler),
    ],
)
def test_all_edits_together_resume_bit_for_bit(patched, tiny_data, ranks, flags):
    commands = patched(*EDITS)
    every = ["--dropout=0.1", "--sample-every=4", "--hellaswag-every=4", "--block-size=64"]
    every.append(f"--hellaswag-data={HELLASWAG}")
    every = run_flags(tiny_data, "--micro-batch-size=2", *every, *flags)
    whole, halves = losses_of_a_run_and_of_one_in_halves(commands, every, ranks=ranks)
    assert halves == whole
    ends = [final_state(commands, run) for run in ("whole", "halves")]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize(
    ("patches", "is_same"),
    [
        (["logits"], False),
        (["parameter", "buffer"], False),
        (["rotary"], False),
        (["dropout", "loss", "lr_scale"], True),
    ],
)
def test_a_checkpoint_has_what_its_code_computes(patched, tiny_data, patches, is_same):
    commands = patched(*patches)
    train(commands, *run_flags(tiny_data, "--run-name=one", "--max-steps=1"))
    state = commands.folder / "runs/one/checkpoints/step_00000001/trainer_state.json"
    logits = json.loads(state.read_text())["code_logits"]
    own = code_logits(GPTConfig(n_head=2))
    assert len(logits) == len(own) == 8
    assert (logits == pytest.approx(own, rel=1e-4)) == is_same


ACTIVATIONS = {  # what an edit makes of the MLP's activation, and whether it can be told
    "relu": ("F.relu(self.c_fc(x))", True),
    "exact GELU": ("F.gelu(self.c_fc(x))", True),
    "for float32": ("F.relu(self.c_fc(x.float()))", True),
    "for one width": ("F.relu(self.c_fc(x.view(-1, 32)).view(*x.shape[:2], -1))", False),
}


@pytest.mark.parametrize(("activation", "told"), ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_a_run_of_other_code_is_resumed_sampled_scored_and_exported_with_a_warning(
    commands, patched, tiny_data, activation, told
):
    changed = patched()
    model = changed.folder / "copy/model.py"
    text = model.read_text()
    edited = text.replace("gelu(self.c_fc(x))", activation)
    assert edited != text
    model.write_text(edited)
    with Commands(changed.folder, changed.folder / "copy") as other:
        flags = run_flags(tiny_data, "--block-size=64", "--run-name=a", "--max-steps=4")
        train(other, *flags)
        train(other, *flags, "--resume=auto", "--max-steps=5")  # by its own code
    run, branch = changed.folder / "runs/a", ["--run-name=b", f"--out-dir={changed.folder}/runs"]
    for script, *more in (
        ("train_gpt2", f"--resume={run}", "--max-steps=6", *branch),
        ("sample", f"--model={run}", "--max-new-tokens=2", "--device=cpu"),
        ("hellaswag", f"--model={run}", f"--data={HELLASWAG}", "--device=cpu"),
        ("export", f"--model={run}", f"--out={changed.folder}/exported"),
    ):
        done = commands.run(script, *more)
        assert done.code == 0, done.stderr
        said = f"warning: {run}/checkpoints/step_00000005 was saved by different code"
        assert done.stderr.count(said) == told
        if script == "sample":
            assert done.stdout.count("--- sample ") == 4


@pytest.mark.parametrize("sharded", [False, True])
def test_another_optimizer_trains_saves_and_resumes(patched, tiny_data, sharded):
    commands = patched("sgd")
    flags = run_flags(tiny_data, "--max-lr=0.1", "--min-lr=0.1", "--micro-batch-size=2")
    # Its state is whole in the file: sharded ranks go on from it, too.
    second_half = {"then_ranks": 2, "more": ["--parallel=fsdp"]} if sharded else {}
    whole, halves = losses_of_a_run_and_of_one_in_halves(commands, flags, **second_half)
    assert max(abs(whole[step] - halves[step]) for step in whole) <= (1e-4 if sharded else 0)


def test_another_position_embedding_trains_resumes_and_is_not_exported(patched, tiny_data):
    commands = patched("rotary")
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
    assert not list((commands.folder / "exported").iterdir())


def test_a_new_field_is_a_flag_that_old_checkpoints_lack(commands, patched, tiny_data):
    flags = run_flags(tiny_data, f"--out-dir={patched.runs}", "--run-name=old")
    train(commands, *flags, "--max-steps=4")
    changed = patched("dropout")
    train(changed, "--resume=runs/old", "--max-steps=6")  # with the default
    done = changed.run("train_gpt2", "--resume=runs/old", "--max-steps=8", "--dropout=0.1")
    assert_refused(done, "dropout 0.0 -> 0.1")
    init = [flag for flag in flags[:-1] if not flag.startswith("--n-")]
    train(changed, *init, "--init-from=runs/old", "--run-name=new", "--dropout=0.2")
    state = json.loads(
        (patched.runs / "new/checkpoints/step_00000008/trainer_state.json").read_text()
    )
    assert state["model_config"]["dropout"] == 0.2


def test_dropout_resumes_bit_for_bit_and_is_off_in_evaluations(patched, tiny_data):
    commands = patched("dropout")
    flags = run_flags(tiny_data, "--block-size=64", "--sample-every=4", "--hellaswag-every=4")
    flags.append("--dropout=0.1")
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
    commands = patched("evaluation")
    flags = run_flags(tiny_data, "--micro-batch-size=2")
    train(commands, *flags, "--run-name=one")
    train(commands, *flags, "--run-name=two", ranks=2)
    one, two = (
        series(commands.folder / "runs" / name, "last_token_acc") for name in ("one", "two")
    )
    assert sorted(one) == [0, 4, 8]
    assert one == two


def test_another_schedule_is_one_function_and_one_line(patched, tiny_data):
    commands = patched("schedule")
    train(commands, *run_flags(tiny_data, "--lr-schedule=flat", "--run-name=a"))
    assert set(series(commands.folder / "runs/a", "lr").values()) == {1e-2}
    done = commands.run("train_gpt2", *run_flags(tiny_data, "--lr-schedule=steep"))
    assert_refused(done, "steep", "cosine", "wsd", "flat")


def test_another_source_is_one_function_and_one_line(patched):
    commands = patched("source")
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
