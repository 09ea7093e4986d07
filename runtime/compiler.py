"""torch.compile: set it up, show that it works, describe its errors."""

import functools
import os
import re
import struct
import sys
import tempfile
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._functorch.config as functorch_config
from filelock import FileLock, Timeout
from torch.compiler import is_compiling
from tqdm import tqdm

from runtime.distributed import is_main

LOCK_SECONDS = 10  # another rank may hold a lock because it deletes the same file
# Sources in torch's cache, each in a folder of two characters, with its library next to it.
CACHED_SOURCES = ("??/*.main.cpp", f"??/c{'?' * 51}.cpp")  # the others test the CPU's instructions
SWITCHES = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_SUPPRESS_ERRORS")


def compile_error(error: Exception) -> str | None:
    """Describe an error of torch.compile and its fix; None for any other error."""
    kind = type(error)  # TorchRuntimeError: an error in the traced code, such as a wrong shape
    is_of_compiler = kind.__module__.startswith(("torch._dynamo", "torch._inductor", "triton"))
    if not is_of_compiler or kind.__name__ == "TorchRuntimeError":
        return None
    return ": ".join(_cause_and_fix(error))


def _cause_and_fix(error: Exception) -> tuple[str, str]:
    """Return why torch.compile failed, and the fix with the error's first line."""
    inner = getattr(error, "inner_exception", error)  # Dynamo may have wrapped it
    first_line = str(inner).strip().partition("\n")[0]
    cause, fix = "torch.compile failed", f"delete the compile cache {cache_folder()}"
    if missing := re.search(r"Python\.h|C(\+\+)? compiler", str(error)):
        cause, fix = f"no {missing[0]}", "apt install g++ python3-dev"
    elif " " in cache_folder():  # the compiler's command does not quote paths
        fix = f"set TORCHINDUCTOR_CACHE_DIR to a path without a space, unlike {cache_folder()}"
    elif " " in torch.__path__[0]:
        fix += f", or install torch in a path without a space, unlike {torch.__path__[0]}"
    return cause, f"{fix}, or add --no-compile ({type(inner).__name__}: {first_line})"


def cache_folder() -> str:
    """Return torch's folder for compiled code, which it finds with TORCHINDUCTOR_CACHE_DIR.

    Set the variable if torch 2.11 or 2.12 would need the name of a user who has none, as in a
    container that runs with the number of a user of its host.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # torch internals may change

    try:
        return cache_dir()
    except (KeyError, OSError):  # OSError: from Python 3.13, or because it cannot be created
        folder = Path(tempfile.gettempdir(), f"torchinductor_uid_{os.getuid()}")
        return os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


@functools.cache  # because it compiles a function
def prepare_compiler(device: torch.device) -> str | None:
    """Set up torch.compile for training; return why it cannot work here, or None if it can."""
    if device.type == "mps":
        return "not compiled: torch.compile does not support MPS well yet"
    with suppress(ImportError, AttributeError, OSError):  # torch internals may change
        show_compiling()
        remove_incomplete_libraries()  # OSError: the cache cannot be written
    try:  # a compiler may be missing or broken, and torch internals may change
        from torch._dynamo import config as dynamo_config  # takes a second to import

        # Also cache compiled code that contains custom autograd functions, as `ops` has them.
        functorch_config.autograd_cache_allow_custom_autograd_functions = True
        dynamo_config.optimize_ddp = False  # it splits graphs at DDP buckets; blocks are short
        # If blocks differ in a number, each needs a program for training and one for validation.
        dynamo_config.recompile_limit = 128
        # A warning of six lines for each loss, if the vocabulary is large relative to the model.
        warnings.filterwarnings("ignore", r"\s*Online softmax is disabled on the fly")
        if device.type == "cpu":  # recompute GELU in the backward pass: 3.3, not 3.9 GiB for 124M
            functorch_config.ban_recompute_materialized_backward = False
        # np.pi makes Dynamo list NumPy's functions now. Later, another thread, such as the data
        # loader's, might be importing a NumPy module at that moment.
        probe = torch.compile(lambda x: (x.sin() + np.pi, is_compiling()), dynamic=False)
        if not probe(torch.ones(64, device=device))[1]:
            switches = " ".join(name for name in SWITCHES if name in os.environ)
            return f"torch.compile is switched off, so not compiled: unset {switches}"
    except Exception as error:  # Dynamo, Inductor and Triton raise many classes
        return ", so not compiled, at about half the speed: ".join(_cause_and_fix(error))
    return None


def remove_incomplete_libraries() -> None:
    """Delete libraries in torch's cache that a process was writing when it was killed.

    torch would load them in every later start. A lock tells whether another process is writing one.
    The folder may also hold files of other programs, such as conda environments.
    """
    from torch._inductor.codecache import get_lock_dir

    sources = [path for names in CACHED_SOURCES for path in Path(cache_folder()).glob(names)]
    libraries = [path.with_suffix(suffix) for path in sources for suffix in (".so", ".o")]
    for path in filter(_is_incomplete, libraries):
        lock = FileLock(Path(get_lock_dir(), f"{path.name.partition('.')[0]}.lock"))
        with suppress(Timeout), lock.acquire(LOCK_SECONDS):
            if _is_incomplete(path):
                path.unlink()
                print(f"note: {path} was incomplete, and is compiled again", flush=True)


def _is_incomplete(path: Path) -> bool:
    """Return whether a library is shorter than its header states (ELF, Linux)."""
    if sys.platform != "linux" or not path.is_file():
        return False
    with path.open("rb") as file:
        header = file.read(64)  # the linker writes it last
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return True
    offset, size, count = struct.unpack("<40xQ10xHH2x", header)  # the last table of the file
    return path.stat().st_size < offset + size * count


def show_compiling() -> None:
    """From now on, show on a terminal what torch.compile compiles, and for how long so far."""
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    ended = list[threading.Event]()  # one for each line

    def start(args: Any) -> None:  # noqa: ANN401 - private to torch
        ended.append(threading.Event())
        is_backward = args.callback_trigger == CallbackTrigger.LAZY_BACKWARD
        text = f"compiling the {'backward' if is_backward else 'forward'} pass"
        threading.Thread(target=show, args=[text, ended[-1]], daemon=True).start()

    def show(text: str, is_done: threading.Event) -> None:
        with tqdm(desc=text, bar_format="{desc}: {elapsed}", leave=False) as line:
            while not is_done.wait(0.2):
                line.refresh()

    if is_main() and sys.stderr.isatty():
        callback_handler.register_start_callback(start)
        callback_handler.register_end_callback(lambda _: ended.pop().set())
