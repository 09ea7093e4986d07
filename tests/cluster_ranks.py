"""Under torchrun: the step time of a small model and the rate of an all-reduce, as JSON."""

import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from model import GPT, GPTConfig
from runtime.distributed import setup_distributed
from train_gpt2 import train_step

MODEL = GPTConfig(block_size=128, vocab_size=2000, n_layer=4, n_head=4, n_embd=192)
SEQUENCES, MICRO_BATCH = 32, 4  # of a step over all processes; of a process at once
REPEATS = 7


def median_seconds(action):
    """Of several repetitions, after one that warms up."""
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def measure(dist_info):
    torch.set_num_threads(1)  # alike, however many processes there are
    model = wrap_model(GPT(MODEL), dist_info)
    optimizer = build_optimizer(model, 0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    tokens = torch.randint(MODEL.vocab_size, (MICRO_BATCH, MODEL.block_size))
    accum = SEQUENCES // MICRO_BATCH // dist_info.world_size

    def step():
        settings = {"grad_accum_steps": accum, "lr": 1e-4, "grad_clip": 1.0, "scaler": scaler}
        batches = iter([(tokens, tokens)] * accum)
        train_step(model, optimizer, batches, dtype=torch.float32, dist_info=dist_info, **settings)

    results = {"step_seconds": median_seconds(step)}
    if dist_info.world_size > 1:
        gradients = torch.zeros(MODEL.n_params)
        seconds = median_seconds(lambda: dist.all_reduce(gradients))
        share = 2 * (dist_info.world_size - 1) / dist_info.world_size
        results["bytes_per_second"] = share * 4 * MODEL.n_params / seconds
    if dist_info.is_main:
        print(json.dumps(results))


if __name__ == "__main__":
    with setup_distributed("cpu") as here:
        measure(here)
