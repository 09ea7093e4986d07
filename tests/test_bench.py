import json
import math
import os
import socket
import subprocess
import sys
from functools import partial

import pytest
import torch
from conftest import ROOT, TINY_MODEL
from forked import HangingProgram, fork_trainers
from torch.profiler import profile

from bench import __main__ as bench
from bench import measurement, plain
from bench.__main__ import PRODUCT, BenchConfig, Setup, peers, read_rates, run_tests
from bench.idle import idle_part
from bench.measurement import (
    RUN_SECONDS,
    TORCHRUN,
    format_results,
    measure_in_turn,
    provenance,
    run_python,
    store_results,
)
from bench.plain import HUGGING_FACE, OPTIMIZATIONS, HuggingFaceGPT2
from formats.metrics import read_metrics
from model import GPT, GPTConfig
from runtime.cli import parse_flags
from runtime.errors import UserError
from training.config import TrainConfig

CPU = torch.device("cpu")
KERNELS = {
    "math": "aten::_scaled_dot_product_attention_math",
    "flash": "aten::_scaled_dot_product_flash_attention_for_cpu",
}


@pytest.fixture
def own_numerics():
    """Undo what a training run changes in its process."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.reset()


# --- measuring in turn ------------------------------------------------------------------------


def test_measure_in_turn_takes_each_once_per_round_and_goes_on_after_a_failure(capsys):
    calls = []

    def measure(label, seconds):
        calls.append(label)
        assert seconds == RUN_SECONDS
        if label == "broken":
            raise UserError("no folder /home/me/data")
        return {"s": float(len(calls))}

    measures = {label: partial(measure, label) for label in ("a", "broken", "b")}
    so_far = [str(results) for results, _ in measure_in_turn(measures, 2)]
    assert calls == ["a", "broken", "b", "a", "b"]
    assert len(so_far) == 5  # after each run
    assert so_far[2] == str({"a": {"s": [1.0]}, "b": {"s": [3.0]}})
    assert so_far[4] == str({"a": {"s": [1.0, 4.0]}, "b": {"s": [3.0, 5.0]}})
    assert capsys.readouterr().out.splitlines()[1].endswith("| no folder PATH")


def test_measure_in_turn_names_what_it_has_no_time_for(monkeypatch):
    clock, limits = [1000.0], {}
    monkeypatch.setattr(measurement, "monotonic", lambda: clock[0])

    def measure(label, takes, seconds):
        limits[label] = seconds
        clock[0] += min(takes, seconds)
        return {}

    takes = {"first": 10, "hangs": math.inf, "hangs too": math.inf, "last": 1}
    measures = {label: partial(measure, label, each) for label, each in takes.items()}
    *_, (_, failures) = measure_in_turn(measures, 1, seconds=120)
    assert limits == {"first": 60, "hangs": 60, "hangs too": 50}
    assert failures == {"last": "not run: no time was left"}
    assert clock[0] == 1120


@pytest.mark.parametrize(
    ("kernels", "idle"),
    [
        ([(0, 4)], 0),
        ([(5, 6), (0, 4)], 1 / 6),
        ([(0, 10), (1, 2), (3, 4), (12, 20)], 2 / 20),  # a stream beside another
        ([(0, 2), (2, 3), (2.5, 4), (8, 10)], 4 / 10),
    ],
)
def test_idle_is_the_part_without_any_kernel(kernels, idle):
    assert idle_part(kernels) == pytest.approx(idle)


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


def test_results_are_replaced_by_name(tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
        path = store_results(tmp_path, "AMD EPYC, 2 cores", name, {"results": value})
    assert path.name == "amd-epyc-2-cores.json"
    file = json.loads(path.read_text())
    assert [file[name]["results"] for name in "ab"] == [3.0, 2.0]
    assert file["a"]["versions"]["torch"] == torch.__version__


def test_provenance_has_the_commit_of_the_code_from_any_folder(tmp_path, monkeypatch):
    describe = ["git", "describe", "--always", "--exclude=*", "--dirty"]
    expected = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
    monkeypatch.chdir(tmp_path)
    assert provenance()["commit"] == (expected or "unknown")
    for command in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "other"]):
        subprocess.run(["git", *command], check=True)
    assert provenance()["commit"] == (expected or "unknown")
    monkeypatch.setattr(measurement, "ROOT", tmp_path)  # a copy that was not committed there
    assert provenance()["commit"] == "unknown"


def test_run_python_returns_all_output_and_raises_with_the_last_line():
    text = "import sys; print('out'); print('err', file=sys.stderr); print('end')"
    assert run_python("-c", text) == "out\nerr\nend\n"
    with pytest.raises(ValueError, match=r"^a reason\n"):
        run_python("-c", "print('out'); raise SystemExit('error: a reason')")
    failed = "import os, sys; print('[rank1]: UserError: because'); print('===='); sys.exit(1)"
    with pytest.raises(ValueError, match=r"^UserError: because\n"):
        run_python("-c", failed)
    with pytest.raises(ValueError, match=r"^killed by signal 9: out of memory"):
        run_python("-c", "import os; os.kill(os.getpid(), 9)")


@pytest.mark.parametrize("ends_by", ["time limit", "output"])
def test_run_python_ends_a_child_with_its_own_children(ends_by, tmp_path, monkeypatch):
    hanging = HangingProgram(tmp_path)
    if ends_by == "time limit":
        monkeypatch.setattr(measurement, "monotonic", lambda: 9e9 if hanging.hangs() else 0.0)
        assert run_python("-c", hanging.program, seconds=600).startswith("x\n")
    else:
        is_done = lambda output: output.count("x") == 2  # noqa: E731
        assert run_python("-c", hanging.program, seconds=600, is_done=is_done) == "x\nx\n"
    assert hanging.is_over()


@pytest.mark.skipif(os.name != "posix", reason="torchrun's processes are found by their pipe")
def test_run_python_ends_the_processes_of_torchrun(tmp_path):
    hanging = HangingProgram(tmp_path)
    script = tmp_path / "hangs.py"
    script.write_text(hanging.program)
    launcher = ("-m", TORCHRUN, "--standalone", "--nproc_per_node=1")
    output = run_python(*launcher, script, is_done=lambda _: hanging.hangs())
    assert "x" in output
    assert hanging.is_over()


# --- what trains ------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_numerics")
def test_plain_trainer_has_the_optimizations_that_are_on_and_the_products_losses(
    commands, tiny_data, tmp_path
):
    flags = [*TINY_MODEL, f"--data-dir={tiny_data}", "--device=cpu", "--dtype=float32"]
    flags += ["--micro-batch-size=2", "--total-batch-size=128", "--max-steps=6", "--no-compile"]
    flags += ["--max-lr=3e-3", "--min-lr=3e-3", "--warmup-steps=0", "--val-every=0"]
    flags += ["--hellaswag-every=0", "--sample-every=0", "--no-shuffle"]
    done = commands.run("train_gpt2", *flags, f"--out-dir={tmp_path}", "--run-name=run")
    assert done.code == 0, done.stderr
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    expected = [record["train_loss"] for record in records if "train_loss" in record]
    assert expected[-1] < expected[0] - 0.05
    config = parse_flags(TrainConfig, flags)
    all_but_compile = {*OPTIMIZATIONS} - {"compile"}  # which takes a minute
    for on, rows, kernel in ((set(), 50257, "math"), (all_but_compile, 50304, "flash")):
        with profile() as profiled:
            losses = list(plain.train(on, config, CPU))
        assert losses == pytest.approx(expected, abs=0.01)
        names = {event.name for event in profiled.events()}
        assert {each for each, name in KERNELS.items() if name in names} == {kernel}
        built = plain.plain_model(on, config, CPU)
        assert len(built.lm_head.weight) == rows
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


# --- the command ------------------------------------------------------------------------------


@pytest.fixture
def call(commands, tiny_data, tmp_path, monkeypatch, capsys):
    """Run `python -m bench --rounds=1` on a tiny model; return its results file and output."""
    fork_trainers(monkeypatch, commands, bench)
    monkeypatch.setattr(bench, "prepare_compiler", lambda _: "none is looked for")

    def call(*flags):
        tiny = [*TINY_MODEL, "--block-size=8", "--device=cpu", f"--data-dir={tiny_data}"]
        tiny += ["--steps=1", "--rounds=1", f"--out-dir={tmp_path}"]
        monkeypatch.setattr(sys, "argv", ["bench", *tiny, *flags])
        bench.main()
        (path,) = tmp_path.glob("*.json")
        return json.loads(path.read_text()), capsys.readouterr().out

    return call


def test_gpu_check_measures_the_ladder_the_defaults_and_larger_models(call, tiny_data):
    file, _ = call("--gpu")
    measured = file["gpu"]
    rows = [name for name in OPTIMIZATIONS if name in measured["results"]]
    assert {"flash attention", "padded vocabulary", "fused AdamW"} <= {*rows}
    assert not {"TF32", "compile"} & {*rows}
    assert [*measured["results"]] == [
        *(PRODUCT, "idle", "--optimizer=muon"),
        "--size=gpt2-xl --total-batch-size=1024",
        "--block-size=1024 --total-batch-size=1024",
        *("float32", *rows),
    ]
    for values in measured["results"].values():
        assert [*values] == ["tokens/s", "peak GiB"]
        assert all(len(runs) == 1 and runs[0] > 0 for runs in values.values())
    assert [*measured["not_measured"]] == ["tests"]  # there is no fork for pytest
    assert measured["model"]["block_size"] == 8
    for private in (str(tiny_data), str(ROOT), "/nonexistent", socket.gethostname()):
        assert private in ("localhost", *file["device"].split()) or private not in str(file)


def test_gpu_check_compares_one_gpu_with_all(call, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    file, _ = call("--gpu")
    results = file["gpu"]["results"]
    rows = ("2 GPUs", "idle", "--optimizer=muon", "2 GPUs --optimizer=muon")
    assert [*results] == [PRODUCT, *rows, "2 GPUs --parallel=fsdp"]
    assert all(values["tokens/s"][0] > 0 for values in results.values())


def test_peer_is_compared_with_the_defaults(call):
    file, shown = call("--peer=transformers")
    results = file["peer_transformers"]["results"]
    peer, product = results["transformers"], results[PRODUCT]
    assert f"({product['tokens/s'][0] / peer['tokens/s'][0]:.2f}x)" in shown
    setup = Setup(BenchConfig(), (), TrainConfig(device="cpu"))
    command = peers(setup, "transformers")["transformers"].args[1]
    assert command[-1].endswith(f"flash attention,padded vocabulary,fused AdamW,{HUGGING_FACE}")


def test_tests_are_counted_or_named_with_their_last_line(tmp_path, monkeypatch):
    tests = tmp_path / "test_gpu.py"
    monkeypatch.setattr(bench, "TEST_FILE", str(tests))
    passing = "import pytest\ndef test_a(): pytest.skip()\ndef test_b(): pass\n"
    tests.write_text(passing)
    assert run_tests(600) == {"passed": 1, "skipped": 1}
    tests.write_text(passing + "def test_c(): assert False\n")
    with pytest.raises(ValueError, match=r"^1 failed, 1 passed, 1 skipped in "):
        run_tests(600)
    with pytest.raises(ValueError, match=r"^not finished after 0 s"):
        run_tests(0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--peer=nothing.py"], "--peer nothing.py is neither transformers nor a .py file"),
        ([f"--peer={ROOT}/README.md"], "README.md is neither transformers nor a .py file"),
        (["--gpu", "--peer=transformers"], "--gpu and --peer are separate measurements: use one"),
        (["--rounds=0"], "--rounds must be above 0, not 0"),
        (["--gpu"], "--gpu found no usable GPU: use --device cpu"),
        (["--data-dir=nowhere"], "nowhere"),
        (
            ["--data-dir=data/fineweb-edu-10BT"],
            "data/fineweb-edu-10BT has no tokens for training",
        ),  # the default
        (
            ["--data_dir", "data/fineweb-edu-10BT"],
            "data/fineweb-edu-10BT has no tokens for training",
        ),
        (["--config=run.json"], "data/fineweb-edu-10BT has no tokens for training"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.json").write_text('{"data_dir": "data/fineweb-edu-10BT"}')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as if there was no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench", *flags])
    with pytest.raises((ValueError, OSError), match=message):
        bench.main()


# --- another project's script -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "rates"),
    [
        ("step  10 | loss: 6.1 | dt: 1056.12ms | tok/sec: 496123.45", [496123.45]),
        ("step 2/20 | loss 6.1, 904.12 ms | 50.1% bf16 MFU | 576,123 tok/s", [576123]),
        ("iter 7: loss 6.1, tokens per second 1234", [1234]),
        ("step 10 tokens/s=496.5k", [496500]),
        ("step 3/9 | loss 6.1 | 1.59M tok/s, mfu 47%, 22.5 GiB | eta 5s", [1_590_000]),
        ("540K tok/s | tokens_per_sec: 5", [540000, 5]),
        ("10 tok/s\n20 tok/s\n", [10, 20]),
        ("loss 6.1, 300 tokens, 5 s", []),
    ],
)
def test_read_rates_knows_how_training_scripts_print_them(line, rates):
    assert read_rates(line) == rates


def script_measure(tiny_data, tmp_path, text):
    """Return the measurement of a script."""
    (tmp_path / "theirs.py").write_text(text)
    setup = Setup(BenchConfig(steps=2), (), TrainConfig(data_dir=tiny_data, device="cpu"))
    measures = peers(setup, tmp_path / "theirs.py")
    assert list(measures) == ["theirs.py", PRODUCT]
    return measures["theirs.py"]


@pytest.mark.parametrize(("steps", "rate"), [(3, 1002.0), (2, 1001.5)])
def test_script_finds_the_data_and_is_ended_after_enough_steps_or_at_the_time_limit(
    steps, rate, tiny_data, tmp_path, monkeypatch
):
    seen = tmp_path / "seen"
    text = f"""
import time
from pathlib import Path
for step in range({steps}):
    print(f"step {{step:4d}} | dt: 10.5ms | tok/sec: {{1000 + step}}.50, mfu 4{{step}}%")
names = sorted(path.name for path in Path("edu_fineweb10B").glob("*.npy"))
Path({str(seen)!r}).write_text(" ".join(names))
time.sleep(600)
"""
    if steps == 2:  # too few
        monkeypatch.setattr(measurement, "monotonic", lambda: 1e9 if seen.exists() else 0.0)
    measure = script_measure(tiny_data, tmp_path, text)
    assert measure(600) == {"tokens/s": rate, "MFU %": 40.0 + steps - 1}
    if steps == 2:
        assert seen.read_text() == "train_000001.npy train_000002.npy val_000000.npy"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("print('1 tok/s')", r"printed fewer than 2 speeds such as `tok/sec: 1` \(limit: 600 s\)"),
        ("raise OSError('no GPU')", "OSError: no GPU"),
    ],
)
def test_script_without_rates_has_a_reason(text, reason, tiny_data, tmp_path):
    with pytest.raises(ValueError, match=f"^{reason}"):
        script_measure(tiny_data, tmp_path, text)(600)
