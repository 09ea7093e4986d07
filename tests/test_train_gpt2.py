import ast
import json
import math
import os
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import replace
from decimal import Decimal
from io import StringIO
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import (
    HELLASWAG,
    ROOT,
    TINY_RUN,
    assert_same_run,
    needs_compiler,
    randomize_weights,
    series,
    tiny_run,
)
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

import dataloader
import evaluation
import generation
import time_limit
import train_gpt2
from corpus.shards import open_shards
from dataloader import Batch
from formats.checkpoint import CheckpointWriter, verify_checkpoint
from formats.load import latest_checkpoint, load_model
from formats.metrics import STANDARD_METRICS, logged_values, read_metrics
from model import GPT, IGNORE_INDEX, GPTConfig
from parallel import SINGLE_PROCESS
from runtime.errors import UserError
from runtime.precision import make_deterministic
from tokenizer import END_OF_TEXT, gpt2_encoding
from train_gpt2 import build, build_optimizers, main, train_step
from training import memory, plan
from training.groups import check_optimizers
from training.trainer import Numbers, Trainer

TINY = GPTConfig(block_size=16, vocab_size=100, n_layer=2, n_head=2, n_embd=16)
WHOLE = ["--max-lr=1e-2", "--sample-every=4"]  # flags of the run that many tests share
SCORED = ["--block-size=64", "--hellaswag-every=4", f"--hellaswag-data={HELLASWAG}"]
COMPILED = pytest.param(["--compile", *SCORED], marks=[pytest.mark.slow, needs_compiler])


@pytest.fixture
def one_step(tiny_data, tmp_path):
    """A first optimizer step of a model."""

    def step(model, batches, **settings):
        with tiny_run(tiny_data, tmp_path, total_batch_size=16 * len(batches), **settings) as run:
            optimizers = build_optimizers(model, run)
            trainer = replace(
                build(run),
                raw_model=model,
                model=model,
                optimizers=optimizers,
                batches=Batches(batches),
            )
            numbers = train_step(trainer, 0)
            trainer.is_finite(numbers)
            return numbers.read()

    return step


class Batches(list):
    """Batches in the place of a loader's."""

    tokens_seen = 0

    def __next__(self):
        return self.pop(0)


def random_batch(rows, seed=0):
    tokens = torch.randint(0, 100, (rows, 17), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens[:, :-1], tokens[:, 1:])


# --- whole runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tiny_data, tmp_path_factory):
    """An uninterrupted run of eight steps, and what it prints."""
    out_dir = tmp_path_factory.mktemp("runs")
    flags = [f"--data-dir={tiny_data}", f"--out-dir={out_dir}", *TINY_RUN, *WHOLE]
    with redirect_stdout(StringIO()) as printed:
        main([*flags, "--run-name=whole"])
    return out_dir / "whole", printed.getvalue().splitlines()


@pytest.fixture
def copied(whole, tmp_path):
    """A copy of that run, in the folder of `tiny_flags`, to resume."""
    return Path(shutil.copytree(whole[0], tmp_path / "runs/copied"))


@pytest.mark.gpt2
def test_main_learns_validates_and_saves(whole, tiny_data):
    run_dir, lines = whole
    loss = series(run_dir, "train_loss")
    assert sorted(loss) == list(range(1, 9))
    assert abs(loss[1] - math.log(50257)) < 0.3
    assert loss[8] < loss[1] - 0.5
    assert sorted(series(run_dir, "val_loss")) == [0, 4, 8]
    assert json.loads((run_dir / "config.json").read_text())["max_lr"] == 1e-2
    samples = (run_dir / "samples.txt").read_text(encoding="utf-8").splitlines()
    texts = [ast.literal_eval(line.split(" | sample: ")[1]) for line in samples]
    assert len(texts) == 12  # four at each of three steps
    val = np.load(tiny_data / "val_000000.npy")
    assert all(text.startswith(gpt2_encoding().decode(val[:16].tolist())) for text in texts)
    record = read_metrics(run_dir / "metrics.jsonl")[-2]
    assert record["tokens_seen"] == 8 * 256
    assert record["mfu"] is None  # a CPU's peak is not guessed
    # Checkpoints are announced once they are complete, which may be after the evaluation.
    paths = [run_dir / "checkpoints" / f"step_{step:08d}" for step in (4, 8)]
    assert sorted((run_dir / "checkpoints").iterdir()) == paths
    saved = [f"step {step} | saved {path}" for step, path in zip((4, 8), paths, strict=True)]
    assert [line for line in lines if " | saved " in line] == saved
    assert lines[-2].startswith("best val_loss ")
    assert lines[-1] == f"done: {run_dir}"
    scripts = ["sample.py --model", "plot.py", "export.py --model"]
    for line, script in zip(lines[-5:-2], scripts, strict=True):
        assert f" python {script} {run_dir}" in line
    for path in paths:
        verify_checkpoint(path)


@pytest.mark.gpt2
def test_walkthrough_lists_every_key_of_metrics_jsonl(whole):
    text = (ROOT / "docs/walkthrough.md").read_text(encoding="utf-8")
    table = text.partition("### How to watch a run")[2].partition("## What people change")[0]
    documented = set(re.findall(r"`(\w+)`", table))
    lines = (whole[0] / "metrics.jsonl").read_text().splitlines()
    logged = {key for line in lines for key in json.loads(line)}
    assert logged | STANDARD_METRICS <= documented


@pytest.mark.parametrize("flags", [["--optimizer=muon"], COMPILED], ids=["muon", "compiled"])
def test_main_resumed_run_equals_an_uninterrupted_one(tiny_flags, tmp_path, flags):
    whole, halves = tmp_path / "runs/whole", tmp_path / "runs/halves"
    flags = [*tiny_flags, *flags, "--sample-every=4"]
    main([*flags, "--run-name=whole"])
    shutil.copytree(whole, halves)
    shutil.rmtree(halves / "checkpoints/step_00000008")
    (halves / "metrics.jsonl").write_text(  # as if it had died in step 7
        (whole / "metrics.jsonl").read_text().split('{"step": 7,')[0]
    )
    main([*flags, "--run-name=halves", "--resume=auto"])
    assert_same_run(halves, whole)
    ends = [load_model(run_dir).state_dict() for run_dir in (whole, halves)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert set(series(halves, "hellaswag_total").values()) <= {24}
    samples = (halves / "samples.txt").read_text(encoding="utf-8").splitlines()
    # What is due at the step that a run resumes from is evaluated again.
    assert [line.split(" | ")[0][5:] for line in samples[::4]] == ["0", "4", "8", "4", "8"]
    assert samples[4:12] == samples[12:]


def test_write_samples_compares_the_cache_again_after_training(tiny_data, tmp_path, capsys):
    """Tokens are mixed by weights that begin as 0."""
    generation.print_once.cache_clear()

    def mix(block, args):
        x, *rest = args
        return x + block.mixed * F.pad(x, (0, 0, 1, -1)), *rest

    with tiny_run(tiny_data, tmp_path) as run, build(run) as trainer:
        block = trainer.raw_model.transformer.h[0]
        block.mixed = torch.zeros(())
        block.register_forward_pre_hook(mix)
        for mixed, warnings in ((0, 0), (1, 1)):
            block.mixed += mixed
            with trainer.run_log.evaluation(mixed) as record:
                record |= evaluation.write_samples(trainer)
            assert capsys.readouterr().err.count("warning: sampling without the cache") == warnings


@pytest.mark.parametrize(("prompt", "begins"), [("état 1", "état 1"), ("", "<|endoftext|>")])
def test_write_samples_continues_the_prompt(tiny_data, tmp_path, prompt, begins):
    with (
        tiny_run(tiny_data, tmp_path, sample_prompt=prompt) as run,
        build(run) as trainer,
        trainer.run_log.evaluation(0) as record,
    ):
        record |= evaluation.write_samples(trainer)
    samples = (run.folder / "samples.txt").read_text(encoding="utf-8").splitlines()
    texts = [ast.literal_eval(line.split(" | sample: ")[1]) for line in samples]
    assert len(texts) == 4
    assert all(text.startswith(begins) for text in texts)


def test_main_two_ranks_equal_one_and_agree_to_leave_hellaswag_out(
    commands, tiny_flags, tmp_path, whole
):
    flags = (*tiny_flags, *WHOLE, "--run-name=two", "--micro-batch-size=2", "--hellaswag-every=4")
    done = commands.run_ranks(2, "train_gpt2", *flags)
    assert done.code == 0, done.stderr
    assert done.stdout.count("warning: HellaSwag will not be scored: HellaSwag was") == 1
    assert_same_run(tmp_path / "runs/two", whole[0], 1e-5)


@pytest.mark.gpt2
@pytest.mark.parametrize("cause", ["signal", "error"])
def test_main_last_evaluation_that_is_cut_short_is_repeated_by_a_resume(
    tiny_flags, tmp_path, monkeypatch, capsys, cause
):
    validation_batches, validations = evaluation.validation_batches, []

    def interrupted(*args, **kwargs):
        validations.append(args)
        if len(validations) == 2 and cause == "signal":  # after the last step
            os.kill(os.getpid(), signal.SIGTERM)
        elif len(validations) == 2:
            raise RuntimeError("the evaluation failed")
        return validation_batches(*args, **kwargs)

    monkeypatch.setattr(evaluation, "validation_batches", interrupted)
    flags = [*tiny_flags, "--run-name=a", "--val-tokens=1900", "--max-steps=4", "--resume=auto"]
    run_dir = tmp_path / "runs/a"
    if cause == "signal":
        main(flags)
        assert json.loads((run_dir / "PREEMPTED").read_text()) == {"step": 4, "reason": "SIGTERM"}
    else:
        with pytest.raises(RuntimeError, match="the evaluation failed"):
            main(flags)
    assert sorted(series(run_dir, "val_loss")) == [0]
    saved = latest_checkpoint(run_dir)
    verify_checkpoint(saved)
    before = saved.stat().st_mtime_ns
    main(flags)
    assert sorted(series(run_dir, "val_loss")) == [0, 4]
    assert sorted(series(run_dir, "train_loss")) == list(range(1, 5))
    assert (saved.name, saved.stat().st_mtime_ns) == ("step_00000004", before)
    assert not (run_dir / "PREEMPTED").exists()
    assert "the run is finished" not in capsys.readouterr().out
    main(flags)
    assert "the run is finished" in capsys.readouterr().out


def test_main_float16_on_cpu_scales_the_loss(tiny_flags, tmp_path, whole):
    main([*tiny_flags, *WHOLE, "--sample-every=0", "--run-name=half", "--dtype=float16"])
    half, full = (series(run, "train_loss") for run in (tmp_path / "runs/half", whole[0]))
    assert max(abs(half[step] - full[step]) for step in full) < 0.05
    latest = latest_checkpoint(tmp_path / "runs/half")
    assert json.loads((latest / "trainer_state.json").read_text())["grad_scaler"]["scale"] > 1


def test_main_init_from_continues_a_model_and_is_resumed_without_it(tiny_flags, tmp_path, copied):
    flags = [*tiny_flags, f"--init-from={copied}", "--run-name=second", "--block-size=16"]
    flags = [flag for flag in flags if not flag.startswith("--n-")]
    main([*flags, "--max-steps=1"])
    second = tmp_path / "runs/second"
    last = series(copied, "val_loss")[8]
    assert series(second, "val_loss")[0] == pytest.approx(last, abs=0.2)
    shutil.rmtree(copied)
    main([f"--resume={second}", "--max-steps=2"])
    assert sorted(series(second, "train_loss")) == [1, 2]


def test_main_refuses_other_data_and_too_little_data(tiny_flags, tiny_data, tmp_path, copied):
    # The split has 562 windows of 32 tokens.
    error = r"needs 65,537\): use the command .*, or --total-batch-size 17920 or less"
    with pytest.raises(ValueError, match=error):
        main([*tiny_flags, "--run-name=a", "--total-batch-size=65536"])
    assert not (tmp_path / "runs/a").exists()
    for path in tiny_data.glob("*.npy"):
        np.save(tmp_path / path.name, np.load(path)[1:])
    before = (copied / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="changed since this run began: restore the data"):
        main([*tiny_flags, "--run-name=copied", "--resume=auto", f"--data-dir={tmp_path}"])
    assert (copied / "metrics.jsonl").read_bytes() == before


def test_main_trains_without_a_validation_split(tiny_flags, tiny_data, tmp_path):
    shutil.copy(tiny_data / "train_000001.npy", tmp_path)
    flags = [*tiny_flags, f"--data-dir={tmp_path}", "--run-name=a", "--max-steps=2"]
    error = f"the validation split in {tmp_path} has 0 tokens, .*, or --val-every 0"
    with pytest.raises(ValueError, match=error):
        main(flags)
    assert not (tmp_path / "runs/a").exists()
    main([*flags, "--val-every=0", "--sample-every=2"])
    samples = (tmp_path / "runs/a/samples.txt").read_text(encoding="utf-8")
    assert samples.startswith("step 0 | sample: '<|endoftext|>")
    main([f"--resume={tmp_path}/runs/a", "--max-steps=3", "--sample-every=0"])
    assert sorted(series(tmp_path / "runs/a", "train_loss")) == [1, 2, 3]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("busy", [(time_limit, "time_call"), (train_gpt2, "build_model")])
def test_main_signal_before_training_leaves_no_folder(
    tiny_flags, tmp_path, monkeypatch, capsys, busy, number
):
    work = getattr(*busy)

    def interrupted(*args):
        os.kill(os.getpid(), number)
        return work(*args)

    monkeypatch.setattr(*busy, interrupted)
    flags, line = [*tiny_flags, "--run-name=a"], "before training began: run the same command again"
    if busy[0] is time_limit:
        flags.append("--max-minutes=9")
    if number == signal.SIGINT:
        with pytest.raises(KeyboardInterrupt, match=line):
            main(flags)
    else:
        main(flags)
        assert capsys.readouterr().out.endswith(f"SIGTERM: stopped {line}\n")
    assert not (tmp_path / "runs/a").exists()


def test_main_in_a_thread_trains_and_leaves_signals_alone(tiny_flags, tmp_path):
    flags = [*tiny_flags, "--run-name=a", "--max-steps=1", "--val-every=0"]
    with ThreadPoolExecutor() as pool:
        pool.submit(main, flags).result()
    assert sorted(series(tmp_path / "runs/a", "train_loss")) == [1]


@pytest.mark.parametrize("flag", ["--data-dir", "--hellaswag-data"])
def test_main_names_the_flag_for_data_that_was_moved(tiny_data, copied, capsys, flag):
    flags = [f"--resume={copied}", "--max-steps=9", "--hellaswag-every=9"]
    with pytest.raises(UserError, match=rf"\bmoved\b.*use {flag} "):
        main([*flags, f"{flag}=moved"])
    main([*flags, f"--data-dir={tiny_data}", "--hellaswag-every=0"])
    assert "done: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("durations", "expected"),
    [([30.0, 0.25, 0.5, 0.25, 0.25, 9.0], 0.25), ([30.0, 9.0], 9.0)],
)
def test_time_call_is_the_median_after_the_first_call(monkeypatch, durations, expected):
    now, left = [0.0], iter(durations)
    monkeypatch.setattr(plan, "perf_counter", lambda: now[0])
    work, cpu = lambda: now.append(now.pop() + next(left)), torch.device("cpu")
    assert plan.time_call(work, cpu, min_seconds=5.0) == expected


def test_fit_max_minutes_times_evaluations_in_eval_mode(tiny_data, tmp_path):
    modes = set()
    flags = {
        "max_minutes": 0.001,
        "warmup_steps": 0,
        "hellaswag_every": 1,
        "hellaswag_data": HELLASWAG,
    }
    with tiny_run(tiny_data, tmp_path, **flags) as run:
        trainer = build(run)
        part = trainer.raw_model.transformer.ln_f
        part.register_forward_hook(lambda m, *_: modes.add((torch.is_grad_enabled(), m.training)))
        time_limit.fit_max_minutes(trainer, train_step)
        assert trainer.raw_model.training
    assert modes == {(True, True), (False, False)}


@pytest.mark.gpt2
@pytest.mark.parametrize(("first_calls", "more"), [(3, []), (0, ["--max-minutes=0.01"])])
def test_auto_micro_batch_that_runs_out_of_memory_is_halved_with_the_same_data(
    tiny_flags, tmp_path, capsys, monkeypatch, first_calls, more
):
    """Also if some micro-steps fit; later starts of the run and a resume halve it, too."""
    fitting = [first_calls]

    def limited(*args, cross_entropy=F.cross_entropy, **kwargs):
        loss = cross_entropy(*args, **kwargs)
        if loss.requires_grad and len(args[0]) > 2 * 16:
            fitting[0] -= 1
            if fitting[0] < 0:
                loss.register_hook(run_out)
        return loss

    def run_out(_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setitem(memory.MAX_MICRO_BATCH_TOKENS, "cpu", 4 * 16)
    flags = [*tiny_flags, "--block-size=16", "--micro-batch-size=auto", "--loss-chunks=1"]
    with monkeypatch.context() as small_memory:
        small_memory.setattr(F, "cross_entropy", limited)
        main([*flags, "--run-name=auto", *more])
    said = "out of memory: repeating the step with --micro-batch-size 2, not 4"
    assert said in capsys.readouterr().out
    config = json.loads((tmp_path / "runs/auto/config.json").read_text())
    assert config["micro_batch_size"] == "auto"
    given = [f"--max-steps={config['max_steps']}", "--micro-batch-size=2", "--run-name=given"]
    main([*flags, *given])
    # A validation has the first size, so its sum is rounded differently.
    assert_same_run(tmp_path / "runs/auto", tmp_path / "runs/given", tolerance=2e-6)


@pytest.mark.gpt2
def test_out_of_memory_is_an_error_once_the_update_has_begun(tiny_flags, monkeypatch):
    def step(self, adamw_step=torch.optim.AdamW.step):
        adamw_step(self)
        monkeypatch.undo()  # the next time, there is enough memory
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(UserError, match="smaller --micro-batch-size; no checkpoint yet"):
        main([*tiny_flags, "--micro-batch-size=auto", "--run-name=a"])


@pytest.mark.gpt2
def test_max_minutes_trains_as_the_number_of_steps_that_it_found(tiny_flags, tmp_path, capsys):
    """Digit for digit, dropout's random numbers included; a resume keeps the number."""
    flags = [*tiny_flags, f"--hellaswag-data={HELLASWAG}", "--block-size=64", "--optimizer=muon"]
    main([*flags, "--run-name=timed", "--max-minutes=0.02", "--hellaswag-every=50"])
    config = json.loads((tmp_path / "runs/timed/config.json").read_text())
    steps = config["max_steps"]
    shown = capsys.readouterr().out
    assert f"--max-minutes 0.02: --max-steps {steps} instead of 8, " in shown
    assert "max_minutes" not in config
    main([*flags, "--run-name=given", f"--max-steps={steps}", "--hellaswag-every=50"])
    assert_same_run(tmp_path / "runs/timed", tmp_path / "runs/given")
    main([*flags, "--run-name=timed", "--resume=auto", "--max-minutes=9"])
    assert "the run is finished" in capsys.readouterr().out
    main([*flags, "--run-name=never", "--max-minutes=0.01", "--val-every=0"])
    assert "done: " in capsys.readouterr().out


@pytest.mark.gpt2
def test_main_never_saves_weights_that_are_not_finite(tiny_flags, copied):
    saved = latest_checkpoint(copied)
    flags = [*tiny_flags, "--run-name=copied", "--resume=auto", "--val-every=0", "--max-steps=10"]
    flags += ["--checkpoint-every=1", "--keep-checkpoints=1", "--max-lr=1e38", "--weight-decay=100"]
    stopped = r"diverged at step 9 \(.*\.weight is not finite\): .* --resume=\S+ --max-lr=5e\+37 "
    with pytest.raises(FloatingPointError, match=stopped):
        main(flags)
    assert logged_values(copied / "metrics.jsonl", "diverged_step") == [9]
    assert latest_checkpoint(copied) == saved
    verify_checkpoint(saved)


@pytest.mark.gpt2
def test_two_ranks_stop_together_when_one_has_a_gradient_that_is_not_finite(
    commands, tiny_flags, tmp_path
):
    script = tmp_path / "poisoned.py"
    script.write_text(
        f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
import train_gpt2
from runtime.cli import run_command

flush = os.fsync
os.fsync = lambda file: (time.sleep(0.2), flush(file))  # a slow disk
build_model = train_gpt2.build_model
def build_poisoned(*args):
    model = build_model(*args)
    if os.environ["RANK"] == "1":
        calls = []
        def poison(grad):
            calls.append(1)
            return grad * float("nan") if len(calls) == 6 else grad
        model.transformer.ln_f.bias.register_hook(poison)
    return model
train_gpt2.build_model = build_poisoned
run_command(train_gpt2.main)
"""
    )
    done = commands.run_ranks(2, script, *tiny_flags, "--run-name=a", "--checkpoint-every=5")
    assert done.codes == [1, 1]
    stopped = [line for line in done.stderr.splitlines() if "training diverged at step 6" in line]
    assert len(stopped) == 2
    # The save of the step before was still under way: both processes waited for it.
    assert all("such as torchrun ... train_gpt2.py --resume=" in line for line in stopped)
    assert all("runs/a --step 6): use a lower" in line for line in stopped)
    assert sorted(series(tmp_path / "runs/a", "train_loss")) == [1, 2, 3, 4, 5]
    latest = latest_checkpoint(tmp_path / "runs/a")
    assert latest.name == "step_00000005"
    assert all(p.isfinite().all() for p in load_model(latest).parameters())


# --- one step -------------------------------------------------------------------------------------


@pytest.mark.gpt2
def test_train_step_of_micro_batches_equals_one_of_the_whole(one_step):
    torch.manual_seed(0)
    whole, parts = GPT(TINY), GPT(TINY)
    parts.load_state_dict(whole.state_dict())
    batch = random_batch(8)
    pieces = [Batch(*pair) for pair in zip(*(part.split(2) for part in batch), strict=True)]
    result_whole, result_parts = one_step(whole, [batch]), one_step(parts, pieces)
    assert result_parts == pytest.approx(result_whole, rel=1e-5)
    assert result_whole["train_loss"] == pytest.approx(math.log(100), abs=0.2)


@pytest.mark.slow
@needs_compiler
def test_compiled_gradients_are_the_same_each_time_with_two_threads():
    make_deterministic()
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=256, vocab_size=100, n_layer=1, n_head=2, n_embd=128))
    compiled = torch.compile(model, dynamic=False)
    idx = torch.randint(0, 5, (4, 256))  # few ids: their gradients are long sums
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        gradients = []
        for _ in range(40):
            model.zero_grad()
            compiled(idx, idx.flip(1)).loss.backward()
            gradients.append(model.transformer.wte.weight.grad)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


@pytest.mark.gpt2
def test_train_step_clips_to_the_norm(one_step):
    torch.manual_seed(0)
    model = GPT(TINY)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    grads = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: grads.update({name: p.grad})
        )
    norm = one_step(model, [random_batch(4)], grad_clip=0.25)["grad_norm"]
    clipped = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
    assert norm > 0.25
    assert clipped == pytest.approx(0.25, rel=1e-4)
    assert any(not torch.equal(before[name], p) for name, p in model.named_parameters())


@pytest.mark.gpt2
def test_train_step_without_a_limit_of_the_norm_is_as_with_a_large_one(one_step):
    weights = []
    for grad_clip in (0.0, 1e9, 1e-9):
        torch.manual_seed(0)
        model = GPT(TINY)
        one_step(model, [random_batch(4)], grad_clip=grad_clip)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.gpt2
def test_numbers_that_are_not_finite_are_an_error(one_step):
    model = GPT(TINY)
    with torch.no_grad():
        model.transformer.ln_f.bias[0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"diverged at step 1 \(loss nan, "):
        one_step(model, [random_batch(4)])


@pytest.mark.gpt2
def test_train_step_whose_float16_gradient_overflows_changes_no_weight(tiny_data, tmp_path, capsys):
    """It raises an error once the scale cannot be halved again."""
    with tiny_run(tiny_data, tmp_path, optimizer="muon", dtype="float16") as run:
        trainer = build(run)
        model = trainer.raw_model
        with trainer.batches:
            train_step(trainer, 0)
            scale = trainer.scaler.get_scale()
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            model.transformer.ln_f.bias.register_hook(lambda grad: grad * math.inf)
            numbers = train_step(trainer, 0)  # AdamW's overflows, none of Muon's does
            halved = trainer.scaler.get_scale()
            trainer.scaler.update(1.0)
            error = rf"at step 4 \(.*, gradient norm inf; .* read_step\.py {run.folder} --step 4\)$"
            with pytest.raises(FloatingPointError, match=error):
                train_step(trainer, 3)
    assert not math.isfinite(numbers.read()["grad_norm"])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert halved == scale / 2
    assert "no update was made" in capsys.readouterr().out


class CountReads(TorchDispatchMode):
    """Count how often a tensor's value is read as a Python number, which waits for the device."""

    reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.gpt2
def test_train_step_reads_no_number_from_the_device_but_its_result(one_step):
    torch.manual_seed(0)
    model, batches = GPT(TINY), [random_batch(4, seed) for seed in range(3)]
    one_step(model, batches)  # the optimizer's state is made
    with CountReads() as counted:
        one_step(model, batches)
    assert counted.reads == 0  # the result is read once, by tolist
    with CountReads() as counted:
        float(torch.ones(()))
    assert counted.reads == 1


class WatchedNumbers(Numbers):
    """Numbers of a step: note when they are queued, and when the host reads them."""

    events = ()

    def average(self, ranks):
        super().average(ranks)
        self.events.append(("queue", self.step))

    def read(self):
        if ("read", self.step) not in self.events:
            self.events.append(("read", self.step))
        return super().read()


@pytest.mark.gpt2
@pytest.mark.parametrize("late", [0, 1])
def test_main_on_a_gpu_reads_the_numbers_of_a_step_once_the_next_one_is_queued(
    tiny_flags, monkeypatch, late
):
    """All numbers are read before anything is saved or evaluated; a CPU reads them at once."""
    events = []

    def note(kind, function):
        def noted(*args, **kwargs):
            events.append((kind, None))
            return function(*args, **kwargs)

        return noted

    monkeypatch.setattr(WatchedNumbers, "events", events)
    monkeypatch.setattr(train_gpt2, "Numbers", WatchedNumbers)
    monkeypatch.setattr(Trainer, "steps_unread", late)
    monkeypatch.setattr(evaluation, "validate", note("validate", evaluation.validate))
    monkeypatch.setattr(CheckpointWriter, "save", note("save", CheckpointWriter.save))
    main([*tiny_flags, "--run-name=a", "--max-steps=6", "--checkpoint-every=3", "--val-every=4"])
    early = [("queue", 1), ("queue", 2), ("read", 1), ("queue", 3), ("read", 2)]
    at_once = [(kind, step) for step in (1, 2, 3) for kind in ("queue", "read")]
    expected = [("validate", None), *(early if late else at_once[:-1]), ("read", 3), ("save", None)]
    assert events[: len(expected)] == expected
    queued = set()
    for kind, step in events:
        if kind == "queue":
            queued.add(step)
        elif kind == "read":
            queued.remove(step)
        else:  # nothing that was not looked at is saved or evaluated
            assert not queued
    assert [kind for kind, _ in events].count("save") == 2


@pytest.mark.gpt2
def test_main_saves_nothing_that_follows_from_numbers_that_are_not_finite(
    tiny_flags, tmp_path, monkeypatch
):
    monkeypatch.setattr(Trainer, "steps_unread", 1)
    steps, forward = [], GPT.forward

    def poisoned(self, idx, targets=None, cache=None):
        output = forward(self, idx, targets, cache)
        if not (self.training and targets is not None):
            return output
        steps.append(1)
        return output._replace(loss=output.loss * (math.nan if len(steps) > 4 else 1))

    monkeypatch.setattr(GPT, "forward", poisoned)
    with pytest.raises(FloatingPointError, match="training diverged at step 3"):
        main([*tiny_flags, "--run-name=a", "--checkpoint-every=2", "--val-every=0"])
    assert len(steps) == 2 * 4  # the work of step 4 was queued before step 3 was read
    assert latest_checkpoint(tmp_path / "runs/a").name == "step_00000002"
    assert logged_values(tmp_path / "runs/a/metrics.jsonl", "diverged_step") == [3]


@pytest.mark.gpt2
def test_main_names_the_patch_for_masked_targets(tiny_flags, monkeypatch):
    to_batch = dataloader.to_batch

    def masked(*args):
        batch = to_batch(*args)
        batch.targets[0, 3] = IGNORE_INDEX
        return batch

    monkeypatch.setattr(dataloader, "to_batch", masked)
    with pytest.raises(UserError, match=r"of step 1 is masked: apply edits/masks\.patch"):
        main([*tiny_flags, "--run-name=a", "--val-every=0"])


@pytest.mark.gpt2
@pytest.mark.parametrize("decay", [None, 3.0])
def test_build_optimizers_decays_matrices_and_embeddings_only(tiny_data, tmp_path, decay):
    with torch.device("meta"):
        model = GPT(GPTConfig())
        # A parameter with one dimension above 1 is a vector, whatever its number of dimensions.
        model.transformer.h[0].attn.temperature = torch.nn.Parameter(torch.ones(12, 1, 1))
    with tiny_run(tiny_data, tmp_path, beta1=0.8, beta2=0.9, embedding_decay=decay) as run:
        (optimizer,) = build_optimizers(model, run)
    groups = optimizer.param_groups  # the blocks' matrices, embeddings, biases and gains
    assert [group["weight_decay"] for group in groups] == [0.1, decay or 0.1, 0.0]
    assert [len(group["params"]) for group in groups] == [48, 2, 99]
    sizes = [sum(p.numel() for p in group["params"]) for group in groups]
    assert sizes == [84_934_656, 39_419_904, 121_344 + 12]
    assert groups[0]["betas"] == (0.8, 0.9)
    assert groups[0]["fused"]


@pytest.mark.gpt2
def test_spelling_is_shared_before_the_embedding_is_updated(tiny_data, tmp_path):
    model = GPT(GPTConfig(block_size=16, n_layer=1, n_head=2, n_embd=16))
    with tiny_run(tiny_data, tmp_path, optimizer="muon", spelling_share=0.5) as run:
        _, adamw = build_optimizers(model, run)
    gradient = model.transformer.wte.weight.grad = torch.zeros_like(model.transformer.wte.weight)
    upper, lower = map(gpt2_encoding().encode_single_token, ("House", " house"))
    gradient[lower] = 1.0
    adamw.step()
    assert gradient[lower].tolist() == pytest.approx([1.5] * 16)
    assert gradient[upper].tolist() == pytest.approx([0.5] * 16, rel=0.05)


@pytest.mark.gpt2
@pytest.mark.parametrize(
    "add",
    [
        lambda numbers, two: numbers.add(2, train_loss=two),
        lambda numbers, two: numbers.add(2, lr=two),
        lambda numbers, two: numbers.set(train_loss=two),
        lambda numbers, two: numbers.set(lr=2.0),
    ],
)
def test_numbers_refuse_a_name_that_is_used_twice(add):
    numbers, two = Numbers(1, lr=0.1), torch.tensor(2.0)
    for _ in range(2):  # micro-steps
        numbers.add(2, train_loss=two)
    with pytest.raises(UserError, match=r"already logs a number named '(train_loss|lr)'"):
        add(numbers, two)
    numbers.average(SINGLE_PROCESS)
    assert numbers.read() == {"train_loss": 2.0, "lr": 0.1}


def test_numbers_are_scalar_tensors_or_floats():
    numbers = Numbers(1)
    numbers.set(a=torch.ones((), requires_grad=True), b=torch.ones(1), c=np.float32(0.5))
    numbers.set(d=Decimal(2), e=np.int64(3))
    kinds = [type(value) for value in numbers.values.values()]
    assert kinds == [torch.Tensor, float, float, float, int]  # no tensor is read: no host waits
    for value in ("high", None, torch.ones(2)):
        with pytest.raises(UserError, match=r"^mine is logged as .* not a number: use one number"):
            numbers.set(mine=value)


def test_check_optimizers_names_parameters_that_are_missing_or_twice():
    model = GPT(TINY)
    first, *_, last = model.parameters()
    rest = [p for p in model.parameters() if p is not last]
    message = r"once: transformer\.wte\.weight \(2 times\), transformer\.ln_f\.bias \(0 times\)$"
    with pytest.raises(ValueError, match=message):
        check_optimizers(model, [SGD(rest), SGD([first])])
    check_optimizers(model, [SGD(rest), SGD([last])])
    last.requires_grad_(False)  # nothing trains it
    check_optimizers(model, [SGD(rest)])


@pytest.mark.gpt2
def test_train_step_refuses_a_parameter_that_no_gradient_reaches(tiny_data, tmp_path):
    with tiny_run(tiny_data, tmp_path) as run:
        trainer = build(run)
        head = trainer.raw_model.lm_head
        head.bias = torch.nn.Parameter(torch.zeros(head.out_features))  # no product uses it
        with trainer.batches:
            train_step(trainer, 0)
            assert [*trainer._unused] == ["lm_head.bias"]
            with pytest.raises(UserError, match=r"reaches lm_head\.bias in 20 steps:"):
                train_step(trainer, 20)
            head.bias.requires_grad_(False)
            train_step(trainer, 0)
            train_step(trainer, 20)


@pytest.mark.gpt2
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("val_loss", "evaluation 3 and evaluation 1 both log 'val_loss': rename one"),
        ("grad_norm", "train_step and evaluation 3 both log 'grad_norm'"),
        ("tokens_seen", "evaluation 3 and the log both log 'tokens_seen'"),
    ],
)
def test_a_metric_that_another_function_logs_is_an_error(tiny_flags, monkeypatch, name, message):
    monkeypatch.setattr(evaluation, "write_samples", lambda *_: {name: 1.0})
    with pytest.raises(ValueError, match=message):
        main([*tiny_flags, "--run-name=a", "--sample-every=4"])


@pytest.mark.gpt2
def test_validate_weighs_tokens_not_batches_and_counts_the_bytes_of_targets(tiny_data, tmp_path):
    """As by hand, for six windows of which the last two share a batch with two fillers."""
    ids = gpt2_encoding().encode_ordinary("naïve café 日本語, 🙂! " * 8)[:96]
    ids.insert(3, END_OF_TEXT)  # a target without bytes
    for name, tokens in (("text", ids), ("short", ids[:9])):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "val_000000.npy", np.array(tokens, np.uint16))
    text, short = (open_shards(tmp_path / name, "all") for name in ("text", "short"))
    with tiny_run(tiny_data, tmp_path, total_batch_size=64, micro_batch_size=4) as run:
        trainer = build(run)
        randomize_weights(trainer.raw_model)
        metrics = evaluation.validate(trainer, text, "my")
        with pytest.raises(ValueError, match="the text of my_loss is shorter than --block-size"):
            evaluation.validate(trainer, short, "my")
        trainer.run = replace(run, model_config=replace(run.model_config, vocab_size=1000))
        assert evaluation.validate(trainer).keys() == {"val_loss"}  # no ids of GPT-2
    tokens = torch.tensor(ids)
    with torch.no_grad():
        logits = trainer.raw_model(tokens[:-1].view(6, 16)).logits
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[1:]).item()
    n_bytes = len(gpt2_encoding().decode_bytes([id for id in ids[1:] if id != END_OF_TEXT]))
    assert metrics["my_loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["my_bpb"] == pytest.approx(96 * loss / math.log(2) / n_bytes, rel=1e-5)


@pytest.mark.gpt2
def test_a_mistake_while_a_checkpoint_is_written_ends_the_run_with_its_traceback(
    tiny_flags, tmp_path, monkeypatch
):
    monkeypatch.setattr("formats.checkpoint.save_file", Mock(side_effect=KeyError("my mistake")))
    flags = [*tiny_flags, "--run-name=a", "--checkpoint-every=2", "--max-steps=100"]
    with pytest.raises(KeyError, match="my mistake"):
        main(flags)
    steps = series(tmp_path / "runs/a", "train_loss")
    assert len(steps) in (3, 4, 5)  # the next save waits for the first one
    assert not (tmp_path / "runs/a/PREEMPTED").exists()


@pytest.mark.gpt2
def test_plan_of_a_resumed_run_is_for_the_steps_that_are_left(copied, capsys):
    main([f"--resume={copied}", "--plan"])
    assert "about 0s to step 8, measured" in capsys.readouterr().out
