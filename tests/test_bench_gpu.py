import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY_MODEL

from bench import __main__ as bench_main
from bench import gpu
from bench.config import BenchConfig
from bench.gpu import gpu_commands
from hellaswag import HellaSwagConfig
from model import GPTConfig
from runtime.cli import parse_flags
from runtime.gpus import GPUS, flops_per_token
from sample import SampleConfig
from training.config import TrainConfig

CONFIGS = {
    "bench": BenchConfig,
    "train_gpt2.py": TrainConfig,
    "hellaswag.py": HellaSwagConfig,
    "sample.py": SampleConfig,
}


@pytest.mark.parametrize("gpus", [0, 2])
def test_every_command_is_one_that_its_program_accepts(gpus, tmp_path, monkeypatch):
    config = parse_flags(BenchConfig, [*TINY_MODEL, "--gpu", "--device=cpu", "--data-dir=data"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    programs = []
    commands = gpu_commands(config, tmp_path)
    for minutes, args in commands:
        assert 0 < minutes <= 12
        (place, *_) = [place for place, arg in enumerate(args) if arg in (*CONFIGS, "pytest")]
        programs.append(" ".join(args[: place + 1]))
        if args[place] != "pytest":
            parse_flags(CONFIGS[args[place]], args[place + 1 :])
            assert args[place] == "bench" or (ROOT / args[place]).is_file()
    assert sum(minutes for minutes, _ in commands) <= 60
    assert sum("torch.distributed.run" in program for program in programs) == bool(gpus)


START_SECONDS = 45  # imports, compiled code, and what a run writes; the first run compiles longer


def test_every_command_ends_in_time_on_every_gpu(tmp_path, monkeypatch):
    for function, value in {
        **{"is_available": True, "device_count": 2, "get_device_capability": (9, 0)},
        **{"get_arch_list": [], "get_device_name": "T4"},
        "get_device_properties": SimpleNamespace(total_memory=2**34),
    }.items():
        monkeypatch.setattr(torch.cuda, function, lambda *_, value=value: value)
    config = parse_flags(BenchConfig, ["--gpu", "--device=cuda", "--data-dir=data"])
    listed = list[tuple[float, int, int, int]]()  # minutes, runs, their steps, context
    for minutes, args in gpu_commands(config, tmp_path):
        runs, steps, context = 1, 0, 1024
        if "train_gpt2.py" in args:
            run = parse_flags(TrainConfig, args[args.index("train_gpt2.py") + 1 :])
            steps, context = (20 if run.resume else run.max_steps), run.block_size
            assert run.resume or run.checkpoint_every <= 20
        elif "bench" in args and not (bench := parse_flags(BenchConfig, args[2:])).component:
            runs = 7 if bench.peer == "switches" else 2  # of the ladder's, two accumulate
            steps = bench.steps + 1
        listed.append((minutes, runs, steps, context))
    assert len([steps for *_, steps, _ in listed if steps]) == 8

    for name, kind in GPUS.items():
        properties = SimpleNamespace(total_memory=kind.memory_gib * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_, it=properties: it)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_, it=name: it)
        for minutes, runs, steps, context in listed:
            tokens = config.step_tokens if context == 1024 else context
            flops = tokens * steps * flops_per_token(GPTConfig(block_size=context))
            seconds = runs * (START_SECONDS + flops / (0.3 * kind.peak_flops))
            assert seconds <= 60 * minutes, (name, minutes, runs, steps, context)


def test_command_notes_what_failed_or_took_too_long_and_goes_on(
    tiny_data, tmp_path, monkeypatch, capsys
):
    survived = tmp_path / "survived"
    waits = f"import os, time; os.fork(); time.sleep(60); open({str(survived)!r}, 'w')"
    listed = [
        (1, ["-c", "print('a result')"]),
        (1, ["-c", "raise SystemExit('a reason')"]),
        (0.02, ["-c", waits]),
        (1, ["-c", "print('the last')"]),
    ]
    monkeypatch.setattr(gpu, "gpu_commands", lambda *_: listed)
    flags = ["bench", "--gpu", "--device=cpu", f"--data-dir={tiny_data}", f"--out-dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", flags)
    bench_main.main()
    shown = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line.split(" in ")[0] for line in shown] == [
        *("done", "FAILED (1)", "STOPPED after 0.02 minutes", "done"),
    ]
    (log,) = tmp_path.glob("*.log")
    text = log.read_text()
    assert f"'torch': '{torch.__version__}'" in text
    for expected in ("a result\n--- done", "a reason\n--- FAILED (1)", "the last\n--- done"):
        assert expected in text
    assert not survived.exists()


def test_command_refuses_a_machine_without_a_gpu(tiny_data, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as if there was none
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flags = ["bench", "--gpu", f"--data-dir={tiny_data}", f"--out-dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", flags)
    with pytest.raises(ValueError, match=r"^--gpu: this machine has no usable"):
        bench_main.main()
