"""Run the whole pipeline on this machine: text → shards → a GPT-2 → samples, export and figures.

    python demo.py             # on Python's standard library, offline, in minutes (make demo)
    python demo.py mine.txt    # on your own text, files or folders; the same command resumes it

Each step is a command of this project, printed before it runs.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

from corpus.shards import Manifest
from formats.metrics import logged_values, read_metrics
from runtime.cli import PathOrName, format_duration, parse_flags, run_command
from runtime.errors import RunStopped, UserError
from runtime.files import read_json

REDRAW_SECONDS = 60.0
NUM_SAMPLES = 8  # of 100 tokens, searched for copies
OTHER_NAMES = ("stdlib", "trials")  # folders of this command without a text, and of bench.trial


@dataclass(frozen=True)
class DemoConfig:
    """Train a GPT-2 on this machine, from text to samples, export and figures."""

    text: tuple[PathOrName, ...] = ()
    """Files and folders of your own text; --text may be left out. Default: Python's library."""
    short: bool = False
    """Train on Python's library for half as many steps, as a quick check that everything works."""

    def __post_init__(self) -> None:
        if missing := [path for path in self.text if not Path(path).exists()]:
            raise UserError(f"{missing[0]} does not exist: pass a file or a folder of text")
        if self.text and self.short:
            raise UserError("--short is for Python's library: leave it out")


def main() -> None:
    """Run all commands in order and print a summary."""
    args = sys.argv[1:]
    has_text = bool(args) and not args[0].startswith("-")
    config = parse_flags(DemoConfig, ["--text", *args] if has_text else args)
    # A file keeps the name of its link, which may have the ending that the linked file lacks.
    texts = [p.resolve() if p.is_dir() else p.absolute() for p in map(Path, config.text)]
    os.chdir(Path(__file__).parent)  # the commands are here, and the run is written here
    start = time.perf_counter()
    name = find_name(*texts) if texts else new_name()
    run_dir, export_dir = Path("runs", name), Path("exported", name)
    if texts:
        train = prepare(texts, name)
    else:
        step("Python's library → token shards", "fineweb.py", "--source=stdlib", "--no-propose")
        train = ["--config=recipes/demo.json", f"--run-name={name}"]
        train += ["--max-steps=270"] if config.short else []
    print(f"\nevery minute, the loss curve so far: {run_dir / 'figures' / 'loss.png'}")
    (run_dir / "PREEMPTED").unlink(missing_ok=True)  # written if the trainer is stopped
    step("shards → a GPT-2", "train_gpt2.py", *train, meanwhile=("plot.py", str(run_dir)))
    metrics = run_dir / "metrics.jsonl"
    if (run_dir / "PREEMPTED").exists() or not logged_values(metrics, "finished_step"):
        raise RunStopped("the run is not complete; on your own text, the same command continues it")
    prompt = [] if texts else ["--prompt=def read"]
    step("samples", "sample.py", f"--model={run_dir}", *prompt, "--num-samples=2")
    if not texts:
        scored = (f"--model={run_dir}", "--data=assets/hellaswag_sample.jsonl")
        step("HellaSwag scorer on 24 sample rows (NOT the benchmark)", "hellaswag.py", *scored)
    step("export for Hugging Face", "export.py", f"--model={run_dir}", f"--out={export_dir}")
    step("figures", "plot.py", str(run_dir))
    scores = [r for r in read_metrics(metrics) if "val_loss" in r]
    losses = [score["val_loss"] for score in scores]
    if not texts and losses[-1] > losses[0] - 1:
        raise RunStopped(f"the model did not learn: validation losses {losses}")
    print(f"\n=== done in {format_duration(time.perf_counter() - start)}, in {Path.cwd()}")
    if losses:  # a short text has no validation split
        bits = f"{scores[-1]['val_bpb']:.2f} bits per byte"
        print(f"held-out text    {losses[-1]:.2f} nats per token, from {losses[0]:.2f}; {bits}")
    if texts:
        print(describe_memory(run_dir, losses[-1] if losses else None))
    print(
        f"run, samples     {run_dir}\n"
        f"loss curve       {run_dir / 'figures' / 'loss.png'}\n"
        f"for transformers {export_dir}\n"
        f"next: source .venv/bin/activate; python sample.py --model {run_dir} --interactive"
    )


def prepare(texts: list[Path], name: str) -> list[str]:
    """Tokenize texts and estimate how long training takes; return the flags of the run."""
    from training.propose import propose_training  # imports torch, which takes seconds

    data_dir = Path("data", name)
    print(f"tokens, run and export are named {name}; a changed text gets another name")
    source = (*map(str, texts), f"--data-dir={data_dir}", "--no-propose")
    step("your text → token shards", "fineweb.py", "--source", *source)
    manifest = Manifest.load(data_dir)
    assert manifest is not None  # fineweb.py has just written it
    command = propose_training(data_dir, manifest)
    script = next(n for n, word in enumerate(command) if word.endswith("train_gpt2.py"))
    train = [*command[script + 1 :], f"--run-name={name}"]
    if not Path("runs", name).exists():
        step("how long will it take?", "train_gpt2.py", *train, "--plan")
        print("Ctrl-C saves the run, and the same command continues it.", flush=True)
    return [*train, "--resume=auto"]


def describe_memory(run_dir: Path, val_loss: float | None) -> str:
    """Return lines with the loss on as much training text, and the copied fraction of samples."""
    import torch  # takes seconds, as most of these imports

    from corpus.overlap import open_training_text
    from corpus.shards import open_shards
    from dataloader import read_windows, to_batch, validation_windows
    from formats.load import load_with_state
    from runtime.device import select_device
    from runtime.precision import inference, select_dtype
    from sample import describe_copies, sample_rows

    device = select_device("auto")
    dtype = select_dtype("auto", device)
    model, checkpoint = load_with_state(run_dir, device)
    train, T = open_training_text(checkpoint), model.config.block_size
    assert checkpoint is not None  # otherwise, its text would be unknown
    settings = checkpoint.state.train_config
    val = open_shards(settings["data_dir"], "val", is_optional=True)
    max_tokens = len(validation_windows(val, T, settings["val_tokens"])) * T
    starts = validation_windows(train, T, max_tokens or settings["val_tokens"]) * T
    with torch.no_grad(), inference(model, device, dtype):
        windows = (
            read_windows(train, start, T, model.config.vocab_size) for start in starts[:, None]
        )
        losses = [float(model(*to_batch(window, device)).loss) for window in windows]
    loss = sum(losses) / len(losses)
    learned = f"training text    {loss:.2f} nats per token"
    if val_loss is not None:
        learned += f" on as many tokens; learned by heart: {val_loss - loss:+.2f}"
    rows = sample_rows(model, "", NUM_SAMPLES, seed=1337, dtype=dtype)
    copied = describe_copies(rows, "", train).splitlines()[0].removeprefix("copied: ")
    return f"{learned}\ncopied           {copied}"


def find_name(text: Path, *more: Path) -> str:
    """Return the name whose dataset has exactly these texts, else the first unused name.

    The first choice is the name of the file without its ending, or the name of the folder.
    """
    from fineweb import FineWebConfig, find_source

    with redirect_stdout(None):  # fineweb.py prints the same
        _, open_source = find_source(FineWebConfig(source=tuple(map(str, (text, *more)))))
    identity, unused = open_source({}).identity, list[str]()
    hashes = [*identity["contents"].values()]
    names = [text.name, text.stem] if text.is_dir() else [text.stem, text.name]
    names += [f"{text.name}-{number}" for number in range(2, 1000)]
    for name in (re.sub(r"[^\w.-]+", "-", name) for name in names):
        data, run_config = Path("data", name), Path("runs", name, "config.json")
        if run_config.exists() and read_json(run_config).get("data_dir") != str(data):
            continue
        if manifest := Manifest.load(data):
            # Earlier versions did not record the contents.
            known = [*manifest.source.get("contents", identity["contents"]).values()]
            if (manifest.source.get("files"), known) == (identity["files"], hashes):
                return name
        if not (any(data.glob("[!.]*")) or name in OTHER_NAMES):
            unused.append(name)
    return unused[0]


def new_name() -> str:
    """Return `demo` or the first unused name of `demo-2`, …, so that earlier runs are kept."""
    names = ["demo", *(f"demo-{number}" for number in range(2, 10_000))]
    return next(n for n in names if not Path("runs", n).exists() | Path("exported", n).exists())


def step(title: str, script: str, *flags: str, meanwhile: Sequence[str] = ()) -> None:
    """Print and run one of the project's commands; if it fails, exit with its code.

    Every minute, run `meanwhile` without output: it may fail as long as there is nothing to show.
    """
    print(f"\n=== {title}\n$ python {shlex.join([script, *flags])}", flush=True)
    with subprocess.Popen([sys.executable, script, *flags]) as child:
        signal.signal(signal.SIGTERM, lambda *_: child.terminate())  # a run is saved first
        signal.signal(signal.SIGINT, lambda *_: None)  # the terminal also sends it to the child
        while meanwhile and child.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                child.wait(REDRAW_SECONDS)
                break
            subprocess.run([sys.executable, *meanwhile], capture_output=True, check=False)
        code = child.wait()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    run_command(main)
