"""What a script does before its imports, which take seconds, and asks without them."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # from Linux's prctl.h


def prepare_process() -> None:
    """Set up this process for slow imports: Ctrl-C ends it in one line.

    A log gets no bars of the hub's downloads. `torchrun` that dies by `kill -9` ends no rank: Linux
    sends them SIGTERM then, so that they save and end.

    libgomp, which torch loads, reads its settings only then. Its waiting threads spin, which costs
    nothing alone but slows down all that shares the cores: on 2 cores next to two busy loops the
    124M model trained at 267 to 291 tokens per second, with a spin count of 1000 at 403 to 419,
    and alone at 800 to 820 with either.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"
    if not (sys.stderr and sys.stderr.isatty()):
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        signal.signal(signal.SIGINT, _exit_on_ctrl_c)


def finish_startup() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again; the imports are done."""
    if signal.getsignal(signal.SIGINT) is _exit_on_ctrl_c:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit_on_ctrl_c(*_: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


def usable_cores() -> int:
    """CPU cores that this process may use: under `torchrun`, its share of the machine's."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
