"""The shape of the house: who may import whom, and what no module may do."""

import ast
import re
import subprocess
import tomllib
from graphlib import TopologicalSorter

import pytest
from conftest import ROOT

# An import goes down these floors, or to another module of its own floor, never in a circle.
FLOORS = (
    ("model", "ops", "lr_schedule"),
    ("runtime", "tokenizer"),
    ("parallel", "generation"),
    ("formats",),
    ("corpus",),
    (
        *("dataloader", "optimizers", "spelling", "vocabulary"),
        *("hellaswag", "sample", "web", "export", "plot", "report"),
    ),
    ("training",),
    ("train_gpt2", "train_plain", "evaluation", "time_limit", "fineweb", "read_step", "demo"),
    ("bench", "replay"),
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
WINGS = ("runtime", "formats", "corpus", "training", "bench")
PATHS = [path for part in (".", *WINGS) for path in sorted((ROOT / part).glob("[!.]*.py"))]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PATHS}
ONLY_DEFINES = (
    *(ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign),
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
)
GUARDS = ("__name__ == '__main__'", "TYPE_CHECKING")
NOTES = sorted((ROOT / "bench").rglob("*.md"))
DOCS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *NOTES]


def parse(module):
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imported_modules(tree):
    """The house's modules that a module imports, inside functions too."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "no relative imports"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in inner]
        yield from (name for name in names if name.split(".")[0] in FLOOR)


def upward_imports(tree, module):
    """The imports of a module that go to a higher floor."""
    own = FLOOR[module.split(".")[0]]
    return sorted(name for name in set(imported_modules(tree)) if FLOOR[name.split(".")[0]] > own)


def work_at_import(tree):
    """The lines of top-level statements that do more than define something."""
    rest = [node for node in tree.body if not isinstance(node, ONLY_DEFINES)]
    if ast.get_docstring(tree) is not None:
        rest.remove(tree.body[0])
    return [
        node.lineno
        for node in rest
        if not (isinstance(node, ast.If) and ast.unparse(node.test) in GUARDS)
    ]


def test_every_module_has_a_floor():
    assert {module.split(".")[0] for module in MODULES} == FLOOR.keys()


def test_pyproject_lists_every_module_and_every_requirement():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    setuptools = project["tool"]["setuptools"]
    assert {*setuptools["py-modules"]} == FLOOR.keys() - {*WINGS}
    assert {*setuptools["packages"]} == {*WINGS, "assets"}
    pinned = (ROOT / "requirements.txt").read_text().replace('"', "'")
    pinned = {line.split("#")[0].strip() for line in pinned.splitlines()} - {""}
    ranges = {each.replace(">=", "==") for each in project["project"]["dependencies"]}
    assert {each for each in pinned ^ ranges if not each.startswith("torch==")} == set()


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_go_down_and_it_says_what_it_is_for(module):
    tree = parse(module)
    assert upward_imports(tree, module) == []
    if module != "runtime.threads":  # it sets what torch reads when it is loaded
        assert work_at_import(tree) == []
    assert ast.get_docstring(tree)


def test_runtime_does_not_import_the_model():
    """It serves any model."""
    for module in MODULES:
        if module.startswith("runtime."):
            assert "model" not in imported_modules(parse(module)), module


def test_imports_never_go_in_a_circle():
    graph = {module: set(imported_modules(parse(module))) - {module} for module in MODULES}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_an_import_upwards_and_work_at_import_are_found():
    for source in ("import plot", "from training import config", "def f():\n  import train_gpt2"):
        assert len(upward_imports(ast.parse(source), "formats.metrics")) == 1
    for source in ("print(1)", "for x in y: pass", "if x: y = 1", "f()"):
        assert work_at_import(ast.parse(source)) == [1]


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_name_tests_and_files_that_exist(path):
    text = path.read_text(encoding="utf-8")
    tests = "".join(test.read_text(encoding="utf-8") for test in (ROOT / "tests").glob("*.py"))
    for name in re.findall(r"`(?:test_\w+\.py::)?(test_\w+)`", text):
        assert f"def {name}(" in tests, name
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    links += re.findall(r"`(tests/[\w./]+|test_\w+\.py)(?:::\w+)?`", text)
    for link in links:
        places = (path.parent / link, ROOT / link, ROOT / "tests" / link)
        assert any(place.exists() for place in places), link


def test_git_for_windows_keeps_line_ends_of_files_that_are_hashed_or_run_by_a_shell(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("needs git's index")
    names = ("assets/vocab.bpe", ".ci/run")
    options = ("-c", "safe.directory=*", "-c", "core.autocrlf=true")
    git = ["git", *options, "checkout-index", f"--prefix={tmp_path}/", *names]
    subprocess.run(git, cwd=ROOT, check=True)
    for name in names:
        assert (tmp_path / name).read_bytes() == (ROOT / name).read_bytes(), name
