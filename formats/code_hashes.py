"""Hash the core's files, so that a resume can name the files that were edited."""

import ast
from functools import cache
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODEL_FILES = ("model.py", "ops.py", "cpu_attention.py")  # they determine what a model computes
CORE_FILES = (
    *("train_gpt2.py", "evaluation.py", "parallel.py", *MODEL_FILES),
    *("dataloader.py", "lr_schedule.py", "optimizers.py", "spelling.py", "training/config.py"),
)


@cache  # later edits do not change what runs
def code_hashes() -> dict[str, str]:
    """Return the hash of each core file."""
    return {file: code_hash((ROOT / file).read_bytes()) for file in CORE_FILES}


def code_hash(source: bytes) -> str:
    """Return eight hex digits that depend on the code, but not on comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            body[:] = [statement for statement in body if not _is_docstring(statement)]
    return sha256(ast.unparse(tree).encode()).hexdigest()[:8]


def _is_docstring(node: ast.stmt) -> bool:
    """Return whether a statement is a string by itself, which may also describe a field."""
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
