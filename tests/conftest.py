import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from forked import ROOT, Commands
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may wait for a network
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: threads would only wait for each other
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as runtime/threads.py sets it
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers share the folder of who starts them
    # A test that kills a compiling process can leave a torn library in the cache.
    compiled = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled.name
settings.register_profile(  # no luck, no clock
    "repeatable",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` ignores it
HELLASWAG = ROOT / "assets/hellaswag_sample.jsonl"
has_compiler = (
    shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))
    and Path(sysconfig.get_path("include"), "Python.h").exists()
    and " " not in tempfile.gettempdir()
)
needs_compiler = pytest.mark.skipif(
    not has_compiler, reason="needs a C++ compiler, Python.h, and a TMPDIR without a space"
)
TINY_MODEL = ("--n-layer=2", "--n-head=2", "--n-embd=32", "--block-size=32")
TINY_RUN = (
    *TINY_MODEL,
    *("--total-batch-size=256", "--micro-batch-size=4", "--max-steps=8", "--warmup-steps=0"),
    *("--val-every=4", "--val-tokens=288", "--sample-every=0", "--hellaswag-every=0"),
    *("--checkpoint-every=4", "--device=cpu", "--dtype=float32", "--no-compile"),
)

SLOW_FILES = (
    *("test_bench", "test_change", "test_demo", "test_faults", "test_nodes", "test_parallel"),
    *("test_preflight", "test_hub", "test_export_clients", "test_harness"),
    "test_fineweb_parts",
)


def pytest_collection_modifyitems(items):
    """Mark whole files as slow: `make test` leaves them out."""
    for item in items:
        if item.path.stem.startswith(SLOW_FILES):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """Shards of a language that can be learnt: each id follows from the one before."""
    folder = tmp_path_factory.mktemp("data")
    steps = np.random.default_rng(0).integers(0, 3, 20_000)
    tokens = (np.cumsum(steps) % 400).astype(np.uint16)
    np.save(folder / "val_000000.npy", tokens[:2000])
    np.save(folder / "train_000001.npy", tokens[2000:9000])
    np.save(folder / "train_000002.npy", tokens[9000:])
    return folder


@pytest.fixture(scope="session")
def commands(tmp_path_factory):
    """What runs the project's commands, alone or as ranks, without waiting for imports."""
    if os.name != "posix":
        pytest.skip("forks")
    with Commands(tmp_path_factory.mktemp("commands")) as commands:
        yield commands


@pytest.fixture
def tiny_flags(tiny_data, tmp_path):
    """Flags of a run of seconds; later flags override them."""
    return [f"--data-dir={tiny_data}", f"--out-dir={tmp_path}/runs", *TINY_RUN]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with one commit, this project's files; the working directory is its parent."""
    from bench import variants

    folder = tmp_path / "checkout"
    folder.mkdir()
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(lambda name: (ROOT / name).is_file(), names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "base"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    monkeypatch.setattr(variants, "ROOT", folder)
    monkeypatch.chdir(tmp_path)
    return folder


def copy_code(folder):
    """A copy of the scripts and what they import, to change."""
    folder.mkdir()
    for path in ROOT.glob("[!.]*.py"):
        shutil.copy(path, folder)
    for name in ("assets", "corpus", "formats", "recipes", "runtime", "training"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(".*"))
    return folder


def torchrun(script, *args, processes=2):
    """The command that starts `script` on several gloo ranks of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc_per_node={processes}", str(ROOT / script), *args]


def check_on_ranks(commands, source, tmp_path, processes=2, **environment):
    """Run the `check(dist_info)` that `source` defines on gloo ranks, each to its end."""
    script = tmp_path / "ranks.py"
    script.write_text(  # Python reads UTF-8
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"from runtime.distributed import *\n{source}\n"
        "with setup_distributed('cpu') as dist_info:\n    check(dist_info)\n"
        "print('fine', flush=True)\n",
        encoding="utf-8",
    )
    done = commands.run_ranks(processes, script, **environment)
    assert done.code == 0, done.stderr
    assert done.stdout.count("fine") == processes


def change_function(monkeypatch, function, changed):
    """Change a function as an edit of its file would, in all modules that have imported it."""
    monkeypatch.setattr(function, "__code__", changed.__code__)


def randomize_weights(model, scale=0.1):
    """Change every parameter: biases start at 0 and gains at 1, which would hide a swap."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
    return model


def fake_checkpoint(run_dir, step, **settings):
    """A checkpoint whose tensor files are empty."""
    from checkpoints import write_manifest

    from formats.checkpoint import Checkpoint, TrainerState, read_state
    from model import GPTConfig
    from runtime.files import write_json

    path = run_dir / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    state = TrainerState(step, 0, asdict(GPTConfig()), settings, "a", [], {}, "v", ["AdamW"], {})
    write_json(path / "trainer_state.json", asdict(state))
    for name in ("model.safetensors", "optimizer.safetensors"):
        (path / name).touch()
    write_manifest(path)
    return Checkpoint(path, read_state(path))


@contextmanager
def tiny_run(data_dir, folder, dist_info=None, **settings):
    """What `train_gpt2.build` and `train_step` take, for a tiny model."""
    from runtime.distributed import DistInfo
    from training.config import TrainConfig
    from training.run import open_run

    tiny = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "max_steps": 100}
    tiny |= {"total_batch_size": 16, "micro_batch_size": 1, "compile": False, "dtype": "float32"}
    tiny |= {"hellaswag_every": 0, "warmup_steps": 2, "val_tokens": 256, "device": "cpu"}
    config = TrainConfig(data_dir=Path(data_dir), out_dir=Path(folder), **(tiny | settings))
    with open_run(config, None, dist_info or DistInfo()) as run:
        yield run


def assert_same_run(run_dir, other, tolerance=0.0, **tolerances):
    """Assert that two runs logged the same losses and, with tolerances of their own, more."""
    for name, within in ({"train_loss": tolerance, "val_loss": tolerance} | tolerances).items():
        values, expected = series(run_dir, name), series(other, name)
        assert values.keys() == expected.keys()
        assert max(abs(values[step] - expected[step]) for step in values) <= within


def series(run_dir, name):
    """A metric's values by step, exactly as logged."""
    from formats.metrics import read_metrics

    records = read_metrics(run_dir / "metrics.jsonl")
    return {record["step"]: record[name] for record in records if name in record}
