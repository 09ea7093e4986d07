import itertools
import json
import platform
import socket
import sys
from dataclasses import asdict, replace

import pytest
import torch
from bench.run import (
    ALL_OPTIMIZATIONS,
    HuggingFaceGPT2,
    RunResult,
    Settings,
    attention,
    build_trainer,
    run_training,
)
from bench.switches import SWITCHES, NarrowTransformer, masked_lm_head_loss
from conftest import ROOT, TINY_MODEL, check_on_ranks
from PIL import Image
from torch.profiler import profile

import model
import ops
from bench import __main__ as bench_main
from bench import ladder, run
from bench.config import PRODUCT, BenchConfig
from bench.ladder import (
    LADDER,
    Configuration,
    available_ladder,
    configuration_flags,
    measure_training,
)
from bench.measurement import error_line
from bench.report import store_section, stored_section
from model import GPT, GPTConfig
from ops import IGNORE_INDEX, lm_head_loss
from runtime.cli import parse_flags, run_command
from runtime.distributed import DistInfo
from training.config import TrainConfig

CPU = torch.device("cpu")
KERNELS = {
    "math": "aten::_scaled_dot_product_attention_math",
    "flash": "aten::_scaled_dot_product_flash_attention_for_cpu",
}


@pytest.fixture
def own_numerics():
    """Undo what a training run changes in its process."""
    query_blocks = ops.QUERY_BLOCKS
    yield
    ops.QUERY_BLOCKS = query_blocks
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.reset()


@pytest.fixture
def no_compiler(monkeypatch):
    """Compiling takes a minute; CXX may name a compiler that is not on the PATH, as conda's."""
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("CXX", "")


RUN = """
from bench import run
from runtime.cli import run_command

run.MATMUL_SIZE = 64
run_command(run.main)
"""


def fork_runs(monkeypatch, commands, folder):
    """Let the bench's training runs be forks, which do without the seconds of imports."""
    script = folder / "bench_run.py"
    script.write_text(RUN)

    def run_python(*args, **environment):
        *launcher, module, settings, steps, path = args
        assert module == "bench.run"
        environment |= {"PATH": "/nonexistent", "CXX": ""}
        if launcher == ["-m"]:
            done = commands.run(script, settings, steps, path, **environment)
        else:
            processes = int(launcher[-2].removeprefix("--nproc_per_node="))
            done = commands.run_ranks(processes, script, settings, steps, path, **environment)
        if done.code:
            raise ValueError(error_line(done.stderr))
        return done.stdout

    monkeypatch.setattr(run, "run_python", run_python)


def tiny_bench(data_dir, *flags):
    return parse_flags(BenchConfig, [*TINY_MODEL, "--device=cpu", f"--data-dir={data_dir}", *flags])


@pytest.mark.usefixtures("no_compiler")
def test_command_compares_the_product_with_a_peer(tiny_data, tmp_path, monkeypatch, capsys):
    flags = [*TINY_MODEL, "--peer=eager", "--steps=2", "--rounds=1", "--device=cpu"]
    flags += [f"--data-dir={tiny_data}", f"--out-dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["bench", *flags])
    # The machine's own name may be a word that is in the file anyway, such as "eager" or "cpu".
    monkeypatch.setattr(socket, "gethostname", lambda: "private-host")
    monkeypatch.setattr(platform, "node", lambda: "private-host")
    bench_main.main()
    stdout = capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    section = json.loads(path.read_text())["peer_eager"]
    peer, product = section["results"]
    assert (peer["name"], product["name"]) == ("eager", PRODUCT)
    ratio = product["tokens_per_second"] / peer["tokens_per_second"]
    assert section["ratios"]["tokens_per_second"] == pytest.approx(ratio, rel=1e-3)
    assert f"{PRODUCT} / eager: {ratio:.2f}x tokens_per_second" in stdout
    # Published results name no machine and no folder.
    for private in (str(tiny_data), str(ROOT), "/nonexistent", "private-host"):
        assert private not in path.read_text() + path.name
    with Image.open(path.with_suffix(".png")) as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 16)}
    assert (0x33, 0x65, 0x8A) in colours  # the product's bar


@pytest.mark.usefixtures("own_numerics", "no_compiler")
def test_ladder_has_the_same_losses_in_every_configuration(tiny_data, monkeypatch):
    monkeypatch.setattr(run, "MATMUL_SIZE", 64)
    settings, left_out = available_ladder(CPU)
    assert [name for name in LADDER if name not in left_out] == list(settings)
    assert left_out.keys() >= {"TF32", "compile"}
    for lower, upper in itertools.pairwise(settings.values()):
        assert len(asdict(upper).items() - asdict(lower).items()) == 1
    config, by_batch = tiny_bench(tiny_data), {}
    for value in settings.values():
        result = run_training(value, configuration_flags(config, value), 12)
        assert result.losses[-1] < result.losses[0] - 0.05
        expected = by_batch.setdefault(result.tokens_per_step, result.losses)
        assert result.losses == pytest.approx(expected, abs=0.01)
    assert list(by_batch) == [4 * 32, 4 * 4 * 32]  # the last ones accumulate


def test_configuration_flags_leave_the_product_its_defaults():
    config = parse_flags(BenchConfig, ["--data-dir=data", "--device=cpu"])
    product = configuration_flags(config, ALL_OPTIMIZATIONS)
    changed = {
        name for name, value in asdict(product).items() if value != getattr(TrainConfig, name)
    }
    assert changed == {
        *("data_dir", "total_batch_size", "device"),
        *("warmup_steps", "val_every", "hellaswag_every", "sample_every"),
    }
    plain = configuration_flags(config, Settings())
    assert (plain.micro_batch_size, plain.total_batch_size) == (4, 4096)
    assert (plain.dtype, plain.compile, plain.loss_chunks) == ("float32", False, 1)


def test_run_alternating_reports_a_failure_and_continues(
    commands, tiny_data, tmp_path, monkeypatch, capsys
):
    fork_runs(monkeypatch, commands, tmp_path)
    broken, sound = (
        Configuration(name, Settings(), configuration_flags(tiny_bench(folder), Settings()))
        for name, folder in (("broken", tmp_path / "nowhere"), ("sound", tiny_data))
    )
    stored = []
    ladder.run_alternating([broken, sound], 1, 1, tmp_path, lambda: stored.append(len(sound.runs)))
    assert stored == [0, 1]  # after each run
    assert not broken.runs
    assert broken.failure.startswith("FileNotFoundError: no data folder PATH")
    assert len(sound.runs) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "no data folder" in lines[0]
    assert "tokens/s" in lines[1]
    table = ladder.training_table([c.summary(1, None) for c in (broken, sound)], {}, 1)
    assert "no data folder" in table.splitlines()[1]


@pytest.mark.usefixtures("own_numerics", "no_compiler")
@pytest.mark.parametrize("name", [name for name in SWITCHES if not SWITCHES[name].gpu_only])
def test_switches_have_the_products_losses(name, tiny_data, monkeypatch):
    monkeypatch.setattr(run, "MATMUL_SIZE", 64)
    monkeypatch.setattr(model, "lm_head_loss", model.lm_head_loss)  # switches replace them
    monkeypatch.setattr(model, "Transformer", model.Transformer)
    config = tiny_bench(tiny_data, "--peer=switches")
    dtype = "bfloat16" if name == "bfloat16 residual" else "float32"
    product, changed = (
        run_training(settings, replace(configuration_flags(config, settings), dtype=dtype), 12)
        for settings in (ALL_OPTIMIZATIONS, replace(ALL_OPTIMIZATIONS, switch=name))
    )
    assert changed.losses[-1] < changed.losses[0] - 0.05
    assert changed.losses == pytest.approx(product.losses, abs=0.01)
    if name == "bfloat16 residual":
        assert changed.losses != product.losses


def test_masked_loss_has_the_sliced_ones_gradients():
    torch.manual_seed(0)
    hidden, targets = torch.randn(6, 8), torch.tensor([0, 9, IGNORE_INDEX, 3, 1, 2])
    weight = torch.randn(16, 8)  # 10 ids and 6 rows of padding
    results = []
    for loss_of in (lm_head_loss, masked_lm_head_loss):
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        loss = loss_of(*inputs, targets, 10, 1)
        results.append([loss, *torch.autograd.grad(loss, inputs)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_narrow_transformer_adds_in_bfloat16():
    transformer = NarrowTransformer(GPTConfig(block_size=8, n_layer=2, n_head=2, n_embd=16))
    dtypes = []
    for layer in (*transformer.h, transformer.ln_f):
        layer.register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        transformer(torch.zeros(1, 8, dtype=torch.int64))
    assert dtypes == [torch.bfloat16] * 3


def test_ddp_switches_have_one_processes_losses(commands, tiny_data, tmp_path):
    """All but bf16_compress_hook, which needs NCCL, and batched_grad_copy with an older torch.

    static_graph does not go with accumulation.
    """
    source = f"""
import inspect
from contextlib import nullcontext
from dataclasses import replace
import pytest
import train_gpt2
from bench import run
from bench.config import BenchConfig
from bench.ladder import configuration_flags
from bench.switches import DDP_SWITCHES
from runtime.cli import parse_flags
run.MATMUL_SIZE = 64
run.setup_distributed = lambda _: nullcontext(dist_info)
config = parse_flags(BenchConfig, {[*TINY_MODEL, "--device=cpu", f"--data-dir={tiny_data}"]})

def check(_):
    wrap, losses = train_gpt2.DistributedDataParallel, {{}}
    known = inspect.signature(wrap).parameters
    left_out = {{"bf16_compress_hook"}} | ({{"batched_grad_copy"}} - known.keys())
    for name in ["", *DDP_SWITCHES]:
        train_gpt2.DistributedDataParallel = wrap
        settings = replace(run.ALL_OPTIMIZATIONS, switch=name)
        changes = {{"micro_batch_size": 2, "total_batch_size": 128, "dtype": "float32"}}
        flags = replace(configuration_flags(config, settings), compile=False, **changes)
        try:
            losses[name] = run.run_training(settings, flags, 4).losses
        except TypeError as error:
            assert name in left_out, error
            assert ("NCCL" if name == "bf16_compress_hook" else name) in str(error), error
    assert {{*losses}} == {{"", *DDP_SWITCHES}} - left_out
    for values in losses.values():
        assert values == pytest.approx(losses[""], abs=1e-3)
"""
    check_on_ranks(commands, source, tmp_path, PATH="/nonexistent", CXX="")


@pytest.mark.usefixtures("no_compiler")
def test_comparison_goes_on_where_it_was_interrupted(commands, tiny_data, tmp_path, monkeypatch):
    """A stored run is taken as it is, unless the settings have changed."""
    fork_runs(monkeypatch, commands, tmp_path)
    config = tiny_bench(tiny_data, "--peer=eager", "--rounds=1", "--steps=1")
    config, stored = replace(config, out_dir=tmp_path), []
    measure_training(config, tmp_path, {}, stored.append)
    first, complete = stored
    assert [len(section["results"]) for section in stored] == [1, 2]
    store_section(config, "CPU", config.section, first, complete=False)
    assert not stored_section(replace(config, steps=2), "CPU", complete=False)
    assert not stored_section(config, "CPU", complete=True)
    earlier = stored_section(config, "CPU", complete=False)
    again = measure_training(config, tmp_path, earlier, stored.append)
    assert len(stored) == 3  # one run
    speeds = [s["results"][0]["tokens_per_second"] for s in (complete, again)]
    assert speeds[0] == pytest.approx(speeds[1], rel=1e-3)


def test_summary_and_ratio_worked_by_hand():
    entry = Configuration("x", Settings(compile=True), TrainConfig())
    # Medians of the runs' steps: 8, 4 and 2 seconds, so 512, 1024 and 2048 tokens per second.
    entry.runs = [
        RunResult(4096, 4, 1, 50.0, [8.0, 8.0, 9.0], [11.0, 3.0], 4.0, 991e9),
        RunResult(4096, 4, 1, 5.0, [4.0, 4.0, 1.0], [11.0, 3.0], 5.0, 991e9),
        RunResult(4096, 4, 1, 2.5, [2.0], [11.0, 4.0], 7.0, 991e9),
    ]
    summary = entry.summary(860_000_000, 991e9)
    assert summary["tokens_per_second"] == 1024
    assert summary["spread"] == pytest.approx((2048 - 512) / 1024)
    assert summary["mfu"] == pytest.approx(1024 * 0.86 / 991)
    assert summary["peak_memory_gib"] == 5
    assert summary["compile_seconds"] == 42  # the first run's: later ones find compiled code
    assert summary["loss"] == 3
    assert entry.summary(860_000_000, None)["mfu"] is None
    peer = {"tokens_per_second": 512.0, "peak_memory_gib": 10.0}
    assert ladder.compare([peer, summary]) == {"tokens_per_second": 2, "peak_memory_gib": 0.5}
    assert ladder.compare([{"failure": "it broke"}, summary]) == {}


def test_hugging_face_peer_has_our_loss():
    torch.manual_seed(0)
    ours = GPT(GPTConfig(block_size=32, n_layer=2, n_head=2, n_embd=32))
    with torch.no_grad():  # far from the initial weights, where every model has the same loss
        for parameter in ours.parameters():
            parameter.mul_(3).add_(0.01)
    theirs = HuggingFaceGPT2(ours)
    tokens = torch.randint(0, 50257, (2, 33))
    idx, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    torch.testing.assert_close(theirs(idx, targets).loss, ours(idx, targets).loss)
    assert theirs.model.config._attn_implementation == "sdpa"
    assert not any(isinstance(m, torch.nn.Dropout) and m.p for m in theirs.modules())


@pytest.mark.usefixtures("own_numerics", "no_compiler")
@pytest.mark.parametrize(
    ("settings", "rows", "eager", "compiled"),
    [
        (Settings(), 50257, {"math"}, {"math"}),
        (Settings(flash_attention=True, padded_vocabulary=True), 50304, {"flash"}, {"flash"}),
        # Compiled for a CPU, the product has its own attention.
        (ALL_OPTIMIZATIONS, 50304, {"flash"}, set()),
    ],
)
def test_build_trainer_switches_off_the_optimization(settings, rows, eager, compiled, tiny_data):
    config = configuration_flags(tiny_bench(tiny_data, "--micro-batch-size=4"), settings)
    trainer = build_trainer(settings, config, DistInfo(CPU))
    assert len(trainer.raw_model.lm_head.weight) == rows
    traced = torch.compile(trainer.raw_model, backend="eager", dynamic=False)
    tokens = torch.randint(0, 400, (2, 32))
    for each, expected in ((trainer.model, eager), (traced, compiled)):
        with profile() as profiled, attention(settings):
            each(tokens, tokens).loss.backward()
        names = {event.name for event in profiled.events()}
        assert {kernel for kernel, name in KERNELS.items() if name in names} == expected


def test_store_section_replaces_its_own_section_only(tmp_path):
    config, label = BenchConfig(out_dir=tmp_path), "Some GPU, 80GB"
    (path,) = store_section(config, label, "component_data", {"value": 1})
    store_section(config, label, "component_sample", {"value": 2})
    store_section(config, label, "component_data", {"value": 1 / 3})
    assert path.name == "some-gpu-80gb.json"
    results = json.loads(path.read_text())
    assert results["device"] == label
    values = results["component_data"]["value"], results["component_sample"]["value"]
    assert values == (0.33333, 2)
    assert results["component_data"]["versions"]["torch"] == torch.__version__


def test_other_settings_than_the_published_write_to_their_own_file(tmp_path):
    """README's small bench once drew 2 layers next to 12 in the published chart."""
    flags = [], ["--n-layer=2"], ["--n-layer=2", "--block-size=256"], ["--n-head=6"]
    flags += ["--micro-batch-size=8"], ["--total-batch-size=8192"], ["--size=gpt2-medium"]
    paths = [
        store_section(parse_flags(BenchConfig, [*given, f"--out-dir={tmp_path}"]), "CPU", "x", {})
        for given in flags
    ]
    names = [path.name for (path,) in paths]
    assert len({*names}) == len(flags)
    assert names[:2] == ["cpu.json", "cpu_2-layers-12-heads-width-768-context-1024.json"]


@pytest.mark.parametrize("path", sorted((ROOT / "bench" / "results").glob("*.json")))
def test_published_results_have_one_model_per_file(path):
    results = json.loads(path.read_text())
    sections = [section for section in results.values() if isinstance(section, dict)]
    assert sections
    assert all(section["model"] == sections[0]["model"] for section in sections)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--peer=eager", "--component=data"], "give one of them"),
        (["--rounds=0"], "--rounds must be at least 1, not 0"),
        (["--data-dir=nowhere"], "no data folder nowhere"),
        (["--data-dir=TINY", "--total-batch-size=1000"], "--total-batch-size 1000"),
    ],
)
def test_bad_flags_end_as_one_line(flags, message, tiny_data, tmp_path, monkeypatch, capsys):
    flags = [flag.replace("TINY", str(tiny_data)) for flag in flags]
    monkeypatch.setattr(sys, "argv", ["bench", "--device=cpu", *flags, f"--out-dir={tmp_path}"])
    with pytest.raises(SystemExit) as stop:
        run_command(bench_main.main)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not list(tmp_path.iterdir())
