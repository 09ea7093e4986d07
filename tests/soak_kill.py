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
from conftest import ROOT, TINY_RUN, torchrun

sys.path.insert(0, str(ROOT))

from fineweb_runs import contents, start_fineweb, texts_of, write_texts

from corpus.shards import SHARD_MANIFEST, Manifest, verify_shards
from runtime.checkpoint import latest_checkpoint, verify_checkpoint
from runtime.cli import parse_flags, run_command
from runtime.metrics import read_metrics

TRAIN_STEPS = 150
KILLS_A_RUN = 6
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
    rng, tally = random.Random(config.seed), Counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        kinds = (TokenizeSoak, TrainSoak)
        soaks = [kind(Path(folder) / kind.__name__, rng, tally) for kind in kinds]
        while (left := config.kills - kills_of(tally)) > 0:
            soaks[tally["runs"] % len(soaks)].one_run(min(left, KILLS_A_RUN))
            tally["runs"] += 1
            print(describe(tally), flush=True)
    if tally["shards lost"] or tally["steps lost"] or tally["other faults"]:
        raise SystemExit(1)


def kills_of(tally):
    return sum(count for kind, count in tally.items() if kind.startswith("kill of "))


def describe(tally):
    """One line: kills by kind, what went on, what was lost."""
    kinds = [f"{kind[8:]} {n}" for kind, n in sorted(tally.items()) if kind.startswith("kill of ")]
    return (
        f"{kills_of(tally)} kills ({', '.join(kinds)}) in {tally['runs']} runs | "
        f"resumed {tally['resumed']} times | "
        f"steps lost beyond the last saved one: {tally['steps lost']} | "
        f"shards lost or changed, so documents lost or repeated: {tally['shards lost']} | "
        f"other faults: {tally['other faults']}"
    )


# Tokenising


class Soak:
    """What tokenising and training have in common."""

    def __init__(self, folder, rng, tally):
        self.folder, self.rng, self.tally, self.runs = folder, rng, tally, 0
        folder.mkdir()
        self.prepare()

    def fault(self, kind, message):
        self.tally[kind] += 1
        print(f"{kind}: {message}", flush=True)


class TokenizeSoak(Soak):
    """Kill fineweb.py."""

    def prepare(self):
        write_texts(self.folder / "a.jsonl", texts_of(20_000))
        self.whole = self.folder / "whole"
        start = time.monotonic()
        self.finish("whole")
        self.seconds = time.monotonic() - start

    def start(self, name):
        flags = ["--source=a.jsonl", "--shard-size=5000", "--workers=2", f"--data-dir={name}"]
        return start_fineweb(self.folder, *flags)

    def finish(self, name):
        process = self.start(name)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        if process.returncode:
            self.fault("shards lost", f"{name} did not finish: {errors[-500:]}")

    def one_run(self, kills):
        """Kill a run up to `kills` times, finish it, compare it with the uninterrupted one."""
        self.runs += 1
        name = f"run{self.runs}"
        killed = self.folder / name
        for _ in range(kills):
            process = self.start(name)
            time.sleep(self.rng.uniform(0, self.seconds))
            process.kill()
            process.communicate()
            if process.returncode == 0:  # it was faster than the kill
                break
            self.tally["kill of fineweb.py"] += 1
            self.tally["resumed"] += 1
            self.check(killed)
        self.finish(name)
        if contents(killed) != contents(self.whole):
            self.fault("shards lost", f"{killed} is not as in an uninterrupted run")

    def check(self, killed):
        """The finished shards of a killed run are those of the uninterrupted one."""
        if (killed / SHARD_MANIFEST).exists():
            try:
                verify_shards(killed, Manifest.load(killed).shards)
            except (OSError, ValueError) as error:
                self.fault("shards lost", str(error))
        for path in killed.glob("*.npy"):
            if path.read_bytes() != (self.whole / path.name).read_bytes():
                self.fault("shards lost", f"{path} is not as in an uninterrupted run")


# Training


class TrainSoak(Soak):
    """Kill train_gpt2.py: one process or, every third run, two ranks under torchrun.

    Half of the runs keep one checkpoint only. They go on by `--resume auto` or by their path.
    """

    def prepare(self):
        (self.folder / "data").mkdir()
        steps = np.random.default_rng(0).integers(0, 3, 60_000)
        tokens = (np.cumsum(steps) % 400).astype(np.uint16)
        np.save(self.folder / "data" / "val_000000.npy", tokens[:2000])
        np.save(self.folder / "data" / "train_000001.npy", tokens[2000:])
        self.references = {}

    def start(self, name, ranks, keep=0):
        run_dir = self.folder / "runs" / name
        way = self.rng.choice(["auto", run_dir if latest_checkpoint(run_dir) else "auto"])
        flags = [f"--data-dir={self.folder}/data", f"--out-dir={self.folder}/runs", *TINY_RUN]
        flags += ["--total-batch-size=64", "--micro-batch-size=1", "--val-every=30"]
        flags += [f"--max-steps={TRAIN_STEPS}", "--checkpoint-every=3"]
        flags += [f"--keep-checkpoints={keep}", f"--resume={way}", f"--run-name={name}"]
        one = [sys.executable, str(ROOT / "train_gpt2.py"), *flags]
        with (self.folder / "errors.txt").open("a") as errors:
            return subprocess.Popen(
                one if ranks == 1 else torchrun("train_gpt2.py", *flags, processes=ranks),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def finish(self, name, ranks, keep=0):
        process = self.start(name, ranks, keep)
        process.communicate(timeout=TIMEOUT_S)
        if process.returncode:
            errors = (self.folder / "errors.txt").read_text()[-500:]
            self.fault("other faults", f"{name} did not finish: {errors}")

    def losses(self, name):
        """Each step's training loss, exactly as logged."""
        records = read_metrics(self.folder / "runs" / name / "metrics.jsonl")
        return {record["step"]: record["train_loss"] for record in records if "lr" in record}

    def reference(self, ranks):
        """The losses of an uninterrupted run."""
        if ranks not in self.references:
            self.finish(f"whole{ranks}", ranks)
            self.references[ranks] = self.losses(f"whole{ranks}")
        return self.references[ranks]

    def one_run(self, kills):
        """Kill a run up to `kills` times, finish it, compare it with the uninterrupted one."""
        self.runs += 1
        ranks, name, keep = 2 if self.runs % 3 == 0 else 1, f"run{self.runs}", self.runs % 2
        reference, run_dir = self.reference(ranks), self.folder / "runs" / name
        saved = 0  # the last step that a run said it had saved
        for _ in range(kills):
            process = self.start(name, ranks, keep)
            lines = self.read_until_the_moment(process)
            kind = self.kill(process, ranks)
            lines += process.communicate(timeout=TIMEOUT_S)[0].splitlines()
            saved = max([saved, *map(saved_step, lines)])
            if process.returncode == 0:
                break
            self.tally[f"kill of {kind}"] += 1
            self.tally["resumed"] += self.check(run_dir, saved)
        self.finish(name, ranks, keep)
        if self.losses(name) != reference:
            self.fault("steps lost", f"{name}: the losses are not the uninterrupted run's")
        if leftovers := list(run_dir.glob("checkpoints/.*")):
            self.fault("other faults", f"left over: {leftovers}")

    def read_until_the_moment(self, process):
        """Follow the console up to a random step or save, and wait a little longer."""
        lines, count, sought = [], 0, self.rng.choice(["| loss", "| saved"])
        wanted = self.rng.randrange(1, 30 if sought == "| loss" else 10)
        for line in process.stdout:
            lines.append(line)
            count += sought in line
            if count == wanted:
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
        if left := psutil.wait_procs(workers, timeout=TIMEOUT_S)[1]:
            self.fault("other faults", f"{left} outlived the kill")
        return kind

    def check(self, run_dir, saved):
        """The newest checkpoint is whole, and no older than the last that was said to be saved."""
        checkpoint = latest_checkpoint(run_dir)
        step = int(checkpoint.name.removeprefix("step_")) if checkpoint else 0
        if step < saved:
            self.fault("steps lost", f"{run_dir} had saved step {saved}, and has step {step}")
        if checkpoint is not None:
            try:
                verify_checkpoint(checkpoint)
            except (OSError, ValueError) as error:
                self.fault("steps lost", str(error))
        return checkpoint is not None


def saved_step(line):
    """The step of a console line `step N | saved PATH`; 0 of any other."""
    return int(line.split()[1]) if "| saved" in line else 0


if __name__ == "__main__":
    run_command(main)
