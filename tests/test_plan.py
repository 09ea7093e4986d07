import itertools
import re
from dataclasses import asdict, replace

import pytest
import torch
from conftest import ROOT, change_function, check_on_ranks, tiny_run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.profiler import profile

from formats.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    RunState,
    copy_weights,
    find_nonfinite,
    load_checkpoint,
    read_state,
    rng_states,
)
from formats.load import latest_checkpoint, load_model
from lr_schedule import position_at, windows_at
from model import GPT, GPT2_SIZES, GPTConfig
from parallel import SINGLE_PROCESS
from runtime.cli import parse_flags
from runtime.distributed import DistInfo
from runtime.flops import GPUS
from runtime.precision import DTYPES
from sample import generate_tokens
from train_gpt2 import build_optimizers, main
from training.config import TrainConfig
from training.plan import (
    Device,
    describe_plan,
    find_device,
    plan_memory,
    split_batch,
    warn_about_gpu,
)

CPU = torch.device("cpu")
NO_FLAGS = TrainConfig()
GPT2, XL = (GPTConfig(**GPT2_SIZES[size]) for size in ("gpt2", "gpt2-xl"))
LONG = GPTConfig(block_size=2048, vocab_size=1000, n_layer=6, n_head=2, n_embd=64)


def gpus(world_size=1, per_node=8):
    return DistInfo(torch.device("cuda"), 0, 0, world_size, min(world_size, per_node))


def peak_bytes(function, *args):
    """The most that the tensors of a call, those that it returns included, take at once."""
    with profile(profile_memory=True) as profiler:
        kept = function(*args)
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    del kept
    return max(itertools.accumulate(sizes), default=0)


ROW = re.compile(r"\| (?:none|`(.*)`) \| (\d+) \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \|")
DOCUMENTED = ROW.findall((ROOT / "docs" / "memory.md").read_text())
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


@pytest.mark.parametrize(("flags", "world_size", "tokens", "gib", "planned"), DOCUMENTED + MEASURED)
def test_planned_memory_is_above_what_a_gpu_allocates_and_near_it(
    flags, world_size, tokens, gib, planned
):
    """`gib` is the peak of torch's CUDA allocator in the third step of such a run."""
    config, n_tokens = parse_flags(TrainConfig, flags.split()), int(tokens.replace(",", ""))
    dist_info, model_config = gpus(int(world_size)), config.model_config()
    device = Device("H100", 4000, DTYPES.get(config.dtype, torch.bfloat16))
    step = {"micro_batch_size": n_tokens // config.block_size}
    step["total_batch_size"] = n_tokens * int(world_size)
    chunks = split_batch(replace(config, **step), model_config, device, dist_info).loss_chunks
    memory = plan_memory(config, model_config, device.dtype, dist_info, chunks)
    total = memory.total(n_tokens) / 2**30
    assert 1 < total / float(gib) < 1.15
    assert f"{total:.1f}" == planned


def test_the_documented_memory_is_read():
    assert len(DOCUMENTED) == 14


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
    state = RunState(1, 1, asdict(deep), {}, "", rng_states(), {}, "", ["AdamW"], {})
    with CheckpointWriter(tmp_path / "checkpoints") as writer:
        assert 3 * size <= peak_bytes(writer.save, state, model, optimizers) < 3.1 * size
        writer.wait()
        assert peak_bytes(writer.save, replace(state, step=2), model, optimizers) < 0.01 * size
    assert peak_bytes(find_nonfinite, model, optimizers) < 0.01 * size
    in_file = 1
    assert peak_bytes(load_model, tmp_path) < (in_file + 1.2) * size
    in_file = 3
    peak = peak_bytes(
        load_checkpoint,
        Checkpoint(path := latest_checkpoint(tmp_path), read_state(path)),
        resumed,
        resumed_optimizers,
    )
    assert peak < (in_file + 3.1) * size  # moments and, as in a step, gradients
    assert peak_bytes(copy_weights, model, resumed, SINGLE_PROCESS) < 0.01 * size
    peak = peak_bytes(generate_tokens, model, idx.repeat(4, 1), 8)
    assert peak < 0.2 * size  # not of 4096 tokens


@settings(max_examples=10)  # each plans for 124M, twice
@given(
    micro=st.integers(1, 64),
    accum=st.integers(1, 64),
    world_size=st.integers(1, 64),
    block_size=st.sampled_from([1, 100, 1024]),
)
def test_split_batch_splits_every_token(micro, accum, world_size, block_size):
    total = micro * accum * world_size * block_size
    dist_info = DistInfo(CPU, world_size=world_size)
    config = TrainConfig(total_batch_size=total, block_size=block_size)
    model = config.model_config()
    device = find_device(config, dist_info)
    plan = split_batch(replace(config, micro_batch_size=micro), model, device, dist_info)
    assert plan.micro_batch_size == micro
    chosen = split_batch(config, model, device, dist_info)
    assert total % (chosen.micro_batch_size * world_size * block_size) == 0


def test_split_batch_fits_steps_of_different_sizes(monkeypatch):
    change_function(monkeypatch, windows_at, lambda config, step: 12 if step < 3 else 36)

    config = TrainConfig(total_batch_size=72 * 64, block_size=64)
    assert [position_at(config, step) for step in (0, 3, 5)] == [0, 3 * 12, 3 * 12 + 2 * 36]
    sizes, device = {}, Device("cpu", 64, torch.float32)
    for world_size in (1, 2, 3, 6, 12):
        dist_info = DistInfo(CPU, world_size=world_size)
        split = split_batch(config, config.model_config(), device, dist_info)
        sizes[world_size] = split.micro_batch_size
    assert sizes == {1: 12, 2: 6, 3: 4, 6: 2, 12: 1}
    dist_info = DistInfo(CPU, world_size=8)  # cannot split 12
    with pytest.raises(ValueError, match="windows_at returns 12, which is not a multiple of 8"):
        split_batch(config, config.model_config(), device, dist_info)


@settings(max_examples=10)
@given(total=st.integers(1, 10**6), micro=st.integers(1, 20), world_size=st.integers(1, 9))
def test_split_batch_names_nearest_sizes_that_do_divide(total, micro, world_size):
    def plan(size):
        config = TrainConfig(total_batch_size=size, micro_batch_size=micro, block_size=64)
        dist_info = DistInfo(CPU, world_size=world_size)
        model, device = config.model_config(), find_device(config, dist_info)
        return split_batch(config, model, device, dist_info)

    unit = micro * 64 * world_size
    if total % unit == 0:
        assert plan(total).micro_batch_size == micro
        return
    with pytest.raises(ValueError, match="is not a multiple of") as error:
        plan(total)
    suggested = [
        int(size) for size in str(error.value).split("use --total-batch-size ")[1].split(" or ")
    ]
    assert all(abs(size - total) < unit for size in suggested)
    assert len([plan(size) for size in suggested]) == (2 if total > unit else 1)


@pytest.mark.parametrize(
    ("gib", "flags", "micro_batch_size", "chunks"),
    [
        (139, {}, 128, 4),  # of 32,768 tokens each: 2**31 logits or more need 64-bit indices
        (79, {}, 128, 4),
        (39, {}, 64, 2),
        (22, {}, 32, 1),
        (79, {"total_batch_size": 1024}, 1, 1),
        (18, {"micro_batch_size": 32}, 32, 2),  # with one, it does not fit
        (8, {"compile": False}, 8, 4),
        (79, {"loss_chunks": 3}, 128, 3),
        (79, {"block_size": 131_072, "total_batch_size": 131_072}, 1, 4),
        (79, {"block_size": 2**20, "total_batch_size": 2**20}, 1, 32),
    ],
)
def test_gpu_has_the_largest_micro_batch_that_fits_and_the_fewest_chunks(
    gib, flags, micro_batch_size, chunks
):
    config = TrainConfig(**flags)
    device = Device("a GPU", gib, torch.bfloat16)
    split = split_batch(config, config.model_config(), device, gpus())
    assert (split.micro_batch_size, split.loss_chunks) == (micro_batch_size, chunks)


def test_other_devices_have_as_many_chunks_whatever_the_batch():
    for kind, chunks in (("cpu", 4), ("mps", 8)):
        for total in (1024, 8192):
            device, dist_info = Device(kind, 64, torch.float32), DistInfo(torch.device(kind))
            config = TrainConfig(total_batch_size=total)
            assert split_batch(config, GPT2, device, dist_info).loss_chunks == chunks


def test_ranks_plan_the_batch_of_the_one_with_the_least_memory(commands, tmp_path):
    check_on_ranks(
        commands,
        "from dataclasses import replace\n"
        "from model import GPTConfig\n"
        "from training.config import TrainConfig\n"
        "from training.plan import find_device, split_batch\n"
        "def check(dist_info):\n"
        "    own = replace(dist_info, local_world_size=10**6 if dist_info.rank else 1)\n"
        "    device = find_device(TrainConfig(), own)\n"
        "    assert split_batch(TrainConfig(), GPTConfig(), device, own).micro_batch_size == 1\n",
        tmp_path,
    )


# Time


def plan_rows(model_config=GPT2, **flags):
    """The rows of a plan for other GPUs, by name."""
    config = TrainConfig(plan=True, **flags)
    dist_info = gpus(config.gpus, config.gpus // config.nodes)
    lines = described(config, model_config, dist_info).splitlines()
    return dict(line.split(maxsplit=1) for line in lines)


def described(config, model_config, dist_info):
    device = find_device(config, dist_info)
    split = split_batch(config, model_config, device, dist_info)
    return describe_plan(config, model_config, device, split, dist_info, None)


def hours_of(time):
    """Of `about 1d02h, at 40% MFU`."""
    duration = re.match(r"about (\w+), at \d\d% MFU", time)[1]
    units = {"d": 24, "h": 1, "m": 1 / 60, "s": 1 / 3600}
    return sum(int(count) * units[unit] for count, unit in re.findall(r"(\d+)(\w)", duration))


def test_the_time_of_a_small_model_on_a_gpu_is_not_known():
    small = GPTConfig(n_layer=4, n_head=1, n_embd=64)
    assert plan_rows(small, gpus=1)["time"].startswith("unknown for this model on this device")


def test_a_plan_says_what_its_recipe_was_shown_to_do():
    path = ROOT / "recipes/gpt2-124m-fast.json"
    assert "Not measured at this size." in plan_rows(gpus=8, config=path)["recipe"]
    assert "recipe" not in plan_rows(gpus=8)


def test_describe_plan_of_the_reproduction_on_a_cpu():
    config, dist_info = TrainConfig(dtype="float32"), DistInfo(CPU, world_size=8)
    text = described(config, GPT2, dist_info)
    for fact in ("124,475,904", "19,073", "9,999,745,024", "8.6e+18", "1.39 GiB", "8 x cpu"):
        assert fact in text
    # Of a measured peak: 0.1 to 10,000 GFLOP/s of each.
    days = re.search(r"time +about (\d+)d\d\dh, at 40% MFU; the eta after the first", text)[1]
    assert 3 < int(days) < 3e6
    on_mps = described(config, GPT2, replace(dist_info, device=torch.device("mps")))
    assert "time        unknown for this model on this device; see the eta" in on_mps


@pytest.mark.parametrize(
    ("gpu", "mfu", "published"), [("A100", 0.60, 218e3), ("H100", 0.41, 473e3)]
)
def test_planned_time_is_that_of_published_runs_at_their_mfu(gpu, mfu, published):
    hours = 19_073 * 524_288 / published / 3600 / 8
    assert hours_of(plan_rows(gpus=8, gpu=gpu, mfu=mfu)["time"]) == pytest.approx(hours, rel=0.02)


@pytest.mark.parametrize(
    ("free_gib", "cudnn_is", "said"),
    [
        (70, 91500, ""),
        (20.5, 91500, "warning: GPU 0 has 20.5 GiB free, but the run needs about 25.0 GiB: "),
        (70, 91002, "warning: attention is slow with cuDNN 91002, older than 91500: "),
    ],
)
def test_warn_about_gpu(free_gib, cudnn_is, said, monkeypatch, capsys):
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "mem_get_info", lambda _: (free_gib * 2**30, 80 * 2**30))
    monkeypatch.setattr(cuda, "get_device_capability", lambda _: (9, 0))  # Hopper
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn_is)
    warn_about_gpu(25 * 2**30, DistInfo(torch.device("cuda", 0)))
    printed = "".join(capsys.readouterr())
    assert printed.startswith(said)
    assert len(printed.splitlines()) == bool(said)


@pytest.mark.parametrize("name", GPUS)
def test_every_kind_of_gpu_has_a_plan_that_fits(name):
    rows, gpu = plan_rows(gpus=1, gpu=name), GPUS[name]
    needed, *_ = rows["memory"].removeprefix("about ").split()
    assert 0.2 * gpu.memory_gib < float(needed) < gpu.memory_gib or gpu.memory_gib > 40
    dtype = "float16" if name in ("T4", "V100") else "bfloat16"
    assert rows["device"] == f"1 x {name}, {dtype}"
    hours = 8.6e18 / (0.4 * gpu.peak_flops) / 3600
    assert hours_of(rows["time"]) == pytest.approx(hours, rel=0.02, abs=1)  # of whole ones


@pytest.mark.parametrize(
    ("flags", "at_once"),
    [
        ({}, 20),  # of 19,073 steps: after each 1,000, and at the end
        ({"max_steps": 2000}, 2),
        ({"checkpoint_every": 0}, 1),
        ({"keep_checkpoints": 2}, 4),  # with the best, and the one that is being written
        ({"keep_checkpoints": 30}, 20),
    ],
)
def test_plan_says_the_disk_that_checkpoints_take(flags, at_once):
    size = 12 * GPT2.n_params / 2**30
    expected = f"1.39 GiB; {at_once * size:,.2f} GiB on disk for {at_once}"
    assert plan_rows(gpus=1, **flags)["checkpoint"] == expected


def test_plan_says_what_does_not_fit_and_names_batches_that_divide():
    assert "; the device has 79" in plan_rows(XL, gpus=8, micro_batch_size=32)["memory"]
    assert "; the device has" not in plan_rows(XL, gpus=8)["memory"]
    with pytest.raises(ValueError, match="use --total-batch-size 516096 or 540672"):
        plan_rows(gpus=24)


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


def test_plan_of_a_time_has_no_number_of_steps_and_that_of_a_long_run_names_the_flag():
    rows = plan_rows(gpus=1, max_minutes=5.0)
    assert {"tokens", "time", "FLOPs"}.isdisjoint(rows)
    assert plan_rows(XL, gpus=1)["time"].endswith("to train for less time, use --max-minutes")
    assert "less time" not in plan_rows(gpus=1)["time"]


def test_plan_is_printed_by_rank_0_only(commands):
    for flags in ([], ["--gpus=8"]):
        done = commands.run_ranks(2, "train_gpt2", "--plan", "--device=cpu", *flags)
        assert done.code == 0, done.stderr
        assert done.stdout.count("GiB per device") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"gpus": 64, "nodes": 7}, "--gpus 64 is not a multiple of --nodes 7"),
        ({"gpus": 8, "plan": False}, "--gpus requires --plan; .* --nproc_per_node=8"),
        ({"gpus": 0}, "--gpus must be above 0"),
        ({"mfu": 40.0}, "--mfu 40.0 is above 1"),
        ({"gpu": "6090"}, "--gpu 6090 is not B200, .*, 4090, "),
    ],
)
def test_impossible_plans_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{"plan": True, **flags})
