"""The shape of the repository: who may import whom, and what no module may do."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LEVELS = {
    "device": 0,
    "files": 0,
    "interrupt": 0,
    "lr_schedule": 0,
    "outliers": 0,
    "cli": 1,
    "distributed": 1,
    "metrics": 1,
    "model": 1,
    "shards": 1,
    "sources": 1,
    "tokenizer": 1,
    "dataloader": 2,
    "parts": 2,
    "fineweb": 3,
    "pretrained": 2,
    "stopping": 2,
    "train_config": 2,
    "checkpoint": 3,
    "plan": 3,
    "build": 4,
    "export": 4,
    "hellaswag": 4,
    "runs": 4,
    "sample": 4,
    "scaling": 4,
    "preflight": 5,
    "train_gpt2": 6,
    "bench_components": 7,
    "bench_run": 7,
    "plot": 7,
    "bench_report": 8,
    "demo": 8,
    "bench": 9,
}
MODULES = sorted(path.stem for path in ROOT.glob("*.py"))
DEFINITIONS = (
    ast.Import,
    ast.ImportFrom,
    ast.Assign,
    ast.AnnAssign,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
)


def parse(module):
    return ast.parse((ROOT / f"{module}.py").read_text(encoding="utf-8"))


def imported_modules(tree):
    """The top-level names of everything that a module imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "the modules are flat: no relative imports"
            yield node.module.split(".")[0]


def breaches(tree, module):
    """The imports of a module that do not go to a lower level."""
    return sorted(
        name
        for name in set(imported_modules(tree)) & LEVELS.keys()
        if LEVELS[name] >= LEVELS[module]
    )


def work_at_import(tree):
    """The lines of top-level statements that do more than define something."""
    return [
        statement.lineno
        for statement in tree.body
        if not isinstance(statement, DEFINITIONS)
        and not is_docstring(statement)
        and not is_guard(statement)
    ]


def is_docstring(statement):
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def is_guard(statement):
    return isinstance(statement, ast.If) and ast.unparse(statement.test) in (
        "__name__ == '__main__'",
        "TYPE_CHECKING",
    )


def test_every_module_has_a_level():
    assert set(MODULES) <= LEVELS.keys(), "place the new module in LEVELS"


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_go_to_a_lower_level(module):
    assert breaches(parse(module), module) == []


@pytest.mark.parametrize("module", MODULES)
def test_module_does_no_work_at_import(module):
    assert work_at_import(parse(module)) == []


@pytest.mark.parametrize("module", MODULES)
def test_module_says_what_it_is_for(module):
    assert ast.get_docstring(parse(module))


@pytest.mark.parametrize("source", ["import plot", "from plot import x", "def f():\n  import plot"])
def test_breaches_finds_an_import_that_goes_up(source):
    assert breaches(ast.parse(source), "metrics") == ["plot"]


@pytest.mark.parametrize("source", ["print(1)", "for x in y: pass", "if x: y = 1", "f()"])
def test_work_at_import_finds_statements_that_run(source):
    assert work_at_import(ast.parse(source)) == [1]
