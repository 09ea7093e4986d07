import io
import math
import os
import sys
import weakref
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from checkpoints import save_run, save_run_with_text
from conftest import randomize_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import generation
import model as model_module
import sample
from corpus.overlap import find_copies
from corpus.shards import Manifest, open_shards
from corpus.sources import file_source
from formats.huggingface import load_pretrained, save_pretrained, to_hf_state_dict
from generation import generate_tokens, sample_token, text_loss
from model import GPT, Block, GPTConfig
from runtime.cli import run_command
from runtime.errors import UserError
from sample import generate, sample_rows
from tokenizer import VOCAB_SHA256, gpt2_encoding

TINY = GPTConfig(block_size=16, n_layer=2, n_head=2, n_embd=16)
SMALL_VOCAB = GPTConfig(block_size=8, vocab_size=100, n_layer=2, n_head=2, n_embd=16)


greedy = partial(generate_tokens, temperature=0, stop_token=None)


def random_model(config):
    """A model whose logits differ enough that no two are near each other."""
    torch.manual_seed(0)
    return randomize_weights(GPT(config), 0.3)


def prompts(config, B, T):
    return torch.randint(0, config.vocab_size, (B, T))


@pytest.mark.gpt2
def test_generate_greedy_equals_transformers():
    transformers = pytest.importorskip("transformers")
    model, idx = random_model(TINY), prompts(TINY, 3, 4)
    hf_config = transformers.GPT2Config(
        n_positions=TINY.block_size, n_layer=TINY.n_layer, n_head=TINY.n_head, n_embd=TINY.n_embd
    )
    theirs = transformers.GPT2LMHeadModel(hf_config).eval()
    theirs.load_state_dict(to_hf_state_dict(model), strict=False)
    theirs.tie_weights()
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 50256}
    mask = torch.ones_like(idx)
    expected = theirs.generate(idx, attention_mask=mask, max_new_tokens=12, **options)
    assert greedy(model, idx, 12) == expected.tolist()


@pytest.mark.parametrize(("block_size", "prompt_length"), [(1, 20), (5, 8), (8, 1), (8, 8)])
def test_generate_greedy_is_the_same_without_the_cache(block_size, prompt_length):
    config = GPTConfig(block_size, vocab_size=100, n_layer=2, n_head=2, n_embd=16)
    model = random_model(config)
    idx = prompts(config, 3, prompt_length)
    cached = greedy(model, idx, 25)
    assert cached == greedy(model, idx, 25, use_cache=False)
    assert [len(row) for row in cached] == [prompt_length + 25] * 3


@pytest.mark.gpt2  # the arguments of the replaced function
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generate_greedy_with_shifted_tokens_is_without_the_cache_and_warns_once(
    monkeypatch, capsys, dtype
):
    class ShiftedBlock(Block):
        def forward(self, x, cache=None):
            shifted = F.pad(x, (0, 0, 1, -1))  # each token gets the one before
            return super().forward(torch.cat([x[..., :8], shifted[..., 8:]], dim=-1), cache)

    generation.print_once.cache_clear()
    monkeypatch.setattr(model_module, "Block", ShiftedBlock)
    model, idx = random_model(SMALL_VOCAB), prompts(SMALL_VOCAB, 3, 5)
    for _ in range(2):
        rows = greedy(model, idx, 25, dtype=dtype)
        assert rows == greedy(model, idx, 25, dtype=dtype, use_cache=False)
    assert capsys.readouterr().err.count("warning: sampling without the cache") == 1


def in_training_only(bias):
    """causal_attention with a bias that depends on the distance, left out for a single query."""

    def attention(q, k, v):
        n = k.size(2)
        if q.size(2) != n:
            return F.scaled_dot_product_attention(q, k, v)
        keys = torch.arange(n)
        distance = (keys[:, None] - keys).float()
        return F.scaled_dot_product_attention(
            q, k, v, bias(distance).masked_fill(distance < 0, -1e9)
        )

    return attention


BIASES = {
    "none": lambda distance: 0 * distance,
    "window": lambda distance: -1e9 * (distance >= 32),
    "alibi": lambda distance: -0.1 * distance,
}


@pytest.mark.gpt2  # the arguments of the replaced function
@pytest.mark.parametrize("bias", BIASES)
def test_generate_is_without_the_cache_if_attention_depends_on_the_distance_in_training_only(
    monkeypatch, bias
):
    """With new weights, whose attention is weak; the same lengths are compared once per model."""
    monkeypatch.setattr(model_module, "causal_attention", in_training_only(BIASES[bias]))
    torch.manual_seed(0)
    model = GPT(GPTConfig(128, vocab_size=100, n_layer=2, n_head=2, n_embd=64))
    idx, calls = prompts(model.config, 1, 3), []
    model.transformer.ln_f.register_forward_hook(lambda *args: calls.append(len(calls)))
    for max_new_tokens in (40, 60):
        calls.clear()
        rows = greedy(model, idx, max_new_tokens)
        n_calls = len(calls)
        assert rows == greedy(model, idx, max_new_tokens, use_cache=False)
    assert n_calls == 60
    used = generation.cache_agrees(weakref.ref(model), 6, idx.device, torch.float32)
    assert used == (bias == "none")


def test_generate_stops_each_row_at_its_own_stop_token_and_not_at_one_in_the_prompt():
    model, idx = random_model(SMALL_VOCAB), prompts(SMALL_VOCAB, 4, 2)
    stop = greedy(model, idx, 12)[0][5]
    idx[1, 0] = stop
    full = greedy(model, idx, 12)
    for row, whole in zip(greedy(model, idx, 12, stop_token=stop), full, strict=True):
        continuation = whole[2:]
        cut = continuation.index(stop) if stop in continuation else len(continuation)
        assert row == whole[: 2 + cut]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generate_never_gives_a_padding_id(temperature):
    model = random_model(SMALL_VOCAB)
    with torch.no_grad():  # so that, of all 128 rows, a padding one is always the most likely
        model.transformer.ln_f.bias.fill_(1.0)
        model.lm_head.weight[SMALL_VOCAB.vocab_size :] = 50.0
    idx = prompts(SMALL_VOCAB, 8, 1)
    hidden = model.hidden_states(idx)
    assert (model.lm_head(hidden).argmax(dim=-1) >= SMALL_VOCAB.vocab_size).all()
    for row in generate_tokens(model, idx, 10, temperature=temperature, top_k=0, stop_token=None):
        assert max(row) < SMALL_VOCAB.vocab_size


def test_generate_in_bfloat16_keeps_training_possible():
    model = random_model(SMALL_VOCAB)
    idx = prompts(SMALL_VOCAB, 2, 3)
    rows = generate_tokens(model, idx, 12, dtype=torch.bfloat16, stop_token=None)
    assert [len(row) for row in rows] == [15, 15]
    with torch.autocast("cpu", torch.bfloat16):
        model(idx, idx).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@settings(max_examples=30)
@given(
    logits=st.lists(st.integers(-20, 20), min_size=1, max_size=30),  # no near ties
    temperature=st.sampled_from([0.0, 1e-38, 1e-3]),
)
def test_sample_token_is_greedy_at_no_temperature(logits, temperature):
    token = int(sample_token(torch.tensor([logits]).float(), temperature, 0, 1.0, None))
    assert logits[token] == max(logits)


def test_sample_token_follows_the_probabilities_worked_by_hand():
    """Of 0.5, 0.25, 0.15, 0.1: top-k 3 renormalises by 0.9, and then 0.7 reaches two tokens."""
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log().repeat(60_000, 1)

    def frequencies(temperature, top_k, top_p):
        tokens = sample_token(logits, temperature, top_k, top_p, torch.Generator().manual_seed(0))
        return torch.bincount(tokens, minlength=4) / len(tokens)

    expected = torch.tensor([0.1, 0.5, 0.15, 0.25])
    top_3, top_3_then_p = torch.tensor([[0, 0.5, 0.15, 0.25], [0, 0.5, 0, 0.25]])
    only_the_first = torch.tensor([0, 1.0, 0, 0])
    for choice, share in (
        ((1.0, 0, 1.0), expected),
        ((0.5, 0, 1.0), expected**2),
        ((1.0, 3, 1.0), top_3),
        ((1.0, 3, 0.7), top_3_then_p),
        ((1.0, 0, 1e-46), only_the_first),  # float32 has no such number
    ):
        torch.testing.assert_close(frequencies(*choice), share / share.sum(), rtol=0, atol=0.01)


# --- texts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["café <|endoftext|>", ""])
def test_generate_gives_texts_that_begin_with_the_prompt_and_repeat_with_the_seed(prompt):
    model = random_model(TINY)
    options = {"num_samples": 3, "temperature": 0.9, "top_k": 0}
    before = torch.get_rng_state()
    first, again, other = (generate(model, prompt, 6, seed=s, **options) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert first == again != other
    assert len(set(first)) == 3
    assert all(text.startswith(prompt) and len(text) > len(prompt) for text in first + other)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample") / "model"
    save_pretrained(random_model(TINY), folder)
    return folder


@pytest.fixture
def run_main(monkeypatch, capsys, folder):
    """A function that returns what `sample.py` prints, in this process."""

    def run(*flags, stdin=""):
        typed = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", typed)
        # The tests compare texts with those of `generate`, whose dtype is not the machine's.
        always = ("--max-new-tokens=5", "--temperature=0", "--device=cpu", "--dtype=float32")
        monkeypatch.setattr(sys, "argv", ["sample.py", f"--model={folder}", *always, *flags])
        sample.main()
        return capsys.readouterr().out

    return run


@pytest.mark.gpt2
def test_main_prints_texts_that_generate_returns(run_main, folder):
    expected = generate(load_pretrained(folder), "café au", 5, num_samples=2, temperature=0)
    printed = run_main("--prompt=café au", "--num-samples=2")
    assert printed == "".join(
        f"--- sample {index} of 2 ---\n{text}\n\n" for index, text in enumerate(expected, start=1)
    )
    assert run_main("--prompt=-", "--num-samples=2", stdin="café au\n") == printed


@pytest.mark.gpt2
def test_main_interactive_continues_all_text_until_new(run_main, folder):
    printed = run_main("--interactive", stdin="Once upon\nHe said\n\n/new\nOnce upon\n")
    model, ids = load_pretrained(folder), []

    def continued(text):
        nonlocal ids
        ids = ids + gpt2_encoding().encode_ordinary(text)
        [longer] = generate_tokens(model, torch.tensor([ids]), 5, temperature=0)
        added, ids = longer[len(ids) :], longer
        return gpt2_encoding().decode(added)

    first, second, third = continued("Once upon"), continued("\nHe said"), continued("")
    texts = printed.removeprefix(f"{sample.GREETING}\n").split("\n> ")
    expected = [f"> Once upon{first}", f"He said{second}", third, f"> Once upon{first}", "\n"]
    assert texts == expected


def test_converse_never_tears_a_character_even_if_each_turn_is_interrupted(monkeypatch, capsys):
    ids, prompts = gpt2_encoding().encode_ordinary("né☃🎉"), []

    def continue_tokens(prompt, on_token):
        prompts.append(prompt[0].tolist())
        on_token(torch.tensor([ids[len(prompts) - 1]]), None)
        raise KeyboardInterrupt

    lines = io.StringIO("Once\n" + "\n" * (len(ids) - 1))
    monkeypatch.setattr(sys, "stdin", lines)
    sample.converse(continue_tokens, torch.device("cpu"))
    assert capsys.readouterr().out.replace("\n> ", "").endswith("Oncené☃🎉\n")
    assert prompts == [gpt2_encoding().encode_ordinary("Once") + ids[:n] for n in range(len(ids))]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.gpt2
def test_text_loss_is_the_mean_over_windows_of_the_context(monkeypatch):
    model, shapes = random_model(TINY), []
    ids = gpt2_encoding().encode_ordinary("Once upon a time, there was a café. " * 5)[:38]
    losses = []
    for start in (0, 16, 32):
        window = torch.tensor(ids[start : start + 17])
        logits = model(window[None, :-1]).logits[0]
        losses += F.cross_entropy(logits, window[1:], reduction="none").tolist()
    monkeypatch.setattr(generation, "SCORED_TOKENS", 2 * 16 + 1)
    monkeypatch.setattr(sys, "stderr", Terminal())
    model.transformer.wte.register_forward_hook(lambda _, args, out: shapes.append(args[0].shape))
    loss = text_loss(model, gpt2_encoding().decode(ids), stride=16)
    assert shapes == [(2, 16), (1, 5)]  # bounded memory
    assert "scoring:   0%|          | 0/2" in sys.stderr.getvalue()
    assert loss == pytest.approx(sum(losses) / 37, rel=1e-5)
    with pytest.raises(ValueError, match="2 tokens or more, but 'Once' has 1"):
        text_loss(model, "Once")


@pytest.mark.gpt2
@pytest.mark.parametrize(("stride", "n_ids"), [(None, 38), (None, 41), (5, 38), (1, 30), (8, 12)])
def test_text_loss_predicts_each_token_from_the_tokens_before_it(stride, n_ids, tmp_path):
    """After the first window, from at least 16 - stride + 1 tokens; half of 16 by default."""
    model, ids = (
        random_model(TINY),
        gpt2_encoding().encode_ordinary("A café in Paris. " * 9)[:n_ids],
    )
    expected, start = [], 0
    for place in range(1, n_ids):
        if place - start > 16:  # the next window
            start += stride or 8
        logits = model(torch.tensor([ids[start:place]])).logits[0, -1]
        expected.append(F.cross_entropy(logits, torch.tensor(ids[place])).item())
    text, found = gpt2_encoding().decode(ids), []
    loss = text_loss(model, text, on_losses=found.extend, stride=stride)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert loss == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    with pytest.raises(UserError, match="--stride 17 is above the context: use at most 16"):
        text_loss(model, text, stride=17)


def test_config_names_all_problems():
    with pytest.raises(ValueError, match=r"--top-k .*--top-p .*use only one of --interactive"):
        sample.SampleConfig(interactive=True, prompt="a", top_k=-1, top_p=2)


def test_main_without_a_model_and_without_runs_is_an_error(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["sample.py", "--device=cpu"])
    with pytest.raises(UserError, match="train one, or use --model gpt2"):
        sample.main()


@pytest.mark.gpt2
def test_main_without_enough_memory_says_so_in_one_line(run_main, tmp_path, capsys):
    long = GPTConfig(block_size=100_000, n_layer=12, n_head=2, n_embd=64)
    save_pretrained(GPT(long), tmp_path / "long")
    flags = ("--num-samples=1000000", "--max-new-tokens=100000")  # more than 48 bits can address
    with pytest.raises(SystemExit, match="2"):
        run_command(lambda: run_main(f"--model={tmp_path}/long", *flags), "--num-samples")
    error = capsys.readouterr().err
    assert error.startswith("error: the device is out of memory: stop other programs")
    assert ", or use a smaller --num-samples (" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"temperature": -1.0}, "--temperature must be at least 0, not -1.0"),
        ({"top_k": -1}, "--top-k must be at least 0, not -1"),
        ({"top_p": 1.5}, "--top-p must be at most 1, not 1.5"),
        ({"max_new_tokens": 0}, "--max-new-tokens must be above 0, not 0"),
        ({"num_samples": 0}, "--num-samples must be above 0, not 0"),
        ({"stop": ("the", "")}, "--stop must be a list of texts, none of them empty"),
        ({"stop": "the"}, "--stop must be a list of texts"),
    ],
)
def test_generate_refuses_what_the_command_refuses(option, message):
    with pytest.raises(ValueError, match=message):
        generate(random_model(TINY), "Once", **option)
    with pytest.raises(ValueError, match=message):
        sample.SampleConfig(**option)


@pytest.mark.gpt2
def test_generate_ends_before_each_stop_text(run_main, folder):
    model = load_pretrained(folder)
    full = generate(model, "Once", 12, num_samples=3, seed=1)
    stops = [text[6:8] for text in full[:2]]  # in the continuation, within a token or across two
    cut = generate(model, "Once", 12, num_samples=3, seed=1, stop=stops)
    for text, whole in zip(cut, full, strict=True):
        ends = [whole.index(stop, 4) for stop in stops if stop in whole[4:]]
        assert text == whole[: min(ends, default=None)]
    both = (full[0][5], full[0][4])  # the first in the text ends it
    assert generate(model, "Once", 12, seed=1, stop=both) == ["Once"]
    on_token = Mock()
    generate_tokens(model, torch.tensor([[1]]), 12, stop=[""], on_token=on_token)
    on_token.assert_not_called()  # it ended with the first token
    flags = ("--prompt=Once", "--num-samples=1", "--max-new-tokens=12")
    text = generate(model, "Once", 12, temperature=0)[0]
    printed = run_main(*flags, f"--stop={text[6:8]}", "--stop=none such")
    assert printed == f"--- sample 1 of 1 ---\n{text[: text.index(text[6:8], 4)]}\n\n"


@pytest.mark.gpt2
def test_main_scores_a_text(run_main, folder, tmp_path, capsys, monkeypatch):
    text = "Once upon a time, there was a café. " * 3
    (tmp_path / "text").write_text(text, encoding="utf-8")
    loss = text_loss(load_pretrained(folder), text)
    ids = gpt2_encoding().encode_ordinary(text)
    bits = loss * (len(ids) - 1) / math.log(2) / (len(text.encode()) - len("Once"))
    expected = f"{loss:.4f} nats per token, {bits:.4f} bits per byte, {len(ids)} tokens"
    assert run_main(f"--score={tmp_path}/text") == f"{tmp_path}/text: {expected}\n"
    assert run_main(f"--score={tmp_path}/text", "--stride=8") == f"{tmp_path}/text: {expected}\n"
    assert run_main(f"--score={tmp_path}/text", "--stride=3") != f"{tmp_path}/text: {expected}\n"
    (tmp_path / "latin").write_bytes(b"caf\xe9 au")
    with pytest.raises(ValueError, match=r"--score .*latin: .*can't decode .* position 3"):
        run_main(f"--score={tmp_path}/latin")
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match=r"--score .*empty: .*2 tokens or more, but '' has 0"):
        run_main(f"--score={tmp_path}/empty")
    (tmp_path / "separated").write_text("a<|endoftext|>b")
    sample.describe_loss(load_pretrained(folder), tmp_path / "separated", torch.float32)
    assert capsys.readouterr().err.startswith("note: <|endoftext|> in the text is scored as text")
    monkeypatch.setattr(generation, "score_tokens", Mock(side_effect=ValueError("my mistake")))
    with pytest.raises(ValueError, match=r"^my mistake$"):  # of the code, not of the file
        run_main(f"--score={tmp_path}/text")


@pytest.mark.gpt2
@pytest.mark.parametrize("change", ["none", "renamed", "edited", "piped"])
def test_main_says_that_a_model_was_trained_on_the_text_that_it_scores(
    run_main, tmp_path, monkeypatch, change
):
    text = tmp_path / "text"
    text.write_text("Once upon a time")
    source = file_source([text]).identity
    Manifest(source, VOCAB_SHA256, 100, complete=True).save(tmp_path)
    save_run(tmp_path / "run", {"data_dir": str(tmp_path)})
    if change == "renamed":
        text = text.rename(tmp_path / "copy")
    if change == "edited":
        text.write_text("another text")
    if change == "piped":  # as `--score <(zcat text.gz)`: a pipe can be read only once
        reader, writer = os.pipe()
        os.write(writer, text.read_bytes())
        os.close(writer)
        text = f"/dev/fd/{reader}"
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert run_main(f"--model={tmp_path}/run", f"--score={text}").startswith(f"{text}: ")
    note = f"note: the model was trained on {text}: new texts may score worse\n"
    assert sys.stderr.getvalue() == (note if change in ("none", "renamed") else "")


# --- copies -----------------------------------------------------------------------------------


def test_main_prints_how_much_of_the_samples_is_copied(run_main, tmp_path):
    """Of the first of two samples, and the end of the prompt, the text has 48 tokens."""
    config = GPTConfig(block_size=16, n_layer=2, n_head=2, n_embd=8)
    torch.manual_seed(0)
    model, prompt = GPT(config).eval(), "Once upon a time"
    options = {"max_new_tokens": 60, "temperature": 1.0, "top_k": 50}
    rows = sample_rows(model, prompt, 2, 1337, **options)
    random_ids = torch.randint(0, 50_000, (500,)).tolist()
    text = [*random_ids, *rows[0][2:50], *random_ids[::-1]]
    save_run_with_text(tmp_path / "run", tmp_path / "data", text, model)
    flags = [f"--model={tmp_path}/run", f"--prompt={prompt}", "--num-samples=2", "--temperature=1"]
    flags += ["--max-new-tokens=60", "--copies"]
    printed = run_main(*flags)
    n_sampled = len(rows[0]) + len(rows[1]) - 8
    share = (
        f"{100 * 46 / n_sampled:.1f} % of {n_sampled} sampled tokens are in passages of 32 tokens"
    )
    _, copied = printed.split("copied: ")
    assert copied.startswith(share)
    assert "longest: 46 tokens, in the training text:\n" in copied
    assert f">>>{gpt2_encoding().decode(rows[0][4:50])}<<<" in copied
    np.save(tmp_path / "data/train_000000.npy", np.array(random_ids, np.uint16))
    with pytest.raises(UserError, match=r"data in .*data changed since the run began: restore it"):
        run_main(*flags)
    with pytest.raises(UserError, match="only a run's training text is known: use a run"):
        run_main("--copies")


def train_on(windows, steps):
    """A model of 512 ids, trained on (N, 65) tokens in order, 16 windows per step."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(64, vocab_size=512, n_layer=2, n_head=2, n_embd=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(steps):
        batch = windows[(torch.arange(16) + 16 * step) % len(windows)]
        model(batch[:, :-1], batch[:, 1:]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize(("n_tokens", "passes"), [(5_200, 200), (520_000, 1)])
def test_a_model_that_memorized_its_text_copies_and_one_that_read_it_once_does_not(
    tmp_path, n_tokens, passes
):
    """About 20 kB, if a token has four bytes: each id is followed by one of four."""
    rng = np.random.default_rng(0)
    successors, ids = rng.integers(0, 500, (500, 4)), [0]
    for choice in rng.integers(0, 4, n_tokens - 1):
        ids.append(int(successors[ids[-1], choice]))
    windows = torch.tensor(ids).unfold(0, 65, 65)
    model = train_on(windows, passes * len(windows) // 16)
    np.save(tmp_path / "train.npy", np.array(ids, np.uint16))
    prompts = windows[:: len(windows) // 8, :8]
    rows = generate_tokens(model, prompts, 56, top_k=50, generator=torch.Generator().manual_seed(0))
    copied, _ = find_copies(rows, 8, open_shards(tmp_path, "train"))
    assert copied >= 0.8 if passes == 200 else copied <= 0.02
