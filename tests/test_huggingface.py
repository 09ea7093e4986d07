import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, randomize_weights
from hub_server import HubServer
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from corpus.shards import open_shards
from formats.huggingface import from_hf, load_pretrained, save_pretrained, to_hf_state_dict
from formats.load import is_hugging_face, load_model
from model import GPT, MLP, GPTConfig
from runtime.errors import UserError
from runtime.files import read_json, write_json
from tokenizer import gpt2_encoding

pytestmark = pytest.mark.gpt2

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")  # which transformers needs

TOLERANCE = {"rtol": 0, "atol": 1e-4}
TINY = GPTConfig(block_size=8, n_layer=2, n_head=2, n_embd=8)


def hf_model(config):
    torch.manual_seed(0)
    sizes = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd")}
    no_dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    hf_config = transformers.GPT2Config(n_positions=config.block_size, **sizes, **no_dropout)
    return randomize_weights(transformers.GPT2LMHeadModel(hf_config)).eval()


def random_model(config=TINY):
    torch.manual_seed(1)
    return randomize_weights(GPT(config)).eval()


@pytest.fixture(scope="module")
def export_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained") / "export"
    save_pretrained(random_model(), folder)
    return folder


@pytest.fixture
def exported(export_once, tmp_path):
    return shutil.copytree(export_once, tmp_path / "export")


def test_from_hf_takes_bare_names_mask_buffers_and_half_precision():
    model = random_model()
    state = {
        name.removeprefix("transformer."): tensor.half()
        for name, tensor in to_hf_state_dict(model).items()
    }
    for layer in range(TINY.n_layer):
        state[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
        state[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    state["lm_head.weight"] = state["wte.weight"].clone()
    loaded = from_hf(state, TINY)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert (loaded.lm_head.weight[TINY.vocab_size :] == 0).all()
    for ours, theirs in zip(loaded.parameters(), model.parameters(), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours[:8], theirs[:8].half().float())


def test_from_hf_refuses_tensors_that_do_not_fit():
    state, wte = to_hf_state_dict(random_model()), "transformer.wte.weight"
    for change, message in (
        ({"lm_head.weight": state[wte] + 1}, "only tied models"),
        ({"score.weight": torch.zeros(2)}, r"\.score\.weight is \(2,\), expected none"),
        # Square weights would hide it, so this one is given untransposed.
        ({"transformer.h.0.mlp.c_fc.weight": torch.zeros(32, 8)}, r"is \(32, 8\), exp"),
        ({"transformer.ln_f.bias": torch.zeros(8, dtype=torch.int64)}, "is not floating-point"),
        ({"transformer.ln_f.bias": torch.full((8,), torch.nan)}, "or has NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            from_hf(state | change, TINY)
    del state[wte]
    with pytest.raises(ValueError, match=r"wte\.weight is missing, expected \(50257, 8\)"):
        from_hf(state, TINY)


def test_save_pretrained_loads_here_and_in_transformers_with_equal_logits(exported):
    model, theirs = random_model(), transformers.GPT2LMHeadModel
    theirs, report = theirs.from_pretrained(exported, output_loading_info=True)
    assert not any(report.values())
    idx = torch.randint(0, TINY.vocab_size, (2, TINY.block_size))
    with torch.no_grad():
        torch.testing.assert_close(theirs(idx).logits, model(idx).logits, **TOLERANCE)
        assert torch.equal(load_pretrained(exported)(idx).logits, model(idx).logits)
    config = read_json(exported / "config.json")  # what tools other than transformers read
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert config["n_ctx"] == config["n_positions"] == TINY.block_size
    assert (config["activation_function"], config["vocab_size"]) == ("gelu_new", 50257)
    assert config["bos_token_id"] == config["eos_token_id"] == 50256
    assert theirs.generation_config.eos_token_id == 50256
    assert load_file(exported / "model.safetensors")["transformer.wte.weight"].shape == (50257, 8)


TEXTS = (
    "Hello  world's\n\t naïve 日本語 🙂 \x00\xad 12345 don't",
    "a\r\nb \r\n\r\n  c\n \n   d    \t\t e\u00a0\u3000f\u2028g  ",
    "I'm you're WE'LL he'd they've it's 's'S 1st 2,000.50 ٣٤٥ ½² x86_64",
    "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 ﬁ ﷽ \uff21 \ufeff\ufdd0\U0001f9ff\U0010ffff <|endoftext",
)


def test_save_pretrained_tokenizers_give_tiktokens_ids(export_once):
    rust = tokenizers.Tokenizer.from_file(str(export_once / "tokenizer.json"))
    fast = transformers.AutoTokenizer.from_pretrained(export_once)
    assert fast.is_fast

    def check(text):
        ids = gpt2_encoding().encode_ordinary(text)
        assert (rust.encode(text).ids, rust.decode(ids)) == (ids, text)
        assert (fast(text)["input_ids"], fast.decode(ids)) == (ids, text)

    for text in TEXTS:
        check(text)
    given(st.text(st.characters(exclude_categories=["Cs"])))(check)()
    ended = [64, 50256, 65]
    assert rust.encode("a<|endoftext|>b").ids == fast("a<|endoftext|>b")["input_ids"] == ended
    assert rust.decode(ended) == "ab"  # it is special
    assert len(fast) == rust.get_vocab_size() == 50257
    assert fast.eos_token_id == fast.bos_token_id == 50256
    assert sorted(read_json(export_once / "vocab.json").values()) == list(range(50257))


@pytest.mark.parametrize("kind", ["pickle", "shards"])
def test_load_pretrained_reads_what_transformers_saves_and_converts(tmp_path, kind):
    theirs, idx = hf_model(TINY), torch.randint(0, 50257, (2, TINY.block_size))
    (tmp_path / "._config.json").touch()  # macOS's, of a file that is elsewhere
    assert not is_hugging_face(tmp_path)
    theirs.save_pretrained(
        tmp_path / "theirs", max_shard_size="300KB" if kind == "shards" else "1GB"
    )
    if kind == "pickle":
        (tmp_path / "theirs" / "model.safetensors").unlink()
        torch.save(theirs.state_dict(), tmp_path / "theirs" / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"lacks model\.safetensors.*with transformers, call"):
        load_model(tmp_path / "theirs")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    loaded.save_pretrained(tmp_path / "converted", max_shard_size="99GB")
    with torch.no_grad():
        ours = load_pretrained(tmp_path / "converted")(idx).logits
        torch.testing.assert_close(ours, theirs(idx).logits, **TOLERANCE)


def test_documented_snippet_converts_nanogpts_checkpoint(tmp_path, monkeypatch):
    model = random_model()
    biases = {name for name, each in model.named_parameters() if name.endswith("bias")}
    for name in biases:  # as with bias=False, in compiled code, and where attention has a mask
        model.get_parameter(name).data.zero_()
    weights = {n: p for n, p in model.state_dict().items() if n not in biases}
    weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 8, "bias": False}
    saved = {
        "model": {f"_orig_mod.{name}": tensor.clone() for name, tensor in weights.items()},
        "model_args": sizes | {"vocab_size": 50304, "dropout": 0.0},
        **{"optimizer": {}, "iter_num": 5, "best_val_loss": torch.tensor(3.0), "config": {}},
    }
    torch.save(saved, tmp_path / "ckpt.pt")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    exec(re.search(r"```python\n(import torch\nfrom model .*?)```", text, re.DOTALL)[1], {})
    idx = torch.randint(0, 50257, (2, 8))
    with torch.no_grad():
        assert torch.equal(load_pretrained("exported/nano")(idx).logits, model(idx).logits)


@pytest.mark.parametrize(("version", "dtype"), [(3, torch.float32), (5, torch.bfloat16)])
def test_documented_snippets_convert_llm_cs_weights_and_shards(
    version, dtype, tmp_path, monkeypatch
):
    model = random_model()
    model.lm_head.weight.data[50257:] = 0  # padding, which an export leaves out
    parts = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    parameters = [f"{part}.{kind}" for part in parts for kind in ("weight", "bias")]
    stacked = [f"h.{layer}.{name}" for name in parameters for layer in range(2)]
    names = ["wte.weight", "wpe.weight", *stacked, "ln_f.weight", "ln_f.bias"]
    values = torch.cat([model.get_parameter(f"transformer.{n}").flatten() for n in names]).detach()

    def in_llm_c(version, values):
        header = np.array([20240326, version, 8, 50257, 2, 2, 8, 50304], "<i4").tobytes()
        return header.ljust(1024, b"\0") + values.view(torch.uint8).numpy().tobytes()

    monkeypatch.chdir(tmp_path)
    Path("gpt2_124M.bin").write_bytes(in_llm_c(version, values.to(dtype)))
    save_pretrained(model, "runs/mine")
    Path("data/mine").mkdir(parents=True)
    np.save("data/mine/train_1.npy", np.arange(300, dtype=np.uint16))

    text = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    weights, shards = re.findall(r"```python\n(.*?)```", text.partition("## llm.c")[2], re.DOTALL)
    exec(weights, {})
    converted = dict(load_pretrained("exported/llmc").named_parameters())
    found = torch.cat([converted[f"transformer.{name}"].flatten() for name in names])
    assert torch.equal(found, values.to(dtype).float())
    assert Path("mine.bin").read_bytes() == in_llm_c(3, values)
    exec(shards, {})
    Path("data/mine/train_1.npy").unlink()
    assert open_shards("data/mine", "train").read(0, 300).tolist() == list(range(300))


def test_load_pretrained_refuses_another_architecture_and_damage(exported):
    config = read_json(exported / "config.json")
    for name, value, message in (
        ("activation_function", "relu", "activation_function is 'relu', not 'gelu_new'"),
        ("n_positions", 16, r"wpe.weight is \(8, 8\), expected \(16, 8\)"),
        ("n_layer", None, "n_layer must be an integer of at least 1, not None"),
    ):
        write_json(exported / "config.json", {**config, name: value})
        with pytest.raises(ValueError, match=message):
            load_pretrained(exported)
    write_json(exported / "config.json", config)
    weights = exported / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a readable"):
        load_pretrained(exported)


def change_part(path, part):
    return lambda model: model.set_submodule(path, part)


class ReluMLP(MLP):
    def forward(self, x):
        return self.c_proj(self.c_fc(x).relu())


def rename_wpe(model):
    model.transformer.positions = model.transformer.wpe
    del model.transformer.wpe


CHANGES = {  # what the refusal says, and the change of the model
    "has 806,312 parameters, but .* has 403,880": change_part(
        "lm_head", nn.Linear(8, 50304, bias=False)
    ),
    r"not GPT-2's \(mat1 and mat2": change_part("transformer.h.1.mlp.c_fc", nn.Linear(8, 16)),
    r"not GPT-2's \('transformer\.wpe\.weight'\)": rename_wpe,
    "changed activation": change_part("transformer.h.1.mlp", ReluMLP(TINY)),
    "relative difference nan": lambda m: m.transformer.ln_f.bias.data.fill_(torch.nan),
}


@pytest.mark.parametrize("message", CHANGES)
def test_save_pretrained_refuses_a_model_that_is_no_gpt2(tmp_path, message):
    model = random_model()
    CHANGES[message](model)
    with pytest.raises(ValueError, match=message):
        save_pretrained(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


LOAD = """
import sys
from huggingface_hub import hf_hub_download
from formats.huggingface import load_pretrained

if "gpt2-medium" not in sys.argv:  # as transformers does for a tokenizer: not the weights
    hf_hub_download("openai-community/gpt2", "config.json", revision="v1")
for name in sys.argv[1:]:
    try:
        print(load_pretrained(name).config.n_embd)
    except ValueError as error:
        print(error)
"""


def test_load_pretrained_downloads_once_then_needs_no_network(commands, export_once, tmp_path):
    script = tmp_path / "load.py"
    script.write_text(LOAD)
    files = {path.name: path.read_bytes() for path in export_once.iterdir()}
    pickle = {"config.json": files["config.json"], "pytorch_model.bin": b""}
    with HubServer() as hub:
        hub.add("model", "openai-community/gpt2", files)
        hub.add("model", "o/pickle", pickle)
        environment = hub.environment(tmp_path / "hf")
        online = commands.run(script, "gpt2@v1", "gpt2@v9", "o/pickle", "o/none", **environment)
    offline = commands.run(script, "gpt2@v1", "gpt2-medium", **environment)
    expected = (
        str(TINY.n_embd),
        "from the Hugging Face hub failed (RevisionNotFoundError",
        "with transformers, call save_pretrained('converted', ",
        "log in with `hf auth login`",
        str(TINY.n_embd),
        "'gpt2-medium' is not a folder, and downloading it from the Hugging Face hub failed",
    )
    lines = (online.stdout + offline.stdout).splitlines()
    for line, text in zip(lines, expected, strict=True):
        assert text in line
    assert "log in" not in lines[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 50304}, r"vocab_size is 50304, .* call resize_token_embeddings\(50257\)"),
        ({"vocab_size": 50000}, "vocab_size is 50000, not 50257$"),
        ({"vocab_size": None}, "vocab_size is None, not 50257$"),
    ],
)
def test_other_vocabularies_have_a_remedy_if_there_is_one(exported, tmp_path, change, message):
    shutil.copytree(exported, tmp_path / "other")
    path = tmp_path / "other/config.json"
    write_json(path, read_json(path) | change)
    with pytest.raises(ValueError, match=message):
        load_pretrained(tmp_path / "other")


def test_an_adapter_is_to_be_merged_first(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is a PEFT adapter: .* merge_and_unload\(\)"):
        load_pretrained(tmp_path)
