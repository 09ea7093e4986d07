"""`hellaswag.py --style harness` and lm-evaluation-harness itself, on the same export."""

import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, randomize_weights

import hellaswag
from formats.huggingface import save_pretrained
from hellaswag import evaluate_hellaswag, load_examples
from model import GPT, GPTConfig

BLOCK_SIZE = 128
ENDINGS = ["runs away.", "is a cat.", "sits down on the chair.", "sings"]


def row(ctx_a, ctx_b="", endings=ENDINGS, label="3", activity="Cooking soup"):
    texts = {"activity_label": activity, "ctx_a": ctx_a, "ctx_b": ctx_b, "endings": endings}
    return {"ind": 0, "split_type": "zeroshot", "label": label, **texts}


ROWS = [
    row("A man stirs.", "THE Man then"),
    row("[header] How to boil eggs [title] Take a pot. [step] Fill it  with   water."),
    row("[header] How to wait [step]", endings=["[step] Sit.", "a [title] b", "Go  on", " So "]),
    row("It ends in a note [substeps]", endings=["[title]", "No [x", "yes] it is", "a"]),
    row("Ein Mädchen isst 日本語 🙂 naïve", "été", ["Çok güzel.", "日本", "ok", "ﬁn\u00a0é"]),
    row("tabs\tand\nlines\n", " \n", ["\n\na", "b\n", "don't", "'s"], activity=" 12 "),
    row("Punctuation ends it...", "", ["...", "!", "?!", "1234567"]),
    row("A long ending.", "", ["a" + " a" * (BLOCK_SIZE - 9), "b", "c", "d" + " d" * 30]),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """These rows and the sample's 24, whose labels are numbers, as one file."""
    rows = [json.loads(x) for x in (ROOT / "assets/hellaswag_sample.jsonl").open()]
    shared = [{**{key: each[key] for key in ROWS[0]}, "label": str(each["label"])} for each in rows]
    path = tmp_path_factory.mktemp("harness") / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in ROWS + shared))
    return path


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    return randomize_weights(
        GPT(GPTConfig(block_size=BLOCK_SIZE, n_layer=2, n_head=2, n_embd=16)), 0.2
    )


@pytest.fixture(scope="module")
def theirs(data, model, tmp_path_factory):
    """The harness's own result, with its own task, on the exported model."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    folder = tmp_path_factory.mktemp("export") / "model"
    save_pretrained(model, folder)
    task = folder.parent / "rows.yaml"  # the harness's own but for where the rows come from
    hellaswag_yaml = Path(lm_eval.__file__).parent / "tasks/hellaswag/hellaswag.yaml"
    files = {"train": str(data), "validation": str(data)}
    kwargs = {"data_files": files, "cache_dir": str(folder.parent / "cache")}
    task.write_text(
        f"include: {hellaswag_yaml}\ntask: rows\ndataset_path: json\n"
        f"dataset_kwargs: {json.dumps(kwargs)}\n"
    )
    return lm_eval.simple_evaluate(
        HFLM(pretrained=str(folder), device="cpu", batch_size=7),
        tasks=[str(task)],
        bootstrap_iters=0,
    )


def test_harness_style_gives_the_harness_numbers_to_the_last_example(theirs, data, model):
    ours = evaluate_hellaswag(model, load_examples(data, style="harness"), batch_size=5)
    samples = sorted(theirs["samples"]["rows"], key=lambda sample: sample["doc_id"])
    assert (len(ours.examples), ours.left_out) == (len(samples), 0) == (len(ROWS) + 24, 0)
    losses = [[-float(each[0][0]) for each in sample["resps"]] for sample in samples]
    torch.testing.assert_close(ours.summed, torch.tensor(losses), rtol=1e-5, atol=1e-4)
    for name, each in (("acc", ours.summed), ("acc_norm", ours.mean)):
        right = [int(row.argmin()) == e.label for row, e in zip(each, ours.examples, strict=True)]
        assert right == [sample[name] == 1 for sample in samples]
        score = ours.metrics()[f"hellaswag_{name}"]
        assert 0 < score == theirs["results"]["rows"][f"{name},none"]
    assert ours.correct()["acc"] != ours.correct()["acc_norm"]  # or equality would say nothing


def test_main_scores_in_the_harness_style_in_float32(data, model, tmp_path, monkeypatch, capsys):
    """On a CPU that has bfloat16, too."""
    save_pretrained(model, tmp_path / "model")
    flags = [f"--model={tmp_path}/model", f"--data={data}", "--style=harness", "--device=cpu"]
    monkeypatch.setattr(sys, "argv", ["hellaswag.py", *flags, f"--output={tmp_path}/out.jsonl"])
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    hellaswag.main()
    result = evaluate_hellaswag(model, load_examples(data, style="harness"))
    assert capsys.readouterr().out.endswith(f"model, harness style: {result}\n")
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    losses = torch.tensor([json.loads(line)["summed_losses"] for line in lines])
    torch.testing.assert_close(losses, result.summed, rtol=0, atol=1e-4)


def test_load_examples_refuses_a_row_without_the_harness_fields(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"ind": 0, "ctx": "a", "endings": ENDINGS, "label": 0}))
    with pytest.raises(ValueError, match="activity_label"):
        load_examples(path, style="harness")
