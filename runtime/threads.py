"""CPU cores per process, and how idle OpenMP threads wait. Import this before torch.

libgomp reads these settings only once, when torch loads it. By default its idle threads spin. That
costs nothing on an idle machine, but slows down every program that shares the cores: on 2 cores
next to two busy loops, the 124M model trained at 267 to 291 tokens per second, and at 403 to 419
with a spin count of 1000. Alone it trained at 800 to 820 with either.
"""

import os
import sys

if "OMP_WAIT_POLICY" not in os.environ:  # a spin count would override the policy
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def usable_cores() -> int:
    """Return the number of CPU cores per process; under `torchrun`, cores are divided equally."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


if "LOCAL_WORLD_SIZE" in os.environ:  # else every rank starts up to 32 compile workers
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(32, usable_cores())))
