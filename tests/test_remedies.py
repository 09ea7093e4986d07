"""Every remedy that a message names works as a user would paste it.

Others are followed where what calls for them is tested: a killed rank (`test_faults_training.py`),
a damaged checkpoint (`test_resume.py`), report.py (`test_plot.py`), trackers,
a GPU that torch cannot use (`test_device.py`), a damaged download (`test_hub.py`).
"""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import HELLASWAG, TINY_MODEL, TINY_RUN
from torch._dynamo.exc import Unsupported
from torch.nn import Module, functional

import train_gpt2
from corpus.shards import Manifest, ShardWriter
from runtime.cli import run_command
from runtime.compiler import prepare_compiler
from tokenizer import VOCAB_SHA256

NEW = f"{shlex.join(TINY_RUN[len(TINY_MODEL) :])} --micro-batch-size=2 --max-steps=2 --val-every=0"
NEW += " --data-dir=shards --out-dir='my runs' --run-name=b"
MODEL = "--n-layer=1 --n-head=2 --n-embd=8 --block-size=64"
TRAIN = f"python train_gpt2.py {NEW} {MODEL}"
INIT = f"python train_gpt2.py {NEW} --init-from='my runs/a'"
LONG = f"{TRAIN} --data-dir=changed --block-size=500 --total-batch-size=1000"
TRAIN_ON = "python train_gpt2.py --max-steps=9"
RESUME = f"{TRAIN_ON} --resume='my runs/a'"
TWO_RANKS = f"torchrun --standalone --nproc_per_node=2 train_gpt2.py {NEW} {MODEL}"
SAMPLE = "python sample.py --device=cpu --num-samples=1 --max-new-tokens=2"
TOKENIZE = "python fineweb.py --workers=1 --shard-size=500"
OTHER = "mps" if sys.platform != "darwin" else "cuda"  # a device that is not there
STEP_4, STEP_8 = (f"my runs/a/checkpoints/step_0000000{step}" for step in (4, 8))
OVERFIT_BEST = "my runs/overfit@best"
# fmt: off
ROWS = [  # a command, words that it says, and what is pasted then: each line of it works
    (f"{TRAIN} --max-stps=1", "did you mean --max-steps?", f"{TRAIN} --max-steps=1"),
    (f"{TRAIN} --warmup-steps=2", "use --warmup-steps 0 ", f"{TRAIN} --warmup-steps 0"),
    (f"{TRAIN} --total-batch-size=200", "--total-batch-size 200 is not a multiple of ",
     f"{TRAIN} --total-batch-size=128", f"{TRAIN} --total-batch-size=256 --run-name=c"),
    (f"{TRAIN} --data-dir=changed --total-batch-size=65536",
     "or --total-batch-size 1408 or less",
     f"{TRAIN} --data-dir=changed --total-batch-size 1408"),
    (f"{LONG} --val-every=1 --val-tokens=500", "or --val-every 0", LONG),
    (f"{TRAIN} --data-dir=none", "try python fineweb.py --source stdlib, then",
     "python fineweb.py --source stdlib", f"{TRAIN} --data-dir=data/stdlib"),
    (f"{TRAIN} --data-dir=a.txt", "of shards: make shards with python fineweb.py --source a.txt",
     f"{TOKENIZE} --source a.txt --data-dir=new", f"{TRAIN} --data-dir=new"),
    (f"{TRAIN} --data-dir=changed --preflight", "delete changed and rerun python fineweb.py",
     "rm -r changed", f"{TOKENIZE} --source=a.txt --data-dir=changed",
     f"{TRAIN} --data-dir=changed --preflight"),
    (f"{INIT} --n-layer=3 --block-size=65", "leave out --n-layer, --n-head, --n-embd and --block",
     INIT),
    (f"{TRAIN} --device={OTHER}", "not available here: use --device cpu", f"{TRAIN} --device=cpu"),
    (f"{TRAIN} --gpus=2",
     "requires --plan; to train on 2 GPUs: torchrun --standalone --nproc_per_node=2 train_gpt2.py",
     f"{TRAIN} --gpus=2 --plan"),
    (f"{TRAIN} --parallel=fsdp",
     "torchrun --standalone --nproc_per_node=2 train_gpt2.py or, for one process, --parallel ddp",
     f"{TWO_RANKS} --parallel=fsdp", f"{TRAIN} --parallel ddp --run-name=c"),
    (f"{TRAIN} --parallel=fsdp --dtype=float16", "use --dtype bfloat16 or",
     f"{TWO_RANKS} --parallel=fsdp --dtype bfloat16"),
    (f"{TRAIN} --logger wandb", "or use --logger without a name", f"{TRAIN} --logger"),
    (f"{TRAIN} --hellaswag-every=2", "(--hellaswag-data FILE in training)",
     f"{TRAIN} --hellaswag-every=2 --hellaswag-data='{HELLASWAG}' --run-name=c"),
    (TRAIN, "python plot.py 'my runs/b', at any time", "python plot.py 'my runs/b'"),
    (TRAIN, "to resume   the same command with --resume 'my runs/b'",
     f"{TRAIN} --resume 'my runs/b' --max-steps=3"),
    ("python train_gpt2.py --resume='my runs/a'", "use a larger --max-steps to continue", RESUME),
    (f"{TRAIN} --run-name=a",
     "use another --run-name; last checkpoint step_00000008, resume with --resume 'my runs/a'",
     f"{TRAIN} --run-name=b", "python train_gpt2.py --resume 'my runs/a' --max-steps=9"),
    (f"{TRAIN_ON} --resume='{STEP_4}'", "my runs/a has a newer checkpoint, step_00000008: resume ",
     f"{TRAIN_ON} --resume='{STEP_4}' --run-name b", f"{TRAIN_ON} --resume='{STEP_8}'"),
    (f"{TRAIN} --resume=auto --run-name=lost", "or start over with another --run-name",
     f"{TRAIN} --resume=auto --run-name=b"),
    (f"{RESUME} --seed=5", "(seed 1337 -> 5): restore these settings", RESUME),
    (f"{RESUME} --optimizer=muon",
     f"use the same --optimizer, or start a new run with --init-from '{STEP_8}'",
     f"{TRAIN} --init-from '{STEP_8}' --optimizer=muon"),
    (f"{RESUME} --max-lr=1e38 --max-steps=12", "such as python train_gpt2.py '--resume=my runs/a' ",
     "python train_gpt2.py '--resume=my runs/a' --max-lr=1e-4 --min-lr=1e-05 --max-steps=12"),
    (f"{TRAIN} --max-lr=1e38 --weight-decay=100", "such as python train_gpt2.py '--config=my ",
     "python train_gpt2.py '--config=my runs/b/config.json' --max-lr=1e-4 --weight-decay=0.1"),
    (f"{RESUME} --max-lr=1e-5 --min-lr=1e-4", "also use --min-lr 1e-06",
     f"{RESUME} --max-lr=1e-5 --min-lr 1e-06"),
    (f"{RESUME} --data-dir=changed", "restore the data, use its --data-dir, or start a new run",
     f"{RESUME} --data-dir=shards", f"{TRAIN} --data-dir=changed --run-name=c"),
    (f"{TRAIN_ON} --resume='my runs/overfit'", f"(--model '{OVERFIT_BEST}')",
     f"{SAMPLE} --model '{OVERFIT_BEST}'"),
    (f"{TOKENIZE} a.txt 'my texts'", "use --source a.txt 'my texts' (--help",
     f"{TOKENIZE} --source a.txt 'my texts'"),
    (f"{TOKENIZE} --source=windows.txt", "use iconv -f ENCODING -t utf-8 FILE > NEW_FILE",
     "iconv -f cp1252 -t utf-8 windows.txt > new.txt", f"{TOKENIZE} --source=new.txt"),
    (f"{TOKENIZE} --source a.txt 'my texts' --part=2/2", "use PART/PARTS, such as 0/32 to 31/32",
     f"{TOKENIZE} --source a.txt 'my texts' --part=1/2"),
    ("torchrun --nproc_per_node=2 fineweb.py --source a.txt", "is not supported: use python",
     "python fineweb.py --source a.txt"),
]
# fmt: on


@pytest.fixture(scope="module")
def home(tiny_data, tmp_path_factory):
    """A folder with texts, data, and runs; things have befallen most of them."""
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(tiny_data, home / "shards")
    for name in ("a.txt", "my texts/a.jsonl"):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text(json.dumps({"text": f"{name} once upon a time" * 500}))
    (home / "windows.txt").write_text("“état” " * 500, encoding="cp1252")
    writer = ShardWriter(home / "changed", Manifest({"kind": "hub"}, VOCAB_SHA256, 500))
    writer.add(np.arange(2000, dtype=np.uint16))
    writer.close()
    np.save(home / "changed/train_000002.npy", np.zeros(500, np.uint16))
    runs = home / "my runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        train_gpt2.main(shlex.split(f"{NEW} {MODEL} --run-name=a --max-steps=8 --val-every=4"))
    for name in ("lost", "overfit"):
        shutil.copytree(runs / "a", runs / name)
    shutil.rmtree(runs / "lost/checkpoints")
    with (runs / "overfit/metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "tokens_seen": 1024, "val_loss": 1.0}\n')
    return home


@pytest.fixture
def run(home, tmp_path, monkeypatch, capsys, request):
    """What runs a line in a copy of `home`; returns the exit code and what is printed."""

    def copy(path, to):  # tensors are never written in place
        (os.link if path.endswith(".safetensors") else shutil.copy)(path, to)

    shutil.copytree(home, home := tmp_path.resolve() / "home", copy_function=copy)
    monkeypatch.chdir(home)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setitem(sys.modules, "wandb", None)  # not installed

    def run(line):
        launcher, *words = shlex.split(line)
        if launcher not in ("python", "torchrun"):
            return subprocess.run(line, shell=True).returncode, ""
        place = next(n for n, word in enumerate(words) if word.endswith(".py"))
        script, args = words[place].removesuffix(".py"), words[place + 1 :]
        if launcher == "torchrun":
            commands = request.getfixturevalue("commands")
            monkeypatch.setattr(commands, "folder", home)
            done = commands.run_ranks(2, script, *args)
            return done.code, (done.stdout + done.stderr).replace(f"{home}/", "")
        monkeypatch.setattr(sys, "argv", [script, *args])
        try:
            code = run_command(importlib.import_module(script).main) or 0
        except SystemExit as stop:
            code = stop.code
        return code, "".join(capsys.readouterr()).replace(f"{home}/", "")

    return run


def check_remedy(run, command, words, *pasted):
    """Type a command, read the remedy in what it says, and paste it."""
    code, text = run(command)
    is_refused = code != 0 or "warning: " in text
    assert words in text
    for line in pasted:
        code, text = run(line)
        assert code == 0, text
        assert not (is_refused and words in text), text
        if "train_gpt2.py" in line and not re.search("--(plan|preflight|help)", line):
            assert "\ndone: " in text


@pytest.mark.gpt2
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[pytest.mark.slow] * ("torchrun" in row[0] + "".join(row[2:])))
        for row in ROWS
    ],
    ids=lambda row: row[1],
)
def test_remedy_works_as_it_is_pasted(run, row):
    check_remedy(run, *row)


def test_remedy_of_a_batch_that_is_too_large(run, monkeypatch):
    def limited(idx, *args, embedding=functional.embedding):
        if idx.ndim == 2 and len(idx) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return embedding(idx, *args)

    monkeypatch.setattr(functional, "embedding", limited)
    fix = "use a smaller --micro-batch-size; last checkpoint step_00000008, resume with --resume"
    check_remedy(run, RESUME, f"{fix} 'my runs/a'", f"{RESUME} --micro-batch-size=1")
    fix = "use a smaller --micro-batch-size; no checkpoint yet: start over with the same command"
    check_remedy(run, TRAIN, fix, f"{TRAIN} --micro-batch-size=1 --run-name=c")


def test_remedy_of_a_compiler_that_fails(run, monkeypatch):
    def fail(*_):
        raise Unsupported("x")

    def compiled(function, **_):
        is_part = isinstance(getattr(function, "__self__", None), Module)  # of the model
        return fail if is_part else lambda *_: (None, True)

    monkeypatch.setattr(torch, "compile", compiled)
    prepare_compiler.cache_clear()
    said = (
        "or add --no-compile (Unsupported: x); no checkpoint yet: start over with the same command"
    )
    check_remedy(run, f"{TRAIN} --compile", said, f"{TRAIN} --run-name=c --no-compile")
    prepare_compiler.cache_clear()
