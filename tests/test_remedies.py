"""Every remedy that a message names works as a user would paste it.

Others are followed where what calls for them is tested: a killed rank (`test_faults_training.py`),
a damaged checkpoint, a rate that jumps (`test_run_dir.py`), report.py (`test_plot.py`), trackers,
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
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import HELLASWAG, TINY_MODEL, TINY_RUN
from torch._dynamo.exc import Unsupported
from torch.nn import Module, functional

import train_gpt2
from corpus.shards import Manifest, ShardWriter
from runtime.cli import run_command
from runtime.device import prepare_compiler

WORDS = {  # of what is typed and pasted
    "INIT": "python train_gpt2.py NEW --init-from='my runs/a'",
    "RESUME": "python train_gpt2.py --max-steps=9 --resume='my runs/a'",
    "AGAIN": "TRAIN --run-name=a --max-steps=9 --resume='my runs/a'",
    "TRAIN": "python train_gpt2.py NEW MODEL",
    "NEW": f"{shlex.join(TINY_RUN[len(TINY_MODEL) :])} --micro-batch-size=2 --max-steps=2 "
    "--val-every=0 --data-dir=shards --out-dir='my runs' --run-name=b",
    "MODEL": "--n-layer=1 --n-head=2 --n-embd=8 --block-size=64",
    "TOKENIZE": "python fineweb.py --workers=1 --shard-size=500",
    "MAKE": "--source=a.txt --shard-size=500 --data-dir",
    "SHORT": "--device=cpu --num-samples=1 --max-new-tokens=2",
    "ROWS": f"'{HELLASWAG}'",
    "NO_DEVICE": "cuda" if sys.platform == "darwin" else "mps",
}
# What is typed, ?? a part of what it says, >> what is pasted then, and so on. "…" is what was
# typed, less the words before it.
TABLE = r"""
TRAIN --max-stps=1 ?? did you mean (--max-steps)\? \((--help) lists the flags\)$
    >> without --max-stps … \1=1 >> python train_gpt2.py \2
TRAIN --compile false ?? give --NAME or (--no-)NAME >> without --compile false … \1compile
TRAIN --n-embd=9 ?? use (--n-embd \d+) >> … \1
TRAIN --warmup-steps=2 ?? use (--warmup-steps \d+) >> … \1
TRAIN --config=none ?? give one of recipes/ or a run's (config\.json)$ >> … --config='my runs/a/\1'
TRAIN --total-batch-size=200 ?? (--total-batch-size) 200 .*: use (\d+) or (\d+)
    >> … \1 \2 >> … \1 \3 --run-name=c
TRAIN --data-dir=changed --total-batch-size=65536 ?? give (--total-batch-size \d+) or less >> … \1
TRAIN --data-dir=changed --val-every=1 --val-tokens=500 --block-size=500 --total-batch-size=1000
    ?? give more data, or (--val-every 0)$ >> … \1
TRAIN --data-dir=none ?? (python .* stdlib) makes (data/stdlib) >> \1 >> … --data-dir=\2
TRAIN --data-dir=nano ?? by (python fineweb.py)$ >> \1 MAKE=new >> … --data-dir=new
TRAIN --data-dir=short ?? delete (.*) and run (.*) again$ >> rm -r \1 >> \2 MAKE=short >> …
TRAIN --data-dir=changed --preflight ?? else delete (.*) and run (.*) again$
    >> rm -r \1 >> \2 MAKE=changed >> …
INIT MODEL ?? leave out (.*): --init-from has its own >> without \1 …
INIT --block-size=65 ?? give (--block-size \d+) or less$ >> … \1
TRAIN --device=NO_DEVICE ?? available: .*(cpu)$ >> … --device=\1
TRAIN --cpu-offload --plan ?? goes with (--parallel fsdp) or >> … \1
TRAIN --plan --gpus=2 --mfu=40 ?? use ([\d.]+), say >> … --mfu=\1
TRAIN --gpus=2 ?? goes with (--plan); .*: (torchrun .*py) >> … \1 >> \2 NEW MODEL
TRAIN --parallel=fsdp ?? as in (torchrun .*); for one process, use (--parallel ddp)$
    >> \1 NEW MODEL --parallel=fsdp >> … \2 --run-name=c
TRAIN --parallel=fsdp --dtype=float16 ?? use (--dtype bfloat16) or
    >> torchrun --nproc_per_node=2 train_gpt2.py NEW MODEL --parallel=fsdp \1
TRAIN --logger wandb ?? or give (--logger) without a name$ >> … \1
TRAIN --hellaswag-every=2 ?? \((--hellaswag-data) FILE in training\)$ >> … \1=ROWS --run-name=c
TRAIN ?? (python plot.py .*), at any time\n.*\nto resume   (python train_gpt2.py .*)$
    >> \1 >> \2 --max-steps=3
torchrun --standalone --nproc_per_node=2 train_gpt2.py NEW MODEL
    ?? to resume   (torchrun .*--nproc_per_node=2 train_gpt2.py --resume .*)$ >> \1 --max-steps=3
torchrun --nnodes=2 --nproc_per_node=1 train_gpt2.py NEW MODEL
    ?? to resume   the same command with (--resume .*)$ >> … \1 --max-steps=3
python train_gpt2.py --resume='my runs/a' ?? give a larger (--max-steps) to train on$ >> … \1=9
RESUME --resume=auto --out-dir='my runs' ?? needs the (--run-name): .* are (a), >> … \1 \2
TRAIN --resume=auto --run-name=aa ?? \(there is (a)\)$ >> … --run-name=\1 --max-steps=9
TRAIN --run-name=a ?? another (--run-name), or go on with it by (--resume .*)$
    >> … \1 b >> python train_gpt2.py \2 --max-steps=9
RESUME --resume='my runs/a/checkpoints/step_00000004'
    ?? has a newer checkpoint, (step_\d+): .* another (--run-name)$
    >> … --resume='my runs/a/checkpoints/\1' >> … \2 b
TRAIN --resume=auto --run-name=lost ?? or begin again with another (--run-name)$ >> … \1 b
TRAIN --resume=auto --run-name=damaged ?? start a new run with another (--run-name)$ >> … \1 b
RESUME --resume=step_00000004 ?? not in a run's checkpoints folder: give a (--run-name)$ >> … \1 b
AGAIN --seed=5 ?? \(seed 1337 -> 5\): leave .* with another (--run-name) and (without --resume)$
    >> without --seed … >> \2 … \1 b
AGAIN --optimizer=muon ?? use the same (--optimizer), or .* (without .*), by (--init-from .*)$
    >> without \1 … >> \2 --resume … \3 --run-name=b
RESUME --max-lr=1e38 --max-steps=12
    ?? go on with (.*) and a lower (--max-lr); if this fails, another (--run-name) with (.*)$
    >> … \1 \2 1e-4 >> … \3 b \4 --max-lr=1e-4
RESUME --max-lr=1e38 --max-steps=12 --checkpoint-every=1
    ?? step_00000009, .*; if this fails, another (--run-name) with (.*)$ >> … \1 b \2 --max-lr=1e-4
RESUME --resume='my runs/a/checkpoints/step_00000004' --run-name=b --max-steps=7 --max-lr=1e38
    ?? go on with (.*) and a lower (--max-lr)$ >> python train_gpt2.py \1 \2 1e-4
RESUME --resume='my runs/overfit' ?? sample and export with (--model .*)$
    >> python sample.py \1 SHORT >> python export.py \1 --out=new
python sample.py SHORT --model='my runs/begun' ?? begin again with (python .*)$ >> \1 >> …
python sample.py SHORT --model='my runs/none' ?? the runs in (.*) are (a), >> … --model='\1/\2'
python sample.py SHORT --model='my runs/a' --prompt=a --prompts-file=a.txt
    ?? (--prompt) and (--prompts-file) are two sources: give one >> without \1 … >> without \2 …
python export.py --model='my runs/a' --out='my texts' ?? give another with (--out)$ >> … \1 new
python hellaswag.py --device=cpu --model='my runs/a' ?? network pass (--data) FILE >> … \1 ROWS
python plot.py ?? no run folder given: (python plot.py) runs/NAME >> \1 'my runs/a'
TOKENIZE --source=b.txt --data-dir=changed
    ?? (changed) holds other data, .*: choose another (--data-dir), or delete it$
    >> … \2 new >> rm -r \1 >> …
TOKENIZE --source=a.txt --data-dir=shards ?? choose another (--data-dir)$ >> … \1 new
TOKENIZE --source=latin1.txt ?? by (iconv -f latin1 -t utf-8) FILE > NEW_FILE
    >> \1 latin1.txt > new.txt >> … --source=new.txt
TOKENIZE ?? use (--source stdlib) .* or (--source) FILES >> … \2 a.txt
TOKENIZE --source a.txt b.txt --part=0 ?? --part 0 of (--parts) None: give both >> … \1 2
torchrun --nproc_per_node=2 fineweb.py --workers=1 --source a.txt b.txt --part=0 --parts=2
    ?? leave out (--part, --parts)$ >> without \1 …
"""


ROWS = [
    pytest.param(row, marks=[pytest.mark.slow] * ("torchrun" in row), id=row.split("??")[0].strip())
    for row in re.split(r"\n(?! )", TABLE.strip())
]


def words_of(line):
    """The words of a line, as a shell has them."""
    for word in WORDS:
        line = re.sub(rf"\b{word}\b", WORDS[word], line)
    return shlex.split(line)


@pytest.fixture(scope="module")
def home(tiny_data, tmp_path_factory):
    """A folder with texts, data, and runs; things have befallen most of them."""
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(tiny_data, home / "shards")
    for name in ("a.txt", "b.txt", "my texts/a.jsonl", "nano/train.bin", "nano/meta.pkl"):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text(json.dumps({"text": f"{name} once upon a time" * 500}))
    (home / "latin1.txt").write_text("état " * 500, encoding="latin-1")
    for name, tokens in (("short", 499), ("changed", 500)):
        writer = ShardWriter(home / name, Manifest({}, "hash", 500))
        writer.add(np.arange(2000, dtype=np.uint16))
        writer.close()
        np.save(home / name / "train_000002.npy", np.zeros(tokens, np.uint16))
    runs = home / "my runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        train_gpt2.main(words_of("NEW MODEL --run-name=a --max-steps=8 --val-every=4"))
    for name in ("lost", "damaged", "begun", "overfit"):
        shutil.copytree(runs / "a", runs / name)
    shutil.copytree(runs / "a/checkpoints/step_00000004", home / "step_00000004")
    shutil.rmtree(runs / "lost/checkpoints")
    shutil.rmtree(runs / "begun/checkpoints")
    (runs / "begun/metrics.jsonl").write_text("")
    for path in runs.glob("damaged/checkpoints/*/model.safetensors"):
        path.write_bytes(b"")
    with (runs / "overfit/metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "tokens_seen": 1024, "val_loss": 1.0}\n')
    return home


@pytest.fixture
def run(home, tmp_path, monkeypatch, capsys, request):
    """What runs a line in a copy of `home`; returns the exit code and what is printed."""

    def copy(path, to):  # tensors are never written in place
        (os.link if path.endswith(".safetensors") else shutil.copy)(path, to)

    monkeypatch.chdir(home := shutil.copytree(home, tmp_path / "home", copy_function=copy))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setitem(sys.modules, "wandb", None)  # not installed

    def run(line):
        launcher, *words = words_of(line)
        if launcher not in ("python", "torchrun"):
            return subprocess.run(line, shell=True).returncode, ""
        place = next(n for n, word in enumerate(words) if word.endswith(".py"))
        script, args = words[place].removesuffix(".py"), words[place + 1 :]
        if launcher == "torchrun":
            commands = request.getfixturevalue("commands")
            monkeypatch.setattr(commands, "folder", home)
            local = re.search(r"--nproc_per_node=(\d+)", line)[1]
            ranks = int(local) * (1 + ("--nnodes=2" in line))
            done = commands.run_ranks(ranks, script, *args, LOCAL_WORLD_SIZE=local)
            return done.code, done.stdout + done.stderr
        monkeypatch.setattr(sys, "argv", [script, *args])
        try:
            code = run_command(importlib.import_module(script).main) or 0
        except SystemExit as stop:
            code = stop.code
        return code, "".join(capsys.readouterr())

    return run


def follow(run, row):
    """Type a row's command, find the remedies in what it says, and paste them."""
    typed, said, *pasted = (part.strip() for part in re.split(r"\?\?|>>", row))
    code, text = run(typed)
    is_refused = code != 0 or "warning: " in text
    found = re.search(said, text, re.MULTILINE)
    assert found, text
    for line in pasted:
        dropped, same, added = found.expand(line).rpartition("…")
        kept = [w for w in words_of(typed) if w.split("=")[0] not in re.split("[ ,]+", dropped)]
        code, text = run(line := f"{shlex.join(kept) if same else ''} {added}")
        assert code == 0, text
        assert not (is_refused and re.search(said, text, re.MULTILINE)), text
        if "train_gpt2.py" in line and not re.search("--(plan|preflight|help)", line):
            assert "\ndone: " in text


@pytest.mark.parametrize("row", ROWS)
def test_remedy_works_as_it_is_pasted(run, row):
    follow(run, row)


def test_remedy_of_a_batch_that_is_too_large(run, monkeypatch):
    def limited(idx, *args, embedding=functional.embedding):
        if idx.ndim == 2 and len(idx) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return embedding(idx, *args)

    monkeypatch.setattr(functional, "embedding", limited)
    smaller = "?? give a smaller (--micro-batch-size);.*"
    follow(run, rf"RESUME {smaller} go on with (--resume .*)$ >> … \1=1 \2")
    follow(run, rf"TRAIN {smaller} no checkpoint yet: begin again with (python .*)$ >> \2 \1=1")
    once = [torch.OutOfMemoryError("out of memory"), torch.amp.GradScaler("cpu", enabled=False)]
    monkeypatch.setattr(torch.amp, "GradScaler", Mock(side_effect=once))  # while it is set up
    follow(run, rf"TRAIN --run-name=c {smaller} with the command that began it$ >> … \1=1")


def test_remedy_of_a_compiler_that_fails(run, monkeypatch):
    def compiled(module, **_):  # fails when it is called
        return Mock(side_effect=Unsupported("x")) if isinstance(module, Module) else module

    monkeypatch.setattr(torch, "compile", compiled)
    prepare_compiler.cache_clear()
    follow(run, r"TRAIN --compile ?? add (--no-compile); .* again with (python .*)$ >> \2 \1")
    prepare_compiler.cache_clear()
