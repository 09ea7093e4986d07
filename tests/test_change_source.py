"""Another document source, as a reader would add it: one function and one line, in a copy."""

import pytest
from conftest import copy_code
from test_fineweb import assert_killed, contents, reference, run_driver, tokens_of

BEFORE = "# What `--source NAME` opens."
FUNCTION = '''
def number_texts() -> Iterator[str]:
    """A document about each number: what divides it."""
    for number in range(1, 400):
        divisors = [str(n) for n in range(1, number + 1) if number % n == 0]
        yield f"{number} can be divided by {', '.join(divisors)}."


'''
LINE = '    "numbers": lambda: text_source("numbers", number_texts),\n'
FLAGS = ("--source=numbers", "--shard-size=800")


def add_source(root):
    """The patch: the function before the table, the line as the table's last one."""
    path = root / "corpus" / "sources.py"
    code = path.read_text(encoding="utf-8")
    assert code.count(BEFORE) == 1
    assert code.endswith("}\n")
    code = code.removesuffix("}\n").replace(BEFORE, FUNCTION + BEFORE) + LINE + "}\n"
    path.write_text(code, encoding="utf-8")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a patched copy of the repository and, in `whole`, what the source makes."""
    work = tmp_path_factory.mktemp("numbers")
    add_source(copy_code(work / "copy"))
    finish(work, "whole")
    return work


def run(work, name, *flags, **options):
    flags = (*FLAGS, f"--data-dir={name}", *flags)
    return run_driver(work, *flags, root=work / "copy", **options)


def finish(work, name, *flags):
    done = run(work, name, *flags)
    assert done.returncode == 0, done.stderr


def test_source_gives_the_tokens_of_its_texts_by_its_name(work):
    functions = {}
    exec("from collections.abc import Iterator\n" + FUNCTION, functions)
    assert tokens_of(work / "whole") == reference(functions["number_texts"]())
    assert "finished earlier" in run(work, "whole").stdout
    done = run_driver(work, "--source=letters", root=work / "copy")
    assert "--source letters is not fineweb-edu, fineweb, stdlib, numbers, a hub" in done.stderr


def test_source_killed_at_any_moment_resumes_to_the_same_bytes(work):
    for kill_at in (2, 3, 8, 8):
        assert_killed(run(work, "killed", kill_at=kill_at))
    finish(work, "killed")
    assert contents(work / "killed") == contents(work / "whole")
