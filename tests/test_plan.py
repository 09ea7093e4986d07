import itertools
import re
from dataclasses import asdict, replace

import pytest
import torch
from conftest import ROOT, change_function, check_on_ranks, tiny_run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.profiler import profile

from corpus.shards import Manifest
from formats.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    TrainerState,
    collect,
    copy_weights,
    find_nonfinite_on_ranks,
    load_checkpoint,
    read_state,
    rng_states,
)
from formats.load import latest_checkpoint, load_model
from generation import generate_tokens
from lr_schedule import position_at, windows_at
from model import GPT, GPTConfig
from parallel import SINGLE_PROCESS
from runtime.cli import parse_flags
from runtime.distributed import DistInfo
from runtime.errors import UserError
from runtime.flops import GPUS
from runtime.precision import DTYPES
from tokenizer import VOCAB_SHA256
from train_gpt2 import build_optimizers, main
from training import memory, plan
from training.config import TrainConfig
from training.memory import Device, find_device, plan_memory, split_batch
from training.plan import MFU, describe_plan

CPU = torch.device("cpu")


def gpus(world_size=1):
    return DistInfo(torch.device("cuda"), world_size=world_size)


def cpus(world_size):
    return Device("cpu", 64, torch.float32, DistInfo(CPU, world_size=world_size))


def peak_bytes(function, *args):
    """The most that the tensors of a call, those that it returns included, take at once."""
    with profile(profile_memory=True) as profiler:
        kept = function(*args)
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    del kept
    return max(itertools.accumulate(sizes), default=0)


ROW = re.compile(r"\| (?:none|`(.*)`) \| (\d+) \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \|")
DOCUMENTED = ROW.findall((ROOT / "bench/results/README.md").read_text())
MEASURED = ROW.findall("""
| none | 1 | 8,192 | 6.15 | 6.5 |
| `--loss-chunks 8` | 1 | 65,536 | 22.5 | 22.8 |
| `--optimizer muon` | 1 | 65,536 | 26.5 | 27.1 |
| `--dtype float32` | 1 | 32,768 | 32.6 | 33.2 |
| `--dtype float16` | 1 | 16,384 | 10.5 | 11.0 |
| `--no-compile` | 1 | 65,536 | 47.8 | 51.1 |
| `--no-compile --loss-chunks 4` | 1 | 65,536 | 35.5 | 37.3 |
| `--no-compile --activation-checkpointing full` | 1 | 65,536 | 28.7 | 32.0 |
| `--parallel fsdp` | 2 | 32,768 | 16.9 | 17.5 |
| `--parallel fsdp --no-reshard-after-forward` | 2 | 32,768 | 17.0 | 17.5 |
| `--parallel fsdp --activation-checkpointing full` | 2 | 32,768 | 8.41 | 9.1 |
| `--parallel fsdp --cpu-offload` | 2 | 8,192 | 4.62 | 5.0 |
""")


@pytest.mark.gpt2
@pytest.mark.parametrize(("flags", "world_size", "tokens", "gib", "planned"), DOCUMENTED + MEASURED)
def test_planned_memory_is_above_what_a_gpu_allocates_and_near_it(
    flags, world_size, tokens, gib, planned
):
    """`gib` is the peak of torch's CUDA allocator in the third step of such a run."""
    assert len(DOCUMENTED) == 14
    config, n_tokens = parse_flags(TrainConfig, flags.split()), int(tokens.replace(",", ""))
    dtype = DTYPES.get(config.dtype, torch.bfloat16)
    device = Device("H100", 4000, dtype, gpus(int(world_size)))
    step = {"micro_batch_size": n_tokens // config.block_size}
    step["total_batch_size"] = n_tokens * int(world_size)
    chunks = split_batch(replace(config, **step), device).loss_chunks
    total = plan_memory(config, device, chunks).total(n_tokens) / 2**30
    assert 1 < total / float(gib) < 1.15
    assert f"{total:.1f}" == planned


@pytest.mark.gpt2
def test_no_path_takes_twice_the_model(tmp_path, tiny_data):
    """In sizes of the model; a GPU takes as much, without the files' content in CPU memory."""
    deep = GPTConfig(block_size=4096, vocab_size=1000, n_layer=40, n_head=4, n_embd=128)
    size, idx = 4 * deep.n_params, torch.zeros(1, 8, dtype=torch.int64)
    assert peak_bytes(GPT, deep) < 1.2 * size
    model = GPT(deep)
    with tiny_run(tiny_data, tmp_path) as run:
        optimizers = build_optimizers(model, run)
        resumed = GPT(deep)
        resumed_optimizers = build_optimizers(resumed, run)
    model(idx, idx).loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    contents = collect(model, optimizers, {})
    state = TrainerState(1, 1, asdict(deep), {}, "", rng_states(), {}, "", ["AdamW"], {})
    with CheckpointWriter(tmp_path / "checkpoints") as writer:
        assert 3 * size <= peak_bytes(writer.save, state, contents) < 3.1 * size
    assert peak_bytes(find_nonfinite_on_ranks, contents) < 0.01 * size
    in_file = 1
    assert peak_bytes(load_model, tmp_path) < (in_file + 1.2) * size
    in_file = 3
    path = latest_checkpoint(tmp_path)
    found = Checkpoint(path, read_state(path))
    peak = peak_bytes(load_checkpoint, found, resumed, resumed_optimizers, None, {})
    assert peak < (in_file + 3.1) * size  # moments and, as in a step, gradients
    assert peak_bytes(copy_weights, model, resumed, SINGLE_PROCESS) < 0.01 * size
    peak = peak_bytes(generate_tokens, model, idx.repeat(4, 1), 8)
    assert peak < 0.2 * size  # not of 4096 tokens


@pytest.mark.gpt2
@settings(max_examples=10)  # each plans for 124M, twice
@given(
    micro=st.integers(1, 64),
    accum=st.integers(1, 64),
    world_size=st.integers(1, 64),
    block_size=st.sampled_from([1, 100, 1024]),
)
def test_split_batch_splits_every_token(micro, accum, world_size, block_size):
    total = micro * accum * world_size * block_size
    config = TrainConfig(total_batch_size=total, block_size=block_size)
    device = cpus(world_size)
    assert split_batch(replace(config, micro_batch_size=micro), device).micro_batch_size == micro
    chosen = split_batch(config, device)
    assert total % (chosen.micro_batch_size * world_size * block_size) == 0


def test_split_batch_fits_steps_of_different_sizes(monkeypatch):
    change_function(monkeypatch, windows_at, lambda config, step: 12 if step < 3 else 36)
    config = TrainConfig(total_batch_size=72 * 64, block_size=64)
    assert [position_at(config, step) for step in (0, 3, 5)] == [0, 3 * 12, 3 * 12 + 2 * 36]
    for world_size, micro_batch_size in ((1, 12), (3, 4), (12, 1)):
        assert split_batch(config, cpus(world_size)).micro_batch_size == micro_batch_size
    with pytest.raises(ValueError, match="windows_at returns 12, which is not a multiple of 8"):
        split_batch(config, cpus(8))


@pytest.mark.gpt2
@pytest.mark.parametrize(
    ("total", "micro", "world_size", "suggested"),
    [(1000, 3, 2, [768, 1152]), (100, 3, 2, [384])],
)
def test_split_batch_names_nearest_sizes_that_do_divide(total, micro, world_size, suggested):
    device = cpus(world_size)
    config = TrainConfig(total_batch_size=total, micro_batch_size=micro, block_size=64)
    sizes = " or ".join(map(str, suggested))
    with pytest.raises(ValueError, match=f": use --total-batch-size {sizes}$"):
        split_batch(config, device)
    for size in suggested:
        fits = replace(config, total_batch_size=size)
        assert split_batch(fits, device).micro_batch_size == micro


@pytest.mark.parametrize(
    ("micro", "world_size", "counts"),
    [("auto", 3, [1, 2, 4]), (5, 2, [1, 2]), (2, 6, [1, 2, 4, 8])],
)
def test_split_batch_of_a_resumed_run_names_the_numbers_of_processes(micro, world_size, counts):
    config = TrainConfig(
        total_batch_size=64 * 8, micro_batch_size=micro, block_size=64, resume="auto"
    )
    numbers = " or ".join(map(str, counts))
    said = f": use {numbers} processes with --micro-batch-size auto$"
    with pytest.raises(ValueError, match=said):
        split_batch(config, cpus(world_size))
    for count in counts:
        split_batch(replace(config, micro_batch_size="auto"), cpus(count))


@pytest.mark.parametrize(
    ("kind", "gib", "flags", "micro_batch_size", "chunks"),
    [
        ("cuda", 139, {}, 128, 4),  # of 32,768 tokens each: 2**31 logits or more are slower
        ("cuda", 39, {}, 64, 2),
        ("cuda", 79, {"total_batch_size": 1024}, 1, 1),
        ("cuda", 18, {"micro_batch_size": 32}, 32, 2),  # with one, it does not fit
        ("cuda", 79, {"loss_chunks": 3}, 128, 3),
        ("cuda", 79, {"block_size": 131_072, "total_batch_size": 131_072}, 1, 4),
        ("cpu", 64, {}, 4, 4),
        ("mps", 64, {}, 8, 8),
    ],
)
def test_the_micro_batch_is_the_largest_that_fits_and_a_gpu_has_the_fewest_chunks(
    kind, gib, flags, micro_batch_size, chunks
):
    device = Device(kind, gib, torch.bfloat16, DistInfo(torch.device(kind)))
    assert split_batch(TrainConfig(**flags), device) == (micro_batch_size, chunks)


def test_ranks_plan_the_batch_of_the_one_with_the_least_memory(commands, tmp_path):
    check_on_ranks(
        commands,
        "from dataclasses import replace\n"
        "from training.config import TrainConfig\n"
        "from training.memory import find_device, split_batch\n"
        "def check(dist_info):\n"
        "    own = replace(dist_info, local_world_size=10**6 if dist_info.rank else 1)\n"
        "    device = find_device(TrainConfig(), own)\n"
        "    assert split_batch(TrainConfig(), device).micro_batch_size == 1\n",
        tmp_path,
    )


# --- the plan -----------------------------------------------------------------------------------


def plan_rows(dist_info=None, **flags):
    """The rows of a plan, by name."""
    config = TrainConfig(plan=True, **flags)
    device = find_device(config, dist_info or gpus(config.gpus))
    lines = describe_plan(config, device, split_batch(config, device), None).splitlines()
    return dict(line.split(maxsplit=1) for line in lines)


def hours_of(time):
    """Of `about 1d02h to step 19,073, at 40% MFU, an assumption`."""
    duration = re.match(r"about (\w+) to step [\d,]+, at 40% MFU, an assumption", time)[1]
    units = {"d": 24, "h": 1, "m": 1 / 60, "s": 1 / 3600}
    return sum(int(count) * units[unit] for count, unit in re.findall(r"(\d+)(\w)", duration))


@pytest.mark.parametrize(
    ("environment", "n_threads", "n_cores", "is_noted"),
    [
        ({"OMP_NUM_THREADS": "1"}, 1, 3, True),
        ({"MKL_NUM_THREADS": "1"}, 1, 3, True),
        ({"OMP_NUM_THREADS": "1"}, 1, 1, False),
        ({"MKL_NUM_THREADS": "1"}, 2, 3, False),  # torch uses two all the same
        ({}, 1, 3, False),  # torch's default for one core that runs several threads
        ({"OMP_NUM_THREADS": "1", "RANK": "0"}, 1, 3, False),  # torchrun sets it; we use more
    ],
)
def test_plan_notes_that_one_thread_leaves_cores_idle(
    monkeypatch, environment, n_threads, n_cores, is_noted
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: n_threads)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(n_cores), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: n_cores)
    for name in ("RANK", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    note = f"note: one for 3 cores, by {next(iter(environment), None)}=1: use 3 instead"
    rows = plan_rows(DistInfo(CPU), dtype="float32")
    assert rows.get("threads") == (note if is_noted else None)
    assert "threads" not in plan_rows(size="gpt2-xl", gpus=8)


@pytest.mark.gpt2
def test_plan_of_the_reproduction_on_a_cpu():
    rows = plan_rows(DistInfo(CPU, world_size=8), dtype="float32")
    assert rows["model"].startswith("124,475,904 parameters: layers 12, heads 12,")
    assert rows["device"] == "8 x cpu, float32"
    assert rows["checkpoint"] == "1.39 GiB each"
    assert rows["memory"].endswith(" activations, without Python and libraries")
    assert rows["tokens"] == "9,999,745,024, max steps 19,073, 80.3 per parameter"
    assert rows["schedule"] == "cosine, warm-up steps 715"
    assert rows["AdamW"] == "beta2 0.95, embedding decay 0.1"
    assert rows["time"].startswith("unknown for this model on this device; see the eta")  # so far


def test_print_plan_measures_the_steps_that_are_left(tiny_flags, monkeypatch, capsys):
    """On this machine; the fastest of all steps but the first takes 0.5 s per token."""
    clock = itertools.cycle([0.0, 1.0, 0.0, 129.0, 0.0, 128.0])  # of steps of 8 x 32 tokens
    monkeypatch.setattr(plan, "perf_counter", lambda: next(clock))
    flags = ("--max-steps=140", "--total-batch-size=256", "--micro-batch-size=8")
    config = parse_flags(TrainConfig, [*tiny_flags, *flags, "--plan"])
    for start_step, duration in ((0, "4h58m"), (120, "42m40s")):
        plan.print_plan(config, start_step)
        said = f"time        about {duration} to step 140, measured in two uncompiled steps"
        assert said in capsys.readouterr().out


def test_print_plan_measures_only_what_fits_into_memory(tiny_flags, monkeypatch, capsys):
    monkeypatch.setattr(memory, "memory_gib", lambda device: 0.01)
    monkeypatch.setattr(plan, "GPT", None)
    plan.print_plan(parse_flags(TrainConfig, [*tiny_flags, "--plan"]))
    assert "time        unknown for this model on this device" in capsys.readouterr().out


def test_the_time_of_a_small_model_on_a_gpu_or_of_any_on_mps_is_not_known():
    small = plan_rows(n_layer=4, n_head=1, n_embd=64, gpus=1)
    for rows in (small, plan_rows(DistInfo(torch.device("mps")))):
        assert rows["time"].startswith("unknown for this model on this device; see the eta")


def test_a_plan_says_what_its_recipe_was_shown_to_do():
    path = ROOT / "recipes/gpt2-124m-fast.json"
    assert "Not measured at this size." in plan_rows(gpus=8, config=path)["recipe"]
    assert "recipe" not in plan_rows(gpus=8)


@pytest.mark.gpt2
@pytest.mark.parametrize(
    ("gpu", "mfu", "published"), [("A100", 0.60, 218e3), ("H100", 0.41, 473e3)]
)
def test_planned_time_is_that_of_published_runs_at_their_mfu(gpu, mfu, published):
    hours = 19_073 * 524_288 / published / 3600 / 8
    planned = hours_of(plan_rows(gpus=8, gpu=gpu)["time"]) * MFU / mfu
    assert planned == pytest.approx(hours, rel=0.02)


@pytest.mark.gpt2
@pytest.mark.parametrize("name", GPUS)
def test_every_kind_of_gpu_has_a_plan_that_fits(name):
    rows, gpu = plan_rows(gpus=1, gpu=name), GPUS[name]
    needed, *_ = rows["memory"].removeprefix("about ").split()
    assert float(needed) < 0.9 * gpu.memory_gib + 0.1  # it is rounded
    # The micro-batch is the largest that is useful, or one of twice the size would not fit.
    assert " micro-batch size 128 x" in rows["batch"] or 0.5 * gpu.memory_gib < float(needed)
    dtype = "float16" if name in ("T4", "V100") else "bfloat16"
    assert rows["device"] == f"1 x {name}, {dtype}"


def test_plan_says_what_does_not_fit():
    said = "without Python and libraries; the device has 79"
    assert said in plan_rows(size="gpt2-xl", gpus=8, micro_batch_size=32)["memory"]
    assert "; the device has" not in plan_rows(size="gpt2-xl", gpus=8)["memory"]


@pytest.mark.gpt2
@pytest.mark.parametrize(("steps", "times"), [(1, "0.0142"), (5000, "71.1")])
def test_plan_and_first_screen_say_how_often_the_run_passes_over_its_data(
    tiny_flags, capsys, steps, times
):
    flags = [*tiny_flags, f"--max-steps={steps}"]
    main([*flags, "--plan"])
    expected = f"passes      {times} over the dataset's 18,000 tokens\n"
    assert expected in capsys.readouterr().out
    main([*flags, "--plan", "--data-dir=none"])
    assert "passes" not in capsys.readouterr().out
    if steps == 1:
        main([*flags, "--run-name=a"])
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda path: path.write_text("mine"), "mine is a file, not a folder of shards: make"),
        (
            lambda path: (path.mkdir(), (path / "a.txt").touch()),
            "mine has no tokens for training: try",
        ),
        (lambda path: None, None),
        (lambda path: path.mkdir(), None),
        (lambda path: (path.mkdir(), Manifest({}, VOCAB_SHA256, 100).save(path)), None),
    ],
    ids=["file", "texts", "missing", "begun", "incomplete"],
)
def test_plan_refuses_what_training_refuses_unless_the_data_is_still_to_be_made(
    tiny_flags, tmp_path, make, error
):
    make(tmp_path / "mine")
    flags = [*tiny_flags, f"--data-dir={tmp_path}/mine"]
    if error is None:
        main([*flags, "--plan"])
    for plan_only in (["--plan"], []) if error else ([],):
        with pytest.raises(UserError, match=error):
            main([*flags, *plan_only])


def test_plan_of_a_time_has_no_number_of_steps():
    assert {"tokens", "time"}.isdisjoint(plan_rows(gpus=1, max_minutes=5.0))


def test_plan_is_printed_by_rank_0_only(commands):
    done = commands.run_ranks(2, "train_gpt2", "--plan", "--device=cpu", "--gpus=8")
    assert done.code == 0, done.stderr
    assert done.stdout.count("GiB per device") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"gpus": 8, "plan": False}, "--gpus requires --plan; .* --nproc_per_node=8"),
        ({"gpu": "6090"}, "--gpu 6090 is not B200, .*, 4090, "),
    ],
)
def test_impossible_plans_are_errors(flags, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{"plan": True, **flags})
