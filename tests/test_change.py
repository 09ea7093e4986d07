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
    done = commands.run("export", "--model=runs/whole", "--out=exported")
    assert_refused(done, "this model's logits are not GPT-2's")
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


def test_a_group_may_have_a_rate_of_its_own(patched, tiny_data):
    commands = patched("rate")
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


EDITS = ("loss", "logits", "rate", "parameter", "buffer", "dropout")


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


def test_a_run_of_other_code_is_resumed_sampled_scored_and_exported_with_a_warning(
    commands, patched, tiny_data
):
    changed = patched()
    for file, text, edited in (
        ("model.py", "gelu(self.c_fc(x))", "torch.relu(self.c_fc(x))"),
        ("lr_schedule.py", "if step < config.warmup", "if config.warmup > step"),
        ("hellaswag.py", "def main", "def unused() -> None: ...\n\n\ndef main"),  # not compared
    ):
        path = changed.folder / "copy" / file
        source = path.read_text(encoding="utf-8")
        assert text in source
        path.write_text(source.replace(text, edited, 1), encoding="utf-8")
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
        edits = "model.py MLP"
        if script == "train_gpt2":
            edits += ", lr_schedule.py learning_rate"
        said = f"warning: {run}/checkpoints/step_00000005 was saved by different code ({edits}): "
        assert done.stderr.count(said) == 1, done.stderr
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


def endings_and_sample(commands, run):
    """The losses of HellaSwag's endings by a run's model; what `sample.py` prints to stderr."""
    output = commands.folder / "endings.jsonl"
    model = [f"--model={run}", "--device=cpu", "--dtype=float32"]
    done = commands.run("hellaswag", *model, f"--data={HELLASWAG}", f"--output={output}")
    assert done.code == 0, done.stderr
    endings = [json.loads(line)["summed_losses"] for line in output.read_text().splitlines()]
    done = commands.run("sample", *model, "--max-new-tokens=70")  # beyond the context
    assert done.code == 0, done.stderr
    return np.array(endings), done.stderr


NO_CACHE = "warning: sampling without the cache"


@pytest.mark.parametrize(
    ("patch", "warnings", "mode"),
    [
        ("window", 0, "--no-compile"),
        pytest.param("window", 0, "--compile", marks=needs_compiler),
        ("token_shift", 1, "--no-compile"),
    ],
)
def test_mixing_tokens_otherwise_acts_in_every_use_and_resumes(
    commands, patched, tiny_data, patch, warnings, mode
):
    changed, runs = patched(patch), patched.runs
    flags = run_flags(tiny_data, "--block-size=64", "--sample-every=4", "--hellaswag-every=4", mode)
    flags.append(f"--hellaswag-data={HELLASWAG}")
    whole, halves = losses_of_a_run_and_of_one_in_halves(changed, flags)
    assert halves == whole
    never = ["--sample-every=0", "--hellaswag-every=0", "--max-steps=1"]
    train(commands, *flags, *never, f"--out-dir={runs}", "--run-name=plain")
    for name, step in (("train_loss", 1), ("val_loss", 0)):  # with the same weights
        loss, other = (series(runs / run, name)[step] for run in ("plain", "whole"))
        assert 1e-6 < abs(loss - other) < 0.1
    endings, stderr = endings_and_sample(changed, runs / "whole")
    assert stderr.count("warning") == stderr.count(NO_CACHE) == warnings
    other, _ = endings_and_sample(commands, runs / "whole")  # the code before the patch
    assert np.abs(endings - other).max() > 1e-3


def test_a_new_field_is_a_flag_that_old_checkpoints_lack(commands, patched, tiny_data):
    flags = run_flags(tiny_data, f"--out-dir={patched.runs}", "--run-name=old")
    train(commands, *flags, "--max-steps=4")
    changed = patched("dropout")
    resume = ["train_gpt2", "--resume=runs/old"]
    done = changed.run(*resume, "--max-steps=6")  # with the default
    assert done.code == 0, done.stderr
    edits = "model.py GPTConfig, model.py Block, training/config.py TrainConfig"
    assert f"was saved by different code ({edits}): " in done.stderr
    assert "note: " not in done.stdout
    done = changed.run(*resume, "--max-steps=8", "--dropout=0.1")
    assert done.stdout.count("note: dropout 0.0 -> 0.1\n") == 1, done.stderr
    assert done.stderr == ""
    done = changed.run(*resume, "--max-steps=9")  # which keeps it
    assert "note: " not in done.stdout
    init = [flag for flag in flags[:-1] if not flag.startswith("--n-")]
    train(changed, *init, "--init-from=runs/old", "--run-name=new", "--dropout=0.2")
    state = json.loads(
        (patched.runs / "new/checkpoints/step_00000008/trainer_state.json").read_text()
    )
    assert state["model_config"]["dropout"] == 0.2
    # Without the edit, its setting is ignored.
    done = commands.run("train_gpt2", f"--resume={patched.runs}/old", "--max-steps=10")
    assert done.code == 0, done.stderr
    ignored = "step_00000009 has values that this version ignores: dropout 0.1\n"
    assert done.stdout.count(ignored) == 1


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


WAYS = [  # to split the same step
    (1, ["--micro-batch-size=8"]),
    (1, ["--micro-batch-size=2", "--activation-checkpointing=full"]),
    (2, ["--micro-batch-size=2", "--activation-checkpointing=selective"]),
    (2, ["--micro-batch-size=1", "--parallel=fsdp"]),
    pytest.param(1, ["--micro-batch-size=4", "--compile"], marks=needs_compiler),
    pytest.param(
        2,
        ["--micro-batch-size=1", "--compile", "--activation-checkpointing=full"],
        marks=needs_compiler,
    ),
]


@pytest.fixture(scope="module")
def plain_series():
    """Series of runs that other runs are compared with, by patch and metric."""
    return {}


@pytest.mark.parametrize(("ranks", "flags"), WAYS)
def test_a_number_from_the_forward_pass_does_not_depend_on_the_split(
    patched, tiny_data, plain_series, ranks, flags
):
    commands = patched("number", "gradient")
    train(commands, *run_flags(tiny_data, *flags), "--run-name=a", ranks=ranks)
    for name in ("attention_rms", "attention_grad_norm"):
        found = series(commands.folder / "runs/a", name)
        assert sorted(found) == [*range(1, 9)]
        expected = plain_series.setdefault(name, found)
        assert found == pytest.approx(expected, rel=2e-2)
    assert found[8] > 0


def test_numbers_of_a_step_are_drawn_and_no_validation_leaks_into_them(patched, tiny_data):
    commands = patched("number", "gradient")
    train(commands, *run_flags(tiny_data, "--run-name=a"))
    train(commands, *run_flags(tiny_data, "--run-name=never", "--val-every=0"))
    runs = commands.folder / "runs"
    for name in ("attention_rms", "attention_grad_norm"):
        assert series(runs / "a", name) == series(runs / "never", name)
    done = commands.run("plot", "runs/a", "--report")
    assert done.code == 0, done.stderr
    page = (runs / "a/report.html").read_text(encoding="utf-8")
    for name in ("attention_rms", "attention_grad_norm"):
        assert f'"{name}":{{"tokens":[2' in page  # a point per step, the first at 256 tokens


@pytest.mark.parametrize(("ranks", "flags"), WAYS[:-1])
def test_each_counted_target_has_the_same_weight(patched, tiny_data, plain_series, ranks, flags):
    commands = patched("masks")
    train(commands, *run_flags(tiny_data, *flags), "--run-name=a", ranks=ranks)
    run = commands.folder / "runs/a"
    for name, tolerance in (("train_loss", 1e-3), ("grad_norm", 2e-2), ("val_loss", 1e-3)):
        found = series(run, name)
        assert all(math.isfinite(value) for value in found.values())
        expected = plain_series.setdefault(("masks", name), found)
        assert found == pytest.approx(expected, rel=tolerance)


def test_settings_of_a_step_are_factors_on_those_of_the_groups(patched, tiny_data):
    commands = patched("momentum")
    flags = run_flags(tiny_data, "--optimizer=muon")
    whole, halves = losses_of_a_run_and_of_one_in_halves(commands, flags)
    assert halves == whole
    train(commands, *flags, "--run-name=less", "--momentum=0.5")
    assert series(commands.folder / "runs/less", "train_loss") != whole
    done = commands.run("train_gpt2", *run_flags(tiny_data, "--run-name=none"))
    assert_refused(done, "no parameter group has a momentum")  # AdamW has betas


def test_weight_decay_may_follow_the_step_and_a_flag_acts_on_a_resume(patched, tiny_data):
    commands = patched("decay")
    flags = run_flags(tiny_data, "--min-lr=1e-2")
    whole, halves = losses_of_a_run_and_of_one_in_halves(commands, flags)
    assert halves == whole
    runs = commands.folder / "runs"
    plain, more = (final_state(commands, run)["transformer.wte.weight"] for run in ("whole",) * 2)
    shutil.copytree(runs / "whole", runs / "flag")
    shutil.rmtree(runs / "flag/checkpoints/step_00000008")
    train(commands, *flags, "--run-name=flag", "--resume=auto", "--weight-decay=0")
    more = final_state(commands, "flag")["transformer.wte.weight"]
    assert plain.norm() < 0.95 * more.norm()  # four steps, each with a decay of 5 %


@pytest.mark.parametrize(("ranks", "flags"), [(1, []), (2, []), (2, ["--parallel=fsdp"])])
def test_state_of_ones_own_is_saved_evaluated_and_resumed(patched, tiny_data, ranks, flags):
    commands = patched("ema")
    flags = run_flags(tiny_data, "--micro-batch-size=2", *flags)
    whole, halves = losses_of_a_run_and_of_one_in_halves(commands, flags, ranks=ranks)
    assert halves == whole
    runs = commands.folder / "runs"
    losses = [series(runs / run, "ema_loss") for run in ("whole", "halves")]
    assert losses[0] == losses[1]
    val = series(runs / "whole", "val_loss")
    assert losses[0][0] == pytest.approx(val[0], abs=1e-5)  # at the start, it is the weights
    assert val[8] + 1e-3 < losses[0][8] < val[0] - 1e-3
    # Another number of ranks goes on with it.
    more = ["--run-name=more", "--resume=runs/whole", "--max-steps=9", "--parallel=ddp"]
    train(commands, *flags, *more)
    assert series(runs / "more", "ema_loss")[8] == pytest.approx(losses[0][8], abs=1e-5)


def test_state_that_one_side_lacks_is_one_line(commands, patched, tiny_data):
    flags = run_flags(tiny_data, f"--out-dir={patched.runs}")
    train(commands, *flags, "--run-name=plain", "--max-steps=4")
    changed = patched("ema")
    done = changed.run("train_gpt2", "--resume=runs/plain", "--max-steps=6")
    assert done.code == 0, done.stderr
    assert done.stdout.count("Trainer.state") == 1
    done = commands.run("train_gpt2", f"--resume={patched.runs}/plain", "--max-steps=8")
    assert done.code == 0, done.stderr
    assert done.stdout.count("Trainer.state") == 1


def test_a_second_validation_text_is_two_lines(patched, tiny_data):
    commands = patched("text")
    shutil.copytree(tiny_data, commands.folder / "second")
    flags = run_flags(tiny_data, "--micro-batch-size=2", "--val-tokens=4000")
    train(commands, *flags, "--run-name=one")
    train(commands, *flags, "--run-name=two", ranks=2)
    runs = commands.folder / "runs"
    one, two = (series(runs / run, "second_loss") for run in ("one", "two"))
    assert sorted(one) == [0, 4, 8]
    assert one == pytest.approx(two, abs=1e-5)
    assert one[8] != series(runs / "one", "val_loss")[8]
    edited = commands.folder / "copy/evaluation.py"
    edited.write_text(edited.read_text().replace('"second"))', '"val"))'))
    with Commands(commands.folder, commands.folder / "copy") as same:
        done = same.run("train_gpt2", *flags, "--run-name=same")
    assert_refused(done, "validate (evaluation 1)", "'val_loss'")


def test_a_batch_size_may_follow_the_step(patched, tiny_data):
    commands = patched("batch")
    flags = run_flags(tiny_data, "--micro-batch-size=2")
    whole, halves = losses_of_a_run_and_of_one_in_halves(commands, flags)
    assert halves == whole
    tokens = series(commands.folder / "runs/whole", "tokens_seen")
    assert [tokens[step] for step in range(1, 9)] == [128, 256, 384, 640, 896, 1152, 1408, 1664]
    train(commands, *flags, "--run-name=two", ranks=2)
    two = series(commands.folder / "runs/two", "train_loss")
    assert two == pytest.approx(whole, abs=1e-4)
    done = commands.run("train_gpt2", *flags, "--micro-batch-size=8", "--run-name=large")
    assert_refused(done, "lr_schedule.windows_at returns 4, which is not a multiple of 8")


def test_an_optimizer_state_that_cannot_be_saved_ends_the_run_after_the_first_update(
    patched, tiny_data
):
    commands = patched("lists")
    for ranks in (1, 2):
        run = commands.run if ranks == 1 else lambda *args: commands.run_ranks(2, *args)
        flags = run_flags(tiny_data, "--micro-batch-size=2", f"--run-name=lists-{ranks}")
        done = run("train_gpt2", *flags)
        assert done.code == 2
        assert "a checkpoint cannot hold GG.transformer.h.0.attn.c_attn.weight" in done.stderr
        assert not [*(commands.folder / f"runs/lists-{ranks}").glob("checkpoints/*")]


def test_numbers_that_an_optimizer_keeps_in_its_groups_are_resumed(patched, tiny_data):
    commands = patched("counter")
    whole, halves = losses_of_a_run_and_of_one_in_halves(commands, run_flags(tiny_data))
    assert halves == whole
    state = commands.folder / "runs/whole/checkpoints/step_00000008/trainer_state.json"
    assert json.loads(state.read_text())["optimizer_groups"] == [{"k": 8, "lr_max": 1e-2}] * 3


def test_fewer_heads_of_keys_and_values_train_with_muon_and_resume(patched, tiny_data):
    commands = patched("gqa")
    flags = run_flags(tiny_data, "--optimizer=muon", "--sample-every=8")
    whole, halves = losses_of_a_run_and_of_one_in_halves(commands, flags)
    assert halves == whole
    train(commands, *flags, "--run-name=two", "--micro-batch-size=2", "--parallel=fsdp", ranks=2)
    two = series(commands.folder / "runs/two", "train_loss")
    assert two == pytest.approx(whole, abs=1e-3)
    # Each of the three matrices gets an update of the same RMS.
    flags += ["--max-steps=1", "--min-lr=0"]
    for name, rate in (("one", 1e-2), ("none", 1e-9)):
        train(commands, *flags, f"--run-name={name}", f"--max-lr={rate}")
    after, before = (
        final_state(commands, name, 1)["transformer.h.0.attn.c_attn.weight"]
        for name in ("one", "none")
    )
    for part in (after - before).split((32, 16, 16)):
        assert part.square().mean().sqrt() == pytest.approx(2e-3, rel=0.25)
