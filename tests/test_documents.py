"""What documents tell a reader to type works: programs, flags, files, patches, links, imports."""

import ast
import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import MISSING, fields, replace
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT
from forked import free_port

from bench.__main__ import BenchConfig
from bench.measurement import split_flags
from bench.recipes import RecipesConfig
from bench.trial import TrialConfig
from demo import DemoConfig
from export import ExportConfig
from fineweb import FineWebConfig
from hellaswag import HellaSwagConfig
from model import GPT2_SIZES
from plot import PlotConfig
from read_step import ReadStepConfig
from replay import ReplayConfig
from runtime.cli import POSITIONAL, _field_docstrings, flag_of, parse_flags, read_flags
from sample import SampleConfig
from train_plain import PlainConfig
from training.config import TrainConfig
from training.recipe import read_recipe

DOCS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "edits/README.md"]
PROGRAMS = {  # the class of its flags, and the flags that name what it reads
    "bench": (BenchConfig, "peer"),
    "bench.recipes": (RecipesConfig, "source recipe"),
    "bench.trial": (TrialConfig, "edit base"),
    "demo.py": (DemoConfig, "text"),
    "export.py": (ExportConfig, "model"),
    "fineweb.py": (FineWebConfig, "source val_source"),
    "hellaswag.py": (HellaSwagConfig, "model data"),
    "plot.py": (PlotConfig, "runs"),
    "read_step.py": (ReadStepConfig, "runs model data_dir"),
    "replay.py": (ReplayConfig, "runs"),
    "sample.py": (SampleConfig, "model compare_to score"),
    "train_gpt2.py": (TrainConfig, "config init_from resume hellaswag_data"),
    "train_plain.py": (PlainConfig, "data_dir"),
}
# A reader's own: a text, what `python demo.py mine.txt` makes, and the text of docs/edits.md.
OWN = ("mine.txt", "data/mine", "runs/mine", "exported/mine", "wikipedia_en_sample.parquet")
OTHERS = ("apt", "gguf/bin/pip", "gguf/bin/python", "jq", "lm_eval", "ollama", "printf", "tail")
SHELL = ("cd", "source", "pip", "sbatch", "launch()", *OTHERS)
# What a flag may name besides a file: a word, a name on the hub, what a reader or a shell replaces.
WORDS = re.compile(r"auto|worktree|base|stdlib|fineweb(-edu)?|transformers|[A-Z]+/[A-Z]+|.*[…$].*")


BLOCK = re.compile(r"```.*?```", re.DOTALL)


def commands_of(text):
    """Return the words of each command in a document: in its blocks, then in its lines."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = BLOCK.sub("", text).replace("\n", " ")
    blocks += re.findall(r"`((?:(?:python|torchrun) [^`]*\.py|git checkout|hf auth)[^`]*)`", lines)
    commands = [[]]
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        line = re.sub(r" > \S+", "", line).replace("$SLURM_ARRAY_TASK_ID", "0")
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word in ("&&", "|"):
                commands.append([])
            else:
                commands[-1].append(word)
    return [words for words in commands if words]


def problems_of(text):
    """Return what does not work if somebody types a document's commands in their order."""
    known = {*OWN}  # what is in the reader's folder, besides the repository
    found = [(shlex.join(words), problem_of(words, known)) for words in commands_of(text)]
    left = [(name, "an edit that is not taken back") for name in known if name.endswith(".patch")]
    return [f"{line}: {problem}" for line, problem in found + left if problem]


def problem_of(words, known):
    """Return why a command does not work, or an empty text; add what it writes to `known`."""
    name, *rest = words
    if name in ("python", "python3", "torchrun"):
        return problem_of_python(rest, known)
    if name == "launch":  # a function of the shell that docs/many_machines.md defines
        return problem_of_python(["train_gpt2.py", *rest], known)
    if name == "make":
        known |= {"data/stdlib", "runs/demo", "exported/demo"} if rest == ["demo"] else set()
        targets = re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return "" if rest[0] in targets else f"there is no target {rest[0]}"
    if name == "git":
        return problem_of_git(rest, known)
    if name == "hf":
        known |= {rest[n + 1] for n, word in enumerate(rest) if word == "--local-dir"}
        known |= {"login"} if rest[0] == "auth" else set()
        return "hf auth login comes first" if rest[0] == "upload" and "login" not in known else ""
    if name not in SHELL:
        return f"this test does not know {name}"
    return missing([w for w in rest if re.match(r"requirements.*\.txt$|scripts/", w)], known)


def problem_of_git(words, known):
    """Return why a command of git does not work, or loses something."""
    if words == ["checkout", "."]:
        return "it discards all other changes, too"
    if any("EXAMPLE" in word for word in words):
        return "it cannot be pasted"
    if words[0] != "apply" or words[-1] == "kept.patch":  # which the command above it writes
        return ""
    known ^= {words[-1]}  # applied, or taken back
    check = ["git", "-C", ROOT, "apply", "--check", words[-1]]
    return subprocess.run(check, capture_output=True, text=True).stderr


def problem_of_python(words, known):
    """Return why a script, a module or a line of code does not work."""
    starts = [n for n, word in enumerate(words) if word in ("-m", "-c") or word.endswith(".py")]
    if not starts:
        return "there is no script"
    name, *args = words[starts[0] + (words[starts[0]] in ("-m", "-c")) :]
    if words[starts[0]] == "-c":
        return problem_of_code(name)
    if name == "venv":
        known.add(args[0])
        return ""
    if name not in PROGRAMS:
        return f"there is no program {name}"
    config_class, read = PROGRAMS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [name, *args])
        try:
            if name == "train_gpt2.py":
                return problem_of_run(args, known)
            if name == "demo.py":  # its settings check that the text exists
                values = {"text": [arg for arg in args if not arg.startswith("-")]}
            elif name.startswith("bench"):
                config, flags = split_flags(config_class)
                problem = problem_of_run(flags, known | {"data/fineweb-edu-10BT"}) if flags else ""
                if problem:
                    return problem
                values = vars(config)
            else:
                values = vars(parse_flags(config_class, args))
        except ValueError as error:
            return str(error)
    paths = [path for field in read.split() for path in paths_in(values[field])]
    if problem := missing(paths, known):
        return problem
    if name == "demo.py":
        stem = Path(values["text"][0]).stem if values["text"] else "demo"
        known |= {f"{folder}/{stem}" for folder in ("data", "runs", "exported")} | {"data/stdlib"}
    elif name == "fineweb.py":
        source = {"fineweb-edu": "fineweb-edu-10BT"}.get(values["source"][0], values["source"][0])
        known.add(str(values["data_dir"] or f"data/{source}"))
    elif name == "bench.recipes":
        known |= {f"runs/recipes/{values['scale']}"}
    known |= {str(values[field]) for field in ("out", "compare") if values.get(field)}
    return ""


def problem_of_run(args, known):
    """Return why `train_gpt2.py` does not start: flags, files, data, a run folder in use."""
    flags = read_flags(TrainConfig, args)
    _, read = PROGRAMS["train_gpt2.py"]
    if problem := missing([p for field in read.split() for p in paths_in(flags.get(field))], known):
        return problem
    recipe = flags.get("config")
    config = replace(read_recipe(recipe) if recipe and recipe.exists() else TrainConfig(), **flags)
    is_known_run = config.resume not in (None, "auto") or (recipe and not recipe.exists())
    if not (is_known_run or config.plan) and (problem := missing([str(config.data_dir)], known)):
        return problem
    if config.run_name and not config.plan:
        run = f"{config.out_dir}/{config.run_name}"
        if run in known and config.resume is None:
            return f"{run} already holds a run"
        known.add(run)
    return ""


def problem_of_code(code):
    """Return why Python code cannot run: its syntax, or what it imports from this project."""
    try:
        for node in ast.walk(ast.parse(code)):
            name = node.module if isinstance(node, ast.ImportFrom) else ""
            if name and (ROOT / f"{name.replace('.', '/')}.py").exists():
                for alias in node.names:
                    getattr(importlib.import_module(name), alias.name)
    except (SyntaxError, ImportError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def paths_in(value):
    """Return the files and folders that a flag names."""
    values = [] if value is None else [value] if isinstance(value, (str, Path)) else value
    words = [word for each in values for word in str(each).split() if not word.startswith("--")]
    return [word for word in words if word not in GPT2_SIZES and not WORDS.fullmatch(word)]


def missing(paths, known):
    """Return an error that names the files and folders that neither exist nor were written."""
    found = [path for path in paths if not is_there(path.removesuffix("@best"), known)]
    return f"{', '.join(found)}: not in the repository, and nothing above writes it" * bool(found)


def is_there(path, known):
    folders = {path, *map(str, Path(path).parents)} - {"."}
    return not folders.isdisjoint({*known}) or (ROOT / path).exists()


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_document_tells_to_type_works(path):
    text = path.read_text(encoding="utf-8")
    assert problems_of(text) == []
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        assert problem_of_code(code) == ""


MISTAKES = {  # a command, and what is wrong with it
    "python tran_gpt2.py": "there is no program tran_gpt2.py",
    "python sample.py --modle runs/mine": "did you mean --model?",
    "python fineweb.py --source mine.txt --val-share 0.7": "--val-share must be",
    "python train_gpt2.py --config recipes/gpt2-5m.json --data-dir data/mine": "gpt2-5m.json: not",
    "python train_gpt2.py --data-dir data/other": "data/other: not in the repository",
    "python train_gpt2.py --max-steps 9": "data/fineweb-edu-10BT: not in the repository",
    "python train_gpt2.py --data-dir data/mine --run-name mine": "runs/mine already holds a run",
    "python -m bench.trial --data-dir data/mine --edit edits/rotari.patch": "rotari.patch: not",
    "python -m bench.trial --data-dir data/mine --edit base --max-stepz=9": "did you mean --max-s",
    "git apply -R edits/rotari.patch": "can't open patch 'edits/rotari.patch'",
    "git clone https://EXAMPLE.COM/COPY.git": "it cannot be pasted",
    "git checkout .": "it discards all other changes",
    "hf upload OWNER/NAME exported/mine": "hf auth login comes first",
    "make demos": "there is no target demos",
    "pip install -r requirements-all.txt": "requirements-all.txt: not in the repository",
    "pyton demo.py": "this test does not know pyton",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_in_a_document_is_found(command):
    problem, *_ = problems_of(f"```sh\n{command}    # why\n```\n")
    assert MISTAKES[command] in problem


def test_what_an_earlier_command_writes_can_be_read():
    text = "```sh\npython fineweb.py --source mine.txt \\\n    --data-dir data/new\n"
    text += "python train_plain.py --data-dir data/new\n```\n"
    assert problems_of(text) == []
    [problem] = problems_of(f"{text}```sh\ngit apply edits/relu2.patch\n```\n")
    assert "not taken back" in problem
    assert len(problems_of(text.replace("--data-dir data/new\n```", "--data-dir new\n```"))) == 1
    assert "no attribute 'Gpt'" in problem_of_code("from model import GPT, Gpt")


SMALLER = {  # flags that make a command of README.md smaller
    "demo.py": "",
    "export.py": "",
    "train_gpt2.py": "--n-layer=1 --block-size=64 --total-batch-size=256",
    "bench.trial": "--max-steps=2 --warmup-steps=1 --seeds=1 --n-layer=1 --val-tokens=2048",
    "sample.py": f"--no-browser --port={free_port()}",
}


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="clones the repository")
def test_commands_of_the_readme_run_in_order_in_a_fresh_clone(tmp_path):
    """Those that need no network and no GPU. `.ci/run` runs `make demo`."""
    clone, ran = tmp_path / "clone", []
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    (clone / "mine.txt").write_text(Path(ast.__file__).read_text()[:8_000])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    start = partial(subprocess.Popen, cwd=clone, text=True, env=os.environ | {"PATH": path})
    stdlib = ["python", "fineweb.py", "--source=stdlib", "--max-tokens=200k"]
    blocks = "\n".join(BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    for words in [stdlib, *commands_of(blocks)]:
        name = words[2] if words[1:2] in (["-m"], ["-c"]) else words[1]
        if words == stdlib or (
            words[0] == "python" and name in SMALLER and words[1:] != ["demo.py"]
        ):
            words = [*words, *SMALLER.get(name, "").split()]
        elif words[:2] != ["python", "-c"]:
            continue
        ran.append(name)
        with start(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as program:
            if name == "sample.py":
                assert program.stdout.readline().startswith("http://127.0.0.1:")
                program.send_signal(signal.SIGINT)
            shown = program.communicate()[0]
        assert program.returncode == 0, (words, shown)
    assert {*SMALLER} < {*ran}


def anchors_of(path):
    """Return the anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_headings(path):
    for target, anchor in re.findall(r"\]\(([\w./]*)#([^)]*)\)", path.read_text(encoding="utf-8")):
        assert anchor in anchors_of(path.parent / target if target else path), (target, anchor)


EDITS_PAGE = """\
# Edits

Each patch begins with what it does, its source, what to mind and whether the result exports as a
GPT-2. `git apply edits/NAME.patch` applies one, and `git apply -R edits/NAME.patch` takes it back.
[Effects](../docs/edits.md) has measurements. The tests make this page from the patches.

| patch | what it does | exports |
| --- | --- | --- |
"""
FLAGS_PAGE = """\
# All flags

What `--help` prints, on one page: each program's flags with their defaults. The tests make this
page from the code. `--NAME` and `--no-NAME` are the two values of a switch.
"""


def edits_page():
    """Return the index of the edits, from the heads of the patches."""
    rows = []
    for path in sorted((ROOT / "edits").glob("*.patch")):
        head = " ".join(path.read_text(encoding="utf-8").partition("\ndiff --git")[0].split())
        first = re.split(r"(?<=\.)\s", head, maxsplit=1)[0].replace("|", r"\|")
        exports = re.search(r"Export: (.*?)[,:.; ]", head)[1]
        rows.append(f"| [{path.stem}]({path.name}) | {first} | {exports} |\n")
    return EDITS_PAGE + "".join(rows)


def flags_page():
    """Return all flags of all programs, from their dataclasses."""
    lines = []
    for name, (config_class, _) in PROGRAMS.items():
        program = f"python {name}" if name.endswith(".py") else f"python -m {name}"
        lines += ["", f"## {program}", "", *flags_of(config_class)]
    return FLAGS_PAGE + "\n".join(lines) + "\n"


def flags_of(config_class):
    """Yield the lines of a table with a class's flags: name, default and meaning."""
    yield from ("| flag | default | meaning |", "| --- | --- | --- |")
    docstrings = _field_docstrings(config_class)
    for field in fields(config_class):
        default = field.default
        if isinstance(default, bool):
            default = "on" if default else "off"
        elif isinstance(default, tuple):
            default = " ".join(default)
        elif default is None or default is MISSING:
            default = ""
        name = field.name.upper() if field.metadata == POSITIONAL else flag_of(field.name)
        meaning = docstrings[field.name].replace("|", r"\|")
        yield f"| `{name}` | {default} | {meaning} |"


PAGES = {ROOT / "edits/README.md": edits_page, ROOT / "docs/flags.md": flags_page}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_generated_pages_are_those_of_the_code(path):
    """If this fails, run `python -m tests.test_documents`, which writes them."""
    assert path.read_text(encoding="utf-8") == PAGES[path]()


if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page(), encoding="utf-8")
