import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from checkpoints import save_run
from conftest import HELLASWAG, randomize_weights, series
from hub_server import HubServer
from torch.nn import functional as F

import hellaswag
from formats.huggingface import save_pretrained, to_hf_state_dict
from hellaswag import HellaSwagResult, evaluate_hellaswag, load_examples, render_example
from model import GPT, GPTConfig
from runtime.errors import UserError
from tokenizer import gpt2_encoding
from train_gpt2 import main

TINY = GPTConfig(block_size=64, n_layer=2, n_head=2, n_embd=16)
ROW = {"ind": 7, "ctx": "A man", "label": 2, "endings": ["runs.", "is a cat.", "x", "sat down."]}
ROWS = [json.loads(line) for line in HELLASWAG.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = randomize_weights(GPT(TINY))
    with torch.no_grad():  # what the padding would do to a softmax that had it
        model.lm_head.weight[TINY.vocab_size :] = 50.0
    return model


@pytest.fixture(scope="module")
def examples():
    return load_examples(HELLASWAG)


def plain_losses(model):
    """Every ending's summed loss by transformers, one whole sequence at a time, unpadded."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_positions=64, n_layer=2, n_head=2, n_embd=16)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.load_state_dict(to_hf_state_dict(model), strict=False)
    theirs.tie_weights()
    encode = gpt2_encoding().encode
    losses = []
    for row in ROWS:
        n_context = len(encode(row["ctx"]))
        for ending in row["endings"]:
            ids = torch.tensor([encode(row["ctx"]) + encode(" " + ending)])
            with torch.no_grad():
                log_probs = theirs(ids).logits.log_softmax(dim=-1)[0]
            steps = range(n_context, ids.size(1))
            losses.append(-sum(float(log_probs[t - 1, ids[0, t]]) for t in steps))
    return torch.tensor(losses).view(-1, 4)


def test_result_worked_by_hand():
    """Two examples whose sums and means name different endings.

    Sums 6, 4, 9, 8 over 6, 2, 3, 8 tokens: means 1, 2, 3, 1; the lowest sum is ending 1, the
    lowest mean the first of 0 and 3. Sums 5, 5, 2, 7 over 5, 1, 1, 7: ending 2 by the sum, and 0
    by the mean (1, 5, 2, 1).
    """
    summed = torch.tensor([[6.0, 4, 9, 8], [5, 5, 2, 7]])
    first = replace(render_example(ROW), label=0, lengths=[6, 2, 3, 8])
    second = replace(first, label=2, lengths=[5, 1, 1, 7])
    assert str(HellaSwagResult([first, second], summed)) == "acc 1/2=0.5000 acc_norm 1/2=0.5000"
    wrong = HellaSwagResult([replace(first, label=1), second], summed)
    metrics = {"hellaswag_acc": 1.0, "hellaswag_acc_norm": 0.0, "hellaswag_total": 2}
    assert wrong.metrics() == metrics


@pytest.mark.gpt2
def test_evaluate_hellaswag_equals_one_sequence_at_a_time(model, examples):
    expected = plain_losses(model)
    result = evaluate_hellaswag(model, examples, batch_size=5)
    torch.testing.assert_close(result.summed, expected, rtol=0, atol=1e-4)
    lengths = torch.tensor([[len(ending) for ending in e.endings] for e in examples])
    torch.testing.assert_close(result.mean, expected / lengths, rtol=0, atol=1e-4)
    correct = sum(int(expected[i].argmin()) == row["label"] for i, row in enumerate(ROWS))
    assert str(result).startswith(f"acc {correct}/24=")


def test_evaluate_hellaswag_in_bfloat16_keeps_the_logits_in_float32(model, examples, monkeypatch):
    seen = []
    hook = model.transformer.h[0].mlp.c_fc.register_forward_hook(
        lambda *args: seen.append(args[2].dtype)
    )
    monkeypatch.setattr(  # autocast would make the product of these bfloat16
        F, "linear", lambda *args, linear=F.linear: seen.append((y := linear(*args)).dtype) or y
    )
    result = evaluate_hellaswag(model, examples, dtype=torch.bfloat16, batch_size=24)
    hook.remove()
    assert torch.bfloat16 in seen[:-1]
    assert seen[-1] == torch.float32
    assert (result.mean - evaluate_hellaswag(model, examples).mean).abs().max() < 0.02


@torch.no_grad()
def test_evaluate_hellaswag_cuts_the_start_of_rows_that_exceed_the_block(model):
    """A block of 64 tokens predicts the last 64 of 65."""
    long_context = {**ROW, "ctx": "a b" + " a" * 60}
    long_endings = {**ROW, "endings": ["c" + " d" * 63 + " e" * n for n in range(4)]}
    for row in (long_context, long_endings):
        [losses] = evaluate_hellaswag(model, [render_example(row)]).summed
        for ending, loss in zip(row["endings"], losses, strict=True):
            context, tokens = (gpt2_encoding().encode(text) for text in (row["ctx"], f" {ending}"))
            seen, n_targets = torch.tensor((context + tokens)[-65:]), min(len(tokens), 64)
            logits = model.logits(model.hidden_states(seen[None, :-1]))[0, -n_targets:]
            expected = F.cross_entropy(logits, seen[-n_targets:], reduction="sum")
            assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_load_examples_takes_any_key_order_text_labels_blank_last_lines_and_a_limit(tmp_path):
    path = tmp_path / "data.jsonl"
    backwards = dict(reversed((ROW | {"label": "2"}).items()))  # on the hub, labels are texts
    path.write_text(f"{json.dumps(ROW)}\n{json.dumps(backwards)}\n\n \r\n\n")
    first, second = load_examples(str(path))
    assert first == second
    decode = gpt2_encoding().decode
    assert (first.ind, first.label, decode(first.context)) == (7, 2, "A man")
    assert [decode(ending) for ending in first.endings] == [" " + e for e in ROW["endings"]]
    assert load_examples(path, limit=1) == [first]
    path.write_text("")
    with pytest.raises(ValueError, match="no examples"):
        load_examples(path)


def test_load_examples_names_the_line_of_a_bad_row(tmp_path):
    good, path = json.dumps(ROW).encode(), tmp_path / "bad.jsonl"
    bad = {
        json.dumps(ROW | {"endings": ["a", "b"]}).encode(): "expected a context, 4 endings and",
        json.dumps(ROW | {"ctx": ""}).encode(): "expected a context",
        json.dumps(ROW | {"label": ""}).encode(): "it has no label, like all of the test split",
        json.dumps(ROW | {"label": None}).encode(): "it has no label, like",
        b'{"ind": 1, "ctx": "a"}': "it lacks 'endings'",
        b"[1]": "it is not a JSON object",
        b"": "Expecting value",
        b'{"ctx": "\xff"}': "can't decode byte 0xff|utf-8",
    }
    for line, message in bad.items():
        path.write_bytes(b"\n".join([good, line, good]))
        with pytest.raises(ValueError, match=f"^{path}:2 is not a HellaSwag row: .*{message}"):
            load_examples(path)


@pytest.fixture
def hub(tmp_path):
    """A hub that has the sample's rows as HellaSwag's validation set."""
    rows = [{**row, "label": str(row["label"])} for row in ROWS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with HubServer() as hub:
        content = (tmp_path / "rows.parquet").read_bytes()
        hub.add("dataset", "Rowan/hellaswag", {hellaswag.DATA_FILE: content})
        yield hub


@pytest.mark.gpt2
def test_main_downloads_once_and_gives_the_same_with_any_number_of_processes(
    commands, hub, model, tmp_path
):
    """Three ranks share two batches, so that one of them has nothing to do."""
    save_pretrained(model, tmp_path / "model")
    flags = [f"--model={tmp_path}/model", "--device=cpu", "--dtype=float32"]
    flags += ["--batch-size=10", "--limit=20"]
    there = hub.environment(tmp_path / "hf")
    together = commands.run_ranks(3, "hellaswag", *flags, f"--output={tmp_path}/n.jsonl", **there)
    assert together.code == 0, together.stderr
    [request] = hub.requests("GET", "/data/validation")
    assert hellaswag.DATA_REVISION in str(request)
    hub.fails = 500
    alone = commands.run("hellaswag", *flags, f"--output={tmp_path}/1.jsonl", **there)
    assert (alone.code, alone.stderr) == (0, "")  # no bar in a file
    assert together.stdout == alone.stdout

    lines = (tmp_path / "1.jsonl").read_text().splitlines()
    assert lines == (tmp_path / "n.jsonl").read_text().splitlines()
    predictions = [json.loads(line) for line in lines]
    assert [p["ind"] for p in predictions] == [row["ind"] for row in ROWS[:20]]
    correct = sum(p["prediction_norm"] == p["label"] for p in predictions)
    assert f"acc_norm {correct}/20={correct / 20:.4f}" in alone.stdout
    for prediction in predictions:
        summed, mean = prediction["summed_losses"], prediction["mean_losses"]
        assert prediction["prediction"] == summed.index(min(summed))
        assert prediction["prediction_norm"] == mean.index(min(mean))


def test_main_without_a_model_scores_the_newest_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = [f"--data={HELLASWAG}", "--limit=2", "--device=cpu"]
    monkeypatch.setattr("sys.argv", ["hellaswag.py", *flags])
    with pytest.raises(UserError, match="train one, or use --model gpt2"):
        hellaswag.main()
    save_run(Path("runs/a"))
    hellaswag.main()
    done = capsys.readouterr()
    assert done.err.startswith("note: the model is runs/a, the newest run; for another one, use")
    assert f"{HELLASWAG}, runs/a, completion style: acc " in done.out


def test_training_scores_the_rows_of_a_file(tiny_flags, tmp_path):
    flags = ["--hellaswag-every=1", f"--hellaswag-data={HELLASWAG}"]
    main([*tiny_flags, *flags, "--max-steps=1", "--val-every=0", "--run-name=a"])
    assert series(tmp_path / "runs/a", "hellaswag_total") == {0: 24, 1: 24}
    assert len(series(tmp_path / "runs/a", "hellaswag_acc_norm")) == 2
