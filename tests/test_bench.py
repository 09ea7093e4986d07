import itertools
import json
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY_MODEL
from PIL import Image
from torch.profiler import profile

import model
from bench import __main__ as bench_main
from bench import run as bench_run
from bench.__main__ import LADDER, PRODUCT, BenchConfig, Contestant, climb, compare, component_table
from bench.components import Figure
from bench.report import rounded, store_section
from bench.run import HuggingFaceGPT2, RungResult, Settings, build_contestant, unfused
from model import GPT, GPTConfig
from runtime.cli import parse_flags, run_command
from runtime.distributed import DistInfo
from train_gpt2 import build_optimizer
from training.config import TrainConfig

CPU = torch.device("cpu")
KERNELS = {
    "math": "aten::_scaled_dot_product_attention_math",
    "flash": "aten::_scaled_dot_product_flash_attention_for_cpu",
}
TINY = GPTConfig(block_size=32, n_layer=2, n_head=2, n_embd=32)


@pytest.fixture
def restored():
    """Undo what a run changes in its process, which is meant to be its own."""
    before = model.VOCAB_MULTIPLE, model.QUERY_BLOCKS
    yield
    model.VOCAB_MULTIPLE, model.QUERY_BLOCKS = before
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def ladder(tiny_data, tmp_path_factory):
    """`python bench.py` on a tiny model, where there is no compiler; what it printed and wrote."""
    folder = tmp_path_factory.mktemp("bench")
    command = [sys.executable, "-m", "bench", *TINY_MODEL, "--steps=12", "--rounds=1"]
    result = subprocess.run(
        [*command, "--device=cpu", f"--data-dir={tiny_data}", f"--out-dir={folder}"],
        env={"PATH": "/nonexistent", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return folder, result.stdout


def tiny_config(data_dir):
    flags = [*TINY_MODEL, "--total-batch-size=128", "--micro-batch-size=4", "--device=cpu"]
    flags += ["--dtype=float32", "--no-compile", "--val-every=0", "--hellaswag-every=0"]
    return parse_flags(TrainConfig, [*flags, f"--data-dir={data_dir}"])


def only_json(folder):
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


def test_ladder_runs_every_rung_that_the_device_has(ladder):
    folder, output = ladder
    section = only_json(folder)["ladder"]
    rungs = [result["name"] for result in section["results"]]
    assert [rung.name for rung in LADDER if rung.name not in section["left_out"]] == rungs
    assert section["left_out"].keys() >= {"TF32", "compile"}
    assert rungs[0] == "float32"
    assert rungs[-1] == PRODUCT
    assert all(any(line.startswith(rung) for line in output.splitlines()) for rung in rungs)


def test_ladder_learns_alike_on_every_rung(ladder):
    results = only_json(ladder[0])["ladder"]["results"]
    assert not any(result["failure"] for result in results)
    alike = {}
    for result in results:
        losses = result["runs"][0]["losses"]
        assert len(losses) == 13
        assert losses[-1] < losses[0] - 0.05
        assert result["loss"] == losses[-1]
        # All begin with the same weights; those with the same batches go the same way.
        batches = result["settings"]["accumulate"]
        assert losses == pytest.approx(alike.setdefault(batches, losses), abs=0.01)
    assert len(alike) == 2


def test_ladder_accumulates_on_the_last_two_rungs(ladder):
    runs = {r["name"]: r["runs"][0] for r in only_json(ladder[0])["ladder"]["results"]}
    assert runs["fused AdamW"]["tokens_per_step"] == 4 * 32
    assert runs["gradient accumulation"]["tokens_per_step"] == 4 * 4 * 32
    assert runs["gradient accumulation"]["grad_accum_steps"] == 4
    product = runs[PRODUCT]  # by the plan, which takes all at once where that fits
    assert (product["micro_batch_size"], product["grad_accum_steps"]) == (16, 1)


def test_results_name_no_machine_and_no_folder(ladder, tiny_data):
    (path,) = ladder[0].glob("*.json")
    text = path.read_text()
    assert str(tiny_data) not in text
    assert str(ROOT) not in text
    assert "/nonexistent" not in text
    assert socket.gethostname() not in text + path.name


def test_ladder_draws_a_chart(ladder):
    (path,) = ladder[0].glob("*.png")
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.size[0] == 960
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 16)}
    assert (0x33, 0x65, 0x8A) in colours  # the product's bar


def test_peer_keeps_the_ladder_and_gives_ratios(ladder, tiny_data, monkeypatch, capsys):
    folder, _ = ladder
    before = only_json(folder)["ladder"]
    flags = [*TINY_MODEL, "--peer=eager", "--steps=2", "--rounds=1", "--device=cpu"]
    monkeypatch.setattr(
        sys, "argv", ["bench.py", *flags, f"--data-dir={tiny_data}", f"--out-dir={folder}"]
    )
    monkeypatch.setenv("PATH", "/nonexistent")
    bench_main.main()
    results = only_json(folder)
    assert results["ladder"] == before
    peer, product = results["peer_eager"]["results"]
    assert (peer["name"], product["name"]) == ("eager", PRODUCT)
    assert {run["grad_accum_steps"] for run in peer["runs"] + product["runs"]} == {1}
    ratio = product["tokens_per_second"] / peer["tokens_per_second"]
    assert results["peer_eager"]["ratios"]["tokens_per_second"] == pytest.approx(ratio, rel=1e-3)
    assert f"{PRODUCT} / eager: {ratio:.2f}x tokens_per_second" in capsys.readouterr().out


def test_climb_changes_one_thing_a_rung():
    rungs, left_out = climb(CPU)
    assert {*rungs, *left_out} == {rung.name for rung in LADDER}
    settings = list(rungs.values())
    assert settings[0] == Settings()
    for lower, upper in itertools.pairwise(settings):
        changed = asdict(upper).items() - asdict(lower).items()
        assert len(changed) == 1


def test_train_config_leaves_the_product_its_defaults():
    rungs, _ = climb(CPU)
    product = bench_main.train_config(BenchConfig(), rungs[PRODUCT], CPU, Path("data"))
    changed = {
        name for name, value in asdict(product).items() if value != getattr(TrainConfig, name)
    }
    assert changed == {
        *("data_dir", "n_layer", "n_head", "n_embd", "total_batch_size"),
        *("warmup_steps", "val_every", "hellaswag_every"),
    }
    plain = bench_main.train_config(BenchConfig(), rungs["float32"], CPU, Path("data"))
    assert (plain.micro_batch_size, plain.total_batch_size) == (4, 4096)
    assert (plain.dtype, plain.compile, plain.loss_chunks) == ("float32", False, 1)


def test_race_reports_a_failure_and_goes_on(tiny_data, tmp_path, capsys):
    broken = Contestant("broken", Settings(), tiny_config(tmp_path / "nowhere"))
    sound = Contestant("sound", Settings(), tiny_config(tiny_data))
    bench_main.race([broken, sound], steps=1, rounds=1, scratch=tmp_path)
    assert not broken.runs
    assert broken.failure.startswith("FileNotFoundError: no data folder")
    assert str(tmp_path) not in broken.failure
    assert len(sound.runs) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "no data folder" in lines[0]
    assert "tokens/s" in lines[1]
    table = bench_main.training_table([c.summary(1, None) for c in (broken, sound)], {}, 1)
    assert "no data folder" in table.splitlines()[1]


def result(seconds, memory, first=9.0, loss=3.0):
    return RungResult(
        tokens_per_step=4096,
        micro_batch_size=4,
        grad_accum_steps=1,
        start_seconds=first,
        step_seconds=seconds,
        losses=[11.0, loss],
        peak_memory_gib=memory,
        device_flops=991e9,
    )


def test_summary_worked_by_hand():
    contestant = Contestant("x", Settings(compile=True), TrainConfig())
    # Medians of the runs' steps: 8, 4 and 2 seconds, so 512, 1024 and 2048 tokens a second.
    contestant.runs = [
        result([8.0, 8.0, 9.0], 4.0, first=50.0),
        result([4.0, 4.0, 1.0], 5.0, first=5.0),
        result([2.0], 7.0, first=2.5, loss=4.0),
    ]
    summary = contestant.summary(860_000_000, 991e9)
    assert summary["tokens_per_second"] == 1024
    assert summary["spread"] == pytest.approx((2048 - 512) / 1024)
    assert summary["mfu"] == pytest.approx(1024 * 0.86 / 991)
    assert summary["peak_memory_gib"] == 5
    assert summary["compile_seconds"] == 42  # the first run's, which found nothing compiled
    assert summary["loss"] == 3
    assert contestant.summary(860_000_000, None)["mfu"] is None


def test_compare_divides_the_product_by_its_peer():
    peer = {"tokens_per_second": 400.0, "peak_memory_gib": 6.0}
    product = {"tokens_per_second": 600.0, "peak_memory_gib": 3.0}
    assert compare([peer, product]) == {"tokens_per_second": 1.5, "peak_memory_gib": 0.5}
    assert compare([{"failure": "it broke"}, product]) == {}


def test_hugging_face_peer_has_our_loss():
    torch.manual_seed(0)
    ours = GPT(TINY)
    with torch.no_grad():  # far from the start, where every model's loss is alike
        for parameter in ours.parameters():
            parameter.mul_(3).add_(0.01)
    theirs = HuggingFaceGPT2(ours)
    tokens = torch.randint(0, 50257, (2, 33))
    idx, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    torch.testing.assert_close(theirs(idx, targets).loss, ours(idx, targets).loss)
    assert theirs.network.config._attn_implementation == "sdpa"
    assert not any(isinstance(m, torch.nn.Dropout) and m.p for m in theirs.modules())


def test_unfused_adamw_makes_the_same_update():
    torch.manual_seed(0)
    ours, plain = GPT(TINY), GPT(TINY)
    plain.load_state_dict(ours.state_dict())
    optimizers = [build_optimizer(ours, 0.1), unfused(build_optimizer(plain, 0.1))]
    assert not optimizers[1].defaults["fused"]
    for gpt, optimizer in zip((ours, plain), optimizers, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        for parameter in gpt.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    for left, right in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    ("switched_on", "rows", "eager", "compiled"),
    [
        ((), 50257, {"math"}, {"math"}),
        (("flash_attention",), 50257, {"flash"}, {"flash"}),
        (("flash_attention", "padded_vocabulary"), 50304, {"flash"}, {"flash"}),
        # Compiled for a CPU, the product has an attention of its own.
        (("flash_attention", "padded_vocabulary", "product"), 50304, {"flash"}, set()),
    ],
)
def test_build_contestant_takes_away_what_is_off(switched_on, rows, eager, compiled, tiny_data):
    settings = Settings(**dict.fromkeys(switched_on, True))
    trainer = build_contestant(settings, tiny_config(tiny_data), DistInfo(CPU))
    assert len(trainer.raw_model.lm_head.weight) == rows
    traced = torch.compile(trainer.raw_model, backend="eager", dynamic=False)
    tokens = torch.randint(0, 400, (2, 32))
    for network, expected in ((trainer.model, eager), (traced, compiled)):
        with profile() as profiled, bench_run.attention(settings):
            network(tokens, tokens).loss.backward()
        names = {event.name for event in profiled.events()}
        assert {kernel for kernel, name in KERNELS.items() if name in names} == expected


def test_store_section_replaces_its_own_section_only(tmp_path):
    label = "Some GPU, 80GB"
    (path,) = store_section(tmp_path, label, "component_data", {"value": 1 / 3})
    store_section(tmp_path, label, "component_sample", {"value": 2})
    store_section(tmp_path, label, "component_data", {"value": 3})
    assert path.name == "some-gpu-80gb.json"
    results = json.loads(path.read_text())
    assert results["device"] == label
    assert (results["component_data"]["value"], results["component_sample"]["value"]) == (3, 2)
    assert results["component_data"]["versions"]["torch"] == torch.__version__


def test_rounded_keeps_five_digits():
    assert rounded({"a": [1 / 3, 123456.7], "b": None}) == {"a": [0.33333, 123460.0], "b": None}


def test_component_table_compares_with_the_first_of_a_unit():
    figures = [
        Figure("plain", "rows/s", [10.0, 20.0, 30.0]),
        Figure("a checkpoint", "s", [0.5]),
        Figure("ours", "rows/s", [50.0]),
    ]
    lines = component_table(figures).splitlines()
    assert lines[1].split() == ["plain", "20", "100.0%", "1.00x", "rows/s"]
    assert lines[2].split() == ["a", "checkpoint", "0.5", "0.0%", "1.00x", "s"]
    assert lines[3].split() == ["ours", "50", "0.0%", "2.50x", "rows/s"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--peers=eager"], "--peers"),
        (["--peer=jax"], "jax"),
        (["--peer=eager", "--component=data"], "give one of them"),
        (["--rounds=0"], "--rounds must be at least 1, not 0"),
        (["--n-head=5"], "n_embd 768 is not a multiple of n_head 5"),
        (["--data-dir=nowhere"], "no data folder nowhere"),
        (["--data-dir=TINY", "--total-batch-size=1000"], "--total-batch-size 1000"),
    ],
)
def test_bad_flags_end_as_one_line(flags, message, tiny_data, tmp_path, monkeypatch, capsys):
    flags = [flag.replace("TINY", str(tiny_data)) for flag in flags]
    monkeypatch.setattr(sys, "argv", ["bench.py", "--device=cpu", *flags, f"--out-dir={tmp_path}"])
    with pytest.raises(SystemExit) as stop:
        run_command(bench_main.main)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not list(tmp_path.iterdir())
