"""Small trainings, and the checkpoints of them."""

from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import load_file

from corpus.shards import open_shards
from formats.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    TrainerState,
    collect,
    load_checkpoint,
    plain_values,
    read_state,
    rng_states,
)
from model import GPT, GPTConfig
from parallel import SINGLE_PROCESS
from runtime.files import read_json, sha256_of, write_json

TINY = GPTConfig(block_size=16, vocab_size=100, n_layer=2, n_head=2, n_embd=16)
TENSOR_FILES = ("model.safetensors", "optimizer.safetensors")


class Counting(torch.optim.Optimizer):
    """SGD whose state is a number and a None, no tensor."""

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state |= {"updates": state.get("updates", 0) + 1, "momentum": None}
            parameter.sub_(parameter.grad, alpha=0.1 / state["updates"])


def muon_and_adamw(model):
    matrices = [p for p in model.transformer.h.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    return torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)


OPTIMIZERS = {
    "AdamW": lambda model: (torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),),
    "momentum": lambda model: (torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),),
    "Counting": lambda model: (Counting(model.parameters(), {}),),
    "Muon": muon_and_adamw,
}


def new_trainer(config=TINY, kind="AdamW"):
    model = GPT(config)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizers = OPTIMIZERS[kind](model)
    return SimpleNamespace(raw_model=model, optimizers=optimizers, scaler=scaler, state={})


def contents(trainer):
    return collect(trainer.raw_model, trainer.optimizers, trainer.state)


def restore(checkpoint, trainer, ranks=SINGLE_PROCESS):
    parts = trainer.raw_model, trainer.optimizers, getattr(trainer, "scaler", None), trainer.state
    load_checkpoint(checkpoint, *parts, ranks)


def run_state(step, trainer, train_config=None):
    return TrainerState(
        step=step,
        position=step * 4,
        tokens_seen=step * 64,
        model_config=asdict(trainer.raw_model.config),
        train_config=train_config or {"seed": 1},
        data_fingerprint="abc",
        rng_states=rng_states(),
        grad_scaler={},
        val_fingerprint="def",
        optimizers=[type(optimizer).__name__ for optimizer in trainer.optimizers],
        optimizer_values=plain_values(contents(trainer).optimizer),
    )


def save(folder, step, trainer, train_config=None, keep=0):
    """Save a checkpoint, wait for it and return its folder."""
    with CheckpointWriter(folder, keep) as writer:
        writer.save(run_state(step, trainer, train_config), contents(trainer))
    return folder / f"step_{step:08d}"


def save_run(run_dir, config=None, step=1):
    """Save a checkpoint of a model that can be exported; returns the model."""
    trainer = new_trainer(GPTConfig(block_size=16, n_layer=2, n_head=2, n_embd=8))
    save(run_dir / "checkpoints", step, trainer, config)
    return trainer.raw_model


def load(path, trainer, ranks=SINGLE_PROCESS):
    state = read_state(path)
    restore(Checkpoint(path, state), trainer, ranks)
    return state


def train(trainer, steps, without_gradient=()):
    model = trainer.raw_model
    for _ in range(steps):
        tokens = torch.randint(0, 100, (4, 17))  # the global generator's state matters
        model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
        for name in without_gradient:
            model.get_parameter(name).grad = None
        for optimizer in trainer.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def saved_tensors(path):
    return {name: load_file(path / name) for name in TENSOR_FILES}


def assert_same_parameters(model, other):
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name


def write_manifest(path):
    """Write a checkpoint's manifest, for the files that are there now."""
    (path / "manifest.json").unlink(missing_ok=True)
    files = {f.name: {"bytes": f.stat().st_size, "sha256": sha256_of(f)} for f in path.iterdir()}
    write_json(path / "manifest.json", {"format": 1, "files": files})


def rewrite_state(path, change):
    """Change a checkpoint's trainer state, and its manifest with it."""
    write_json(path / "trainer_state.json", change(read_json(path / "trainer_state.json")))
    write_manifest(path)


def save_run_with_text(run_dir, data_dir, tokens, model=None):
    """Save a checkpoint of a run on a training text of these tokens."""
    data_dir.mkdir(exist_ok=True)
    np.save(data_dir / "train_000000.npy", np.array(tokens, np.uint16))
    fingerprint = open_shards(data_dir, "train").fingerprint
    trainer = new_trainer(GPTConfig(block_size=16, n_layer=2, n_head=2, n_embd=8))
    trainer.raw_model = model or trainer.raw_model
    trainer.optimizers = OPTIMIZERS["AdamW"](trainer.raw_model)
    path = save(run_dir / "checkpoints", 1, trainer, {"data_dir": str(data_dir)})
    rewrite_state(path, lambda state: state | {"data_fingerprint": fingerprint})
    return trainer.raw_model
