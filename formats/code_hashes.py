"""The code that runs: hashes of its files, and its difference from the last commit."""

import ast
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Training may load the page, the figures and the command line, but computes nothing with them.
SKIPPED = {"web.py", "plot.py", "runtime/cli.py"}


@cache  # later edits do not change what runs
def code_hashes(program: str = "train_gpt2.py") -> dict[str, str]:
    """Return the hash of each file of the project that a program can import, sorted by name.

    The files are found by the imports in their code, so all ranks have the same list, which
    includes the modules that an edit added and modules that only some ranks import.
    """
    hashes, files = dict[str, str](), {program}
    # If pip has installed this project, libraries are next to its files.
    libraries = {path.name.partition("-")[0] for path in ROOT.glob("*.dist-info")}
    while files:
        file = files.pop()
        source = (ROOT / file).read_bytes()
        hashes[file] = code_hash(source)
        for path in {*_imports(file, source)} - SKIPPED - hashes.keys():
            if (ROOT / path).is_file() and path.partition("/")[0] not in libraries:
                files.add(path)
    return dict(sorted(hashes.items()))


def _imports(file: str, source: bytes) -> Iterator[str]:
    """Yield the files that a file may import, whether they exist or not."""
    for node in ast.walk(ast.parse(source)):
        names = list[str]()
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom():
                package = file.split("/")[: -node.level] if node.level else []
                module = [*package, *filter(None, [node.module])]
                names = [".".join([*module, alias.name]) for alias in node.names]
            case ast.Call(
                ast.Name(function) | ast.Attribute(_, function), [ast.Constant(str(name)), *_]
            ):
                is_import = function in ("import_module", "__import__")
                names = [name.lstrip(".")] * is_import
        for name in names:
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                path = "/".join(parts[:end])
                yield from (f"{path}.py", f"{path}/__init__.py")


def code_diff() -> bytes:
    """Return the changes of tracked files since the last commit; empty if git has none to show."""
    command = ("git", "diff", "--relative", "--no-color", "--no-ext-diff", "HEAD")
    with suppress(OSError):  # no git
        return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).stdout
    return b""


def code_hash(source: bytes) -> str:
    """Return eight hex digits that depend on the code, but not on comments and docstrings."""
    tree = _WithoutDocstrings().visit(ast.parse(source))
    return sha256(ast.unparse(tree).encode()).hexdigest()[:8]


class _WithoutDocstrings(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """Remove a string that is a statement by itself, which may also describe a field."""
        return None if isinstance(getattr(node.value, "value", None), str) else node
