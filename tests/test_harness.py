"""`hellaswag.py --style harness` and lm-evaluation-harness itself, on the same export."""

import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import HELLASWAG, randomize_weights

import hellaswag
from formats.huggingface import save_pretrained
from hellaswag import load_examples
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
    row("A long" + " start" * 99, "", ["a" + " a" * (BLOCK_SIZE - 9), "b", "c", "d" + " d" * 30]),
]


@pytest.fixture
def data(tmp_path):
    """These rows and the sample's 24, whose labels are numbers, as one file."""
    rows = [json.loads(line) for line in HELLASWAG.open(encoding="utf-8")]
    shared = [{**{key: each[key] for key in ROWS[0]}, "label": str(each["label"])} for each in rows]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in ROWS + shared))
    return path


@pytest.fixture
def model(tmp_path):
    """A folder with a model."""
    torch.manual_seed(3)
    config = GPTConfig(block_size=BLOCK_SIZE, n_layer=2, n_head=2, n_embd=16)
    save_pretrained(randomize_weights(GPT(config), 0.2), tmp_path / "model")
    return tmp_path / "model"


def harness_result(data, model):
    """The harness's own result, with its own task, on an exported model."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    task = model.parent / "rows.yaml"  # the harness's own but for where the rows come from
    hellaswag_yaml = Path(lm_eval.__file__).parent / "tasks/hellaswag/hellaswag.yaml"
    files = {"train": str(data), "validation": str(data)}
    kwargs = {"data_files": files, "cache_dir": str(model.parent / "cache")}
    task.write_text(
        f"include: {hellaswag_yaml}\ntask: rows\ndataset_path: json\n"
        f"dataset_kwargs: {json.dumps(kwargs)}\n"
    )
    return lm_eval.simple_evaluate(
        HFLM(pretrained=str(model), device="cpu", batch_size=7),
        tasks=[str(task)],
        bootstrap_iters=0,
    )


def test_harness_style_gives_the_harness_numbers_to_the_last_example(
    data, model, monkeypatch, capsys
):
    """In float32, also on a CPU that has bfloat16."""
    theirs = harness_result(data, model)
    samples = sorted(theirs["samples"]["rows"], key=lambda sample: sample["doc_id"])
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    flags = [f"--model={model}", f"--data={data}", "--style=harness", "--device=cpu"]
    output = model.parent / "out.jsonl"
    monkeypatch.setattr(sys, "argv", ["hellaswag.py", *flags, f"--output={output}"])
    hellaswag.main()
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(lines) == len(samples) == len(ROWS) + 24
    losses = [[-float(each[0][0]) for each in sample["resps"]] for sample in samples]
    summed = torch.tensor([line["summed_losses"] for line in lines])
    torch.testing.assert_close(summed, torch.tensor(losses), rtol=1e-5, atol=1e-4)
    printed, scores = capsys.readouterr().out, []
    assert printed.endswith(" (chance: 0.25)\n")
    for name, prediction in (("acc", "prediction"), ("acc_norm", "prediction_norm")):
        right = [line[prediction] == line["label"] for line in lines]
        assert right == [sample[name] == 1 for sample in samples]
        scores.append(theirs["results"]["rows"][f"{name},none"])
        assert f" {name} {sum(right)}/{len(lines)}={scores[-1]:.4f}" in printed
    assert 0 < scores[0] != scores[1] > 0  # or equality would say nothing


def test_load_examples_refuses_a_row_without_the_harness_fields(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"ind": 0, "ctx": "a", "endings": ENDINGS, "label": 0}))
    with pytest.raises(ValueError, match="ctx_a"):
        load_examples(path, style="harness")
