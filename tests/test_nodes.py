"""Two machines, as two launches of torchrun that meet over loopback; and Slurm's part in it."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, series
from forked import free_port

from formats.metrics import read_metrics
from train_gpt2 import main

SCRIPT = ROOT / "scripts/slurm_train.sh"
TIMEOUT_S = 600  # ends a process that hangs; none that is slow
LOOPBACK = os.environ | {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
SRUN = """#!/usr/bin/env bash
# srun --flag=… command …: the command once per node; signals go to all, as Slurm sends them.
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do "$@" & pids+=($!); done
echo "${pids[*]}" >> pids
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit $status
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then echo 127.0.0.1; else echo "$*" >> requeued; fi
"""
PYTHON = """#!/usr/bin/env bash
# Stands for torchrun: the preflight passes, training leaves $MARK and ends with $STATUS.
echo "$*" >> launches
[[ $* == *--preflight* ]] && exit "${PREFLIGHT:-0}"
[[ -n ${MARK:-} ]] && mkdir -p runs/a && echo "$MARK" > runs/a/PREEMPTED
exit "${STATUS:-0}"
"""


def two_nodes(*flags):
    """Train on two "nodes" of two processes each; both must end well."""
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", *meeting]
    launcher += ["--nproc_per_node=2", "--local-addr=127.0.0.1"]
    command = [*launcher, str(ROOT / "train_gpt2.py"), *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    nodes = [subprocess.Popen(command, env=LOOPBACK, **pipes) for _ in range(2)]
    outputs = [node.communicate(timeout=TIMEOUT_S)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs


def losses(run_dir):
    """Training and validation losses, as logged."""
    return [*series(run_dir, "train_loss").values(), *series(run_dir, "val_loss").values()]


def test_two_nodes_of_two_ranks_with_fsdp_equal_one_process(tiny_flags, tmp_path):
    flags = [*tiny_flags, "--micro-batch-size=2"]
    two_nodes(*flags, "--parallel=fsdp", "--run-name=two")
    main([*flags, "--run-name=one"])
    expected = losses(tmp_path / "runs/one")
    assert len(expected) == 8 + 3
    assert losses(tmp_path / "runs/two") == pytest.approx(expected, rel=0, abs=1e-5)


# --- Slurm ------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path):
    """A folder to submit from, and what runs the script in it as Slurm does, on two nodes."""
    (tmp_path / "bin").mkdir()
    for name, content in (("srun", SRUN), ("scontrol", SCONTROL), ("stand-in", PYTHON)):
        (tmp_path / "bin" / name).write_text(content)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "train_gpt2.py").symlink_to(ROOT / "train_gpt2.py")
    slurm = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "MASTER_PORT": str(free_port()),
        "PROCESSES_PER_NODE": "1",
        "PYTHON": "stand-in",
    }

    def start(*args, **environment):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        environment = LOOPBACK | slurm | environment
        return subprocess.Popen(["bash", str(SCRIPT), *args], cwd="/", env=environment, **pipes)

    return start


@pytest.mark.parametrize(
    ("environment", "code", "requeued"),
    [
        ({}, 0, False),
        ({"STATUS": "1"}, 1, False),
        ({"MARK": "step 9", "STATUS": "1"}, 0, True),  # torchrun that was signalled fails
        ({"MARK": "step 4", "STATUS": "1"}, 1, False),  # no progress since the time before
        ({"MARK": "step 9", "PREFLIGHT": "3"}, 3, False),  # trains nothing
    ],
)
def test_slurm_job_is_requeued_where_it_was_preempted_again(
    job, tmp_path, environment, code, requeued
):
    if "MARK" in environment:
        (tmp_path / "runs/a").mkdir(parents=True)
        (tmp_path / "runs/a/PREEMPTED").write_text("step 4\n")
    started = job("a", "--max-steps=9", **environment)
    output = started.communicate(timeout=TIMEOUT_S)[0]
    assert started.returncode == code, output
    assert (tmp_path / "requeued").exists() == requeued
    launches = (tmp_path / "launches").read_text().splitlines()
    assert len(launches) == (2 if "PREFLIGHT" in environment else 4)  # on two nodes
    assert all("--nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d" in each for each in launches)
    assert launches[-1].endswith("--max-steps=9 --out-dir=runs --run-name=a --resume=auto")


def test_slurm_job_without_a_name_says_how_it_is_used(job):
    started = job("--max-steps=9")
    assert started.communicate(timeout=TIMEOUT_S)[0].startswith("usage: sbatch")
    assert started.returncode == 2


def test_slurm_job_saves_at_usr1_is_requeued_and_goes_on(job, tmp_path, tiny_flags):
    flags = [*tiny_flags, "--val-every=0", "--checkpoint-every=0"]
    run_dir, python = tmp_path / "runs/a", {"PYTHON": sys.executable}
    first = job("a", *flags, "--max-steps=100000", **python)
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + TIMEOUT_S
    while not metrics.exists() or len(read_metrics(metrics)) < 3:
        assert first.poll() is None, first.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for pid in (tmp_path / "pids").read_text().splitlines()[-1].split():
        os.kill(int(pid), signal.SIGUSR1)
    output = first.communicate(timeout=TIMEOUT_S)[0]
    assert first.returncode == 0, output
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    stopped = max(r["step"] for r in read_metrics(metrics))
    assert f"SIGUSR1: stopped after step {stopped}; " in output

    # The queued job resumes; here on one rank, which takes less time.
    main([*flags, "--run-name=a", "--resume=auto", f"--max-steps={stopped + 2}"])
    assert list(series(run_dir, "lr")) == list(range(1, stopped + 3))
    assert not (run_dir / "PREEMPTED").exists()
