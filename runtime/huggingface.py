"""To and from Hugging Face's GPT-2 format, without transformers.

The format differs from `model.py` in two ways: its linear layers ("Conv1D") store their weights
as (in, out), and its vocabulary is not padded. Names are the same. Only safetensors files are
read or written; a pickle file could run any code.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from model import GPT, GPT2_SIZES, GPTConfig
from runtime.files import atomic_write, is_plain_name, read_json, redact_secrets, write_json
from tokenizer import END_OF_TEXT, VOCAB_PATH

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"  # in place of WEIGHTS_NAME where there are several
EXPORTED_BY = "pretrained.save_pretrained"  # marks a folder that may be written over
HUB_TIMEOUT_SECONDS = 10

CONV1D_WEIGHTS = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
WTE = "transformer.wte.weight"
WPE = "transformer.wpe.weight"
# Old files carry the causal mask as a buffer of every attention layer.
MASK_BUFFER = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")
FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

# What `model.py` computes, in the words of Hugging Face's GPT2Config, whose default each is.
FIXED_SETTINGS: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "vocab_size": (50257,),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


def load_pretrained(source: str, device: torch.device) -> GPT:
    """Load a GPT-2 from a folder in Hugging Face's format, or from the hub.

    Args:
        source: a folder with `config.json` and `model.safetensors`; or `gpt2`, `gpt2-medium`,
            `gpt2-large`, `gpt2-xl`, or any `owner/name` on the hub. What the hub gave once is
            kept in its cache and needs no network again.
        device: where to put the model.

    Returns:
        The model, in float32.

    Raises:
        FileNotFoundError: there is no such folder or model, or the hub cannot be reached.
        ValueError: it is not a GPT-2 that `model.py` can compute, or a file is damaged.
    """
    folder = Path(source) if Path(source).is_dir() else _download(source)
    config = _read_config(folder / CONFIG_NAME)
    try:
        return from_hf(dict(_read_weights(folder)), config).to(device)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def save_pretrained(model: GPT, folder: Path) -> None:
    """Write a folder that transformers loads: weights, configuration and tokenizer.

    Args:
        model: the raw model, neither compiled nor wrapped.
        folder: empty, missing, or an earlier export, which is written over.

    Raises:
        ValueError: the folder holds something else, or the vocabulary is not GPT-2's.
    """
    vocab_sizes = FIXED_SETTINGS["vocab_size"]
    if model.config.vocab_size not in vocab_sizes:
        raise ValueError(
            f"vocab_size is {model.config.vocab_size}, and GPT-2's tokenizer has {vocab_sizes[0]}"
        )
    _check_replaceable(folder)
    write_json(folder / CONFIG_NAME, _hf_config(model.config))
    # transformers 4 wants to be told that the tensors are PyTorch's.
    weights = save(to_hf_state_dict(model), metadata={"format": "pt"})
    with atomic_write(folder / WEIGHTS_NAME) as file:
        file.write(weights)
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": END_OF_TEXT, "eos_token_id": END_OF_TEXT, "pad_token_id": END_OF_TEXT},
    )
    _write_tokenizer(folder, model.config.block_size)


def from_hf(state_dict: Mapping[str, Tensor], config: GPTConfig) -> GPT:
    """Build a model from Hugging Face's tensors; the rows that pad the vocabulary are zeros.

    Args:
        state_dict: tensors of any of `FLOAT_TYPES`, by name, with or without `transformer.` in
            front. They are copied.
        config: the dimensions.

    Returns:
        The model, in float32, on the CPU.

    Raises:
        ValueError: a tensor is missing, unexpected or of another shape, or `lm_head` is not tied.
    """
    tensors = _normalise_names(state_dict)
    check_dimensions(tensors, config)
    with torch.device("meta"):  # names and shapes only: no random numbers are drawn
        model = GPT(config)
    _check_fit(tensors, dict(_hf_views(model)))
    model.to_empty(device="cpu")
    model.lm_head.weight = model.transformer.wte.weight  # `to_empty` has untied them
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
        for name, target in _hf_views(model):
            target.copy_(tensors[name])
    return model


def check_dimensions(
    tensors: Mapping[str, Tensor], config: GPTConfig, vocab_rows: int | None = None
) -> None:
    """Refuse dimensions that the tensors do not have, before a model of such a size is built.

    Args:
        tensors: by name, with `transformer.` in front.
        config: the dimensions that a file claims.
        vocab_rows: of the embedding; by default the vocabulary, without padding.

    Raises:
        ValueError: the embeddings are missing or of another shape, or layers are missing.
    """
    rows = {WTE: vocab_rows or config.vocab_size, WPE: config.block_size}
    problems = [
        f"{name} is missing"
        if name not in tensors
        else f"{name} has shape {tuple(tensors[name].shape)}, not {(count, config.n_embd)}"
        for name, count in rows.items()
        if name not in tensors or tensors[name].shape != (count, config.n_embd)
    ]
    layers = {name.split(".")[2] for name in tensors if name.startswith("transformer.h.")}
    if config.n_layer > len(layers):
        problems.append(f"n_layer is {config.n_layer}, and there are {len(layers)} layers")
    if problems:
        raise ValueError("; ".join(problems))


def to_hf_state_dict(model: GPT) -> dict[str, Tensor]:
    """A model's parameters as Hugging Face's GPT2LMHeadModel names and lays them out.

    Returns:
        Contiguous tensors on the CPU, some of which share memory with the model, none with each
        other. The tied `lm_head` is left out, as transformers does.
    """
    return {name: view.cpu().contiguous() for name, view in _hf_views(model)}


def _hf_views(model: GPT) -> Iterator[tuple[str, Tensor]]:
    """Each parameter's name and a view of it in Hugging Face's layout, to read or to fill."""
    for name, parameter in model.named_parameters():
        view = parameter.detach()
        if name.endswith(CONV1D_WEIGHTS):
            view = view.t()
        elif name == WTE:
            view = view[: model.config.vocab_size]
        yield name, view


def _normalise_names(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put `transformer.` before every name; drop mask buffers and a tied `lm_head`.

    Raises:
        ValueError: `lm_head` has weights of its own.
    """
    tensors = {}
    for name, tensor in state_dict.items():
        full_name = "transformer." + name.removeprefix("transformer.")
        if not MASK_BUFFER.fullmatch(full_name):
            tensors[full_name] = tensor
    head = tensors.pop("transformer.lm_head.weight", None)
    if head is not None and WTE in tensors and not torch.equal(head, tensors[WTE]):
        raise ValueError("lm_head.weight differs from wte.weight; only tied models are supported")
    return tensors


def _check_fit(tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not exactly the targets' names and shapes; name every problem."""
    problems = [f"{name} is missing" for name in targets.keys() - tensors.keys()]
    problems += [f"{name} is unexpected" for name in tensors.keys() - targets.keys()]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)}, not {tuple(targets[name].shape)}"
        for name in targets.keys() & tensors.keys()
        if tensors[name].shape != targets[name].shape
    ]
    problems += [
        f"{name} is of {tensor.dtype}, not a float type"
        for name, tensor in tensors.items()
        if tensor.dtype not in FLOAT_TYPES
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:5])
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"the tensors are not this GPT-2's: {shown}{more}")


def _read_config(path: Path) -> GPTConfig:
    """Read the dimensions from `config.json`, and refuse what `model.py` does not compute."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}: it is not a Hugging Face model")
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a JSON object")
    problems = [
        f"{name} is {values[name]!r}, not {accepted[0]!r}"
        for name, accepted in FIXED_SETTINGS.items()
        if values.get(name, accepted[0]) not in accepted
    ]
    names = ("n_positions", "n_layer", "n_head", "n_embd")
    missing = [f"{name} is missing" for name in names if not isinstance(values.get(name), int)]
    problems += missing
    if not missing and values.get("n_inner") not in (None, 4 * values["n_embd"]):
        problems.append(f"n_inner is {values['n_inner']!r}, not 4 * n_embd")
    if problems:
        raise ValueError(f"{path} is not a GPT-2 that can be loaded: {'; '.join(problems)}")
    block_size, n_layer, n_head, n_embd = (values[name] for name in names)
    return GPTConfig(block_size=block_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd)


def _hf_config(config: GPTConfig) -> dict[str, Any]:
    """The `config.json` of a model; all that is not said has GPT2Config's default."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        **{name: accepted[0] for name, accepted in FIXED_SETTINGS.items()},
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "n_positions": config.block_size,
        "n_ctx": config.block_size,  # not read by transformers, but by many tools around it
        "n_inner": None,
        # GPT2Config's defaults would bring dropout into fine-tuning; this model has none.
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": END_OF_TEXT,
        "torch_dtype": "float32",
        "exported_by": EXPORTED_BY,
    }


def _read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a folder's safetensors file, or files, by name."""
    if (folder / INDEX_NAME).is_file():
        index = read_json(folder / INDEX_NAME)
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        # The files may be links, as those in the hub's cache are; their names may be no paths.
        if not isinstance(weight_map, dict) or not all(map(is_plain_name, weight_map.values())):
            raise ValueError(f"{INDEX_NAME} does not name the weights' files in its own folder")
        paths = sorted({folder / name for name in weight_map.values()})
    else:
        paths = [folder / WEIGHTS_NAME]
    for path in paths:
        if not path.is_file():
            pickled = next(folder.glob("*.bin"), None)
            hint = f"; {pickled.name} is a pickle file, which is never loaded" if pickled else ""
            raise FileNotFoundError(f"{folder} has no {path.name}{hint}")
        try:
            yield from load_file(path).items()
        except SafetensorError as error:
            raise ValueError(f"{path.name} is not a readable safetensors file: {error}") from None


def _download(source: str) -> Path:
    """Fetch a model's configuration and weights from the hub; returns their folder."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import LocalEntryNotFoundError

    repo = f"openai-community/{source}" if source in GPT2_SIZES else source
    names = (CONFIG_NAME, WEIGHTS_NAME)
    try:
        try:
            paths = [hf_hub_download(repo, name, local_files_only=True) for name in names]
        except LocalEntryNotFoundError:
            for name in names:
                # Fails at once where the download itself would try again for half a minute.
                get_hf_file_metadata(hf_hub_url(repo, name), timeout=HUB_TIMEOUT_SECONDS)
            paths = [hf_hub_download(repo, name) for name in names]
    except Exception as error:  # the hub's HTTP library, and so its errors, vary by version
        raise FileNotFoundError(
            f"{source!r} is not a folder, and the Hugging Face hub did not give it "
            f"({type(error).__name__}: {redact_secrets(str(error).strip().splitlines()[0])}); "
            f"--model and --init-from take a run, a local folder, {', '.join(GPT2_SIZES)} or "
            f"owner/name"
        ) from None
    return Path(paths[0]).parent


def _check_replaceable(folder: Path) -> None:
    """Refuse a folder that holds anything but an earlier export."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give another folder with --out")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    config_path = folder / CONFIG_NAME
    config = read_json(config_path) if config_path.is_file() else None
    if not isinstance(config, dict) or config.get("exported_by") != EXPORTED_BY:
        raise ValueError(f"{folder} is not empty, nor an earlier export; give another with --out")


def _write_tokenizer(folder: Path, block_size: int) -> None:
    """Write GPT-2's tokenizer in the files that every version of transformers reads."""
    merges = VOCAB_PATH.read_bytes()
    with atomic_write(folder / "merges.txt") as file:
        file.write(merges)
    special = "<|endoftext|>"
    pieces = ["".join(line.split()) for line in merges.decode().splitlines()[1:]]
    tokens = [*_byte_characters(), *pieces, special]
    with atomic_write(folder / "vocab.json") as file:
        vocab = {token: token_id for token_id, token in enumerate(tokens)}
        file.write(json.dumps(vocab, ensure_ascii=False).encode())
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "GPT2Tokenizer",
            "model_max_length": block_size,
            "bos_token": special,
            "eos_token": special,
            "unk_token": special,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
        },
    )


def _byte_characters() -> list[str]:
    """The characters that stand for the 256 bytes in `vocab.bpe`, in the order of their ids.

    Printable Latin-1 stands for itself; the other bytes take the characters from 256 on.
    """
    printable = [chr(byte) for byte in (*range(33, 127), *range(161, 173), *range(174, 256))]
    return printable + [chr(256 + place) for place in range(256 - len(printable))]
