"""Load and save models in Hugging Face's GPT-2 format, without transformers.

The format differs from `model.py` in two ways: its linear layers ("Conv1D") store their weights
as (in, out), and its vocabulary is not padded. Names are the same. Only safetensors files are
read or written; a pickle file could run any code.
"""

import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from filelock import Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import functional as F

from formats import hub
from model import GPT, GPT2_SIZES, GPTConfig
from runtime.files import atomic_write, lock_folder, read_json, sync_folder, write_json
from tokenizer import END_OF_TEXT, VOCAB_PATH, VOCAB_SIZE, byte_characters

HF_CONFIG_NAME = "config.json"
HF_WEIGHTS_NAME = "model.safetensors"
HF_WEIGHT_PARTS = "model-*-of-*.safetensors"
EXPORTED_BY = "gpt2-from-text"  # marks a folder that may be written over
WORK_NAME = f".{EXPORTED_BY}"  # in an export's folder while it is written

TOKEN_IDS = {f"{kind}_token_id": END_OF_TEXT for kind in ("bos", "eos", "pad")}
CONV1D_WEIGHTS = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
WTE = "transformer.wte.weight"
# Old files carry the causal mask as a buffer of every attention layer.
MASK_BUFFER = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")
MAX_CHECKED_TOKENS = 1024
MAX_LOGIT_ERROR = 1e-4  # float32 rounding gives about 1e-6, the exact GELU instead of tanh's 3e-4

# The settings of Hugging Face's GPT2Config that `model.py` computes; the first is its default.
GPT2_SETTINGS: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "vocab_size": (VOCAB_SIZE,),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


def load_pretrained(source: str | Path, device: torch.device | str = "cpu") -> GPT:
    """Load a GPT-2, in float32 and eval mode, from a folder in Hugging Face's format or the hub.

    `source` is a folder with `config.json` and safetensors, in one file or several; or a name on
    the hub, `gpt2` to `gpt2-xl` or OWNER/NAME, which may have `@REVISION` and is downloaded once.
    """
    folder = _find_folder(source)
    config, files = _read_hf_config(folder / HF_CONFIG_NAME), _weight_files(folder)
    tensors = {name: each for file in files for name, each in read_tensors(file).items()}
    return from_hf(tensors, config).to(device).eval()


def read_pretrained_config(source: str | Path) -> GPTConfig:
    """The dimensions of the model that `load_pretrained` loads; its weights are not read."""
    return _read_hf_config(_find_folder(source) / HF_CONFIG_NAME)


@contextmanager
def export_folder(folder: str | Path) -> Iterator[Path]:
    """A path for a new export, whose files move to `folder` once the body has written them there.

    `folder` is missing, empty or an earlier export, and loses nothing but files that are written
    again. A kill leaves the old export, the new one, or no weights and so nothing that loads.
    """
    folder = Path(folder).resolve()
    check_replaceable(folder)
    new = folder / WORK_NAME / "new"
    try:
        with lock_folder(new.parent, "lock"):
            shutil.rmtree(new, ignore_errors=True)  # a killed export's
            try:
                yield new
                (folder / HF_WEIGHTS_NAME).unlink(missing_ok=True)  # a mixture must not load
                for path in sorted(new.iterdir(), key=lambda path: path.name == HF_WEIGHTS_NAME):
                    path.replace(folder / path.name)  # the weights last
                sync_folder(folder)
            finally:
                shutil.rmtree(new, ignore_errors=True)
    except Timeout:
        raise ValueError(f"another export to {folder} is at work: wait until it ends") from None


def check_replaceable(folder: Path) -> None:
    """Refuse to export to a folder that holds anything but an earlier export, whole or begun."""
    config = folder / HF_CONFIG_NAME
    values = read_json(config) if config.is_file() else {}
    # transformers keeps the mark when it saves a fine-tuned model, and adds its version.
    is_export = values.get("exported_by") == EXPORTED_BY and "transformers_version" not in values
    is_begun = (folder / WORK_NAME).exists()
    if folder.exists() and any(folder.iterdir()) and not (is_export or is_begun):
        raise ValueError(f"{folder} is not empty, nor an earlier export; give another with --out")


def save_pretrained(model: GPT, folder: str | Path) -> int:
    """Write a folder that transformers loads: weights, configuration and tokenizer.

    A raw model is refused that has other parameters than GPT-2, or computes something else. Returns
    the number of parameters in the file, where no rows pad the vocabulary.
    """
    config, folder = model.config, Path(folder)
    if config.vocab_size != VOCAB_SIZE:
        raise ValueError(f"vocab_size is {config.vocab_size}; GPT-2's tokenizer has {VOCAB_SIZE}")
    tensors = to_hf_state_dict(model)
    check_tensors(tensors, gpt2_shapes(config), "this model cannot be exported as a GPT-2")
    _check_computes_gpt2(model, tensors)
    write_json(folder / HF_CONFIG_NAME, _hf_config(config))
    # transformers 4 demands to be told that the tensors are PyTorch's.
    with atomic_write(folder / HF_WEIGHTS_NAME) as file:
        file.write(save(tensors, metadata={"format": "pt"}))
    # Without this a pipeline asks for 256 new tokens, more than short contexts have room for.
    write_json(folder / "generation_config.json", {**TOKEN_IDS, "max_length": config.block_size})
    _write_tokenizer(folder, config.block_size)
    return sum(tensor.numel() for tensor in tensors.values())


def from_hf(state_dict: Mapping[str, Tensor], config: GPTConfig) -> GPT:
    """Build a model from copies of Hugging Face's tensors, floats of any width.

    Their names may begin with `transformer.` or not. The rows that pad the vocabulary are zeros.
    """
    named = {"transformer." + n.removeprefix("transformer."): t for n, t in state_dict.items()}
    tensors = {name: t for name, t in named.items() if not MASK_BUFFER.fullmatch(name)}
    head = tensors.pop("transformer.lm_head.weight", None)
    if head is not None and not torch.equal(head, tensors.get(WTE, head)):
        raise ValueError("lm_head.weight differs from wte.weight; only tied models are supported")
    model = new_model(config)
    targets = dict(_hf_views(model))
    check_tensors(tensors, shapes_of(targets), "the tensors do not fit the model in model.py")
    with torch.no_grad():
        model.get_parameter(WTE).zero_()
        for name, target in targets.items():
            target.copy_(tensors[name])
    return model


def to_hf_state_dict(model: GPT) -> dict[str, Tensor]:
    """A model's parameters as GPT2LMHeadModel lays them out, on the CPU, without the tied head.

    Some share memory with the model, none with each other.
    """
    return {name: view.cpu().contiguous() for name, view in _hf_views(model)}


def gpt2_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a GPT-2's tensors in Hugging Face's format, whatever `model.py` says."""
    C = config.n_embd
    block: dict[str, tuple[int, ...]] = {
        **{"ln_1": (C,), "attn.c_attn": (C, 3 * C), "attn.c_proj": (C, C)},
        **{"ln_2": (C,), "mlp.c_fc": (C, 4 * C), "mlp.c_proj": (4 * C, C)},
    }
    layers = {f"h.{i}.{name}": block[name] for i in range(config.n_layer) for name in block}
    weights = {**layers, "ln_f": (C,), "wte": (config.vocab_size, C), "wpe": (config.block_size, C)}
    shapes = {f"{name}.weight": shape for name, shape in weights.items()}
    shapes |= {f"{name}.bias": weights[name][-1:] for name in (*layers, "ln_f")}
    return {f"transformer.{name}": shape for name, shape in shapes.items()}


def is_local(source: str | Path) -> bool:
    """Whether a model's name means a folder here, there or not, and no model on the hub."""
    path, name = Path(source), str(source).partition("@")[0]
    is_repo = hub.REPO_NAME.fullmatch(name) is not None and not path.parent.is_dir()
    return path.exists() or not (name in GPT2_SIZES or is_repo)


def new_model(config: GPTConfig, device: torch.device | str = "cpu") -> GPT:
    """A model whose parameters will be overwritten; torch's generators stay as they are."""
    device = torch.device(device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        return GPT(config)


def _hf_views(model: GPT) -> Iterator[tuple[str, Tensor]]:
    """Each parameter's name and a view of it in Hugging Face's layout, to read or to fill."""
    for name, parameter in model.named_parameters():
        view = parameter.detach()
        if name.endswith(CONV1D_WEIGHTS) and view.dim() == 2:
            view = view.t()
        elif name == WTE:
            view = view[: model.config.vocab_size]
        yield name, view


@torch.no_grad()
def _check_computes_gpt2(model: GPT, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a model whose code computes other logits than GPT-2's from the same tensors.

    Shapes do not show another activation, or rotary embeddings next to an unused `wpe`.
    """
    config = model.config
    T = min(config.block_size, MAX_CHECKED_TOKENS)
    idx = torch.randint(config.vocab_size, (T,), generator=torch.Generator().manual_seed(0))
    logits = deepcopy(model).cpu()(idx[None]).logits
    expected = gpt2_logits(tensors, config, idx)
    error = (logits[0] - expected).norm() / expected.norm()
    if error > MAX_LOGIT_ERROR:
        raise ValueError(
            f"this model does not compute what GPT-2 computes (its logits differ by {error:.1e} of "
            f"their size): another activation, position embedding or attention cannot be exported"
        )


def gpt2_logits(tensors: Mapping[str, Tensor], config: GPTConfig, idx: Tensor) -> Tensor:
    """GPT-2's logits (T, vocab_size) of one sequence (T,), without `model.py`'s help."""

    def norm(x: Tensor, name: str) -> Tensor:
        weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
        return F.layer_norm(x, (config.n_embd,), weight, bias, eps=1e-5)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    T, C = len(idx), config.n_embd
    x = tensors[WTE][idx] + tensors["transformer.wpe.weight"][:T]  # (T, C)
    for block in (f"transformer.h.{layer}" for layer in range(config.n_layer)):
        qkv = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn")
        q, k, v = qkv.view(T, 3, config.n_head, -1).permute(1, 2, 0, 3)  # (H, T, D) each
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(heads.transpose(0, 1).reshape(T, C), f"{block}.attn.c_proj")
        hidden = linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc")
        x = x + linear(F.gelu(hidden, approximate="tanh"), f"{block}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ tensors[WTE].T


def check_tensors(
    tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], refusal: str
) -> None:
    """Refuse weights of other names or shapes than expected, integers, NaN and infinities."""
    found = shapes_of(tensors)
    problems = [
        f"{name} is {found.get(name, 'missing')}, expected {expected.get(name, 'none')}"
        for name in sorted(expected.keys() | found.keys())
        if found.get(name) != expected.get(name)
    ]
    problems += [
        f"{name} has values that are NaN, infinite or no floats"
        for name, tensor in tensors.items()
        if not (tensor.is_floating_point() and is_finite(tensor))
    ]
    if problems:
        raise ValueError(f"{refusal}: {'; '.join(problems[:5])}")


def is_finite(*tensors: Tensor) -> bool:
    """Whether no number is NaN or infinite; waits for each device once."""
    # Extremes, which are NaN if a number is, take a CPU a 16th of the time of isfinite().all().
    extremes: dict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in filter(Tensor.numel, tensors):  # a shard may be empty
        extremes[tensor.device] += tensor.aminmax()
    return all(bool(torch.stack(each).isfinite().all()) for each in extremes.values())


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The tensors' shapes, by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _read_hf_config(path: Path) -> GPTConfig:
    """Read the dimensions from `config.json`, and refuse what `model.py` does not compute."""
    values = read_json(path)
    problems = [
        f"{name} is {values[name]!r}, not {accepted[0]!r}"
        for name, accepted in GPT2_SETTINGS.items()
        if values.get(name, accepted[0]) not in accepted
    ]
    if problems:
        raise ValueError(f"{path} is not a GPT-2 that can be loaded: {'; '.join(problems)}")
    sizes = {name: values.get(name) for name in ("n_layer", "n_head", "n_embd")}
    return GPTConfig(block_size=values.get("n_positions"), **sizes)


def _hf_config(config: GPTConfig) -> dict[str, Any]:
    """A model's `config.json`; every setting left out has GPT2Config's default."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        **{name: accepted[0] for name, accepted in GPT2_SETTINGS.items()},
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "n_positions": config.block_size,
        "n_ctx": config.block_size,  # not read by transformers, but by many tools around it
        "n_inner": None,
        # GPT2Config's defaults would bring dropout into fine-tuning; this model has none.
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        **TOKEN_IDS,
        "torch_dtype": "float32",
        "exported_by": EXPORTED_BY,
    }


def read_tensors(path: Path) -> dict[str, Tensor]:
    """A safetensors file's tensors, mapped into memory: each is read when it is used."""
    try:
        return load_file(path)
    except (SafetensorError, RuntimeError) as error:  # the latter if it is deleted meanwhile
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from None


def _find_folder(source: str | Path) -> Path:
    """A model's folder, from the hub if need be; refused if its weights have to be converted."""
    folder = Path(source) if is_local(source) else _download(str(source))
    # Any configuration, config.json or another's; `[!.]` takes a first letter.
    if any(folder.glob("[!.]*onfig.json")) and not _weight_files(folder):
        raise FileNotFoundError(
            f"{source} lacks {HF_WEIGHTS_NAME}, or parts of it, and pickle is never loaded: load "
            f"it with transformers, call save_pretrained('converted'), and give that folder"
        )
    return folder


def _download(source: str) -> Path:
    """The folder in the hub's cache that has a model's configuration and weights."""
    name, _, revision = source.partition("@")
    repo = f"openai-community/{name}" if name in GPT2_SIZES else name
    files = ["*config.json", HF_WEIGHTS_NAME, HF_WEIGHT_PARTS]
    failure = f"{source!r} is not a folder, and the Hugging Face hub did not give it"
    remedy = f"--model and --init-from take a run, a local folder, {', '.join(GPT2_SIZES)} or "
    with hub.explain_hub_errors(failure, remedy + "OWNER/NAME"):
        return hub.fetch_files(repo, _weight_files, revision=revision or None, allow_patterns=files)


def _weight_files(folder: Path) -> list[Path]:
    """The files of a model's weights: one, or its numbered parts; none unless all are there."""
    if (folder / HF_WEIGHTS_NAME).is_file():
        return [folder / HF_WEIGHTS_NAME]
    parts = sorted(folder.glob(HF_WEIGHT_PARTS))
    return parts if parts and parts[-1].stem.endswith(f"-of-{len(parts):05}") else []


def _write_tokenizer(folder: Path, block_size: int) -> None:
    """Write GPT-2's tokenizer in transformers' files and, for other clients, `tokenizer.json`."""
    text, special = VOCAB_PATH.read_bytes(), "<|endoftext|>"
    merges = text.decode().splitlines()[1:]
    pieces = [merge.replace(" ", "") for merge in merges]
    vocab = {token: i for i, token in enumerate([*byte_characters(), *pieces, special])}
    (folder / "merges.txt").write_bytes(text)
    write_json(folder / "vocab.json", vocab)
    added = {"id": END_OF_TEXT, "content": special, "special": True}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    content: dict[str, Any] = {"version": "1.0", "added_tokens": [added], "normalizer": None}
    content |= dict.fromkeys(("pre_tokenizer", "post_processor", "decoder"), byte_level)
    content["model"] = {"type": "BPE", "vocab": vocab, "merges": merges}
    write_json(folder / "tokenizer.json", content)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "GPT2Tokenizer",
            "model_max_length": block_size,
            # Batches and the collators of trainers need one that pads.
            **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), special),
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
        },
    )
