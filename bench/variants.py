"""The versions that a trial compares: a copy of the code of each, its flags, and a hash of both."""

import hashlib
import json
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any, NamedTuple

from bench.measurement import ROOT, device_label, provenance, run_python
from corpus.shards import open_shards
from formats.metrics import find_run
from runtime.cli import as_flags, flag_of
from runtime.device import select_device
from runtime.errors import UserError
from runtime.files import read_json, sha256_of

BASE, WORKTREE = "base", "worktree"
THREADS = 1  # per run
OFF = dict.fromkeys(("hellaswag_every", "sample_every", "checkpoint_every"), 0)
SET_BY_TRIAL = {"seed", "run_name", "out_dir", "resume", "plan", "preflight"}
# What training does not read, as pathspecs: a note in these files does not change a version.
CODE = (".", *(f":!{path}" for path in ("*.md", "*.txt", "docs", "tests", "bench", "edits")))
PRINT_SETTINGS = """
import json, sys
sys.path.insert(0, sys.argv.pop(1))
from runtime.cli import run_command
from training.resume import parse_config
def main():
    config, _ = parse_config(sys.argv[1:])
    print(json.dumps(config.saved() | {"max_minutes": config.max_minutes}))
run_command(main)
"""


class Variant(NamedTuple):
    """Code and flags to train with."""

    name: str
    code: Path
    """Folder with a copy of the code."""
    tree: str
    """The copy as a git tree."""
    flags: tuple[str, ...]
    settings: dict[str, Any]
    """Meaning of the flags in this code, with all defaults and recipes."""
    conditions: dict[str, Any]
    """Everything else that determines a run: hashes of code and data, versions, device, threads."""

    @property
    def digest(self) -> str:
        """Hash of all that determines a run, except its seed."""
        places = ("data_dir", *SET_BY_TRIAL)  # the data's fingerprints are in the conditions
        named = {name: value for name, value in self.settings.items() if name not in places}
        values = json.dumps([named, self.conditions], sort_keys=True)
        return hashlib.sha256(values.encode()).hexdigest()[:8]

    def run_name(self, seed: int) -> str:
        """Return the name of a run's folder."""
        return f"{self.name}-{self.digest}-seed{seed}"

    def changed(self, **settings: object) -> "Variant":
        """Return the same code with other settings."""
        flags = (*self.flags, *as_flags(settings))
        return self._replace(flags=flags, settings=self.settings | settings)

    def scaled(self, setting: str, factor: float) -> "Variant":
        """Return the same code with a setting times a factor; min_lr keeps its ratio to max_lr."""
        value = self.settings.get(setting)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            fix = f"pass {flag_of(setting)}"
            raise UserError(f"--tune {setting} is {value}, not a number above 0: {fix}")
        names = (setting, "min_lr") if setting == "max_lr" else (setting,)
        kind = round if isinstance(value, int) else float
        return self.changed(**{name: kind(self.settings[name] * factor) for name in names})


def build_variants(
    base: str | None, edits: Sequence[str], flags: Sequence[str], folder: Path
) -> list[Variant]:
    """Copy the code of the base and of each edit into `folder`, and read their flags.

    `base` and `edits` are texts as in `TrialConfig`.
    """
    patches, flags = list[str](), (*as_flags(OFF), *flags)
    if base is not None:
        patch, _, base_flags = split_edit(base)
        patches, flags = [patch], (*flags, *base_flags)
    base_code = copy_code(folder / BASE, patches)
    variants = {BASE: new_variant(BASE, base_code, flags)}
    for edit in edits:
        source, files, own_flags = split_edit(edit)
        path = ROOT if source == WORKTREE else Path(source).absolute()
        words = own_flags if source == BASE else (Path(source).absolute().stem, *own_flags)
        name = re.sub(r"\W+", "-", " ".join(words)).strip("-")
        if source != BASE and not path.exists():
            raise UserError(f"--edit {edit}: {source} does not exist")
        if name in variants:
            raise UserError(f"--edit {edit} and another variant are both named {name}: rename it")
        code = base_code
        if path.suffix == ".json":
            settings = read_json(path)
            if not isinstance(settings, dict):
                raise UserError(f"--edit {edit} is not a JSON object of settings")
            # The data and what the trial turns off are the base's; all versions compile, or none.
            skipped = ("about", "compile", "data_dir", *OFF, *SET_BY_TRIAL)
            kept = {key: value for key, value in settings.items() if key not in skipped}
            own_flags = (*as_flags(kept), *own_flags)
        elif source != BASE:
            changes: Any = ([], path, files) if path.is_dir() else ([*patches, source],)
            code = copy_code(folder / name, *changes)
        try:
            variants[name] = new_variant(name, code, (*flags, *own_flags))
        except UserError as error:
            raise UserError(f"--edit {edit}: {error}") from None
        if variants[name].digest == variants[BASE].digest:
            raise UserError(f"--edit {edit} changes neither the code nor the settings of the base")
    return [*variants.values()]


def split_edit(text: str) -> tuple[str, list[str], tuple[str, ...]]:
    """Return the path, the files to take along and the flags of an edit."""
    words = [text] if Path(text).exists() else shlex.split(text)
    n_paths = next((n for n, word in enumerate(words) if word.startswith("-")), len(words))
    path, *files = words[:n_paths] or [BASE]
    return path, files, tuple(words[n_paths:])


def new_variant(name: str, code: tuple[Path, str, str], flags: Sequence[str]) -> Variant:
    """Return a variant whose flags its own code has read; raise UserError if one is invalid.

    On a CPU, it compiles only with `--compile`.
    """
    folder, tree, code_hash = code
    given = {flag.partition("=")[0].replace("_", "-") for flag in flags}
    if taken := sorted(given & {flag_of(setting) for setting in SET_BY_TRIAL}):
        raise UserError(f"leave out {', '.join(taken)}: set by the trial for each run")
    output = run_python("-P", "-c", PRINT_SETTINGS, folder, *flags, folder=Path.cwd())
    settings = json.loads(output.strip().rpartition("\n")[2])
    if settings.pop("max_minutes") is not None:
        raise UserError("leave out --max-minutes: a trial compares equal numbers of --max-steps")
    device = select_device(settings["device"])
    if device.type == "cpu" and "--compile" not in flags:
        flags, settings = ("--no-compile", *flags), settings | {"compile": False}
    conditions = {"code": code_hash, "data": data_hashes(settings), "threads": THREADS}
    conditions |= {"device": device_label(device), "versions": provenance()["versions"]}
    return Variant(name, folder, tree, tuple(flags), settings, conditions)


def data_hashes(settings: Mapping[str, Any]) -> list[str]:
    """Return the fingerprints of the dataset and of other files that settings name."""
    splits = [open_shards(settings["data_dir"], split) for split in ("train", "val")]
    named = filter(None, (settings["init_from"], settings["hellaswag_data"]))
    paths = [path for name in named for path in (find_run(name), *find_run(name).rglob("*"))]
    files = sorted(p for p in paths if p.suffix in (".safetensors", ".jsonl") and p.is_file())
    return [*(split.fingerprint for split in splits), *map(sha256_of, files)]


# --- code -------------------------------------------------------------------------------------


def copy_code(
    target: Path, patches: Sequence[str], source: Path | None = None, files: Sequence[str] = ()
) -> tuple[Path, str, str]:
    """Copy the last commit with `patches`, or with the changes in the folder `source`.

    Changed tracked files, new files that the code imports, and `files` are copied. The
    checkout and its index are left unchanged.

    Returns:
        The copy, its git tree, and a hash of the files that training reads.
    """
    environment = {"GIT_INDEX_FILE": f"{target}.index"}
    git("read-tree", "HEAD", **environment)
    if source is not None:
        git_dir = git("rev-parse", "--absolute-git-dir")
        inside = {**environment, "GIT_DIR": git_dir, "GIT_WORK_TREE": str(source)}
        if missing := [file for file in files if not (source / file).is_file()]:
            raise UserError(f"{missing[0]} is not a file in {source}")
        git("add", "--update", **inside)
        git("add", "--force", "--", *imported_files(source), *files, **inside)
    for patch in patches:
        try:
            git("apply", "--cached", Path(patch).absolute(), **environment)
        except UserError as error:
            raise UserError(f"{patch} does not apply to the last commit: {error}") from None
    git("checkout-index", "--all", f"--prefix={target}/", **environment)
    read = git("ls-files", "--stage", "--", *CODE, **environment)
    read += git("ls-files", "--stage", "--", *files, **environment) if files else ""
    return target, git("write-tree", **environment), hashlib.sha256(read.encode()).hexdigest()


def imported_files(folder: Path) -> set[str]:
    """Return the files in a folder that `train_gpt2.py` imports, directly or through each other."""
    finder = ModuleFinder([str(folder)])
    try:
        with suppress(SyntaxError):  # training shows it
            finder.run_script(str(folder / "train_gpt2.py"))
    except AttributeError:  # cpython's ModuleFinder does not know namespace packages
        raise UserError(
            f"{folder} has a folder of modules without an __init__.py: add it"
        ) from None
    paths = [vars(module)["__file__"] for module in finder.modules.values()]
    return {Path(path).relative_to(folder).as_posix() for path in paths if path}


def git(*args: str | Path, **environment: str) -> str:
    """Run git in this checkout; return its output, or raise UserError with its first error."""
    command, env = ["git", *args], {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=False)
    if done.returncode:
        error = done.stderr.decode(errors="replace").partition("\n")[0]
        raise UserError(error.removeprefix("error: "))
    return done.stdout.decode(errors="replace").strip()
