"""Hash the core's functions, classes and constants, to name the edits since a checkpoint."""

import ast
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODEL_FILES = ("model.py", "ops.py", "cpu_attention.py")  # they determine what a model computes
CORE_FILES = (
    *("train_gpt2.py", "evaluation.py", "parallel.py", *MODEL_FILES),
    *("dataloader.py", "lr_schedule.py", "optimizers.py", "spelling.py", "training/config.py"),
)


def code_hashes(files: Sequence[str] = CORE_FILES) -> dict[str, str]:
    """Return the hashes of all definitions in these files, by names such as `model.py MLP`.

    A process reads each file once, so later edits do not change what it returns.
    """
    return {
        f"{file} {name}": digest for file in files for name, digest in _read_hashes(file).items()
    }


@cache
def _read_hashes(file: str) -> dict[str, str]:
    """Return the hashes of a file's definitions."""
    return definition_hashes((ROOT / file).read_bytes())


def definition_hashes(source: bytes) -> dict[str, str]:
    """Return eight hex digits for each function, class and constant at a module's top level.

    They depend on the syntax tree, without comments, docstrings and line breaks.
    """
    trees = defaultdict[str, list[object]](list)
    for statement in ast.parse(source).body:
        for name in _defined_names(statement):
            trees[name].append(_as_lists(statement))
    return {name: sha256(ascii(tree).encode()).hexdigest()[:8] for name, tree in trees.items()}


def _defined_names(statement: ast.stmt) -> list[str]:
    """Return the names that a definition or an assignment sets; other statements have none."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    targets = list[ast.expr]()
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        targets = [statement.target]
    return [
        node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)
    ]


def _as_lists(node: object) -> object:
    """Return a syntax tree as nested lists, the same in Python 3.11 to 3.14.

    `ast.dump` and `ast.unparse` differ between versions. Empty fields are left out, because newer
    versions have more of them.
    """
    if isinstance(node, list):
        return [_as_lists(item) for item in node if not _is_docstring(item)]
    if isinstance(node, ast.JoinedStr):  # Python 3.12 adds empty strings to some f-strings
        return ["JoinedStr", *(_as_lists(v) for v in node.values if getattr(v, "value", "") != "")]
    if not isinstance(node, ast.AST):
        return node
    fields = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, [])]
    return [type(node).__name__, *((name, _as_lists(value)) for name, value in fields)]


def _is_docstring(node: object) -> bool:
    """Return whether a node is a string by itself, which may also describe a field."""
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
