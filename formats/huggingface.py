"""Load and save models in Hugging Face's GPT-2 format, without the transformers library.

The format differs from `model.py` in two ways: its linear layers ("Conv1D") store their weights
as (in, out), and its vocabulary is not padded. Parameter names are the same. Only safetensors files
are read or written, because loading a pickle file can run arbitrary code.
"""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from formats import hub
from formats.tensors import Tensors, check_tensors, find_nonfinite, read_tensors
from model import GPT, GPT2_SIZES, GPTConfig
from runtime.errors import UserError
from runtime.files import read_json, write_json
from tokenizer import VOCAB_PATH, VOCAB_SIZE, byte_characters

HF_CONFIG_NAME = "config.json"
HF_WEIGHTS_NAME = "model.safetensors"
EXPORT_FILES = VOCAB_PATH.with_name("huggingface.json")

SIZES = ("n_layer", "n_head", "n_embd")
CONV1D_WEIGHTS = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
WTE = "transformer.wte.weight"
# Old files contain the causal mask as a buffer of each attention layer.
MASK_BUFFERS = (".attn.bias", ".attn.masked_bias")
MAX_CHECKED_TOKENS = 1024
# Float32 rounding causes about 1e-6; exact GELU instead of its tanh approximation causes 3e-4.
MAX_LOGIT_ERROR = 1e-4

# The values of Hugging Face's GPT2Config that `model.py` implements, its default first.
GPT2_SETTINGS: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "vocab_size": (VOCAB_SIZE,),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
}


def load_pretrained(source: str | Path, device: torch.device | str = "cpu") -> GPT:
    """Load a GPT-2 from a folder in Hugging Face format or from the hub, in float32 and eval mode.

    `source` is either a folder with `config.json` and `model.safetensors`, or a name on the hub:
    `gpt2` to `gpt2-xl`, OWNER/NAME, or either with `@REVISION`. A model from the hub is downloaded
    only once.
    """
    folder = _find_folder(source)
    config = read_pretrained_config(folder)
    return from_hf(read_tensors(folder / HF_WEIGHTS_NAME), config).to(device).eval()


def read_pretrained_config(source: str | Path) -> GPTConfig:
    """Return the dimensions of the model that `load_pretrained` loads, without its weights.

    Raise UserError if `model.py` does not implement a setting in its `config.json`.
    """
    path = _find_folder(source) / HF_CONFIG_NAME
    values = read_json(path)
    for name, accepted in GPT2_SETTINGS.items():
        value = values.get(name, accepted[0])
        if value not in accepted:
            problem = f"{name} is {value!r}, not {accepted[0]!r}"
            if name == "vocab_size" and isinstance(value, int) and value > VOCAB_SIZE:
                methods = f"resize_token_embeddings({VOCAB_SIZE}) and save_pretrained('converted')"
                fix = f"load it with transformers, call {methods}"
                problem += f"; if the first {VOCAB_SIZE} are GPT-2's, {fix}"
            raise UserError(f"{path} is not a GPT-2 that can be loaded: {problem}")
    sizes = {name: values.get(name) for name in SIZES}
    try:
        return GPTConfig(block_size=values.get("n_positions"), **sizes)
    except ValueError as error:
        raise UserError(f"{path} is not a GPT-2: {error}") from None


def save_pretrained(model: GPT, folder: str | Path, dtype: torch.dtype = torch.float32) -> int:
    """Write a folder that transformers can load: weights, configuration and tokenizer.

    Args:
        model: a raw model, neither compiled nor wrapped.
        folder: the folder to write.
        dtype: dtype of the weights in the file.

    Returns:
        The number of parameters in the file, which has no rows that pad the vocabulary.

    Raises:
        UserError: the model's parameters or logits are not a GPT-2's, or `dtype` cannot hold them.
    """
    folder, tensors = Path(folder), to_hf_state_dict(model)
    _check_computes_gpt2(model, tensors)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    if find_nonfinite(tensors):
        raise UserError(f"a weight exceeds the range of {dtype}: use --dtype bfloat16")
    _write_settings(folder, model.config, str(dtype).removeprefix("torch."))
    # transformers 4 requires the metadata that names PyTorch as the tensors' format. `save_file`
    # would make the file unreadable for other users.
    (folder / HF_WEIGHTS_NAME).write_bytes(save(tensors, metadata={"format": "pt"}))
    return sum(tensor.numel() for tensor in tensors.values())


def from_hf(state_dict: Tensors, config: GPTConfig) -> GPT:
    """Build a model from copies of Hugging Face's tensors, of any floating-point dtype.

    Names may start with `transformer.` or not. The rows that pad the vocabulary are zero.
    """
    named = {"transformer." + n.removeprefix("transformer."): t for n, t in state_dict.items()}
    tensors = {name: t for name, t in named.items() if not name.endswith(MASK_BUFFERS)}
    head = tensors.pop("transformer.lm_head.weight", None)
    if head is not None and not torch.equal(head, tensors.get(WTE, head)):
        raise UserError("lm_head.weight differs from wte.weight; only tied models are supported")
    model = GPT(config)
    targets = dict(_hf_views(model))
    check_tensors(tensors, targets, "the tensors do not fit the model in model.py")
    with torch.no_grad():
        model.get_parameter(WTE).zero_()
        for name, target in targets.items():
            target.copy_(tensors[name])
    return model


def to_hf_state_dict(model: GPT) -> dict[str, Tensor]:
    """Return the parameters as GPT2LMHeadModel lays them out, on the CPU, without the tied head.

    Some share memory with the model, but none with each other.
    """
    return {name: view.cpu().contiguous() for name, view in _hf_views(model)}


def is_local(source: str | Path) -> bool:
    """Return whether a name means a local folder, existing or not, and not a model on the hub."""
    path, name = Path(source), str(source).partition("@")[0]
    is_repo = hub.REPO_NAME.fullmatch(name) is not None and not path.parent.is_dir()
    return path.exists() or not (name in GPT2_SIZES or is_repo)


def _hf_views(model: GPT) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter's name and a view in Hugging Face's layout, for reading and writing."""
    for name, parameter in model.named_parameters():
        view = parameter.detach()
        if name.endswith(CONV1D_WEIGHTS) and view.dim() == 2:
            view = view.t()
        elif name == WTE:
            view = view[: model.config.vocab_size]
        yield name, view


@torch.no_grad()
def _check_computes_gpt2(model: GPT, tensors: Tensors) -> None:
    """Raise if a model's parameters or logits are not a GPT-2's.

    Shapes do not reveal a different activation, or rotary embeddings next to an unused `wpe`.
    """
    config, C = model.config, model.config.n_embd
    T = min(config.block_size, MAX_CHECKED_TOKENS)
    idx = torch.randint(config.vocab_size, (T,), generator=torch.Generator().manual_seed(0))
    try:
        gpt2 = gpt2_logits(tensors, config.n_layer, config.n_head, idx)
    except (KeyError, RuntimeError) as error:  # a missing name, or shapes that cannot be multiplied
        problem = f"its parameters are not GPT-2's ({error})"
        raise UserError(f"this model cannot be exported: {problem}") from None
    found = sum(tensor.numel() for tensor in tensors.values())
    expected = config.n_layer * (12 * C**2 + 13 * C) + (VOCAB_SIZE + config.block_size + 2) * C
    if found != expected:
        problem = f"it has {found:,} parameters, but a GPT-2 of its dimensions has {expected:,}"
        raise UserError(f"this model cannot be exported: {problem}")
    logits = deepcopy(model).cpu()(idx[None]).logits
    difference = (logits[0] - gpt2).norm() / gpt2.norm()
    if not difference <= MAX_LOGIT_ERROR:  # NaN also is an error
        problem = f"this model's logits are not GPT-2's (relative difference {difference:.1e})"
        changed = "a changed activation, position embedding or attention"
        raise UserError(f"{problem}: a model with {changed} cannot be exported")


def gpt2_logits(tensors: Tensors, n_layer: int, n_head: int, idx: Tensor) -> Tensor:
    """Compute GPT-2's logits (T, vocab_size) for a sequence (T,), independently of `model.py`."""

    def norm(x: Tensor, name: str) -> Tensor:
        weight, bias = tensors[f"transformer.{name}.weight"], tensors[f"transformer.{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps=1e-5)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ tensors[f"transformer.{name}.weight"] + tensors[f"transformer.{name}.bias"]

    T, wte = len(idx), tensors[WTE]
    x = wte[idx] + tensors["transformer.wpe.weight"][:T]  # (T, C)
    for block in (f"h.{layer}" for layer in range(n_layer)):
        qkv = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn")
        q, k, v = qkv.view(T, 3, n_head, -1).permute(1, 2, 0, 3)  # (H, T, D) each
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(heads.transpose(0, 1).reshape(T, -1), f"{block}.attn.c_proj")
        hidden = linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc")
        x = x + linear(F.gelu(hidden, approximate="tanh"), f"{block}.mlp.c_proj")
    return norm(x, "ln_f") @ wte.T


def _find_folder(source: str | Path) -> Path:
    """Return a model's folder, downloaded if needed; raise if it has no safetensors weights."""
    folder = Path(source) if is_local(source) else _download(str(source))
    folder = folder.parent if folder.is_file() else folder  # a file of the model
    if (folder / HF_WEIGHTS_NAME).is_file():
        return folder
    problem = f"lacks {HF_WEIGHTS_NAME}, and neither pickle nor shards are loaded"
    library = "the model with transformers"
    method = "save_pretrained('converted', max_shard_size='99GB')"
    if (folder / "adapter_config.json").is_file():
        problem, library = "is a PEFT adapter", "it with peft's AutoPeftModelForCausalLM"
        method = "merge_and_unload().save_pretrained('merged')"
    raise UserError(f"{source} {problem}: load {library}, call {method}, and use the new folder")


def repo_name(source: str) -> str:
    """Return the hub's OWNER/NAME of a model, without its revision."""
    name = source.partition("@")[0]
    return f"openai-community/{name}" if name in GPT2_SIZES else name


def is_from_hub(source: str) -> bool:
    """Return whether a name means one of OpenAI's models or a model in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    if is_local(source):
        return False
    revision = source.partition("@")[2] or None
    found = try_to_load_from_cache(repo_name(source), HF_CONFIG_NAME, revision=revision)
    return source in GPT2_SIZES or isinstance(found, str)


def _download(source: str) -> Path:
    """Return the folder in the hub's cache with a model's configuration and weights."""
    revision, files = source.partition("@")[2] or None, ["*config.json", HF_WEIGHTS_NAME]
    failure = f"{source!r} is not a folder, and downloading it from the Hugging Face hub failed"
    remedy = f"use a run, a checkpoint, a local folder, {', '.join(GPT2_SIZES)} or OWNER/NAME"
    with hub.explain_hub_errors(failure, remedy):
        wanted = {"revision": revision, "allow_patterns": files}
        return hub.fetch_files(repo_name(source), HF_WEIGHTS_NAME, **wanted)


def _write_settings(folder: Path, config: GPTConfig, dtype: str) -> None:
    """Write the configuration and GPT-2's tokenizer, also as `tokenizer.json` for other clients.

    `EXPORT_FILES` has the files of GPT-2 124M, whose sizes and vocabulary are replaced here. Its
    dropout rates are 0, as in this model; GPT2Config's defaults would act in fine-tuning. Batching
    and the trainers' data collators need its padding token. Without `max_length`, a pipeline
    generates 256 tokens, which may exceed a short context.
    """
    merges = VOCAB_PATH.read_text(encoding="utf-8").splitlines()[1:]
    pieces = [merge.replace(" ", "") for merge in merges]
    tokens = [*byte_characters(), *pieces, "<|endoftext|>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    files = read_json(EXPORT_FILES)
    files[HF_CONFIG_NAME] |= {name: getattr(config, name) for name in SIZES}
    # transformers ignores `n_ctx`, but many other tools read it.
    files[HF_CONFIG_NAME] |= dict.fromkeys(("n_positions", "n_ctx"), config.block_size)
    files[HF_CONFIG_NAME]["torch_dtype"] = dtype
    files["generation_config.json"]["max_length"] = config.block_size
    files["tokenizer_config.json"]["model_max_length"] = config.block_size
    files["tokenizer.json"]["model"] |= {"vocab": vocab, "merges": merges}
    files["vocab.json"] = vocab
    for name, content in files.items():
        write_json(folder / name, content)
    (folder / "merges.txt").write_bytes(VOCAB_PATH.read_bytes())
