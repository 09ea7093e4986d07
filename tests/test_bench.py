import json
import socket
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, TINY_MODEL
from forked import NO_COMPILER, HangingProgram, fork_trainers
from torch.profiler import profile

import model
from bench import __main__ as bench_main
from bench import ladder, measurement, plain
from bench.config import BenchConfig
from bench.ladder import (
    PEERS,
    PRODUCT,
    UNTIMED_STEPS,
    Workspace,
    ladder_rows,
    read_rates,
    training_measures,
)
from bench.measurement import (
    format_results,
    measure_in_turn,
    results_path,
    run_python,
    store_results,
)
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
    attention = model.scaled_dot_product_attention
    yield
    model.scaled_dot_product_attention = attention
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


@pytest.mark.parametrize("peer", [None, *PEERS])
def test_training_measures_are_commands_of_the_trainers(peer, tiny_data, tmp_path, monkeypatch):
    """Every flag of each is one of train_gpt2.py."""
    for name, value in NO_COMPILER.items():
        monkeypatch.setenv(name, value)
    commands = []
    monkeypatch.setattr(ladder, "run_python", lambda *args, **_: str(commands.append(args)))
    measures = training_measures(replace(tiny_bench(tiny_data), peer=peer), Workspace(tmp_path))
    rows = ladder_rows(CPU)
    assert not {"TF32", "compile"} & {*rows}
    assert list(measures) == ([peer, PRODUCT] if peer else [*rows, PRODUCT])
    for measure in measures.values():
        with pytest.raises(ValueError, match="not enough values"):  # the command did not run
            measure()
        args = commands[-1]
        config = parse_flags(TrainConfig, args[3 if args[0] == "-m" else 1 :])
        assert (config.n_embd, config.max_steps, config.val_every) == (32, 3, 0)
        assert config.total_batch_size == 4 * 32
    assert all(commands.count(command) == 1 for command in commands)


def test_training_run_is_ended_after_its_last_step(tiny_data, tmp_path, monkeypatch):
    """So that it writes no checkpoint; until then it runs, whatever it prints."""

    def run_python(*args, is_done, **_):
        config = parse_flags(TrainConfig, args[1:])
        path = config.out_dir / config.run_name / "metrics.jsonl"
        ends = [is_done("")]
        path.parent.mkdir()
        for step in (1, 2, 3):
            record = {"step": step, "train_loss": 5.0, "step_time_ms": 64, "peak_memory_gib": 1.5}
            with path.open("a") as file:
                print(json.dumps(record), file=file)
            ends.append(is_done(""))
        assert ends == [False, False, False, True]
        return "device      1 x cpu\nmemory      about 2.5 GiB per device: 1.0 weights\n"

    monkeypatch.setattr(ladder, "run_python", run_python)
    monkeypatch.setattr(ladder, "prepare_compiler", lambda _: "none is looked for")
    measure = training_measures(tiny_bench(tiny_data), Workspace(tmp_path))[PRODUCT]
    values = measure()
    assert (values["planned GiB"], values["peak GiB"]) == (2.5, 1.5)
    assert values["tokens/s"] == 4 * 32 / 0.064


# --- another project's script -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "rates"),
    [
        ("step  10 | loss: 6.1 | dt: 1056.12ms | tok/sec: 496123.45", [496123.45]),
        ("step 2/20 | loss 6.1, 904.12 ms | 50.1% bf16 MFU | 576,123 tok/s", [576123]),
        ("iter 7: loss 6.1, tokens per second 1234", [1234]),
        ("step 10 tokens/s=496.5k", [496500]),
        ("540K tok/s | tokens_per_sec: 5", [540000, 5]),
        ("10 tok/s\n20 tok/s\n", [10, 20]),
        ("loss 6.1, 300 tokens, 5 s", []),
    ],
)
def test_read_rates_knows_how_training_scripts_print_them(line, rates):
    assert read_rates(line) == rates


def script_measure(tiny_data, tmp_path, before="", steps=100, after=""):
    """Measure a script that prints rates of 1,000.5, 1,001.5, … and then hangs."""
    script = tmp_path / "theirs.py"
    printed = "print(f'step {i:4d} | dt: 10.5ms | tok/sec: {1000 + i}.50')"
    lines = ["from pathlib import Path", before, f"for i in range({steps}): {printed}", after]
    script.write_text("\n".join([*lines, "import time; time.sleep(600)"]))
    config = tiny_bench(tiny_data, f"--peer={script}")
    measures = training_measures(config, Workspace(tmp_path))
    assert list(measures) == ["theirs.py", PRODUCT]
    return measures["theirs.py"]


def test_script_finds_the_data_and_is_ended_after_enough_steps(tiny_data, tmp_path):
    seen = tmp_path / "seen"
    names = "' '.join(sorted(p.name for p in Path('edu_fineweb10B').glob('*.npy')))"
    measure = script_measure(tiny_data, tmp_path, f"Path({str(seen)!r}).write_text({names})")
    (rate,) = measure().values()
    assert rate >= 1000.5 + UNTIMED_STEPS + 0.5  # two steps or more, however late the first look
    assert seen.read_text() == "train_000001.npy train_000002.npy val_000000.npy"


def test_script_that_is_slow_is_measured_by_its_steps_until_the_time_limit(
    tiny_data, tmp_path, monkeypatch
):
    printed = tmp_path / "printed"
    after = f"Path({str(printed)!r}).touch()"
    measure = script_measure(tiny_data, tmp_path, steps=UNTIMED_STEPS + 1, after=after)
    monkeypatch.setattr(ladder, "monotonic", lambda: 1e9 if printed.exists() else 0.0)
    assert measure() == {"tokens/s": 1000.5 + UNTIMED_STEPS}


@pytest.mark.parametrize(
    ("text", "reason"),
    [("print('hello')", "printed 0 speeds such"), ("raise OSError('no GPU')", "OSError: no GPU")],
)
def test_script_without_rates_has_a_reason(text, reason, tiny_data, tmp_path):
    (tmp_path / "theirs.py").write_text(text)
    config = tiny_bench(tiny_data, f"--peer={tmp_path}/theirs.py")
    with pytest.raises(ValueError, match=f"^{reason}"):
        training_measures(config, Workspace(tmp_path))["theirs.py"]()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--peer=nothing.py"], "--peer nothing.py is not transformers, eager or a .py file"),
        ([f"--peer={ROOT}/README.md"], "README.md is not transformers, eager or a .py file"),
        (["--gpu", "--peer=eager"], "--gpu requires a .py file as --peer, not eager"),
        (["--only=xl"], "--only requires --gpu"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        parse_flags(BenchConfig, flags)


# --- child processes --------------------------------------------------------------------------


def test_run_python_returns_and_logs_all_output(tmp_path):
    log = tmp_path / "log"
    log.write_text("earlier\n")
    text = "import sys; print('out'); print('err', file=sys.stderr); print('end')"
    assert run_python("-c", text, log=log) == "out\nerr\nend\n"
    assert log.read_text() == f"earlier\n$ python -c {text}\nout\nerr\nend\n"
    with pytest.raises(ValueError, match=r"^a reason$"):
        run_python("-c", "print('out'); raise SystemExit('error: a reason')")
    with pytest.raises(ValueError, match=r"^killed by signal 9: out of memory"):
        run_python("-c", "import os; os.kill(os.getpid(), 9)")


@pytest.mark.parametrize("ends_by", ["time limit", "output"])
def test_run_python_ends_a_child_with_its_own_children(ends_by, tmp_path, monkeypatch):
    hanging = HangingProgram(tmp_path)
    if ends_by == "time limit":
        monkeypatch.setattr(measurement, "monotonic", lambda: 9e9 if hanging.hangs() else 0.0)
        with pytest.raises(ValueError, match=r"^stopped at its time limit, after 600 s$"):
            run_python("-c", hanging.program, seconds=600)
    else:
        is_done = lambda output: output.count("x") == 2  # noqa: E731
        assert run_python("-c", hanging.program, seconds=600, is_done=is_done) == "x\nx\n"
    assert hanging.is_over()


def test_run_python_starts_nothing_without_time(tmp_path):
    hanging = HangingProgram(tmp_path)
    with pytest.raises(ValueError, match=r"^no time was left$"):
        run_python("-c", hanging.program, seconds=0)
    assert not hanging.hangs()


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
    (product_run,) = (path.parent for path in tmp_path.glob("*/run/config.json"))
    records = read_metrics(product_run / "metrics.jsonl")
    first, *steps = [record for record in records if "train_loss" in record]
    mean_ms = sum(step["step_time_ms"] for step in steps) / 2  # the median of two
    assert product["ms per step"] == [pytest.approx(mean_ms)]
    assert product["tokens/s"] == [pytest.approx(4 * 32 / mean_ms * 1000)]
    assert product["first step s"] == [first["step_time_ms"] / 1000]
    assert product["loss after 2 steps"] == [steps[-1]["train_loss"]]
    assert min(*product["peak GiB"], *product["planned GiB"], *product["MFU"]) > 0
    assert "planned GiB" not in peer
    # Published results name no machine and no folder.
    for private in (str(tiny_data), str(ROOT), "/nonexistent", socket.gethostname()):
        assert private in ("localhost", *file["device"].split()) or private not in path.read_text()


def test_results_are_replaced_by_name_and_have_a_file_per_model(tmp_path):
    config = BenchConfig(out_dir=tmp_path, device="cpu")
    for name, value in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
        store_results(results_path(config), config, name, {"x": {"s": [value]}}, {})
    file = json.loads(results_path(config).read_text())
    assert [file[name]["results"]["x"]["s"] for name in "ab"] == [[3.0], [2.0]]
    # README's small bench once drew 2 layers next to 12 in the published chart.
    flags = [], ["--n-layer=2"], ["--n-layer=2", "--block-size=256"], ["--n-head=6"]
    flags += ["--micro-batch-size=8"], ["--size=gpt2-medium"]
    paths = {results_path(parse_flags(BenchConfig, ["--device=cpu", *each])) for each in flags}
    assert len(paths) == len(flags)
