"""40 steps of the command equal those of a plain loop that trains transformers' GPT-2."""

import math

import numpy as np
import pytest
import torch
from conftest import randomize_weights, series

pytestmark = pytest.mark.gpt2

STEPS, WARMUP_STEPS, MICRO_STEPS, CONTEXT = 40, 6, 2, 64
MAX_LR, MIN_LR, DECAY = 2e-3, 2e-4, 0.3
CLIP = 1.0  # some of the norms are above, others below


def train_plainly(model, tokens):
    """Train on the tokens in sequence; yields each step's loss, rate and norm before clipping."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for step in range(STEPS):
        lr = MAX_LR * (step + 1) / WARMUP_STEPS
        if step >= WARMUP_STEPS:
            angle = math.pi * (step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS)
            lr = MIN_LR + (MAX_LR - MIN_LR) * (1 + math.cos(angle)) / 2
        for group in optimizer.param_groups:
            group["lr"] = lr
        losses = []
        for micro_step in range(step * MICRO_STEPS, (step + 1) * MICRO_STEPS):
            window = tokens[micro_step * CONTEXT :][: CONTEXT + 1]
            logits = model(window[None, :-1]).logits[0]
            losses.append(torch.nn.functional.cross_entropy(logits, window[1:]))
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item(), lr, norm.item()


def test_training_equals_a_plain_loop_with_the_model_of_transformers(commands, tiny_data, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_positions": CONTEXT, "n_layer": 3, "n_head": 4, "n_embd": 32}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **no_dropout))
    randomize_weights(theirs, 0.02).save_pretrained(tmp_path / "initial")
    done = commands.run(
        "train_gpt2",
        *(f"--init-from={tmp_path}/initial", f"--data-dir={tiny_data}", "--no-shuffle"),
        *(f"--max-steps={STEPS}", f"--warmup-steps={WARMUP_STEPS}", "--micro-batch-size=1"),
        *(f"--total-batch-size={MICRO_STEPS * CONTEXT}", f"--max-lr={MAX_LR}"),
        *(f"--min-lr={MIN_LR}", f"--weight-decay={DECAY}", f"--grad-clip={CLIP}", "--beta2=0.95"),
        *("--device=cpu", "--dtype=float32", "--no-compile"),
        *("--val-every=0", "--hellaswag-every=0", "--sample-every=0"),
        *(f"--out-dir={tmp_path}", "--run-name=run"),
    )
    assert done.code == 0, done.stderr
    shards = [np.load(path) for path in sorted(tiny_data.glob("train_*.npy"))]
    tokens = torch.from_numpy(np.concatenate(shards).astype(np.int64))
    losses, rates, norms = zip(*train_plainly(theirs.train(), tokens), strict=True)
    assert min(norms) < CLIP < max(norms)
    for name, values in {"lr": rates, "train_loss": losses, "grad_norm": norms}.items():
        found = tuple(series(tmp_path / "run", name).values())
        assert found == pytest.approx(values, rel=1e-14 if name == "lr" else 1e-5), name
