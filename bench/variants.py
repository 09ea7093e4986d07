"""The versions that a trial compares: code and flags of each, and a hash of all that it reads."""

import hashlib
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

from bench.measurement import ROOT, device_label, provenance, run_python
from corpus.shards import open_shards
from formats.metrics import BEST_SUFFIX, find_run
from runtime.cli import as_flags, flag_of
from runtime.device import select_device
from runtime.errors import UserError
from runtime.files import read_json, sha256_of

BASE, WORKTREE = "base", "worktree"
THREADS = 1  # per run
OFF = dict.fromkeys(("hellaswag_every", "sample_every", "checkpoint_every"), 0)
SET_BY_TRIAL = {"seed", "run_name", "out_dir", "resume", "plan", "preflight"}
PLACES = {"data_dir", *SET_BY_TRIAL}  # where a run reads or writes does not change it
QUOTED = re.compile(r"""(?<=["'])[^"'\n]+(?=["'])""")
# Environment variables that are set for each run, or differ between terminals.
NOT_COMPARED = {
    *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONUNBUFFERED"),
    *("PATH", "SSH_CONNECTION"),
}
UNREAD = ("bench", "tests")  # folders that training does not import
HASHED_BYTES = 4_000_000_000  # in one folder; if there are more, files are sampled
SAMPLES, SAMPLE_BYTES, SAMPLED = 256, 4096, " (sampled)"
PRINT_SETTINGS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from runtime.cli import run_command
from training.resume import parse_config
def main():
    configs = [parse_config(flags)[0] for flags in json.loads(sys.argv[2])]
    print(json.dumps([config.saved() | {"max_minutes": config.max_minutes} for config in configs]))
run_command(main)
"""


class Variant(NamedTuple):
    """Code and flags to train with."""

    name: str
    code: Path
    """Folder with a copy of the code."""
    patch: str
    """Changes of the code from the base's, for `git apply`."""
    flags: tuple[str, ...]
    settings: dict[str, Any]
    """Meaning of the flags in this code, with all defaults and recipes."""
    conditions: dict[str, Any]
    """Everything else that determines a run: hashes of what it reads, versions, device, threads."""

    @property
    def digest(self) -> str:
        """Hash of all that determines a run, except its seed."""
        named = {name: value for name, value in self.settings.items() if name not in PLACES}
        values = json.dumps([named, self.conditions], sort_keys=True)
        return hashlib.sha256(values.encode()).hexdigest()[:8]

    def run_name(self, seed: int) -> str:
        """Return the name of a run's folder."""
        return f"{self.name}-{self.digest}-seed{seed}"

    def changed(self, **settings: object) -> "Variant":
        """Return the same code with other settings."""
        flags = (*self.flags, *as_flags(settings))
        return self._replace(flags=flags, settings=self.settings | settings)

    def multiple(self, setting: str, factor: float) -> dict[str, Any]:
        """Return a setting times a factor; min_lr keeps its ratio to max_lr."""
        value = self.settings.get(setting)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            fix = f"pass {flag_of(setting)}"
            raise UserError(f"{setting} is {value}, not a number above 0: {fix}")
        names = (setting, "min_lr") if setting == "max_lr" else (setting,)
        kind = round if isinstance(value, int) else float
        return {name: kind(self.settings[name] * factor) for name in names}

    def scaled(self, setting: str, factor: float) -> "Variant":
        """Return the same code with a setting times a factor."""
        return self.changed(**self.multiple(setting, factor))


# --- what a run can read ----------------------------------------------------------------------


def content_hash(path: Path, pattern: str = "**") -> str:
    """Hash a file, or the files in a folder that match a pattern, and their names.

    Links are followed, and `*` matches no hidden files. If the files have more than `HASHED_BYTES`,
    their sizes, times and samples are hashed instead, and the hash ends with `SAMPLED`.
    """
    hidden = pattern == "**"
    names = glob(pattern, root_dir=path, recursive=True, include_hidden=hidden) or [""]
    files = [path / name for name in sorted(names) if "__pycache__" not in name]
    infos = [(file, file.stat()) for file in files if file.is_file()]
    is_large = sum(info.st_size for _, info in infos) > HASHED_BYTES
    hash_file = sample_hash if is_large else sha256_of
    values = [[os.path.relpath(f, path), i.st_mode & 0o100, hash_file(f)] for f, i in infos]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest() + SAMPLED * is_large


def sample_hash(path: Path) -> str:
    """Hash the size and time of a file, and samples throughout."""
    status = path.stat()
    found = hashlib.sha256(f"{status.st_size} {status.st_mtime_ns}".encode())
    with path.open("rb") as file:
        for place in range(0, status.st_size, max(SAMPLE_BYTES, status.st_size // SAMPLES)):
            file.seek(place)
            found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()


def hash_what_is_read(
    folder: Path, settings: Mapping[str, Any], hash_of: Callable[[Path, str], str]
) -> dict[str, str]:
    """Return hashes of all that a run of the code in `folder` can read.

    These are the code, the data, files and folders that settings name, and what is named in quotes
    in the code: environment variables, and files in the working directory.
    """
    code = [p for p in folder.rglob("*.py") if p.relative_to(folder).parts[0] not in UNREAD]
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in code)
    quoted = {word for text in texts for word in QUOTED.findall(text)}
    found = {"code": hash_of(folder, "**"), "data": hash_of(Path(settings["data_dir"]), "*")}
    for name in (quoted & os.environ.keys()) - NOT_COMPARED:
        found[f"${name}"] = hashlib.sha256(os.fsencode(os.environ[name])).hexdigest()
    values = {v for k, v in settings.items() if isinstance(v, str) and k not in PLACES}
    names = {v for v in values if os.path.exists(v) and ("/" in v or os.path.isfile(v))}
    names |= {w for w in quoted if re.search(r"\.(?!py$|md$)\w+$", w) and os.path.isfile(w)}
    paths = {name: Path(name) for name in names}
    if start := settings["init_from"]:
        model = find_run(start.removesuffix(BEST_SUFFIX))
        paths[start] = model.parent if model.is_file() else model
    return found | {name: hash_of(path, "**") for name, path in paths.items() if path.exists()}


def build_variants(
    base: str | None, edits: Sequence[str], flags: Sequence[str], folder: Path
) -> list[Variant]:
    """Copy the code of the base and of each edit into `folder`, and read their flags.

    `base` and `edits` are texts as in `TrialConfig`.
    """
    patches, flags, hash_once = list[str](), (*as_flags(OFF), *flags), cache(content_hash)
    if base is not None:
        patch, more, base_flags = split_edit(base)
        patches, flags = [patch, *more], (*flags, *base_flags)
    repository = open_repository(folder)
    base_code, base_tree = folder / BASE, copy_code(repository, folder / BASE, patches)
    variants = {BASE: new_variant(BASE, (base_code, ""), flags, hash_once)}
    for edit in edits:
        source, files, own_flags = split_edit(edit)
        path = ROOT if source == WORKTREE else Path(source).absolute()
        sources = [source, *(files if path.suffix == ".patch" else ())]
        stems = [Path(each).absolute().stem for each in sources if each != BASE]
        name = re.sub(r"\W+", "-", " ".join((*stems, *own_flags))).strip("-")
        if source != BASE and not path.exists():
            raise UserError(f"--edit {edit}: {source} does not exist")
        if name in variants:
            raise UserError(f"--edit {edit} and another variant are both named {name}: rename it")
        code, patch = base_code, ""
        if path.suffix == ".json":
            settings = read_json(path)
            if not isinstance(settings, dict):
                raise UserError(f"--edit {edit} is not a JSON object of settings")
            # The data and what the trial turns off are the base's; all versions compile, or none.
            skipped = ("about", "compile", "data_dir", *OFF, *SET_BY_TRIAL)
            kept = {key: value for key, value in settings.items() if key not in skipped}
            own_flags = (*as_flags(kept), *own_flags)
        elif source != BASE:
            changes: Any = (patches, path, files) if path.is_dir() else ([*patches, *sources],)
            code = folder / name
            patch = patch_between(repository, base_tree, copy_code(repository, code, *changes))
        try:
            variants[name] = new_variant(name, (code, patch), (*flags, *own_flags), hash_once)
        except UserError as error:
            raise UserError(f"--edit {edit}: {error}") from None
        if variants[name].digest == variants[BASE].digest:
            raise UserError(f"--edit {edit} changes neither the code nor the settings of the base")
    return [*variants.values()]


def split_edit(text: str) -> tuple[str, list[str], tuple[str, ...]]:
    """Return the path, the files to take along and the flags of an edit."""
    try:
        words = [text] if os.path.exists(text) else shlex.split(text)
    except ValueError as error:
        fix = "write it in double quotes, as in '\"ann's.patch\" --max-lr=1e-3'"
        raise UserError(f"{text}: {error}: a name may have an apostrophe: {fix}") from None
    n_paths = next((n for n, word in enumerate(words) if word.startswith("-")), len(words))
    path, *files = words[:n_paths] or [BASE]
    return path, files, tuple(words[n_paths:])


def new_variant(
    name: str,
    code: tuple[Path, str],
    flags: Sequence[str],
    hash_of: Callable[[Path, str], str] = content_hash,
) -> Variant:
    """Return a variant whose flags its own code has read; raise UserError if one is invalid.

    On a CPU, it compiles only with `--compile`.
    """
    return read_variants([Variant(name, *code, tuple(flags), {}, {})], hash_of)[0]


def read_variants(
    variants: Sequence[Variant], hash_of: Callable[[Path, str], str] = content_hash
) -> list[Variant]:
    """Return variants of the same code with the settings that their flags mean in it.

    Raise UserError if a flag or a combination of flags is invalid.
    """
    for variant in variants:
        given = {flag.partition("=")[0].replace("_", "-") for flag in variant.flags}
        if taken := sorted(given & {flag_of(setting) for setting in SET_BY_TRIAL}):
            raise UserError(f"leave out {', '.join(taken)}: set by the trial for each run")
    lines, found = json.dumps([variant.flags for variant in variants]), list[Variant]()
    output = run_python("-P", "-c", PRINT_SETTINGS, variants[0].code, lines)
    versions = provenance()["versions"]
    for variant, settings in zip(variants, json.loads(output.splitlines()[-1]), strict=True):
        if settings.pop("max_minutes") is not None:
            raise UserError(
                "leave out --max-minutes: a trial compares equal numbers of --max-steps"
            )
        device, flags = select_device(settings["device"]), variant.flags
        if device.type == "cpu" and not {"--compile", "--no-compile"} & {*flags}:
            flags, settings = ("--no-compile", *flags), settings | {"compile": False}
        open_shards(settings["data_dir"], "train")  # raise before the first run
        open_shards(settings["data_dir"], "val")
        read = hash_what_is_read(variant.code, settings, hash_of)
        conditions = {"read": read, "threads": THREADS, "device": device_label(device)}
        conditions |= {"versions": versions}
        found.append(variant._replace(flags=flags, settings=settings, conditions=conditions))
    return found


# --- code -------------------------------------------------------------------------------------


def open_repository(folder: Path) -> dict[str, str]:
    """Create a repository in `folder` that shares this one's objects; return git's environment.

    Neither the user's configuration nor attributes change there which bytes git reads and writes.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    options = ("--show-object-format", "--git-path", "objects")
    kind, objects, _ = git("rev-parse", *options).split("\n")
    environment["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = str((ROOT / objects).resolve())
    environment["GIT_DIR"] = str(folder / ".git")
    git("init", "--quiet", f"--object-format={kind}", environment=environment)
    (folder / ".git/info").mkdir(exist_ok=True)
    (folder / ".git/info/attributes").write_text("* -text -ident -filter -working-tree-encoding\n")
    (folder / ".git/info/binary").write_text("* -diff\n")
    return environment


def copy_code(
    repository: Mapping[str, str],
    target: Path,
    patches: Sequence[str],
    source: Path | None = None,
    files: Sequence[str] = (),
) -> str:
    """Copy the last commit, with the changes in the folder `source` and with `patches`.

    The changes are the tracked files, new Python files that git does not ignore, and `files`. Links
    lead to what they lead to in the checkout, which is left unchanged.

    Returns:
        The copy as a git tree.
    """
    inner = git("rev-parse", "--show-prefix").strip()  # this folder's place in a larger repository
    origin = source or ROOT
    place = {"GIT_INDEX_FILE": f"{target}.index", "GIT_WORK_TREE": str(origin)}
    run = partial(git, environment={**repository, **place})
    try:
        run("read-tree", git("rev-parse", f"HEAD:{inner.removesuffix('/')}").strip())
    except UserError:
        fix = "commit it with git add and git commit"
        raise UserError(f"{ROOT} is not in the last commit: {fix}") from None
    if source is not None:
        if missing := [file for file in files if not (source / file).exists()]:
            raise UserError(f"{missing[0]} is not a file in {source}")
        run("add", "--update")
        run("add", "--", "*.py", ":!*site-packages*")
        run("--literal-pathspecs", "add", "--force", "--", *files)
    for patch in patches:
        is_outer = inner and f"b/{inner}".encode() in Path(patch).read_bytes()
        depth = 1 + inner.count("/") * bool(is_outer)
        apply = partial(run, "apply", "--cached", f"-p{depth}", Path(patch).absolute())
        try:
            apply()
        except UserError as error:
            try:
                apply("--reverse", "--check", "-C0")  # changes may stand beside the patch's lines
            except UserError:
                fix = ": apply it there, then repeat your edit" if source else ""
                code = source or "the last commit"
                raise UserError(f"{patch} does not apply to {code}: {error}{fix}") from None
    run("checkout-index", "--all", f"--prefix={target}/")
    for link in filter(Path.is_symlink, target.rglob("*")):
        if not link.exists():
            path = origin / link.relative_to(target).parent / link.readlink()
            link.unlink()
            link.symlink_to(path.resolve())
    return run("write-tree").strip()


def patch_between(repository: Mapping[str, str], base: str, edit: str) -> str:
    """Return the changes between two trees as a patch, from which `git apply` makes the bytes."""
    command = ("diff-tree", "-p", "-M", "--binary", base, edit)
    with suppress(UnicodeEncodeError):  # a text file that is not UTF-8
        return git(*command, environment=repository).encode().decode()
    attributes = f"core.attributesFile={repository['GIT_DIR']}/info/binary"
    return git("-c", attributes, *command, environment=repository)


def git(*args: str | Path, environment: Mapping[str, str] = os.environ) -> str:
    """Run git in this checkout; return its output, or raise UserError with its first error."""
    command = ["git", *args]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    if done.returncode:
        error = done.stderr.decode(errors="replace").removeprefix("error: ")
        is_of_owner = "safe.directory" in error  # the fix is in the last line
        fix = ": run git init, git add and git commit" * ("not a git repository" in error)
        raise UserError(" ".join(error.split()) if is_of_owner else error.partition("\n")[0] + fix)
    return done.stdout.decode(errors="surrogateescape")
