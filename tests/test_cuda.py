"""What only a GPU can show."""

import math
import re
from functools import partial

import pytest
import torch
from conftest import HELLASWAG, series

from corpus.shards import open_shards
from dataloader import validation_batches
from formats.huggingface import save_pretrained
from generation import generate_tokens, score_tokens
from hellaswag import evaluate_hellaswag, load_examples
from model import GPT, IGNORE_INDEX, GPTConfig
from ops import checkpoint_activations
from runtime.distributed import DistInfo
from runtime.errors import is_out_of_memory
from runtime.precision import autocast
from train_gpt2 import compile_by_block

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
needs_gpu = pytest.mark.skipif(not GPUS, reason="this machine has no CUDA GPU")
needs_two = pytest.mark.skipif(GPUS < 2, reason="this machine has no two CUDA GPUs")
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CONFIG = GPTConfig(block_size=128, n_layer=2, n_head=2, n_embd=64)
COMPILERS = {
    "eager": lambda model: model,
    "one graph": partial(torch.compile, dynamic=False, fullgraph=True),
    "blocks": compile_by_block,
}


@pytest.fixture
def both():
    """The same model on the CPU and on the GPU, in full float32, with a large padding."""
    torch.manual_seed(0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    model, twin = GPT(CONFIG), GPT(CONFIG).to(CUDA)
    model.transformer.wte.weight.data[CONFIG.vocab_size :] = 50.0  # in no loss, with no gradient
    twin.load_state_dict(model.state_dict())
    yield model, twin
    torch.set_float32_matmul_precision(before)


@needs_gpu
@pytest.mark.parametrize("compile_as", COMPILERS.values(), ids=COMPILERS)
@pytest.mark.parametrize(("chunks", "checkpointing"), [(1, "none"), (4, "full")])
def test_loss_and_gradients_are_those_of_the_cpu(both, compile_as, chunks, checkpointing):
    idx = torch.randint(CONFIG.vocab_size, (4, 64))
    targets = idx.roll(-1, 1).masked_fill(torch.rand(idx.shape) < 0.1, IGNORE_INDEX)
    results = []
    for model, device in zip(both, (CPU, CUDA), strict=True):
        model.loss.chunks = chunks
        checkpoint_activations(model.transformer.h, checkpointing)
        trained = compile_as(model) if device == CUDA else model
        loss = trained(idx.to(device), targets.to(device)).loss
        loss.backward()
        gradients = {name: p.grad.cpu() for name, p in model.named_parameters()}
        results.append((loss.item(), gradients))
    (loss, gradients), (their_loss, their_gradients) = results
    assert their_loss == pytest.approx(loss, abs=1e-4)
    for name, gradient in gradients.items():
        error = (their_gradients[name] - gradient).norm() / gradient.norm()
        assert error < 1e-3, name
    assert not their_gradients["transformer.wte.weight"][CONFIG.vocab_size :].any()


@needs_gpu
def test_compiled_gradients_in_bfloat16_are_as_close_to_float32_as_eager_ones(both):
    del both  # it asks for full float32
    model = GPT(GPTConfig(n_layer=2)).to(CUDA)
    idx, targets = torch.randint(50257, (2, 4, 1024), device=CUDA)
    exact = torch.autograd.grad(model(idx, targets).loss, [*model.parameters()])
    errors = {}
    for name, compile_as in COMPILERS.items():
        with autocast(CUDA, torch.bfloat16):
            loss = compile_as(model)(idx, targets).loss
        found = torch.autograd.grad(loss, [*model.parameters()])
        errors[name] = torch.stack(
            [(g - e).norm() / e.norm() for g, e in zip(found, exact, strict=True)]
        )
    for name in ("one graph", "blocks"):
        assert (errors[name] <= 1.1 * errors["eager"]).all(), errors
    assert errors["one graph"].min() > 0


@needs_gpu
@pytest.mark.parametrize("compile_flag", ["--compile", "--no-compile"])
def test_deterministic_run_resumes_bit_for_bit(commands, tiny_flags, tmp_path, compile_flag):
    flags = [*tiny_flags, "--device=cuda", "--dtype=auto", compile_flag, "--deterministic"]
    flags += ["--block-size=128", "--total-batch-size=2048", "--sample-every=4"]
    flags += ["--hellaswag-every=4", f"--hellaswag-data={HELLASWAG}"]
    middle = tmp_path / "runs/whole/checkpoints/step_00000004"
    for more in (["--run-name=whole"], ["--run-name=rest", f"--resume={middle}"]):
        done = commands.run("train_gpt2", *flags, *more)
        assert done.code == 0, done.stderr
    whole, rest = (series(tmp_path / "runs" / run, "train_loss") for run in ("whole", "rest"))
    assert rest == {step: whole[step] for step in (5, 6, 7, 8)}


@needs_gpu
def test_micro_batch_is_chosen_by_the_plan(commands, tiny_flags, tmp_path):
    flags = [*tiny_flags, "--device=cuda", "--dtype=auto", "--micro-batch-size=auto"]
    flags += ["--n-layer=12", "--n-head=12", "--n-embd=768", "--block-size=1024"]
    flags += ["--total-batch-size=8192", "--max-steps=2", "--val-every=0", "--run-name=a"]
    done = commands.run("train_gpt2", *flags)
    assert done.code == 0, done.stderr
    assert re.search(r"= \d+ sequences x 1,024 tokens", done.stdout)
    assert all(map(math.isfinite, series(tmp_path / "runs/a", "train_loss").values()))


@needs_gpu
def test_out_of_memory_is_known_by_really_running_out(commands, tmp_path):
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**46, dtype=torch.uint8, device=CUDA)
    assert is_out_of_memory(error.value)
    save_pretrained(GPT(GPTConfig(100_000, n_layer=12, n_head=2, n_embd=64)), tmp_path / "long")
    flags = ("--num-samples=1000000", "--max-new-tokens=100000")
    done = commands.run("sample", f"--model={tmp_path}/long", "--device=cuda", *flags)
    assert done.code == 2, done
    line = done.stderr.splitlines()[-1]  # after torch's own of what it could not allocate
    assert line.startswith("error: the device is out of memory: stop other programs")
    assert "Traceback" not in done.stderr


@needs_gpu
def test_samples_and_hellaswag_are_those_of_the_cpu(both):
    model, twin = both
    idx = torch.randint(CONFIG.vocab_size, (3, 5))
    options = {"temperature": 0, "stop_token": None}
    with torch.no_grad():  # logits far enough apart that rounding chooses no token
        model.transformer.wte.weight.mul_(5)
        twin.transformer.wte.weight.mul_(5)
    on_gpu = generate_tokens(twin, idx.to(CUDA), 150, **options)
    assert on_gpu == generate_tokens(model, idx, 150, **options)
    examples = load_examples(HELLASWAG)
    ours, theirs = (evaluate_hellaswag(each, examples, batch_size=4) for each in (model, twin))
    assert (ours.summed - theirs.summed).abs().max() < 1e-3 * ours.summed.abs().max()


@needs_gpu
def test_evaluation_never_waits_for_the_gpu(both, tiny_data):
    _, model = both
    examples = load_examples(HELLASWAG)[:8]
    rows = [(each.context, ending) for each in examples for ending in each.endings]
    shards, dist_info = open_shards(tiny_data, "val"), DistInfo(CUDA)
    batches = {"block_size": 128, "micro_batch_size": 4, "max_tokens": 1024, "vocab_size": 50257}
    for mode in ("default", "error"):  # first what is only made once, such as cuBLAS's handle
        torch.cuda.set_sync_debug_mode(mode)
        try:
            score_tokens(model, rows, CUDA)
            for inputs, targets in validation_batches(shards, **batches, dist_info=dist_info):
                with torch.no_grad():
                    model(inputs, targets)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@needs_two
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("more", [[], ["--parallel=fsdp"], ["--parallel=fsdp", "--cpu-offload"]])
def test_two_gpus_train_as_one(commands, tiny_flags, tmp_path, optimizer, more):
    flags = [*tiny_flags, "--device=cuda", "--micro-batch-size=2", "--no-compile"]
    flags.append(f"--optimizer={optimizer}")
    one = commands.run("train_gpt2", *flags, "--run-name=one")
    two = commands.run_ranks(2, "train_gpt2", *flags, *more, "--run-name=two")
    assert (one.code, two.code) == (0, 0), one.stderr + two.stderr
    first, second = (series(tmp_path / "runs" / run, "train_loss") for run in ("one", "two"))
    assert first.keys() == second.keys()
    assert max(abs(first[step] - second[step]) for step in first) < 1e-3  # TF32


@needs_two
def test_run_moves_between_one_gpu_and_all(commands, tiny_flags, tmp_path):
    flags = [*tiny_flags, "--device=cuda", "--micro-batch-size=1", "--optimizer=muon"]
    flags += [f"--total-batch-size={32 * 8 * GPUS}"]
    whole = commands.run("train_gpt2", *flags, "--run-name=whole")
    assert whole.code == 0, whole.stderr
    middle = tmp_path / "runs/whole/checkpoints/step_00000004"
    for more in ([], ["--parallel=fsdp"]):
        name = f"rest{len(more)}"
        rest = [*flags, *more, f"--run-name={name}", f"--resume={middle}"]
        done = commands.run_ranks(GPUS, "train_gpt2", *rest)
        assert done.code == 0, done.stderr
        first, second = (series(tmp_path / "runs" / r, "train_loss") for r in ("whole", name))
        assert second.keys() == {5, 6, 7, 8}
        assert max(abs(first[step] - second[step]) for step in second) < 1e-3  # TF32
