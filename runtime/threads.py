"""CPU threads: how many, and what they do while they wait. Scripts import this before torch.

libgomp, which torch loads, reads its settings only then. Its waiting threads spin, which costs
nothing alone but slows down all that shares the cores: on 2 cores next to two busy loops the 124M
model trained at 267 to 291 tokens per second, with a spin count of 1000 at 403 to 419, and alone
at 800 to 820 with either.
"""

import os
import sys

if "OMP_WAIT_POLICY" not in os.environ:  # which a spin count would override
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def usable_cores() -> int:
    """CPU cores that this process may use: under `torchrun`, its share of the machine's."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


if "LOCAL_WORLD_SIZE" in os.environ:  # else every rank starts up to 32 processes to compile
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(32, usable_cores())))
