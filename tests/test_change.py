"""What people change first, done by a patch to a copy of the code; see docs/walkthrough.md."""

import inspect
import json
import math
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import HELLASWAG, ROOT, TINY_RUN, copy_code, has_compiler, needs_compiler, series
from forked import Commands, assert_refused
from safetensors.torch import load_file

from tokenizer import END_OF_TEXT, gpt2_encoding

EVALUATED = ("--block-size=64", "--sample-every=4", "--hellaswag-every=4")
EVALUATED += (f"--hellaswag-data={HELLASWAG}",)
UNCHANGED = ("--max-lr=1e-9", "--min-lr=0", "--max-steps=1")  # a run that keeps its first weights
ON_CPU = ("--device=cpu", "--dtype=float32")
EDITS = sorted(path.stem for path in (ROOT / "edits").glob("*.patch"))


def git(folder, *args):
    """Run git in a folder that is not in a repository, or the root of one."""
    # In a repository, as that of a TMPDIR or of a hook, git would look for the files elsewhere.
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    own["GIT_CEILING_DIRECTORIES"] = str(folder.parent)
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.com")
    subprocess.run(["git", *identity, *args], cwd=folder, check=True, env=own)


def apply(folder, *patches):
    """Apply patches of `edits/` to a copy of the code."""
    for name in patches:
        git(folder, "apply", str(ROOT / "edits" / f"{name}.patch"))


@pytest.fixture
def patched(tmp_path):
    """Commands of a copy of the code that patches have changed; they train into `tmp_path/runs`."""
    opened = []

    def start(*patches):
        copy = copy_code(tmp_path / "copy")
        apply(copy, *patches)
        opened.append(Commands(tmp_path, copy).__enter__())
        return opened[0]

    yield start
    for commands in opened:
        commands.__exit__()


def edited(commands, file, text, replacement):
    """Commands of the same copy after another edit."""
    path = commands.folder / "copy" / file
    source = path.read_text(encoding="utf-8")
    assert text in source
    path.write_text(source.replace(text, replacement, 1), encoding="utf-8")
    return Commands(commands.folder, commands.folder / "copy")


def run_flags(data_dir, *flags):
    return [f"--data-dir={data_dir}", *TINY_RUN, "--max-lr=1e-2", *flags]


def without_sizes(flags):
    """Flags of a run that gets its model from `--init-from`."""
    return [flag for flag in flags if not flag.startswith(("--n-", "--parallel"))]


def train(commands, *flags, ranks=1):
    run = commands.run if ranks == 1 else lambda *args: commands.run_ranks(ranks, *args)
    done = run("train_gpt2", *flags)
    assert done.code == 0, done.stderr
    assert "different code" not in done.stderr


def succeed(commands, script, *flags):
    done = commands.run(script, *flags)
    assert done.code == 0, done.stderr
    return done


def train_twice(commands, flags, ranks=1, more=(), then_ranks=None, tolerance=0.0):
    """Train `whole`; train its second half again as `halves`, with the same losses."""
    runs = commands.folder / "runs"
    train(commands, *flags, "--run-name=whole", ranks=ranks)
    shutil.copytree(runs / "whole", runs / "halves")
    shutil.rmtree(runs / "halves/checkpoints/step_00000008")
    again = [*flags, "--run-name=halves", "--resume=auto", *more]
    train(commands, *again, ranks=then_ranks or ranks)
    whole, halves = (logged(commands, name, "train_loss") for name in ("whole", "halves"))
    assert len(set(whole.values())) == 8
    assert halves == pytest.approx(whole, rel=0, abs=tolerance)
    return whole


def logged(commands, run, name):
    return series(commands.folder / f"runs/{run}", name)


def saved(commands, run, step=8):
    return commands.folder / f"runs/{run}/checkpoints/step_{step:08d}"


def final_state(commands, run, step=8):
    return load_file(saved(commands, run, step) / "model.safetensors")


def saved_state(commands, run):
    return json.loads((saved(commands, run) / "trainer_state.json").read_text())


# --- mistakes in an edit ----------------------------------------------------------------------

MISTAKE = (
    'if __import__("os").environ.get("RANK", "1") == "1":\n{}raise ValueError("my mistake")\n{}'
)
MISTAKES = {  # a line of the code, before which the mistake is made
    "the model": ("model.py", "B, T, C = x.shape"),
    "the loss": ("model.py", "return cross_entropy(logits, targets, config.vocab_size)"),
    "the loader": ("dataloader.py", "first = position + self.dist_info.rank"),
    "an evaluation": ("evaluation.py", "device, vocab_size = run.ranks.device"),
    "the schedule": ("lr_schedule.py", 'return {"lr": learning_rate'),
    "an optimizer": ("optimizers.py", "rows, updates, by_settings = {}"),
}


@pytest.mark.parametrize("place", MISTAKES)
def test_a_mistake_in_an_edit_shows_its_file_and_line_on_its_rank(patched, tiny_data, place):
    commands = patched()
    file, line = MISTAKES[place]
    path = commands.folder / "copy" / file
    lines = path.read_text(encoding="utf-8").splitlines()
    number = next(i for i, text in enumerate(lines) if text.strip().startswith(line))
    indent = lines[number].partition(line[0])[0]
    more = (MISTAKE.format(f"{indent}    ", indent) + line).partition(line)[0]
    flags = run_flags(tiny_data, "--micro-batch-size=2", "--optimizer=muon")
    modes = [[], ["--compile"]] if place == "the model" and has_compiler else [[]]
    with edited(commands, file, lines[number].strip(), more + lines[number].strip()) as wrong:
        runs = [
            wrong.run("train_gpt2", *flags, f"--run-name=a{len(mode)}", *mode) for mode in modes
        ]
        runs.append(wrong.run_ranks(2, "train_gpt2", *flags, "--run-name=ranks"))
    for done in runs:
        assert done.codes[-1] == 1, done.stderr
        assert f'copy/{file}", line {number + 2}, in ' in done.stderr
        assert done.stderr.count("ValueError: my mistake") >= 1
        assert "error: my mistake" not in done.stderr


@pytest.mark.parametrize("name", ["stop", "masked", "lr", "train_loss", "grad_norm"])
def test_a_number_of_ones_own_cannot_have_a_name_of_the_step(patched, tiny_data, name):
    commands = patched()
    before = "    numbers.set(grad_norm=norm"
    mine = f"    numbers.set({name}=torch.tensor(0.25))\n{before}"
    with edited(commands, "train_gpt2.py", before, mine) as changed:
        done = changed.run("train_gpt2", *run_flags(tiny_data))
    assert_refused(done, f"train_step already logs a number named '{name}': rename yours")


def test_numbers_that_differ_from_rank_to_rank_are_an_error(patched, tiny_data):
    commands = patched()
    before = "    numbers.set(grad_norm=norm"
    mine = (
        f'    numbers.set(**{{"code" if run.ranks.rank else "prose": torch.tensor(1.0)}})\n{before}'
    )
    with edited(commands, "train_gpt2.py", before, mine) as changed:
        done = changed.run_ranks(2, "train_gpt2", *run_flags(tiny_data, "--micro-batch-size=2"))
    assert done.code == 2
    assert "the numbers of train_step differ: rank 1 has" in done.stderr


@pytest.mark.parametrize("steps", [8, 24])
def test_an_expert_without_tokens_is_a_warning_and_later_an_error(patched, tiny_data, steps):
    commands = patched()
    line = "        self.mlp = MLP(config)\n"
    unused = f"{line}        self.unused = torch.nn.Parameter(torch.zeros(()))\n"
    flags = run_flags(tiny_data, f"--max-steps={steps}")
    with edited(commands, "model.py", line, unused) as changed:
        done = changed.run("train_gpt2", *flags)
    said = "no gradient reaches transformer.h.0.unused, transformer.h.1.unused in"
    assert done.stdout.count(f"warning: {said} the first step") == 1
    if steps < 20:
        assert done.code == 0, done.stderr
    else:
        assert_refused(done, f"{said} 20 steps: use the parameter")


# --- the shelf --------------------------------------------------------------------------------

SMALL_GPT2 = "../bench/small_gpt2"  # the base of bench.recipes


@pytest.mark.parametrize("name", [*EDITS, SMALL_GPT2])
def test_an_edit_begins_with_what_it_does_its_source_what_to_mind_and_whether_it_exports(name):
    text = (ROOT / "edits" / f"{name}.patch").read_text(encoding="utf-8")
    header, found, _ = text.partition("\n\ndiff --git ")
    assert found
    starts = [line.partition(" ")[0] for line in header.splitlines() if ": " in line]
    assert [start for start in starts if start in ("Source:", "Mind:", "Export:")] == [
        *("Source:", "Mind:", "Export:")
    ]
    assert all(len(line) <= 100 for line in header.splitlines())
    assert (
        header.partition("Source: ")[2].startswith("none; ")
        or "https://" in header
        or name == (SMALL_GPT2)
    )


def test_each_edit_is_tested_here():
    """By a test that applies it alone or with others, or by a table of edits."""
    calls = re.findall(r"patched\(([^)]*)\)", inspect.getsource(sys.modules[__name__]))
    in_tests = set(re.findall(r'"(\w+)"', " ".join(calls)))
    in_tables = {*MODEL_EDITS, *OPTIMIZER_EDITS, *(name for name, *_ in MIXING_EDITS)}
    assert in_tests | in_tables | {"modern"} == {*EDITS}  # see test_modern.py


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_applies_on_top_of_the_small_models_patch(tmp_path, name):
    apply(copy_code(tmp_path / "copy"), SMALL_GPT2, name)


def test_small_models_keep_the_values_of_parameters_of_ones_own(patched, tiny_data):
    commands = patched(SMALL_GPT2)
    line = "        self.c_fc = Linear(config.n_embd, 4 * config.n_embd)\n"
    own = f"{line}        self.gates = nn.Parameter(torch.ones(2, 4 * config.n_embd))\n"
    edited(commands, "model.py", "gelu(self.c_fc(x))", "self.gates[0] * gelu(self.c_fc(x))")
    with edited(commands, "model.py", line, own) as changed:
        train(changed, *run_flags(tiny_data, "--run-name=a", *UNCHANGED))
    state = final_state(commands, "a", 1)
    assert len(state["transformer.wte.weight"]) == 32 * 32
    assert state["transformer.h.0.mlp.gates"].sub(1).abs().max() < 1e-6
    for name, std in (("wte", 0.02), ("h.0.mlp.c_fc", 0.02), ("h.1.attn.c_proj", 0.01)):
        found = state[f"transformer.{name}.weight"].std()
        assert found == pytest.approx(std * (768 / 32) ** 0.5, rel=0.1)


def test_a_run_keeps_the_diff_of_its_code(patched, tiny_data):
    commands = patched()
    copy = commands.folder / "copy"
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "base"]):
        git(copy, *command)
    train(commands, *run_flags(tiny_data, "--run-name=plain", "--max-steps=1"))
    assert not (commands.folder / "runs/plain/code.diff").exists()
    with edited(commands, "model.py", "gelu(self.c_fc(x))", "torch.relu(self.c_fc(x))") as changed:
        train(changed, *run_flags(tiny_data, "--run-name=relu", "--max-steps=1"))
    edit = (copy / "model.py").read_bytes()
    git(copy, "checkout", "-q", ".")
    git(copy, "apply", str(commands.folder / "runs/relu/code.diff"))
    assert (copy / "model.py").read_bytes() == edit


# --- edits that act together ------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        ["--parallel=fsdp"],
        pytest.param(["--compile"], marks=needs_compiler),
    ],
)
def test_all_edits_together_resume_bit_for_bit(patched, tiny_data, flags):
    commands = patched("loss", "logits", "rate", "parameter", "buffer", "dropout")
    flags = [*flags, "--dropout=0.1", "--micro-batch-size=2", "--optimizer=muon"]
    train_twice(commands, run_flags(tiny_data, *EVALUATED, *flags), ranks=2)
    whole, halves = (final_state(commands, run) for run in ("whole", "halves"))
    assert whole.keys() == halves.keys()
    assert all(torch.equal(whole[name], halves[name]) for name in whole)


def test_another_loss_is_trained_on_in_any_chunks_and_validation_stays_what_it_was(
    commands, patched, tiny_data, tmp_path
):
    changed = patched("loss")
    flags = run_flags(tiny_data, f"--out-dir={tmp_path}/runs")
    train(commands, *flags, "--run-name=plain", "--loss-chunks=4")
    train(changed, *flags, "--run-name=four", "--loss-chunks=4")
    train(changed, *flags, "--run-name=one", "--loss-chunks=1")
    plain, four, one = (logged(changed, run, "train_loss") for run in ("plain", "four", "one"))
    assert four == pytest.approx(one, abs=1e-5)
    assert four[1] > plain[1] + 1e-3
    first = [logged(changed, run, "val_loss")[0] for run in ("plain", "four", "one")]
    assert first == pytest.approx([first[0]] * 3, abs=1e-6)
    # The loss reads its coefficient from there.
    assert saved_state(changed, "one")["model_config"]["z_loss"] == 1e-4


def test_other_logits_are_those_of_every_use_and_are_not_exported(patched, tiny_data):
    commands = patched("logits")
    flags = run_flags(tiny_data, *EVALUATED)
    train(commands, *flags, "--run-name=a")
    done = commands.run("export", "--model=runs/a", "--out=exported")
    assert_refused(done, "this model's logits are not GPT-2's")
    # With a cap of nearly nothing, every use sees equal logits.
    with edited(commands, "model.py", "return 15 *", "return 1e-9 *") as capped:
        train(capped, *flags, "--run-name=capped", "--max-steps=1")
        for name in ("train_loss", "val_loss"):
            losses = logged(capped, "capped", name).values()
            assert all(abs(loss - math.log(50257)) < 1e-4 for loss in losses)
        done = succeed(capped, "hellaswag", "--model=runs/a", f"--data={HELLASWAG}", *ON_CPU)
        labels = [json.loads(line)["label"] for line in HELLASWAG.read_text().splitlines()]
        assert f"acc_norm {labels.count(0)}/{len(labels)}" in done.stdout
        done = succeed(capped, "sample", "--model=runs/a", "--temperature=0", *ON_CPU)
        assert len(set(done.stdout.split("\n")[1])) < 5  # always the same token


def test_a_group_may_have_a_rate_of_its_own(patched, tiny_data):
    commands = patched("rate")
    flags = run_flags(tiny_data, "--max-steps=1", "--optimizer=muon")
    train(commands, *flags, "--run-name=one")
    train(commands, *flags, "--run-name=none", *UNCHANGED)
    after, before = (final_state(commands, run, 1) for run in ("one", "none"))
    # Adam's first update is its rate, Muon's has an RMS of 0.2 times its rate.
    assert after["transformer.ln_f.bias"].abs().max() == pytest.approx(0.1 * 1e-2, rel=1e-3)
    name = "transformer.h.1.mlp.c_fc.weight"
    rms = (after[name] - before[name]).square().mean().sqrt()
    assert rms == pytest.approx(2 * 1e-2 * 0.2, rel=0.2)


def test_a_new_parameter_keeps_its_own_initial_value(patched, tiny_data):
    commands = patched("parameter")
    flags = ["--micro-batch-size=2", "--parallel=fsdp", "--max-steps=1", "--max-lr=1e-3"]
    train(commands, *run_flags(tiny_data, *flags), "--run-name=one", ranks=2)
    gate = final_state(commands, "one", 1)["transformer.h.0.mlp.gate"]
    assert gate.abs().item() == pytest.approx(1e-3, rel=1e-3)  # 0, and Adam's first update


def test_a_buffer_is_saved_sharded_and_loaded(patched, tiny_data):
    commands = patched("buffer")
    flags = run_flags(tiny_data, "--micro-batch-size=2", "--block-size=64")
    train(commands, *flags, "--run-name=alone")
    train(commands, *flags, "--run-name=two", "--parallel=fsdp", ranks=2)
    assert final_state(commands, "two")["rms"] != 0.5
    alone, two = (logged(commands, run, "val_loss") for run in ("alone", "two"))
    assert two[0] == pytest.approx(alone[0], abs=1e-5)
    init = [*without_sizes(flags), "--init-from=runs/two", *UNCHANGED]
    train(commands, *init, "--run-name=more")
    # The loaded model is the trained one, with its buffer.
    assert logged(commands, "more", "val_loss")[0] == pytest.approx(two[8], abs=1e-5)
    succeed(commands, "hellaswag", "--model=runs/two", f"--data={HELLASWAG}", *ON_CPU)


def test_dropout_resumes_bit_for_bit_and_is_off_in_evaluations(patched, tiny_data):
    commands = patched("dropout")
    flags = run_flags(tiny_data, *EVALUATED, "--dropout=0.1")
    whole = train_twice(commands, flags)
    never = ["--val-every=0", "--sample-every=0", "--hellaswag-every=0", "--run-name=never"]
    train(commands, *flags, *never)  # an evaluation changes nothing of the training
    assert logged(commands, "never", "train_loss") == whole
    # The second half evaluates the step again that it resumes from.
    for name in ("val_loss", "hellaswag_acc_norm"):
        assert logged(commands, "halves", name) == logged(commands, "whole", name)
    texts = (commands.folder / "runs/halves/samples.txt").read_text(encoding="utf-8").splitlines()
    step_4 = [text for text in texts if text.startswith("step 4 ")]
    assert len(step_4) == 8
    assert step_4[:4] == step_4[4:]


def test_a_new_field_is_a_flag_that_old_checkpoints_lack(commands, patched, tiny_data, tmp_path):
    flags = run_flags(tiny_data, f"--out-dir={tmp_path}/runs")
    train(commands, *flags, "--run-name=old", "--max-steps=4")
    changed = patched("dropout")
    resume = ["train_gpt2", "--resume=runs/old"]
    done = succeed(changed, *resume, "--max-steps=6")  # with the default
    edits = "model.py, training/config.py"
    assert f"was saved by different code ({edits}): " in done.stderr
    assert "note: dropout" not in done.stdout
    done = succeed(changed, *resume, "--max-steps=8", "--dropout=0.1")
    assert done.stdout.count("note: dropout 0.0 -> 0.1\n") == 1, done.stderr
    assert done.stderr == ""
    done = succeed(changed, *resume, "--max-steps=9")  # which keeps it
    assert "note: dropout" not in done.stdout
    init = [*without_sizes(flags), "--init-from=runs/old", "--dropout=0.2"]
    train(changed, *init, "--run-name=new")
    assert saved_state(changed, "new")["model_config"]["dropout"] == 0.2
    # Without the edit, its setting is ignored.
    done = succeed(commands, "train_gpt2", f"--resume={tmp_path}/runs/old", "--max-steps=10")
    ignored = "step_00000009 has values that this version ignores: dropout 0.1\n"
    assert done.stdout.count(ignored) == 1


def test_a_run_of_other_code_is_resumed_sampled_scored_and_exported_with_a_warning(
    commands, patched, tiny_data
):
    changed = patched()
    edited(changed, "model.py", "gelu(self.c_fc(x))", "torch.relu(self.c_fc(x))")
    edited(changed, "lr_schedule.py", "if step < config.warmup", "if config.warmup > step")
    unused = "def unused() -> None: ...\n\n\ndef main"  # in a file that is not compared
    with edited(changed, "plot.py", "def main", unused) as other:
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
        done = succeed(commands, script, *more)
        edits = "lr_schedule.py, model.py" if script == "train_gpt2" else "model.py"
        said = f"warning: {run}/checkpoints/step_00000005 was saved by different code ({edits}): "
        assert done.stderr.count(said) == 1, done.stderr


# --- edits of the model -----------------------------------------------------------------------


def test_another_position_embedding_trains_resumes_and_is_not_exported(patched, tiny_data):
    commands = patched("rotary")
    flags = run_flags(tiny_data, *EVALUATED)
    train_twice(commands, flags)
    beyond_the_context = ("--max-new-tokens=70", "--num-samples=1")
    succeed(commands, "sample", "--model=runs/whole", *beyond_the_context, *ON_CPU)
    succeed(commands, "hellaswag", "--model=runs/whole", f"--data={HELLASWAG}", *ON_CPU)
    train(commands, *without_sizes(flags), "--init-from=runs/whole", "--block-size=32")
    done = commands.run("export", "--model=runs/whole", "--out=exported")
    assert_refused(done, "not GPT-2's ('transformer.wpe.weight')")


def endings_and_sample(commands, run):
    """The losses of HellaSwag's endings by a run's model; what `sample.py` prints to stderr."""
    output = commands.folder / "endings.jsonl"
    model = [f"--model={run}", *ON_CPU]
    succeed(commands, "hellaswag", *model, f"--data={HELLASWAG}", f"--output={output}")
    endings = [json.loads(line)["summed_losses"] for line in output.read_text().splitlines()]
    done = succeed(commands, "sample", *model, "--max-new-tokens=70")  # beyond the context
    return np.array(endings), done.stderr


MIXING_EDITS = [
    ("window", 0, "--compile" if has_compiler else "--no-compile"),
    ("token_shift", 1, "--no-compile"),
]


@pytest.mark.parametrize(("patch", "warnings", "mode"), MIXING_EDITS)
def test_mixing_tokens_otherwise_acts_in_every_use_and_resumes(
    commands, patched, tiny_data, tmp_path, patch, warnings, mode
):
    changed = patched(patch)
    flags = run_flags(tiny_data, *EVALUATED, mode)
    train_twice(changed, flags)
    never = ["--sample-every=0", "--hellaswag-every=0", "--max-steps=1"]
    train(commands, *flags, *never, f"--out-dir={tmp_path}/runs", "--run-name=plain")
    for name, step in (("train_loss", 1), ("val_loss", 0)):  # with the same weights
        loss, other = (logged(changed, run, name)[step] for run in ("plain", "whole"))
        assert 1e-6 < abs(loss - other) < 0.1
    endings, stderr = endings_and_sample(changed, tmp_path / "runs/whole")
    no_cache = stderr.count("warning: sampling without the cache")
    assert stderr.count("warning") == no_cache == warnings
    other, _ = endings_and_sample(commands, tmp_path / "runs/whole")  # the code before the patch
    assert np.abs(endings - other).max() > 1e-3


def test_fewer_heads_of_keys_and_values_train_with_muon_and_resume(patched, tiny_data):
    commands = patched("gqa")
    flags = run_flags(tiny_data, "--optimizer=muon", "--sample-every=8")
    whole = train_twice(commands, flags)
    train(commands, *flags, "--run-name=two", "--micro-batch-size=2", "--parallel=fsdp", ranks=2)
    assert logged(commands, "two", "train_loss") == pytest.approx(whole, abs=1e-3)
    # Each of the three matrices gets an update of the same RMS.
    flags += ["--max-steps=1", "--min-lr=0"]
    train(commands, *flags, "--run-name=one")
    train(commands, *flags, "--run-name=none", *UNCHANGED)
    after, before = (
        final_state(commands, name, 1)["transformer.h.0.attn.c_attn.weight"]
        for name in ("one", "none")
    )
    for part in (after - before).split((32, 16, 16)):
        assert part.square().mean().sqrt() == pytest.approx(2e-3, rel=0.25)


PARAMETERS, LOGITS = "its parameters are not GPT-2's", "this model's logits are not GPT-2's"
COUNT = "parameters, but a GPT-2 of its dimensions has"
MODEL_EDITS = {  # why an export stops
    "rmsnorm": PARAMETERS,
    "qk_norm": COUNT,
    "relu2": LOGITS,
    "swiglu": PARAMETERS,
    "untied": COUNT,
    "parallel": PARAMETERS,
    "value_residual": COUNT,
    "zero_init": None,
    "head_gate": COUNT,
    "documents": None,  # the random ids of the check have no end of a text
    "moe": PARAMETERS,
    "multi_token": COUNT,
}
MORE_BETWEEN_MODULES = ("value_residual", "moe", "multi_token")


@pytest.mark.parametrize("name", MODEL_EDITS)
def test_an_edit_of_the_model_trains_with_muon_on_ranks_resumes_samples_and_exports(
    patched, tiny_data, name
):
    commands = patched(name)
    flags = run_flags(tiny_data, *EVALUATED, "--optimizer=muon")
    whole = train_twice(commands, flags)
    assert whole[8] < whole[1] - 0.1
    for mode in ("ddp", "fsdp")[name not in MORE_BETWEEN_MODULES :]:
        split = [f"--run-name={mode}", f"--parallel={mode}", "--micro-batch-size=2"]
        train(commands, *flags, *split, ranks=2)
        for metric in ("train_loss", "val_loss"):
            found, expected = (logged(commands, run, metric) for run in (mode, "whole"))
            assert found == pytest.approx(expected, abs=2e-3)
    done = succeed(commands, "sample", "--model=runs/whole", "--max-new-tokens=70", *ON_CPU)
    assert "warning" not in done.stderr  # the cache is used
    done = commands.run("export", "--model=runs/whole", "--out=exported")
    if MODEL_EDITS[name]:
        assert_refused(done, MODEL_EDITS[name])
    else:
        assert done.code == 0, done.stderr


@needs_compiler
def test_an_edit_that_passes_more_between_modules_compiles(patched, tiny_data):
    commands = patched("value_residual")  # what the first block returns is an input of the others
    flags = run_flags(tiny_data, "--max-steps=4")
    train(commands, *flags, "--run-name=eager")
    more = ["--compile", "--activation-checkpointing=full"]
    train(commands, *flags, "--run-name=compiled", *more)
    eager, compiled = (logged(commands, run, "train_loss") for run in ("eager", "compiled"))
    assert compiled == pytest.approx(eager, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "number"),
    [("qk_norm", "temperature"), ("moe", "balance"), ("number", "attention_rms")],
)
def test_a_number_of_ones_own_is_on_the_console_line(patched, tiny_data, name, number):
    commands = patched(name)
    flags = run_flags(tiny_data, "--run-name=a", "--max-steps=1")
    done = succeed(commands, "train_gpt2", *flags)
    value = logged(commands, "a", number)[1]
    assert f" | {number} {value:.4g} | " in done.stdout
    if number != "attention_rms":
        assert value == pytest.approx(1, abs=0.2)


CHECK_DOCUMENTS = """
import torch
from generation import generate_tokens
from model import GPT, GPTConfig

torch.manual_seed(0)
model = GPT(GPTConfig(block_size=32, vocab_size=100, n_layer=2, n_head=2, n_embd=32)).eval()
for parameter in model.parameters():
    parameter.data.normal_(std=0.3)
first, second = torch.randint(99, (2, 1, 8))
end = torch.full((1, 1), 99)
alone = model(torch.cat([end, second], dim=1)).logits
for before in (first, second, torch.cat([end, first[:, 1:]], dim=1)):
    after = model(torch.cat([before, end, second], dim=1)).logits[:, 8:]
    shifted = model(torch.cat([before.flip(1), end, second], dim=1)).logits[:, 8:]
    assert torch.allclose(after, shifted, atol=1e-5)
    prompt = torch.cat([before, end, second], dim=1)
    with_cache, without = (
        generate_tokens(model, prompt, 8, temperature=0.0, stop_token=None, use_cache=use)
        for use in (True, False)
    )
    assert with_cache == without
assert not torch.allclose(alone, after, atol=1e-3)  # positions continue
"""


def test_with_document_masking_a_document_does_not_depend_on_those_before(patched, tmp_path):
    script = tmp_path / "check.py"
    script.write_text(CHECK_DOCUMENTS, encoding="utf-8")
    commands = patched("documents")
    done = commands.run(script)
    assert done.code == 0, done.stderr


# --- edits of the optimizer and of what follows the step --------------------------------------


def test_another_optimizer_trains_saves_and_resumes(patched, tiny_data):
    commands = patched("sgd")
    flags = run_flags(tiny_data, "--max-lr=0.1", "--min-lr=0.1", "--micro-batch-size=2")
    # Its state is whole in the file: sharded ranks continue from it, too.
    train_twice(commands, flags, then_ranks=2, more=["--parallel=fsdp"], tolerance=1e-4)


def test_an_optimizer_state_that_cannot_be_saved_ends_the_run_after_the_first_update(
    patched, tiny_data
):
    commands = patched("lists")
    flags = run_flags(tiny_data, "--micro-batch-size=2", "--run-name=a")
    done = commands.run_ranks(2, "train_gpt2", *flags)
    assert done.code == 2
    assert "a checkpoint cannot hold GG.transformer.h.0.attn.c_attn.weight" in done.stderr
    assert not [*(commands.folder / "runs/a").glob("checkpoints/*")]


def test_numbers_that_an_optimizer_keeps_in_its_groups_are_resumed(patched, tiny_data):
    commands = patched("counter")
    train_twice(commands, run_flags(tiny_data))
    assert saved_state(commands, "whole")["optimizer_groups"] == [{"k": 8, "lr_max": 1e-2}] * 3


OPTIMIZER_EDITS = {
    "lion": ["--optimizer=lion", "--max-lr=3e-3"],
    "soap": ["--optimizer=soap"],
    "schedule_free": ["--optimizer=schedule-free", "--min-lr=1e-2"],
    "cautious_decay": [],
    "ema_nesterov": ["--optimizer=ema-nesterov"],
    "embedding_lr": ["--embedding-lr=2e-2"],
    "normuon": ["--optimizer=muon"],
}


@pytest.mark.parametrize("name", OPTIMIZER_EDITS)
def test_an_edit_of_the_optimizer_trains_on_ranks_resumes_and_exports(patched, tiny_data, name):
    commands = patched(name)
    flags = run_flags(tiny_data, "--weight-decay=0.5", *OPTIMIZER_EDITS[name])
    whole = train_twice(commands, flags)
    assert whole[8] < whole[1] - 0.1
    mode = "ddp" if name == "soap" else "fsdp"
    split = ["--run-name=two", f"--parallel={mode}", "--micro-batch-size=2"]
    train(commands, *flags, *split, ranks=2)
    # The first gradients do not determine all of SOAP's basis.
    tolerance = 2e-2 if name == "soap" else 2e-3
    assert logged(commands, "two", "train_loss") == pytest.approx(whole, abs=tolerance)
    if name == "soap":
        done = commands.run("train_gpt2", *flags, "--parallel=fsdp")
        assert_refused(done, "--optimizer soap requires --parallel ddp")
    succeed(commands, "export", "--model=runs/whole", "--out=exported")


SOAP_CHECK = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from train_gpt2 import SOAP

class Products(TorchDispatchMode):
    seen = []
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mm.default:
            is_basis = result.size(0) == result.size(1)
            self.seen.append((is_basis, torch.get_float32_matmul_precision()))
        return result

torch.set_float32_matmul_precision("high")
p = torch.nn.Parameter(torch.rand(4, 6))
optimizer = SOAP([p], {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.9)})
for _ in range(11):
    p.grad = torch.rand(4, 6)
    with Products():
        optimizer.step()
assert set(Products.seen) == {(True, "highest"), (False, "high")}, Products.seen
assert Products.seen.count((True, "highest")) == 2 * 11 + 2
"""


def test_soap_multiplies_what_its_bases_come_from_in_float32(patched, tmp_path):
    script = tmp_path / "soap.py"
    commands = patched("soap")
    script.write_text(f"import sys\nsys.path.insert(0, {str(tmp_path / 'copy')!r})\n{SOAP_CHECK}")
    done = commands.run(script)
    assert done.code == 0, done.stderr


def first_update(commands, flags, more=()):
    """The change of each parameter in a run's only step, in which the flags `more` act."""
    train(commands, *flags, *more, "--max-steps=1", "--run-name=one")
    train(commands, *flags, "--run-name=none", *UNCHANGED)
    after, before = (final_state(commands, run, 1) for run in ("one", "none"))
    return {name: after[name] - before[name] for name in after}


@pytest.mark.parametrize(
    ("name", "matrices"), [("lion", 1.0), ("schedule_free", 1.0), ("embedding_lr", 2.0)]
)
def test_a_first_update_has_the_size_of_the_learning_rate(patched, tiny_data, name, matrices):
    commands = patched(name)
    optimizer = [flag for flag in OPTIMIZER_EDITS[name] if "lr" not in flag]
    flags = [*optimizer, "--weight-decay=0", "--max-lr=1e-3", "--min-lr=0"]
    more = ["--embedding-lr=2e-3"] if name == "embedding_lr" else []
    updates = first_update(commands, run_flags(tiny_data, *flags), more)
    for parameter, factor in (("ln_f.bias", 1.0), ("wte.weight", matrices)):
        update = updates[f"transformer.{parameter}"].abs()
        assert update.max() == pytest.approx(factor * 1e-3, rel=1e-2)
    if name == "lion":
        sizes = updates["transformer.h.0.mlp.c_fc.weight"].abs()
        assert sizes.numpy() == pytest.approx(np.full(sizes.shape, 1e-3), rel=1e-2)


def test_cautious_decay_is_adamw_without_decay_and_decays_less(
    commands, patched, tiny_data, tmp_path
):
    flags = run_flags(tiny_data, f"--out-dir={tmp_path}/runs", "--weight-decay=0")
    train(commands, *flags, "--run-name=plain")
    changed = patched("cautious_decay")
    train(changed, *flags, "--run-name=cautious")
    plain, cautious = (logged(changed, run, "train_loss") for run in ("plain", "cautious"))
    assert cautious == plain
    decay = [*flags, "--weight-decay=20"]
    train(commands, *decay, "--run-name=decayed")
    train(changed, *decay, "--run-name=less")
    norms = [
        final_state(changed, run)["transformer.wte.weight"].norm()
        for run in ("plain", "less", "decayed")
    ]
    assert norms[0] > 1.01 * norms[1] > 1.02 * norms[2]


def test_a_power_cool_down_ends_with_the_square_of_the_steps_that_are_left(patched, tiny_data):
    commands = patched("power_cooldown")
    flags = run_flags(tiny_data, "--lr-schedule=wsd-power", "--min-lr=0", "--run-name=a")
    train(commands, *flags)
    rates = [*logged(commands, "a", "lr").values()]
    assert rates == pytest.approx([1e-2] * 6 + [1e-2 * (2 / 3) ** 2, 1e-2 / 9])


def test_another_schedule_is_one_function_and_one_line(patched, tiny_data):
    commands = patched("schedule")
    train(commands, *run_flags(tiny_data, "--lr-schedule=flat", "--run-name=a"))
    assert set(logged(commands, "a", "lr").values()) == {1e-2}
    done = commands.run("train_gpt2", *run_flags(tiny_data, "--lr-schedule=steep"))
    assert_refused(done, "steep", "cosine", "wsd", "flat")


def test_settings_of_a_step_are_factors_on_those_of_the_groups(patched, tiny_data):
    commands = patched("momentum")
    flags = run_flags(tiny_data, "--optimizer=muon")
    whole = train_twice(commands, flags)
    train(commands, *flags, "--run-name=less", "--momentum=0.5")
    assert logged(commands, "less", "train_loss") != whole


def test_weight_decay_may_follow_the_step_and_a_flag_acts_on_a_resume(patched, tiny_data):
    commands = patched("decay")
    flags = run_flags(tiny_data, "--min-lr=1e-2")
    train_twice(commands, flags)
    shutil.rmtree(saved(commands, "halves"))
    train(commands, *flags, "--run-name=halves", "--resume=auto", "--weight-decay=0")
    name = "transformer.wte.weight"
    plain, more = (final_state(commands, run)[name] for run in ("whole", "halves"))
    assert plain.norm() < 0.95 * more.norm()  # four steps, each with a decay of 5 %


def test_a_batch_size_may_follow_the_step(patched, tiny_data):
    commands = patched("batch")
    flags = run_flags(tiny_data, "--micro-batch-size=2")
    whole = train_twice(commands, flags)
    tokens = logged(commands, "whole", "tokens_seen")
    assert [tokens[step] for step in range(1, 9)] == [128, 256, 384, 640, 896, 1152, 1408, 1664]
    train(commands, *flags, "--run-name=two", ranks=2)
    assert logged(commands, "two", "train_loss") == pytest.approx(whole, abs=1e-4)
    done = succeed(commands, "read_step", "runs/whole", "runs/two", "--step=4")
    texts = [text.strip() for text in done.stdout.split("--- ")[1:]]
    assert len(texts) == 16
    assert texts[:8] == texts[8:]


# --- numbers of a step, evaluations, state, data ----------------------------------------------


def assert_same_in_every_split(commands, tiny_data, tolerances):
    """Train the same steps, split in several ways; compare the metrics that have a tolerance."""
    ways = [
        (1, ["--micro-batch-size=8"]),
        (1, ["--micro-batch-size=2"]),
        (2, ["--micro-batch-size=1", "--parallel=fsdp"]),
    ]
    if has_compiler:
        compiled = ["--micro-batch-size=1", "--compile", "--activation-checkpointing=full"]
        ways.append((2, compiled))
    for index, (ranks, flags) in enumerate(ways):
        train(commands, *run_flags(tiny_data, *flags), f"--run-name={index}", ranks=ranks)
        for name, tolerance in tolerances.items():
            found, expected = logged(commands, index, name), logged(commands, 0, name)
            assert all(math.isfinite(value) for value in found.values())
            assert found == pytest.approx(expected, rel=tolerance)


def test_numbers_of_a_step_depend_on_no_split_and_no_validation_and_are_drawn(patched, tiny_data):
    commands = patched("number", "gradient")
    names = ("attention_rms", "attention_grad_norm")
    assert_same_in_every_split(commands, tiny_data, dict.fromkeys(names, 2e-2))
    train(commands, *run_flags(tiny_data, "--micro-batch-size=8", "--val-every=0", "--run-name=a"))
    for name in names:
        found = logged(commands, "a", name)
        assert found == logged(commands, "0", name)
        assert sorted(found) == [*range(1, 9)]
        assert found[8] > 0
    succeed(commands, "plot", "runs/a")
    figures = {path.stem for path in (commands.folder / "runs/a/figures").iterdir()}
    assert {f"own_{name}" for name in names} <= figures


def test_each_counted_target_has_the_same_weight(patched, tiny_data):
    tolerances = {"train_loss": 1e-3, "grad_norm": 2e-2, "val_loss": 1e-3}
    assert_same_in_every_split(patched("masks"), tiny_data, tolerances)


def test_another_evaluation_is_one_function_and_one_line(patched, tiny_data):
    commands = patched("evaluation")
    flags = run_flags(tiny_data, "--micro-batch-size=2")
    train(commands, *flags, "--run-name=one")
    train(commands, *flags, "--run-name=two", ranks=2)
    one, two = (logged(commands, run, "last_token_acc") for run in ("one", "two"))
    assert sorted(one) == [0, 4, 8]
    assert one == two


def test_a_second_validation_text_is_two_lines(patched, tiny_data):
    commands = patched("text")
    shutil.copytree(tiny_data, commands.folder / "second")
    flags = run_flags(tiny_data, "--micro-batch-size=2", "--val-tokens=4000")
    train(commands, *flags, "--run-name=one")
    train(commands, *flags, "--run-name=two", ranks=2)
    one, two = (logged(commands, run, "second_loss") for run in ("one", "two"))
    assert sorted(one) == [0, 4, 8]
    assert one == pytest.approx(two, abs=1e-5)
    assert one[8] != logged(commands, "one", "val_loss")[8]
    with edited(commands, "evaluation.py", '"second"))', '"val"))') as same:
        done = same.run("train_gpt2", *flags, "--run-name=same")
    assert_refused(done, "evaluation 2 and evaluation 1 both log 'val_loss'")


def test_state_of_ones_own_is_saved_evaluated_and_resumed(patched, tiny_data):
    commands = patched("ema")
    flags = run_flags(tiny_data, "--micro-batch-size=2", "--parallel=fsdp")
    train_twice(commands, flags, ranks=2)
    whole, halves = (logged(commands, run, "ema_loss") for run in ("whole", "halves"))
    assert whole == halves
    val = logged(commands, "whole", "val_loss")
    assert whole[0] == pytest.approx(val[0], abs=1e-5)  # at the start, it is the weights
    assert val[8] + 1e-3 < whole[8] < val[0] - 1e-3
    # Another number of ranks continues with it.
    more = ["--run-name=more", "--resume=runs/whole", "--max-steps=9", "--parallel=ddp"]
    train(commands, *flags, *more)
    assert logged(commands, "more", "ema_loss")[8] == pytest.approx(whole[8], abs=1e-5)


def test_state_that_one_side_lacks_is_one_line(commands, patched, tiny_data, tmp_path):
    flags = run_flags(tiny_data, f"--out-dir={tmp_path}/runs")
    train(commands, *flags, "--run-name=plain", "--max-steps=4")
    changed = patched("ema")
    done = succeed(changed, "train_gpt2", "--resume=runs/plain", "--max-steps=6")
    assert done.stdout.count("Trainer.state") == 1
    done = succeed(commands, "train_gpt2", f"--resume={tmp_path}/runs/plain", "--max-steps=8")
    assert done.stdout.count("Trainer.state") == 1


def test_another_source_is_one_function_and_one_line(patched):
    commands = patched("source")
    for _ in range(2):  # the second time it is finished
        flags = ("--source=numbers", "--shard-size=800", "--data-dir=numbers")
        succeed(commands, "fineweb", *flags)
    files = sorted((commands.folder / "numbers").glob("*.npy"), key=lambda path: path.stem[-6:])
    tokens = np.concatenate([np.load(file) for file in files])
    assert len(files) > 3
    texts = gpt2_encoding().decode(tokens).split("<|endoftext|>")[1:]
    assert len(texts) == 399
    divisors = {n: [str(d) for d in range(1, n + 1) if n % d == 0] for n in range(1, 400)}
    documents = {f"{n} can be divided by {', '.join(divisors[n])}." for n in divisors}
    assert len(documents & {*texts}) > 350  # the others are cut, for validation
    assert tokens[0] == END_OF_TEXT
    done = commands.run("fineweb", "--source=letters")
    assert_refused(done, "--source letters is not fineweb-edu, fineweb, stdlib, numbers")
