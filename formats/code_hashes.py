"""The code that runs: hashes of the core's files, and its difference from the last commit."""

import ast
import subprocess
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODEL_FILES = ("model.py", "ops.py")  # they determine what a model computes
CORE_FILES = (
    *("train_gpt2.py", "evaluation.py", "parallel.py", *MODEL_FILES),
    *("dataloader.py", "lr_schedule.py", "optimizers.py", "spelling.py"),
    *("runtime/permutation.py", "training/config.py"),
)


@cache  # later edits do not change what runs
def code_hashes() -> dict[str, str]:
    """Return the hash of each core file."""
    return {file: code_hash((ROOT / file).read_bytes()) for file in CORE_FILES}


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
