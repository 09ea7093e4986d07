import json
import math
import os
import pty
import shlex
import shutil
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, no_spaces, tiny_trainer
from torch.utils._python_dispatch import TorchDispatchMode

from dataloader import Batch
from model import GPT, GPTConfig
from runtime.checkpoint import latest_checkpoint, load_model, verify_checkpoint
from runtime.device import compiler_problem, make_deterministic
from runtime.distributed import DistInfo
from runtime.metrics import read_metrics
from train_gpt2 import (
    StepResult,
    build_optimizers,
    check_finite,
    evaluate_loss,
    learning_rate,
    main,
    train_step,
    training_loader,
)
from training.config import TrainConfig
from training.run_dir import parse_config

CPU = torch.device("cpu")
DIST_INFO = DistInfo(CPU)
TINY = GPTConfig(block_size=16, vocab_size=100, n_layer=2, n_head=2, n_embd=16)


def losses(run_dir):
    """Training loss by step, exactly as logged."""
    return {
        r["step"]: r["train_loss"] for r in read_metrics(run_dir / "metrics.jsonl") if "lr" in r
    }


def val_losses(run_dir):
    records = read_metrics(run_dir / "metrics.jsonl")
    return {r["step"]: r["val_loss"] for r in records if "val_loss" in r}


@pytest.fixture
def one_step(tiny_data):
    """A first optimizer step of a model."""

    def step(model, batches, **settings):
        tokens = 16 * len(batches)
        trainer = tiny_trainer(tiny_data, model, total_batch_size=tokens, **settings)
        return train_step(trainer, iter(batches), 1e-3)

    return step


def random_batch(rows, seed=0):
    tokens = torch.randint(0, 100, (rows, 17), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens[:, :-1], tokens[:, 1:])


def test_main_learns_validates_and_saves(tiny_flags, tmp_path, capsys):
    main([*tiny_flags, "--run-name=a", "--max-steps=12", "--max-lr=1e-2", "--sample-every=12"])
    run_dir = tmp_path / "runs" / "a"
    loss = losses(run_dir)
    assert sorted(loss) == list(range(1, 13))
    assert abs(loss[1] - math.log(50257)) < 0.3
    assert loss[12] < loss[1] - 1
    assert sorted(val_losses(run_dir)) == [0, 4, 8, 12]
    assert [p.name for p in sorted((run_dir / "checkpoints").iterdir())] == [
        "step_00000004",
        "step_00000008",
        "step_00000012",
    ]
    assert json.loads((run_dir / "config.json").read_text())["max_lr"] == 1e-2
    samples = (run_dir / "samples.txt").read_text(encoding="utf-8").splitlines()
    assert len(samples) == 8  # four at step 0 and four at the end
    assert all("Hello, I'm a language model," in line for line in samples)
    record = read_metrics(run_dir / "metrics.jsonl")[-2]
    assert record["tokens_seen"] == 12 * 256
    assert record["mfu"] is None  # a CPU's peak is not guessed
    assert record["tokens_per_second"] > 0
    printed = capsys.readouterr().out
    assert "step 12/12 | loss" in printed
    before, _ = printed.split("step 0 | ", 1)
    quoted = shlex.quote(str(run_dir))  # temporary folders may have spaces
    for words in (f"run folder  {quoted}", f"plot.py {quoted}", "Ctrl-C", f"--resume {quoted}"):
        assert words in before
    for path in (quoted, str(run_dir)):
        printed = printed.replace(path, "runs/gpt2-medium-20261122-212815")
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 100
    assert "".join(line.lstrip() for line in lines).count("sample: ") == 8


def test_main_resumed_run_equals_an_uninterrupted_one(tiny_flags, tmp_path):
    main([*tiny_flags, "--run-name=whole"])
    main([*tiny_flags, "--run-name=halves", "--checkpoint-every=3"])
    runs = tmp_path / "runs"
    for later in ("step_00000006", "step_00000008"):  # as if it had died after step 5
        for file in (runs / "halves/checkpoints" / later).iterdir():
            file.unlink()
    main([*tiny_flags, "--run-name=halves", "--resume=auto"])
    assert losses(runs / "halves") == losses(runs / "whole")
    assert val_losses(runs / "halves") == val_losses(runs / "whole")
    ends = [load_model(runs / name).state_dict() for name in ("whole", "halves")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_main_resumed_where_it_had_evaluated_does_not_evaluate_again(tiny_flags, tmp_path):
    flags = [*tiny_flags, "--run-name=a", "--sample-every=4", "--resume=auto"]
    main([*flags, "--max-steps=4"])
    main([*flags, "--max-steps=8"])
    records = read_metrics(tmp_path / "runs/a/metrics.jsonl")
    evaluated = [r for r in records if "val_loss" in r]
    assert [r["step"] for r in evaluated] == [0, 4, 8]
    assert all(r["evaluation_seconds"] > 0 for r in evaluated)
    # Evaluations and saves count in the overall rate, and not in that of a step.
    assert "overall_tokens_per_second" not in evaluated[0]
    fastest = max(r["tokens_per_second"] for r in records if "lr" in r)
    assert 0 < evaluated[2]["overall_tokens_per_second"] < fastest
    samples = (tmp_path / "runs/a/samples.txt").read_text(encoding="utf-8").splitlines()
    assert [line.split(" | ")[0] for line in samples[::4]] == ["step 0", "step 4", "step 8"]


@pytest.mark.slow
@no_spaces
@pytest.mark.skipif(compiler_problem(CPU) is not None, reason="needs a C++ compiler")
def test_main_compiled_run_resumes_exactly_and_evaluates(tiny_flags, tmp_path):
    sample = ROOT / "assets" / "hellaswag_sample.jsonl"
    flags = [*tiny_flags, "--compile", "--block-size=64", "--sample-every=4"]
    flags += ["--hellaswag-every=4", f"--hellaswag-data={sample}"]
    main([*flags, "--run-name=whole"])
    main([*flags, "--run-name=halves", "--max-steps=8", "--checkpoint-every=4"])
    runs = tmp_path / "runs"
    for file in (runs / "halves/checkpoints/step_00000008").iterdir():
        file.unlink()
    main([*flags, "--run-name=halves", "--resume=auto"])
    assert losses(runs / "halves") == losses(runs / "whole")
    scores = [r for r in read_metrics(runs / "whole/metrics.jsonl") if "hellaswag_acc_norm" in r]
    assert [score["step"] for score in scores] == [0, 4, 8]
    assert scores[0]["hellaswag_total"] == 24


def test_main_two_ranks_equal_one(commands, tiny_flags, tmp_path):
    main([*tiny_flags, "--run-name=one"])
    flags = (*tiny_flags, "--run-name=two", "--micro-batch-size=2")
    assert commands.run_ranks(2, "train_gpt2", *flags).code == 0
    one, two = losses(tmp_path / "runs/one"), losses(tmp_path / "runs/two")
    assert one.keys() == two.keys()
    assert max(abs(one[step] - two[step]) for step in one) <= 1e-5
    one, two = val_losses(tmp_path / "runs/one"), val_losses(tmp_path / "runs/two")
    assert max(abs(one[step] - two[step]) for step in one) <= 1e-5


def test_main_ranks_agree_to_leave_hellaswag_out(commands, tiny_flags, tmp_path):
    damaged = commands.folder / "data/hellaswag/hellaswag_val.jsonl"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("not the benchmark")  # rank 0 cannot mend it, rank 1 would find a file
    flags = (*tiny_flags, "--run-name=a", "--hellaswag-every=4")
    nobody = {"https_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    done = commands.run_ranks(2, "train_gpt2", *flags, **nobody)
    assert done.code == 0, done.stderr
    assert done.stdout.count("warning: HellaSwag will not be scored: cannot download") == 1
    assert len(losses(tmp_path / "runs/a")) == 8


def test_main_float16_on_cpu_scales_the_loss(tiny_flags, tmp_path):
    flags = [*tiny_flags, "--max-steps=4", "--val-every=0"]
    main([*flags, "--run-name=half", "--dtype=float16"])
    main([*flags, "--run-name=full"])
    half, full = losses(tmp_path / "runs/half"), losses(tmp_path / "runs/full")
    assert max(abs(half[step] - full[step]) for step in full) < 0.05
    state = json.loads(
        (latest_checkpoint(tmp_path / "runs/half") / "trainer_state.json").read_text()
    )
    assert state["grad_scaler"]["scale"] > 1


def test_main_init_from_continues_a_model(tiny_flags, tmp_path):
    main([*tiny_flags, "--run-name=first", "--max-lr=1e-2"])
    first = tmp_path / "runs/first"
    flags = [flag for flag in tiny_flags if not flag.startswith("--n-")]
    main([*flags, f"--init-from={first}", "--run-name=second", "--block-size=16"])
    assert val_losses(tmp_path / "runs/second")[0] == pytest.approx(val_losses(first)[8], abs=0.2)


def test_main_config_file_is_overridden_by_flags(tiny_flags, tmp_path):
    main([*tiny_flags, "--run-name=a"])
    config, _ = parse_config(
        ["--config", str(tmp_path / "runs/a/config.json"), "--max_steps=3", "--shuffle"]
    )
    assert (config.n_embd, config.max_steps, config.compile, config.run_name) == (
        32,
        3,
        False,
        None,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--n-layer=3"], "n_layer 2 -> 3"),
        (["--total-batch-size=512"], "total_batch_size 256 -> 512"),
        (["--seed=2", "--no-shuffle"], "seed 1337 -> 2, shuffle True -> False"),
    ],
)
def test_resume_refuses_another_run(tiny_flags, tmp_path, changes, message):
    main([*tiny_flags, "--run-name=a", "--max-steps=4"])
    with pytest.raises(ValueError, match=message):
        main([*tiny_flags, "--run-name=a", "--resume=auto", *changes])


def test_resume_refuses_other_data(tiny_flags, tiny_data, tmp_path):
    main([*tiny_flags, "--run-name=a", "--max-steps=4"])
    other = tmp_path / "other"
    other.mkdir()
    for path in tiny_data.glob("*.npy"):
        np.save(other / path.name, np.load(path)[1:])
    with pytest.raises(ValueError, match="data_fingerprint"):
        main([*tiny_flags, "--run-name=a", "--resume=auto", f"--data-dir={other}"])


def test_main_restarts_a_run_that_died_before_its_first_checkpoint(tiny_flags, tmp_path):
    flags = [*tiny_flags, "--run-name=a", "--max-steps=2", "--resume=auto"]
    main(flags)
    path = tmp_path / "runs/a/metrics.jsonl"
    shutil.rmtree(tmp_path / "runs/a/checkpoints")
    first, log = losses(tmp_path / "runs/a"), path.read_text()
    with pytest.raises(ValueError, match="had saved step 2 and has no checkpoint any more: mount"):
        main(flags)
    assert path.read_text() == log  # as it was
    path.write_text(log.replace('{"saved_step": 2}\n', ""))  # as if it had not come so far
    main(flags)
    records = [r for r in read_metrics(path) if "lr" in r]
    assert [r["step"] for r in records] == [1, 2]
    assert losses(tmp_path / "runs/a") == first


def test_main_with_too_little_data_makes_no_run(tiny_flags, tmp_path):
    with pytest.raises(ValueError, match="one step needs"):
        main([*tiny_flags, "--run-name=a", "--total-batch-size=65536"])
    assert not (tmp_path / "runs").exists()


def test_main_plan_prints_and_touches_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["--plan", "--device=cpu", "--dtype=float32"])
    plan = capsys.readouterr().out
    assert "124,475,904" in plan
    assert "860M per token" in plan
    assert "9,999,745,024" in plan
    assert "1.39 GiB" in plan
    assert not list(tmp_path.iterdir())


def test_train_step_of_micro_batches_equals_one_of_the_whole(one_step):
    torch.manual_seed(0)
    whole, parts = GPT(TINY), GPT(TINY)
    parts.load_state_dict(whole.state_dict())
    batch = random_batch(8)
    pieces = [Batch(*pair) for pair in zip(*(part.split(2) for part in batch), strict=True)]
    result_whole, result_parts = one_step(whole, [batch]), one_step(parts, pieces)
    assert result_parts.loss == pytest.approx(result_whole.loss, abs=1e-6)
    assert result_parts.grad_norm == pytest.approx(result_whole.grad_norm, rel=1e-5)


@pytest.mark.slow
@no_spaces
@pytest.mark.skipif(compiler_problem(CPU) is not None, reason="needs a C++ compiler")
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


def test_train_step_clips_to_the_norm(one_step):
    torch.manual_seed(0)
    model = GPT(TINY)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    grads = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: grads.update({name: p.grad})
        )
    result = one_step(model, [random_batch(4)], grad_clip=0.25)
    clipped = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
    assert result.grad_norm > 0.25
    assert clipped == pytest.approx(0.25, rel=1e-4)
    assert any(not torch.equal(before[name], p) for name, p in model.named_parameters())


def test_train_step_stops_before_an_update_that_is_not_finite(one_step):
    torch.manual_seed(0)
    model = GPT(TINY)
    with torch.no_grad():
        model.transformer.ln_f.bias[0] = float("nan")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(FloatingPointError, match="no update was made"):
        one_step(model, [random_batch(4)])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.nan_to_num(7.0), before[name].nan_to_num(7.0))


def test_train_step_float16_gives_up_once_the_scale_is_down_to_1():
    torch.manual_seed(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    finite, overflowed = StepResult(1.0, 1.0), StepResult(1.0, math.inf)
    check_finite(finite, scaler)
    check_finite(overflowed, scaler)  # skipped, and the scale halved
    scaler.scale(torch.ones(()))  # sets it up
    scaler.update(1.0)
    with pytest.raises(FloatingPointError, match="gradient norm inf"):
        check_finite(overflowed, scaler)
    with pytest.raises(FloatingPointError, match="loss nan"):
        check_finite(StepResult(math.nan, 1.0), torch.amp.GradScaler("cpu", init_scale=4.0))


class CountReads(TorchDispatchMode):
    """Count how often a tensor's value is read as a Python number, which waits for the device."""

    reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


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


def test_train_step_tells_all_that_one_is_to_stop(tiny_data):
    trainer = tiny_trainer(tiny_data)
    with training_loader(trainer, 0) as batches:
        train_step(trainer, batches, 1e-3)
        assert trainer.stop.reason is None
        trainer.stop.fail(ValueError("moved"))
        train_step(trainer, batches, 1e-3)
        assert trainer.stop.reason == "failure"


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
init_model = train_gpt2.init_model
def init_poisoned(*args):
    model = init_model(*args)
    if os.environ["RANK"] == "1":
        calls = []
        def poison(grad):
            calls.append(1)
            return grad * float("nan") if len(calls) == 6 else grad
        model.transformer.ln_f.bias.register_hook(poison)
    return model
train_gpt2.init_model = init_poisoned
run_command(train_gpt2.main)
"""
    )
    done = commands.run_ranks(2, script, *tiny_flags, "--run-name=a", "--checkpoint-every=5")
    assert done.code == 1
    stopped = [line for line in done.stderr.splitlines() if "no update was made" in line]
    assert len(stopped) == 2
    # The save of the step before was still under way: both processes waited for it.
    assert all("step_00000005" in line for line in stopped)
    assert sorted(losses(tmp_path / "runs/a")) == [1, 2, 3, 4, 5]
    latest = latest_checkpoint(tmp_path / "runs/a")
    assert latest.name == "step_00000005"
    assert all(p.isfinite().all() for p in load_model(latest).parameters())


def test_main_says_saved_of_complete_checkpoints_and_done_after_the_last(
    tiny_flags, tmp_path, capsys
):
    main([*tiny_flags, "--run-name=a", "--checkpoint-every=1"])
    lines = capsys.readouterr().out.splitlines()
    run_dir = tmp_path / "runs/a"
    paths = [run_dir / "checkpoints" / f"step_{step:08d}" for step in range(1, 9)]
    saved = [f"step {step} | saved {path}" for step, path in enumerate(paths, 1)]
    assert [line for line in lines if " | saved " in line] == saved
    assert lines[-2:] == [saved[-1], f"done: {run_dir}"]
    for path in paths:
        verify_checkpoint(path)


def test_main_that_stops_finishes_the_save_under_way(tiny_flags, tmp_path):
    # A first update so large that the second step's loss is not finite.
    flags = ["--max-lr=1e20", "--min-lr=0", "--warmup-steps=0", "--checkpoint-every=1"]
    with pytest.raises(FloatingPointError, match=r"last checkpoint step_00000001, go on .*/a'?$"):
        main([*tiny_flags, *flags, "--run-name=a", "--val-every=0"])
    folder = tmp_path / "runs/a/checkpoints"
    assert os.listdir(folder) == ["step_00000001"]
    verify_checkpoint(folder / "step_00000001")


def test_main_never_saves_weights_that_are_not_finite(tiny_flags, tmp_path):
    flags = [*tiny_flags, "--run-name=a", "--val-every=0", "--checkpoint-every=1"]
    main([*flags, "--max-steps=2"])
    saved = tmp_path / "runs/a/checkpoints/step_00000002"
    flags += ["--resume=auto", "--keep-checkpoints=1", "--max-lr=1e38", "--min-lr=1e38"]
    stopped = r"\.weight is not finite after step 3, .*last checkpoint step_00000002, go on with"
    with pytest.raises(FloatingPointError, match=stopped):
        main(flags)
    assert latest_checkpoint(tmp_path / "runs/a") == saved
    verify_checkpoint(saved)


def test_main_stops_soon_after_a_save_that_failed(tiny_flags, tmp_path):
    run_dir = tmp_path / "runs/a"
    run_dir.mkdir(parents=True)
    (run_dir / "checkpoints").write_text("in the way")
    flags = ["--max-steps=40", "--checkpoint-every=20", "--val-every=0", "--stop-on-write-error"]
    with pytest.raises(OSError, match="step_00000020 was not saved"):
        main([*tiny_flags, *flags, "--run-name=a"])
    assert 20 <= max(losses(run_dir)) < 40


def test_main_resumed_from_an_older_checkpoint_sets_the_later_ones_aside(tiny_flags, tmp_path):
    main([*tiny_flags, "--run-name=a"])
    checkpoints = tmp_path / "runs/a/checkpoints"
    main([f"--resume={checkpoints / 'step_00000004'}", "--max-steps=6"])
    assert latest_checkpoint(tmp_path / "runs/a").name == "step_00000006"
    assert (checkpoints / "set_aside" / "step_00000008").is_dir()


def test_main_resumes_without_the_model_it_was_started_from(tiny_flags, tmp_path):
    main([*tiny_flags, "--run-name=first", "--max-steps=2"])
    flags = [flag for flag in tiny_flags if not flag.startswith("--n-")]
    main([*flags, f"--init-from={tmp_path}/runs/first", "--run-name=second", "--max-steps=4"])
    shutil.rmtree(tmp_path / "runs/first")
    main([f"--resume={tmp_path}/runs/second", "--max-steps=6"])
    assert sorted(losses(tmp_path / "runs/second")) == [1, 2, 3, 4, 5, 6]


def test_main_shows_a_bar_on_a_terminal_only(commands, tiny_flags):
    command = [sys.executable, str(ROOT / "train_gpt2.py"), *tiny_flags, "--run-name=a"]
    seen = []
    shell = ["sh", "-c", f"stty rows 40 cols 100; exec {shlex.join(command)}"]
    # What this process's own standard input is must not matter: nothing is read from it.
    pty.spawn(shell, lambda fd: seen.append(os.read(fd, 4096)) or seen[-1], lambda _: b"")
    shown = b"".join(seen).decode()
    assert "100%" in shown
    assert "8/8 steps, eta 0s" in shown
    assert "validating" in shown  # a bar of its own
    piped = commands.run("train_gpt2", *tiny_flags, "--run-name=b")
    assert (piped.code, piped.stderr) == (0, "")
    assert "100%" not in piped.stdout


def test_build_optimizer_decays_matrices_only():
    with torch.device("meta"):
        model = GPT(GPTConfig())
    (optimizer,) = build_optimizers(model, TrainConfig(), DistInfo())
    decayed, others = optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert (len(decayed["params"]), len(others["params"])) == (50, 98)
    assert sum(p.numel() for p in decayed["params"]) == 124_354_560
    assert sum(p.numel() for p in others["params"]) == 121_344
    assert decayed["betas"] == (0.9, 0.95)
    assert decayed["fused"]


def test_evaluate_loss_weighs_tokens_not_batches():
    torch.manual_seed(0)
    model = GPT(TINY)
    batch = random_batch(6)
    ignored = batch.targets.clone()
    ignored[4:] = -100
    nothing = torch.full_like(ignored, -100)
    batches = [Batch(batch.inputs, ignored), Batch(batch.inputs[4:], batch.targets[4:])]
    batches.append(Batch(batch.inputs, nothing))
    expected = float(model(*batch).loss.detach())
    assert evaluate_loss(model, batches, torch.float32, DIST_INFO) == pytest.approx(
        expected, abs=1e-6
    )


def test_learning_rate_follows_the_flags(tiny_flags):
    config, _ = parse_config(
        [*tiny_flags, "--lr-schedule=wsd", "--max-steps=10", "--warmup-steps=2"]
    )
    rates = [learning_rate(config, step) for step in range(10)]
    assert rates[0] == 3e-4
    assert rates[1:8] == [6e-4] * 7
    assert rates[9] < rates[8] <= 6e-4
