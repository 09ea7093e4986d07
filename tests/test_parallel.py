"""The same run by one process, DDP and FSDP2; activations kept, or computed again."""

import pytest
import torch
from conftest import (
    HELLASWAG,
    ROOT,
    TINY_RUN,
    assert_same_run,
    check_on_ranks,
    needs_compiler,
    series,
)

from formats.checkpoint import verify_checkpoint
from formats.load import latest_checkpoint
from train_gpt2 import main

CPU = torch.device("cpu")
STEPS = ["--max-steps=20", "--lr-schedule=wsd", "--max-lr=1e-3", "--min-lr=1e-3"]
STEPS += ["--spelling-share=0.5"]  # of the whole gradient, which a rank has not
EVALUATED = ["--block-size=64", "--hellaswag-every=10", f"--hellaswag-data={HELLASWAG}"]
EVALUATED += ["--sample-every=20", "--val-every=10", "--checkpoint-every=10"]
ONLY_STEPS = ["--val-every=0", "--hellaswag-every=0", "--sample-every=0", "--max-steps=4"]


def run_flags(tiny_data, out_dir):
    return [f"--data-dir={tiny_data}", f"--out-dir={out_dir}", *TINY_RUN, *STEPS, *EVALUATED]


@pytest.fixture(scope="module")
def runs(tiny_data, tmp_path_factory):
    """A folder of runs, the first of one process."""
    out_dir = tmp_path_factory.mktemp("runs")
    main([*run_flags(tiny_data, out_dir), "--run-name=one"])
    return out_dir


@pytest.fixture
def ranks(commands, tiny_data, runs):
    def run(processes, *flags):
        done = commands.run_ranks(processes, "train_gpt2", *run_flags(tiny_data, runs), *flags)
        assert done.code == 0, done.stderr
        assert "Warning" not in done.stderr  # newer versions of torch deprecate arguments
        return done.stdout

    return run


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("ddp", []),
        ("zero-3", ["--parallel=fsdp", "--activation-checkpointing=full"]),
        ("zero-2", ["--parallel=fsdp", "--no-reshard-after-forward"]),
    ],
)
def test_two_ranks_equal_one_process(ranks, runs, name, flags):
    ranks(2, "--micro-batch-size=1", f"--run-name={name}", *flags)
    # A norm's float32 sum over a whole embedding is right to three digits, over half of it to four.
    more = {"val_bpb": 1e-5, "grad_norm": 1e-3, "hellaswag_acc": 0, "hellaswag_acc_norm": 0}
    assert_same_run(runs / name, runs / "one", 1e-5, **more)
    verify_checkpoint(latest_checkpoint(runs / name))
    sizes = [path.stat().st_size for path in sorted(latest_checkpoint(runs / name).iterdir())]
    whole = [path.stat().st_size for path in sorted(latest_checkpoint(runs / "one").iterdir())]
    assert sizes[1:3] == whole[1:3]  # both safetensors files: the whole state


@pytest.mark.parametrize(("optimizer", "tolerance"), [("adamw", 1e-5), ("muon", 1e-4)])
def test_run_moves_between_processes_ddp_and_fsdp(ranks, tiny_data, runs, optimizer, tolerance):
    flags = [*run_flags(tiny_data, runs), f"--optimizer={optimizer}"]
    whole = "one" if optimizer == "adamw" else "one-muon"
    main([*flags, f"--run-name={whole}", "--resume=auto"])  # one is finished
    move = [f"--optimizer={optimizer}", f"--run-name=moved-{optimizer}", "--resume=auto"]
    main([*flags, *move, "--max-steps=4"])
    ranks(4, *move, "--max-steps=9", "--parallel=fsdp", "--micro-batch-size=1")
    ranks(2, *move, "--max-steps=14", "--parallel=ddp", "--micro-batch-size=2")
    main([*flags, *move, "--parallel=ddp"])
    moved, one = (
        series(runs / f"moved-{optimizer}", "train_loss"),
        series(runs / whole, "train_loss"),
    )
    assert moved.keys() == one.keys()
    assert max(abs(moved[step] - one[step]) for step in one) <= tolerance


@needs_compiler
def test_fsdp_compiled_in_bfloat16_is_near_to_one_process(ranks, runs):
    flags = ["--run-name=bf16", "--parallel=fsdp", "--compile", "--dtype=bfloat16"]
    said = ranks(2, *flags, "--micro-batch-size=2", "--max-steps=3")
    assert "recompile_limit" not in said
    losses, one = series(runs / "bf16", "train_loss"), series(runs / "one", "train_loss")
    assert max(abs(losses[step] - one[step]) for step in losses) <= 0.01


@needs_compiler
def test_compiled_model_in_ddp_equals_one_process(ranks, runs):
    """The default path on several GPUs, with the flags that change what is compiled."""
    flags = ["--loss-chunks=4", "--activation-checkpointing=full", *ONLY_STEPS]
    ranks(2, "--run-name=compiled", "--compile", "--micro-batch-size=1", *flags)
    losses, one = series(runs / "compiled", "train_loss"), series(runs / "one", "train_loss")
    assert len(losses) == 4
    assert max(abs(losses[step] - one[step]) for step in losses) <= 1e-5


STEPS_CHECK = """
import os, sys
sys.path.insert(0, {root!r})
import torch.distributed as dist
import train_gpt2
from runtime.cli import run_command

calls = []
for name in ("all_reduce", "all_gather", "broadcast", "barrier"):
    def counted(*args, function=getattr(dist, name), **kwargs):
        calls.append(function.__name__)
        return function(*args, **kwargs)
    setattr(dist, name, counted)
train_step = train_gpt2.train_step
def counting(trainer, step):
    result = train_step(trainer, step)
    if trainer.run.ranks.rank == 0:
        print("calls", *calls, flush=True)
    calls.clear()
    return result
train_gpt2.train_step = counting
run_command(train_gpt2.main)
"""


def test_turn_of_the_loop_has_two_small_collectives_besides_the_gradients(
    commands, tiny_data, runs, tmp_path
):
    script = tmp_path / "counting.py"
    script.write_text(STEPS_CHECK.format(root=str(ROOT)))
    flags = [*run_flags(tiny_data, runs), "--run-name=counted", "--micro-batch-size=1"]
    done = commands.run_ranks(2, script, *flags, *ONLY_STEPS)
    turns = [line for line in done.stdout.splitlines() if line.startswith("calls")]
    # Before the first step, the run is set up; after it, the state to save is checked.
    # One for the numbers and, with DDP, one for the parameters that a rank did not use.
    assert turns[2:] == ["calls all_reduce all_reduce"] * 2, done


ZERO_CHECK = f"""
import torch
from torch.distributed.tensor.debug import CommDebugMode
sys.path.append({str(ROOT / "tests")!r})
from conftest import tiny_run
from train_gpt2 import build_model

def count(communication, name):
    counts = communication.get_comm_counts()
    return sum(n for op, n in counts.items() if name in str(op))

def check(dist_info):
    idx = torch.zeros(1, 16, dtype=torch.int64)
    for reshard in (True, False):  # ZeRO-3, ZeRO-2
        settings = dict(parallel="fsdp", reshard_after_forward=reshard, total_batch_size=64)
        with tiny_run("DATA", "FOLDER", dist_info, **settings) as run:
            model = build_model(run)
        assert sum(p.numel() for p in model.parameters()) == model.config.n_params
        shard = sum(p.to_local().numel() for p in model.parameters())
        assert shard <= 0.51 * model.config.n_params
        gathered, reduced = [], []
        for last in (False, False, True):
            with CommDebugMode() as communication, run.ranks.accumulate(model, last):
                model(idx, idx).loss.backward()
            gathered.append(count(communication, "gather"))
            reduced.append(count(communication, "reduce_scatter"))
        # Two blocks, each twice a micro-step in ZeRO-3, and the root.
        assert gathered == ([5, 5, 5] if reshard else [3, 0, 0]), gathered
        assert reduced == [0, 0, 3], reduced
        assert run.ranks.grad_norm(model.parameters()).shape == ()
"""


def test_fsdp_holds_its_share_and_sends_what_it_says(commands, tmp_path, tiny_data):
    source = ZERO_CHECK.replace("DATA", str(tiny_data)).replace("FOLDER", str(tmp_path))
    check_on_ranks(commands, source, tmp_path)


def test_cpu_offload_is_refused_where_there_is_no_gpu(tiny_flags):
    with pytest.raises(ValueError, match="--cpu-offload requires a GPU, but this device is cpu"):
        main([*tiny_flags, "--parallel=fsdp", "--cpu-offload"])
