"""A model with the rows of a text's ids trains like one whose other rows start equal."""

import numpy as np
import pytest
import torch
from checkpoints import saved_tensors
from conftest import HELLASWAG, TINY_RUN, assert_same_run, needs_compiler, series, tiny_run

from corpus.shards import open_shards
from evaluation import run_evaluation, score_hellaswag, validate
from formats.checkpoint import copy_state, model_state
from formats.load import latest_checkpoint, load_model
from hellaswag import load_examples
from model import GPT, IGNORE_INDEX, GPTConfig, lm_logits
from parallel import SINGLE_PROCESS
from runtime.errors import UserError
from spelling import share_by_spelling
from tokenizer import gpt2_encoding
from train_gpt2 import build, main, train_step
from vocabulary import text_vocabulary

OWN = [*range(40, 340), 50_256]  # ids of the training text
CONSTANT = ["--lr-schedule=wsd", "--max-lr=1e-3", "--min-lr=1e-3", "--max-steps=12"]
SAVED = ["--checkpoint-every=3", "--val-every=3", "--sample-every=6", "--spelling-share=0.3"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two shards of training text, and validation text that also has other ids."""
    folder = tmp_path_factory.mktemp("data")
    steps = np.random.default_rng(0).integers(0, 3, 12_000)
    for name, n_ids, part in (
        ("val_000000", 400, slice(2000)),
        ("train_000001", 300, slice(2000, 5000)),
        ("train_000002", 300, slice(5000, None)),
    ):
        tokens = 40 + np.cumsum(steps)[part] % n_ids
        tokens[-1] = 50_256
        np.save(folder / f"{name}.npy", tokens.astype(np.uint16))
    return folder


@pytest.fixture
def flags(data, tmp_path):
    return [f"--data-dir={data}", f"--out-dir={tmp_path}", *TINY_RUN, *CONSTANT, *SAVED]


def trainers(data, folder, **settings):
    """The trainer of a model with all rows, those that do not occur equal, and of one without."""
    for vocabulary in ("gpt2", "text"):
        with tiny_run(data, folder / vocabulary, vocabulary=vocabulary, **settings) as run:
            trainer = build(run)
        if vocabulary == "gpt2":
            others = [id for id in range(50_257) if id not in set(OWN)]
            wte = trainer.raw_model.transformer.wte.weight
            with torch.no_grad():
                wte[others] = wte[others[0]].clone()
        yield trainer


@pytest.fixture
def double(monkeypatch):
    """Train in float64: in float32, rounding adds up to a few units in the last place."""
    monkeypatch.setattr(lm_logits, "__code__", (lambda hidden, weight: hidden @ weight.T).__code__)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.gpt2
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_20_steps_equal_those_of_a_model_with_all_rows(data, tmp_path, optimizer, clip, double):
    check_20_steps(data, tmp_path, 1e-6, 1e-6, optimizer=optimizer, grad_clip=clip, loss_chunks=1)


@pytest.mark.gpt2
def test_20_steps_with_the_loss_in_chunks_equal_those_of_a_model_with_all_rows(
    data, tmp_path, double
):
    check_20_steps(data, tmp_path, 1e-6, 1e-6, grad_clip=0.5, loss_chunks=3)


def check_20_steps(data, tmp_path, tolerance, relative, **settings):
    settings |= {"max_lr": 3e-3}
    full, text = trainers(data, tmp_path, **settings, total_batch_size=64, micro_batch_size=2)
    assert len(text.raw_model.transformer.wte.weight) == 384
    for trainer in (full, text):
        trainer.numbers = []
        with trainer.batches:
            for step in range(20):
                numbers = train_step(trainer, step)
                trainer.is_finite(numbers)
                trainer.numbers.append(numbers.read())
    for name, within in (("train_loss", {"abs": tolerance}), ("grad_norm", {"rel": relative})):
        values, expected = ([n[name] for n in trainer.numbers] for trainer in (text, full))
        assert values == pytest.approx(expected, **within), name
    assert min(values) > settings["grad_clip"]
    losses = [run_evaluation(validate, trainer)["val_loss"] for trainer in (text, full)]
    assert losses[0] == pytest.approx(losses[1], abs=tolerance)
    # Weights and moments of all rows but the padding.
    contents = text.contents()
    for found, expected in zip(contents[:2], full.contents()[:2], strict=True):
        tensors = {name: x for name, x in found.items() if x.dim()}  # no counts of steps
        for name, tensor in text.run.vocabulary.expand(tensors).items():
            difference = (tensor - expected[name])[:50_257].abs().max()
            assert difference <= 10 * relative * expected[name].abs().max(), name


def test_evaluations_are_those_of_the_whole_vocabulary(data, tmp_path, double):
    _, text = trainers(data, tmp_path, block_size=32, total_batch_size=32, max_lr=3e-3)
    with text.batches:
        for step in range(5):
            train_step(text, step)
    running, full = text.raw_model.eval(), GPT(text.run.model_config).eval()
    copy_state(text.run.vocabulary.expand(model_state(running)), full, "test")
    tokens = np.load(data / "val_000000.npy").astype(np.int64)
    assert set(tokens[200:457].tolist()) - set(OWN)
    windows = torch.from_numpy(np.stack([tokens[i : i + 33] for i in range(200, 457, 32)]))
    inputs, targets = windows[:, :-1], windows[:, 1:]
    torch.testing.assert_close(running(inputs).logits, full(inputs).logits)
    for counted in (targets, targets.masked_fill(targets % 2 == 0, IGNORE_INDEX)):
        loss = full(inputs, counted).loss.item()
        assert running(inputs, counted).loss.item() == pytest.approx(loss, abs=1e-9)


def test_hellaswag_is_scored_with_the_whole_vocabulary(data, tmp_path):
    _, text = trainers(data, tmp_path)
    vars(text.run)["hellaswag"] = load_examples(HELLASWAG)[:8]  # `Run` is frozen
    scores = run_evaluation(score_hellaswag, text)
    full = GPT(text.run.model_config)
    copy_state(text.run.vocabulary.expand(model_state(text.raw_model)), full, "test")
    text.raw_model = full
    assert scores == run_evaluation(score_hellaswag, text)


def run(flags, name, *more):
    main([*flags, f"--run-name={name}", "--resume=auto", *more])


def test_resume_is_exact_also_from_text_to_gpt2_and_back(data, flags, tmp_path):
    flags = [*flags, "--spelling-share=0"]  # with GPT-2's rows, it would make them differ
    run(flags, "one", "--vocabulary=text")
    run(flags, "parts", "--vocabulary=text", "--max-steps=6")
    run(flags, "parts")
    run(flags, "moved", "--vocabulary=text", "--max-steps=3")
    run(flags, "moved", "--vocabulary=gpt2", "--max-steps=6")
    run(flags, "moved", "--vocabulary=text")
    assert_same_run(tmp_path / "parts", tmp_path / "one")
    assert_same_run(tmp_path / "moved", tmp_path / "one", 1e-5)
    one, parts = (saved_tensors(latest_checkpoint(tmp_path / name)) for name in ("one", "parts"))
    for file, tensors in one.items():
        assert all(torch.equal(tensors[name], parts[file][name]) for name in tensors)
        assert all(len(x) == 50_304 for name, x in tensors.items() if ".wte." in name and x.dim())
    # Other commands see a GPT-2 whose validation loss is the one that was logged.
    model = load_model(tmp_path / "one")
    tokens = np.load(data / "val_000000.npy").astype(np.int64)
    windows = [tokens[32 * i :][:33] for i in (n * 62 // 9 for n in range(9))]
    windows = torch.from_numpy(np.stack(windows))
    assert set(windows.flatten().tolist()) - set(OWN)
    loss = model(windows[:, :-1], windows[:, 1:]).loss.item()
    assert loss == pytest.approx(series(tmp_path / "one", "val_loss")[12], abs=1e-5)


def test_rows_that_differ_and_init_from_are_refused(flags, tmp_path):
    run(flags, "gpt2", "--max-steps=3")
    with pytest.raises(UserError, match=r"transformer.wte.weight has different rows for ids that"):
        run(flags, "gpt2", "--vocabulary=text")
    with pytest.raises(UserError, match="--vocabulary text requires new weights: leave it out"):
        main([*flags, f"--init-from={tmp_path}/gpt2", "--vocabulary=text"])


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_equal_one_process(commands, flags, tmp_path, parallel):
    flags = [*flags, "--vocabulary=text", "--grad-clip=0.5"]
    main([*flags, "--run-name=one"])
    ranks = [*flags, f"--run-name={parallel}", f"--parallel={parallel}", "--micro-batch-size=1"]
    done = commands.run_ranks(2, "train_gpt2", *ranks, "--max-steps=6")
    assert done.code == 0, done.stderr
    done = commands.run_ranks(2, "train_gpt2", *ranks, "--resume=auto")
    assert done.code == 0, done.stderr
    assert_same_run(tmp_path / parallel, tmp_path / "one", 1e-5, grad_norm=1e-4)


@pytest.mark.slow
@needs_compiler
def test_compiled_model_equals_an_uncompiled_one(flags, tmp_path):
    flags = [*flags, "--vocabulary=text", "--max-steps=3"]
    for name, more in (("one", "--no-compile"), ("compiled", "--compile")):
        main([*flags, f"--run-name={name}", more])
    assert_same_run(tmp_path / "compiled", tmp_path / "one", 1e-5)


def test_spelling_acts_on_ids_with_rows_of_their_own(tmp_path):
    words = (" house", "House", "Sun")
    common, rare, other = map(gpt2_encoding().encode_single_token, words)
    np.save(tmp_path / "train.npy", np.array([common, rare, other], np.uint16))
    vocabulary = text_vocabulary(open_shards(tmp_path, "train"), GPTConfig())
    rows = vocabulary.rows[[common, rare, other]].tolist()
    assert sorted(rows) == [0, 1, 2]
    embedding = torch.nn.Parameter(torch.zeros(128, 2))
    embedding.grad = torch.zeros(128, 2)
    embedding.grad[rows[0]] = 8.0
    embedding.grad[3] = 1.0  # the shared row's
    share_by_spelling(embedding, 0.5, SINGLE_PROCESS, vocabulary)()
    gradients = embedding.grad[:, 0].tolist()
    assert gradients[rows[0]] == pytest.approx(12.0)
    assert gradients[rows[1]] == pytest.approx(4.0, rel=0.05)
    assert abs(gradients[rows[2]]) < 1
    assert gradients[3:] == [1.0] + [0.0] * 124


def test_a_text_with_every_id_needs_no_shared_row(tmp_path):
    np.save(tmp_path / "train.npy", np.arange(50_257, dtype=np.uint16))
    assert text_vocabulary(open_shards(tmp_path, "train"), GPTConfig()) is None
    np.save(tmp_path / "train.npy", np.arange(50_256, dtype=np.uint16))
    vocabulary = text_vocabulary(open_shards(tmp_path, "train"), GPTConfig())
    assert (vocabulary.n_own, len(vocabulary.ids)) == (50_256, 50_304)
