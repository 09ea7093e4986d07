import io
import queue
import re
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
from filelock import FileLock
from torch._dynamo import callback
from torch._dynamo.callback import CallbackTrigger, CompilationCallbackHandler
from torch._dynamo.utils import counters
from torch._inductor.runtime import cache_dir_utils
from torch._inductor.runtime.triton_compat import OutOfResources

import model as model_module
from model import GPT, Block, GPTConfig
from runtime import compiler
from runtime.compiler import (
    cache_folder,
    compile_error,
    prepare_compiler,
    remove_incomplete_libraries,
    show_compiling,
)
from train_gpt2 import compile_by_block


@pytest.fixture
def problem():
    """What `prepare_compiler` returns on a CPU without a C++ compiler; its settings stay."""
    torch._dynamo.reset()
    without = {"cpp.cxx": (None, "no-compiler"), "force_disable_caches": True}
    with inductor_config.patch(without):
        return prepare_compiler.__wrapped__(torch.device("cpu"))


@pytest.mark.parametrize(
    ("traced", "advice"),
    [
        (lambda x: x @ torch.ones(3, 3), None),  # a mistake in the model
        (lambda x: print(x), r"delete the compile cache .*, or add --no-compile \(Unsupported: "),
    ],
)
def test_compile_error_is_none_of_a_mistake_in_the_model(traced, advice):
    with pytest.raises(RuntimeError) as raised:
        torch.compile(traced, backend="eager", fullgraph=True)(torch.ones(2, 2))
    problem = compile_error(raised.value)
    assert problem is None if advice is None else re.search(advice, problem)


def test_prepare_compiler_says_why_it_cannot_work(problem):
    assert "MPS" in prepare_compiler(torch.device("mps"))
    assert problem.startswith("no C++ compiler, so not compiled, at about half the speed: apt ")
    assert " (InvalidCxxCompiler: " in problem  # what torch has wrapped
    assert "\n" not in problem


@pytest.mark.parametrize("name", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_prepare_compiler_names_the_switch_that_turns_compiling_off(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    # torch reads the second one when it is imported.
    with torch._dynamo.config.patch(disable=name == "TORCH_COMPILE_DISABLE"):
        problem = prepare_compiler.__wrapped__(torch.device("cpu"))
    assert problem == f"torch.compile is switched off, so not compiled: unset {name}"


@pytest.mark.parametrize(("cache", "package"), [("/a b", "/torch"), ("/cache", "/a b/torch")])
def test_compile_error_names_a_path_with_a_space(cache, package, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
    monkeypatch.setattr(torch, "__path__", [package])
    problem = compile_error(OutOfResources(2, 1, "shared memory"))
    assert re.search(
        r": (set TORCHIND|delete .*, or install torch).* without a space, unlike /a b", problem
    )


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize(
    ("trigger", "part"),
    [(CallbackTrigger.DYNAMO, "forward"), (CallbackTrigger.LAZY_BACKWARD, "backward")],
)
def test_show_compiling_moves_a_line_on_a_terminal_only(trigger, part, is_terminal, monkeypatch):
    class Stream(io.StringIO):
        def isatty(self):
            return is_terminal

        def write(self, text):
            written.put(text)
            return len(text)

    written, handler = queue.SimpleQueue(), CompilationCallbackHandler()
    monkeypatch.setattr(sys, "stderr", Stream())
    monkeypatch.setattr(callback, "callback_handler", handler)
    show_compiling()
    with handler.install_callbacks(trigger, "0/0"):
        texts = [written.get(timeout=60) for _ in range(9 * is_terminal)]
    lines = [text for text in texts if "compiling" in text]
    assert (len(lines) > 1) == is_terminal == bool(handler.start_callbacks)
    assert all(f"compiling the {part} pass: 0" in line for line in lines)


def test_prepare_compiler_silences_a_warning_of_every_small_model(request, recwarn):
    warnings.simplefilter("always")
    request.getfixturevalue("problem")
    recwarn.clear()
    # As torch 2.11's torch/_inductor/lowering.py warns.
    warnings.warn("\nOnline softmax is disabled on the fly since Inductor decides", stacklevel=1)
    warnings.warn("another one", stacklevel=1)
    assert [str(each.message) for each in recwarn] == ["another one"]


@pytest.mark.usefixtures("problem")
def test_blocks_that_all_differ_are_all_compiled_for_training_and_validation(monkeypatch):
    class ScaledBlock(Block):
        def __init__(self, config, layer):
            super().__init__(config, layer)
            self.scale = 1 / (layer + 1)  # a number, which compiled code has as a constant

        def forward(self, x, cache=None):
            return self.scale * super().forward(x, cache)

    monkeypatch.setattr(model_module, "Block", ScaledBlock)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    model = GPT(GPTConfig(block_size=16, n_layer=5, n_head=2, n_embd=32))  # 8 is torch's limit
    trained, idx = compile_by_block(model), torch.zeros(1, 16, dtype=torch.int64)
    counters["stats"].clear()
    trained(idx, idx)
    with torch.no_grad():
        trained(idx, idx)
    assert counters["stats"]["unique_graphs"] == 2 * (5 + 2)  # and both ends


@pytest.fixture
def torn_cache(tmp_path, monkeypatch):
    """A compile cache in which a killed process left a good library, and parts of others.

    The folder also holds files of other programs, none of them a library in ELF format.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "LOCK_SECONDS", 0.1)
    whole = Path(torch._C.__file__).read_bytes()
    probe = "c" + 51 * "a"  # torch tests with it which instructions the CPU has
    parts = {"empty.main.so": 0, "head.main.o": 64, f"{probe}.so": len(whole) // 2}
    contents = {"good.main.so": whole} | {name: whole[:size] for name, size in parts.items()}
    contents["zeros.main.so"] = bytes(5000)  # the linker writes the header last
    folder = tmp_path / "ab"
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        (folder / name).with_suffix(".cpp").touch()
    for name in ("env/lib/libncurses.so", "env/b.main.so", "ab/c.so", "ab/d.o", "ab/e.main.o"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("INPUT(libncurses.so.6)")
    for name in ("env/b.main.cpp", "ab/c.cpp", "ab/d.cpp"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF headers")
def test_remove_incomplete_libraries_deletes_only_torchs_that_nobody_is_writing(torn_cache, capsys):
    def files():
        return {path.relative_to(torn_cache).as_posix() for path in torn_cache.rglob("*.*")}

    (torn_cache / "locks").mkdir()
    before, written = files(), "ab/empty.main.so"
    incomplete = {written, "ab/head.main.o", "ab/zeros.main.so", f"ab/c{51 * 'a'}.so"}
    with FileLock(torn_cache / "locks/empty.lock"):
        remove_incomplete_libraries()
        assert before - files() == incomplete - {written}
    remove_incomplete_libraries()
    assert before - files() == incomplete
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(line.endswith(" was incomplete, and is compiled again") for line in lines)


def unnamed():
    """Raise as torch 2.11 does for a user without a name."""
    raise KeyError("getpwuid(): uid not found: 12345")


def test_cache_folder_needs_no_user_name(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(cache_dir_utils, "default_cache_dir", unnamed)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = cache_folder()
    assert Path(folder).parent == tmp_path
    assert cache_dir_utils.cache_dir() == folder  # where torch compiles


def test_compiling_is_given_up_if_there_is_no_place_for_its_cache(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file/folder"))
    torch._dynamo.reset()
    problem = prepare_compiler.__wrapped__(torch.device("cpu"))
    assert problem.startswith("torch.compile failed, so not compiled, at about half the speed: ")
