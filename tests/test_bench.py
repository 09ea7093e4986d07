import json
import socket
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, TINY_MODEL
from forked import NO_COMPILER, fork_trainers
from torch.profiler import profile

import model
from bench import __main__ as bench_main
from bench import ladder, plain
from bench.config import BenchConfig
from bench.ladder import (
    ACCUMULATION,
    PEERS,
    PRODUCT,
    available_optimizations,
    training_measures,
)
from bench.measurement import format_results, measure_in_turn, results_path, store_results
from bench.plain import OPTIMIZATIONS, HuggingFaceGPT2
from formats.metrics import read_metrics
from model import GPT, GPTConfig
from runtime.cli import parse_flags
from training.config import TrainConfig

CPU = torch.device("cpu")
KERNELS = {
    "math": "aten::_scaled_dot_product_attention_math",
    "flash": "aten::_scaled_dot_product_flash_attention_for_cpu",
}


@pytest.fixture
def own_numerics():
    """Undo what a training run changes in its process."""
    attention = model.causal_attention
    yield
    model.causal_attention = attention
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.reset()


def tiny_bench(data_dir, *flags):
    tiny = [*TINY_MODEL, "--device=cpu", f"--data-dir={data_dir}", "--steps=2"]
    return parse_flags(BenchConfig, [*tiny, *flags])


# --- measuring in turn ------------------------------------------------------------------------


def test_measure_in_turn_takes_each_once_per_round_and_goes_on_after_a_failure(capsys):
    calls = []

    def measure(label):
        calls.append(label)
        if label == "broken":
            raise ValueError("no folder /home/me/data")
        return {"s": float(len(calls))}

    measures = {label: lambda label=label: measure(label) for label in ("a", "broken", "b")}
    so_far = [str(results) for results, _ in measure_in_turn(measures, 2)]
    assert calls == ["a", "broken", "b", "a", "b"]
    assert len(so_far) == 5  # after each run
    assert so_far[2] == str({"a": {"s": [1.0]}, "b": {"s": [3.0]}})
    assert so_far[4] == str({"a": {"s": [1.0, 4.0]}, "b": {"s": [3.0, 5.0]}})
    assert capsys.readouterr().out.splitlines()[1].endswith("| no folder PATH")
    with pytest.raises(ValueError, match="nothing was measured: no folder PATH"):
        list(measure_in_turn({"broken": measures["broken"]}, 2))


def test_format_results_compares_medians_with_the_first_label():
    results = {
        "plain": {"rows/s": [10.0, 30.0, 20.0], "GiB": [2.0]},
        "ours": {"rows/s": [50.0], "GiB": [1.0], "s": [7.0]},
    }
    lines = format_results(results, {"none": "why"}).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "plain | 20 rows/s (1.00x), 2 GiB (1.00x)",
        "ours | 50 rows/s (2.50x), 1 GiB (0.50x), 7 s (1.00x)",
        "none | why",
    ]


# --- what trains ------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_numerics")
def test_every_configuration_of_the_ladder_has_the_products_losses(commands, tiny_data, tmp_path):
    flags = [*TINY_MODEL, f"--data-dir={tiny_data}", "--device=cpu", "--dtype=float32"]
    flags += ["--micro-batch-size=4", "--total-batch-size=256", "--max-steps=12", "--no-compile"]
    flags += ["--max-lr=1e-3", "--min-lr=1e-3", "--warmup-steps=0", "--val-every=0"]
    flags += ["--hellaswag-every=0", "--sample-every=0", "--no-shuffle"]
    done = commands.run("train_gpt2", *flags, f"--out-dir={tmp_path}", "--run-name=run")
    assert done.code == 0, done.stderr
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    expected = [record["train_loss"] for record in records if "train_loss" in record]
    assert expected[-1] < expected[0] - 0.05
    config, on = parse_flags(TrainConfig, flags), []
    for name in ("", *OPTIMIZATIONS):
        on.append(name)
        if name not in ("TF32", "compile"):  # this CPU has none, takes a minute
            losses = [record["train_loss"] for record in plain.train({*on} - {"compile"}, config)]
            assert losses == pytest.approx(expected, abs=0.01), name


@pytest.mark.usefixtures("own_numerics")
@pytest.mark.parametrize(
    ("on", "rows", "kernel"),
    [((), 50257, "math"), (("flash attention", "padded vocabulary"), 50304, "flash")],
)
def test_plain_trainer_has_only_the_optimizations_that_are_on(on, rows, kernel, tiny_data):
    flags = [*TINY_MODEL, f"--data-dir={tiny_data}", "--device=cpu", "--max-steps=1"]
    flags += ["--micro-batch-size=4", "--total-batch-size=128"]
    config = parse_flags(TrainConfig, flags)
    built = plain.plain_model(on, config, CPU)
    assert len(built.lm_head.weight) == rows
    with profile() as profiled:
        list(plain.train(on, config))
    names = {event.name for event in profiled.events()}
    assert {each for each, name in KERNELS.items() if name in names} == {kernel}
    tokens = torch.randint(0, 400, (2, 32))
    with profile() as profiled:  # compiled for a CPU, the product has attention of its own
        torch.compile(built, backend="eager", dynamic=False)(tokens, tokens)
    assert KERNELS["flash"] in {event.name for event in profiled.events()}


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


@pytest.mark.parametrize("peer", [None, *PEERS, "switches"])
def test_training_measures_are_commands_of_the_trainers(peer, tiny_data, tmp_path, monkeypatch):
    """Every flag of each is one of train_gpt2.py."""
    for name, value in NO_COMPILER.items():
        monkeypatch.setenv(name, value)
    commands = []
    monkeypatch.setattr(ladder, "run_python", lambda *args, **env: commands.append((args, env)))
    measures = training_measures(replace(tiny_bench(tiny_data), peer=peer), tmp_path)
    available = available_optimizations(CPU)
    assert not {"TF32", "compile"} & {*available}
    switches = [PRODUCT, *ladder.SWITCHES]
    expected = {None: ["float32", *available, ACCUMULATION, PRODUCT], "switches": switches}
    assert list(measures) == expected.get(peer, [peer, PRODUCT])
    for name, measure in measures.items():
        with pytest.raises(FileNotFoundError):  # nothing ran
            measure()
        args, _ = commands[-1]
        config = parse_flags(TrainConfig, args[3 if args[0] == "-m" else 1 :])
        assert (config.n_embd, config.max_steps, config.val_every) == (32, 3, 0)
        is_accumulated = name in (ACCUMULATION, PRODUCT) and peer is None
        assert config.total_batch_size == 4 * 32 * (4 if is_accumulated else 1)
    assert all(commands.count(command) == 1 for command in commands)


# --- the command and its results --------------------------------------------------------------


def test_measure_compares_the_product_with_a_peer(
    commands, tiny_data, tmp_path, monkeypatch, capsys
):
    fork_trainers(monkeypatch, commands, ladder)
    monkeypatch.setattr(ladder, "prepare_compiler", lambda _: "none is looked for")
    flags = ["--peer=eager", "--rounds=1", f"--out-dir={tmp_path}/results"]
    bench_main.measure(tiny_bench(tiny_data, *flags), tmp_path)
    (path,) = (tmp_path / "results").glob("*.json")
    file = json.loads(path.read_text())
    measured = file["peer_eager"]
    assert measured["versions"]["torch"] == torch.__version__
    peer, product = measured["results"]["eager"], measured["results"][PRODUCT]
    assert f"({product['tokens/s'][0] / peer['tokens/s'][0]:.2f}x)" in capsys.readouterr().out
    records = read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")  # the last run's
    first, *steps = [record for record in records if "train_loss" in record]
    mean_ms = sum(step["step_time_ms"] for step in steps) / 2  # the median of two
    assert product["tokens/s"] == [pytest.approx(4 * 32 / mean_ms * 1000)]
    assert product["first step s"] == [first["step_time_ms"] / 1000]
    assert product["loss after 2 steps"] == [steps[-1]["train_loss"]]
    assert min(*product["peak GiB"], *product["MFU"]) > 0
    # Published results name no machine and no folder.
    for private in (str(tiny_data), str(ROOT), "/nonexistent", socket.gethostname()):
        assert private in ("localhost", *file["device"].split()) or private not in path.read_text()


def test_results_are_replaced_by_name_and_have_a_file_per_model(tmp_path):
    config = BenchConfig(out_dir=tmp_path, device="cpu")
    for name, value in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
        store_results(config, name, {"x": {"s": [value]}}, {})
    file = json.loads(results_path(config).read_text())
    assert [file[name]["results"]["x"]["s"] for name in "ab"] == [[3.0], [2.0]]
    # README's small bench once drew 2 layers next to 12 in the published chart.
    flags = [], ["--n-layer=2"], ["--n-layer=2", "--block-size=256"], ["--n-head=6"]
    flags += ["--micro-batch-size=8"], ["--size=gpt2-medium"]
    paths = {results_path(parse_flags(BenchConfig, ["--device=cpu", *each])) for each in flags}
    assert len(paths) == len(flags)
