"""Kill tokenising and training with -9 at random moments, many times, and count what was lost.

python tests/soak_kill.py --kills 200 --seed 0        # by hand: pytest does not collect it
"""

import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from conftest import ROOT, TINY_RUN, series, torchrun

sys.path.insert(0, str(ROOT))

from fineweb_runs import contents, start_fineweb, texts_of, write_texts

from corpus.shards import SHARD_MANIFEST, Manifest, verify_shards
from formats.checkpoint import verify_checkpoint
from formats.load import latest_checkpoint
from runtime.cli import parse_flags, run_command

KILLS_PER_RUN = 6
TIMEOUT_S = 1800  # ends a process that hangs; none that is slow


@dataclass(frozen=True)
class SoakConfig:
    """Kill tokenising and training at random moments and count what was lost."""

    kills: int = 200
    """Kills in all."""
    seed: int = 0
    """Chooses the moments."""


def main() -> None:
    """Take turns between the two until there were enough kills; exit 1 if anything was lost."""
    config = parse_flags(SoakConfig)
    rng = random.Random(config.seed)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        soaks = [TokenizeSoak(Path(folder, "texts"), rng), TrainSoak(Path(folder, "runs"), rng)]
        killed = 0
        while killed < config.kills:
            for soak in soaks:
                soak.one_run(min(config.kills - killed, KILLS_PER_RUN))
                killed = sum(count for each in soaks for count in each.kills.values())
            print(f"{killed} kills: {dict(soaks[0].kills + soaks[1].kills)}", flush=True)
    if soaks[0].faults or soaks[1].faults:
        raise SystemExit(1)


class Soak:
    """What tokenising and training have in common."""

    def __init__(self, folder, rng):
        self.folder, self.rng, self.runs, self.kills, self.faults = folder, rng, 0, Counter(), 0
        folder.mkdir()
        self.prepare()

    def expect(self, holds, message):
        if not holds:
            self.faults += 1
            print(f"LOST: {message}", flush=True)

    def expect_valid(self, verify, *args):
        try:
            verify(*args)
        except (OSError, ValueError) as error:
            self.expect(False, error)

    def finish(self, process):
        output = process.communicate(timeout=TIMEOUT_S)
        self.expect(process.returncode == 0, f"a run did not finish: {str(output)[-500:]}")


class TokenizeSoak(Soak):
    """Kill fineweb.py; what it had finished and what it makes at last must be as without kills."""

    def prepare(self):
        write_texts(self.folder / "a.jsonl", texts_of(20_000))
        start = time.monotonic()
        self.finish(self.start("whole"))
        self.seconds = time.monotonic() - start

    def start(self, name):
        flags = ["--source=a.jsonl", "--shard-size=5000", "--workers=2", f"--data-dir={name}"]
        return start_fineweb(self.folder, *flags)

    def one_run(self, kills):
        self.runs += 1
        killed, whole = self.folder / f"run{self.runs}", self.folder / "whole"
        for _ in range(kills):
            process = self.start(killed.name)
            time.sleep(self.rng.uniform(0, self.seconds))
            process.kill()
            process.communicate()
            if process.returncode == 0:  # it was faster than the kill
                break
            self.kills["fineweb.py"] += 1
            if (killed / SHARD_MANIFEST).exists():
                self.expect_valid(verify_shards, killed, Manifest.load(killed).shards)
            for path in killed.glob("*.npy"):
                same = path.read_bytes() == (whole / path.name).read_bytes()
                self.expect(same, f"{path} is not as in an uninterrupted run")
        self.finish(self.start(killed.name))
        self.expect(contents(killed) == contents(whole), f"{killed} is not as without kills")


class TrainSoak(Soak):
    """Kill train_gpt2.py: one process or, every third run, two ranks under torchrun.

    Half of the runs keep one checkpoint only. They go on by `--resume auto` or by their path.
    """

    def prepare(self):
        tokens = (np.cumsum(np.random.default_rng(0).integers(0, 3, 60_000)) % 400).astype("u2")
        np.save(self.folder / "val_000000.npy", tokens[:2000])
        np.save(self.folder / "train_000001.npy", tokens[2000:])
        self.references = {}

    def start(self, name, ranks, keep=0):
        way = self.rng.choice(["auto", self.folder / name])
        if latest_checkpoint(self.folder / name) is None:
            way = "auto"
        flags = [f"--data-dir={self.folder}", f"--out-dir={self.folder}", *TINY_RUN]
        flags += ["--total-batch-size=64", "--micro-batch-size=1", "--val-every=30"]
        flags += ["--max-steps=150", "--checkpoint-every=3", f"--keep-checkpoints={keep}"]
        flags += [f"--resume={way}", f"--run-name={name}"]
        one = [sys.executable, str(ROOT / "train_gpt2.py"), *flags]
        command = one if ranks == 1 else torchrun("train_gpt2.py", *flags, processes=ranks)
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )

    def reference(self, ranks):
        """The losses of an uninterrupted run, exactly as logged."""
        if ranks not in self.references:
            self.finish(self.start(f"whole{ranks}", ranks))
            self.references[ranks] = series(self.folder / f"whole{ranks}", "train_loss")
        return self.references[ranks]

    def one_run(self, kills):
        self.runs += 1
        ranks, name, keep = 2 if self.runs % 3 == 0 else 1, f"run{self.runs}", self.runs % 2
        reference, run_dir = self.reference(ranks), self.folder / name
        saved = 0  # the last step that a run said it had saved
        for _ in range(kills):
            process = self.start(name, ranks, keep)
            lines = self.read_until_the_moment(process)
            kind = self.kill(process, ranks)
            lines += process.communicate(timeout=TIMEOUT_S)[0].splitlines()
            saved = max([saved, *(int(line.split()[1]) for line in lines if "| saved" in line)])
            if process.returncode == 0:
                break
            self.kills[kind] += 1
            latest = latest_checkpoint(run_dir)
            step = int(latest.name.removeprefix("step_")) if latest else 0
            self.expect(step >= saved, f"{run_dir} had saved step {saved}, and has step {step}")
            if latest is not None:
                self.expect_valid(verify_checkpoint, latest)
        self.finish(self.start(name, ranks, keep))
        is_same = series(run_dir, "train_loss") == reference
        self.expect(is_same, f"{name}: the losses are not the uninterrupted run's")
        self.expect(not list(run_dir.glob("checkpoints/.*")), f"{name} left something over")

    def read_until_the_moment(self, process):
        """Follow the console up to a random step or save, and wait a little longer."""
        sought = self.rng.choice(["| loss", "| saved"])
        lines, left = [], self.rng.randrange(1, 30 if sought == "| loss" else 10)
        for line in process.stdout:
            lines.append(line)
            left -= sought in line
            if left == 0:
                break
        time.sleep(self.rng.choice([0.0, self.rng.uniform(0, 0.05)]))
        return lines

    def kill(self, process, ranks):
        """Kill the whole job or, of two ranks, one or only torchrun: then all must end."""
        workers = psutil.Process(process.pid).children()
        kind, victims = f"train_gpt2.py, {ranks} process(es)", [process, *workers]
        if ranks > 1 and len(workers) == ranks:
            kinds = [(kind, victims), ("torchrun alone", [process])]
            kind, victims = self.rng.choice([*kinds, ("one rank of two", workers[:1])])
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        left = psutil.wait_procs(workers, timeout=TIMEOUT_S)[1]
        self.expect(not left, f"{left} outlived the kill")
        return kind


if __name__ == "__main__":
    run_command(main)
