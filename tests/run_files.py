"""What a run leaves in its folder: written at once, or by `RunLog` itself."""

import json

from runtime.distributed import DistInfo
from training.config import TrainConfig
from training.memory import find_device
from training.run_log import RunLog

BATCH = 8192


def append_records(run_dir, *records):
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def write_run(run_dir, steps, val_every=0, hellaswag_every=0, total=10042, loss_at_end=3, **extra):
    """A run's metrics, as train_gpt2.py logs them."""
    records = []
    for step in range(steps + 1):
        loss = loss_at_end + 8 / (1 + step / 20)
        evaluation = {}
        if val_every and step % val_every == 0:
            evaluation["val_loss"] = loss + 0.05
        if hellaswag_every and step % hellaswag_every == 0:
            evaluation |= {"hellaswag_acc_norm": 0.3, "hellaswag_total": total}
        if evaluation:
            records.append({"step": step, "tokens_seen": step * BATCH} | evaluation)
        if step < steps:
            trained = {"step": step + 1, "tokens_seen": (step + 1) * BATCH, "train_loss": loss}
            records.append(trained | {"tokens_per_second": 15000.0, "mfu": None} | extra)
    append_records(run_dir, *records)
    return run_dir


def new_log(run_dir, start_step=0, **settings):
    """The log of a run of ten steps; its settings can be others."""
    config = TrainConfig(**({"max_steps": 10, "total_batch_size": 1000} | settings))
    log = RunLog(run_dir, config, find_device(config, DistInfo()), config.model_config())
    log.start_at(start_step, start_step * config.total_batch_size)
    return log


def log_step(log, step, loss=3.0, lr=1e-3, grad_norm=1.0):
    """Log a step as `train` does."""
    metrics = {"train_loss": loss, "lr": lr, "grad_norm": grad_norm}
    log.step(step, step * log.config.total_batch_size, metrics)


def log_session(run_dir, tracker, start_step, end):
    """Log the steps after `start_step`, as a run does; evaluate at every fourth step."""
    run_dir.mkdir(exist_ok=True)
    with new_log(run_dir, start_step, logger=(tracker,), max_steps=end) as log:
        log.record(resumed_from=start_step)
        for step in range(start_step, end + 1):
            if step > start_step:
                log_step(log, step, loss=1 / step, grad_norm=float(end))
            if step % 4 == 0:
                with log.evaluation(step) as record:
                    log.samples(["<b>one</b>"])
                    record |= {"val_loss": 1 / (1 + step), "samples": 1}
