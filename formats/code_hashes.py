"""The code that runs: hashes of its files, and its difference from the last commit."""

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from runtime.cli import print_error

ROOT = Path(__file__).parent.parent
SKIPPED = {"runtime/cli.py"}  # files that training loads but does not compute with


@cache  # later edits do not change what runs
def code_hashes(program: str = "train_gpt2.py") -> dict[str, str]:
    """Return the hash of each file of the project that a program can import, sorted by name.

    The imports in the code decide, so all ranks have the same files, which include the modules that
    an edit added and modules that only some ranks import.
    """
    hashes, paths = dict[str, str](), [program]
    while paths:
        path = paths.pop()
        # A library is next to this project's files if pip has installed both.
        is_library = any(ROOT.glob(f"{path.partition('/')[0]}-*.dist-info"))
        if (ROOT / path).is_file() and not (is_library or path in hashes or path in SKIPPED):
            source = (ROOT / path).read_bytes()
            hashes[path] = code_hash(source)
            paths += _imports(path, ast.parse(source))
    return dict(sorted(hashes.items()))


def _imports(file: str, tree: ast.Module) -> Iterator[str]:
    """Yield the paths of files that a file may import, whether they exist or not."""
    for node in ast.walk(tree):
        names: list[Any] = []
        if isinstance(node, ast.Import | ast.ImportFrom):
            package = file.split("/")[: -getattr(node, "level", 0) or 0]
            module = [*package, getattr(node, "module", None) or ""]
            names = [".".join([*module, alias.name]) for alias in node.names]
        elif getattr(getattr(node, "func", None), "attr", None) == "import_module":  # a call
            names = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
        for name in names:
            path = Path(*str(name).split("."))
            for each in (path, *path.parents[:-1]):
                yield from (f"{each.as_posix()}.py", f"{each.as_posix()}/__init__.py")


def code_diff() -> bytes:
    """Return the changes of tracked files since the last commit; empty if there are none.

    If the code is in a repository that git cannot read, print a warning with git's reason.
    """
    options = ("--relative", "--no-color", "--no-ext-diff", "HEAD", "--")
    commands = (("git", "rev-parse", "HEAD", "--"), ("git", "diff", *options))
    try:  # the first command has clearer errors
        _, done = (subprocess.run(c, cwd=ROOT, capture_output=True, check=True) for c in commands)
        return done.stdout
    except (OSError, subprocess.CalledProcessError) as error:  # OSError: no git
        reason = getattr(error, "stderr", b"").decode(errors="replace") or str(error)
    if any((folder / ".git").exists() for folder in (ROOT, *ROOT.absolute().parents)):
        print_error(f"warning: code.diff is missing: {' '.join(reason.split())}")
    return b""


def code_hash(source: bytes) -> str:
    """Return eight hex digits that depend on the code, but not on comments and docstrings."""
    tree = _WithoutDocstrings().visit(ast.parse(source))
    return sha256(ast.unparse(tree).encode()).hexdigest()[:8]


class _WithoutDocstrings(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """Remove a string that is a statement by itself, which may also describe a field."""
        return None if isinstance(getattr(node.value, "value", None), str) else node
