"""What people load an exported folder with; docs/export.md has a line for each.

All but the first two need packages of `requirements-test-all.txt`.
"""

import re

import pytest
import torch
from conftest import ROOT, randomize_weights

from formats.huggingface import load_pretrained, save_pretrained
from model import GPT, GPTConfig
from sample import generate

transformers = pytest.importorskip("transformers")

SIZE = GPTConfig(block_size=32, n_layer=2, n_head=2, n_embd=16)
EXACT = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    model = randomize_weights(GPT(SIZE))
    folder = tmp_path_factory.mktemp("clients") / "export"
    save_pretrained(model, folder)
    return folder


@pytest.fixture
def theirs(exported):
    return transformers.AutoModelForCausalLM.from_pretrained(exported)


@pytest.fixture
def tokenizer(exported):
    return transformers.AutoTokenizer.from_pretrained(exported)


@pytest.fixture
def idx():
    return torch.randint(0, 50257, (2, 20), generator=torch.Generator().manual_seed(1))


def assert_ours_reads(folder, expected, idx):
    """What a client has saved is a model for --init-from and --model."""
    with torch.no_grad():
        torch.testing.assert_close(load_pretrained(folder)(idx).logits, expected, **EXACT)


def test_pipeline_stays_in_the_context_obeys_lengths_and_takes_batches(exported):
    pipe = transformers.pipeline("text-generation", str(exported), device="cpu")
    transformers.set_seed(0)

    def ids(prompts, **settings):
        made = pipe(prompts, return_tensors=True, **settings)
        return [each["generated_token_ids"] for each in made]

    [whole] = ids("def main")
    assert len(whole) == SIZE.block_size or whole[-1] == pipe.tokenizer.eos_token_id
    greedy = {"do_sample": False}
    assert [len(ids("def main", max_length=n, **greedy)[0]) for n in (5, 30)] == [5, 30]
    assert len(ids("def main", max_new_tokens=7, **greedy)[0]) == 2 + 7
    prompts = ["def main", "A long prompt of more than one word", "x"]
    texts = [pipe(prompt, max_new_tokens=6, **greedy)[0]["generated_text"] for prompt in prompts]
    batched = pipe(prompts, batch_size=3, max_new_tokens=6, **greedy)
    assert [each["generated_text"] for [each] in batched] == texts
    with pytest.raises(ValueError, match="max_length"):
        pipe("a " * 40)


def test_tokenizer_pads_for_batches_and_for_the_trainers_collator(theirs, tokenizer):
    batch = tokenizer(["one", "one two three"], padding=True, return_tensors="pt")
    assert batch["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
    with torch.no_grad():
        short = theirs(tokenizer("one", return_tensors="pt")["input_ids"]).logits
        torch.testing.assert_close(theirs(**batch).logits[:1, :1], short, **EXACT)
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    labels = collate([tokenizer("one"), tokenizer("one two three")])["labels"]
    assert (labels[0] == -100).tolist() == [False, True, True]
    assert theirs.config.pad_token_id == tokenizer.pad_token_id == 50256


def test_peft_trains_an_adapter_that_ours_reads_once_merged(theirs, idx, tmp_path):
    peft = pytest.importorskip("peft")
    before = theirs(idx).logits
    lora = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(theirs, lora)
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=10.0)
    for _ in range(2):  # the first step moves only one of an adapter's two matrices
        tuned(input_ids=idx, labels=idx).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        expected = tuned.eval()(input_ids=idx).logits
    assert (expected - before).abs().max() > 1e-3
    tuned.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert_ours_reads(tmp_path / "merged", expected, idx)


def test_trl_fine_tunes_on_texts(exported, idx, tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    settings = trl.SFTConfig(
        output_dir=str(tmp_path / "trl"),
        **{"max_steps": 2, "per_device_train_batch_size": 2, "max_length": SIZE.block_size},
        **{"learning_rate": 1e-2, "use_cpu": True, "bf16": False, "report_to": "none"},
        **{"save_strategy": "no", "gradient_checkpointing": False, "disable_tqdm": True},
    )
    texts = ["one two three", "A longer text, of some more words. " * 9, "four", "five six"]
    data = datasets.Dataset.from_dict({"text": texts})
    trainer = trl.SFTTrainer(model=str(exported), args=settings, train_dataset=data)
    before = load_pretrained(exported)(idx).logits
    result = trainer.train()
    assert result.global_step == 2
    assert 5 < result.training_loss < 15
    trainer.save_model(str(tmp_path / "tuned"))
    with torch.no_grad():
        expected = trainer.model.eval()(idx).logits
    assert (expected - before).abs().max() > 1e-3
    assert_ours_reads(tmp_path / "tuned", expected, idx)


def test_documented_snippet_exports_onnx_with_the_same_logits_at_any_length(
    exported, theirs, idx, tmp_path, monkeypatch
):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "export.md").read_text(encoding="utf-8").partition("## ONNX")[2]
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1].replace("DIR", str(exported)), {})
    session = runtime.InferenceSession("mine.onnx")
    for each in (idx, idx[:1, :7]):
        [logits] = session.run(None, {session.get_inputs()[0].name: each.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(logits), theirs(each).logits, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_the_same_greedy_text(exported, tokenizer, tmp_path, dtype):
    save_pretrained(load_pretrained(exported), tmp_path, dtype)
    assert (tmp_path / "model.safetensors").stat().st_size < 0.6 * (
        exported / "model.safetensors"
    ).stat().st_size
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert getattr(config, "dtype", None) == dtype or config.torch_dtype == dtype
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = tokenizer("Once upon", return_tensors="pt").input_ids
    text = tokenizer.decode(theirs.generate(prompt, max_new_tokens=12, do_sample=False)[0])
    assert text.startswith(generate(load_pretrained(tmp_path), "Once upon", 12, temperature=0)[0])
    huge = load_pretrained(exported)
    with torch.no_grad():
        huge.transformer.h[0].mlp.c_fc.bias[0] = 1e5
    if dtype == torch.float16:
        with pytest.raises(ValueError, match=r"exceeds the range of torch.float16: use --dtype"):
            save_pretrained(huge, tmp_path / "huge", dtype)
