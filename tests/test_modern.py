"""`edits/modern.patch`: each switch does what its own patch does, and all of them combine."""

import importlib.util
import shutil
from functools import reduce

import numpy as np
import pytest
import torch
from conftest import ROOT, copy_code, has_compiler
from forked import Commands, assert_refused
from test_change import (
    EDITS,
    SMALL_GPT2,
    apply,
    git,
    logged,
    run_flags,
    succeed,
    train,
    train_twice,
)

SWITCHES = {  # the patch that does the same, and a value
    "rotary": ("rotary", True),
    "qk_norm": ("qk_norm", True),
    "n_kv_head": ("gqa", 1),
    "value_residual": ("value_residual", True),
    "head_gate": ("head_gate", True),
    "window": ("window", 8),
    "documents": ("documents", True),
    "mlp": ("relu2", "relu2"),
    "token_shift": ("token_shift", True),
    "parallel_residual": ("parallel", True),
    "rmsnorm": ("rmsnorm", True),
    "zero_init": ("zero_init", True),
    "untied": ("untied", True),
    "softcap": ("logits", 15.0),
}
HADAMARD = reduce(np.kron, 4 * [[[1, 1], [1, -1]]])  # 16 x 16
ON_RANKS = (3, 10, 12)  # rows that together have all switches
IS_ON = [*(HADAMARD[:, 1 : 1 + len(SWITCHES)] < 0), np.full(len(SWITCHES), True)]


def settings_of(row):
    """The switches of a row of the orthogonal array; the last row has them all."""
    values = {name: value for name, (_, value) in SWITCHES.items()}
    values["mlp"] = ("relu2", "swiglu")[row // 2 % 2]
    return {name: values[name] for name, is_on in zip(values, IS_ON[row], strict=True) if is_on}


def flags_of(settings):
    return [
        f"--{name.replace('_', '-')}" + f"={value}" * (value is not True)
        for name, value in settings.items()
    ]


def test_each_pair_of_switches_is_in_all_four_states():
    on = np.array(IS_ON[:16])
    pairs = {(i, j): 0 for i in range(on.shape[1]) for j in range(i)}
    assert all(len({*zip(on[:, i], on[:, j], strict=True)}) == 4 for i, j in pairs)
    kinds = [settings_of(row).get("mlp") for row in range(16)]
    assert (kinds.count("relu2"), kinds.count("swiglu")) == (4, 4)
    assert on[[*ON_RANKS]].any(axis=0).all()


# --- the same as the single patches -----------------------------------------------------------


def first_steps(folder, *patches, **settings):
    """Parameters, stacked matrices and losses of a few steps by an edited model.py."""
    folder.mkdir()
    shutil.copy(ROOT / "model.py", folder)
    for name in patches:
        git(folder, "apply", "--include=model.py", str(ROOT / "edits" / f"{name}.patch"))
    spec = importlib.util.spec_from_file_location("edited", folder / "model.py")
    edited = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(edited)
    torch.manual_seed(0)
    sizes = {"block_size": 16, "vocab_size": 100, "n_layer": 2, "n_head": 2, "n_embd": 32}
    model = edited.GPT(edited.GPTConfig(**sizes, **settings))
    initial = [(name, value.clone()) for name, value in model.state_dict().items()]
    stacked = [(name, getattr(layer, "rows", None)) for name, layer in model.named_modules()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        idx = torch.randint(100, (4, 17))
        idx[:, 5] = 99  # the end of a text
        loss = model(idx[:, :-1], idx[:, 1:]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    losses.append(model(idx[:, :-1], idx[:, 1:]).loss.item())
    return initial, [(name, rows) for name, rows in stacked if rows], losses


SINGLE = {None: (None, None), **SWITCHES, "swiglu": ("swiglu", "swiglu")}


@pytest.mark.gpt2
@pytest.mark.parametrize("switch", SINGLE)
def test_one_switch_is_its_own_patch_bit_for_bit(tmp_path, switch):
    patch, value = SINGLE[switch]
    settings = {} if switch is None else {"mlp" if switch == "swiglu" else switch: value}
    initial, rows, losses = first_steps(tmp_path / "modern", "modern", **settings)
    expected, expected_rows, expected_losses = first_steps(
        tmp_path / "single", *([] if patch is None else [patch])
    )
    assert [name for name, _ in initial] == [name for name, _ in expected]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(initial, expected, strict=True))
    assert rows == expected_rows
    assert losses == expected_losses
    if switch is not None:
        assert losses != first_steps(tmp_path / "stock")[2]


@pytest.mark.gpt2
def test_edits_of_optimizer_data_and_loss_apply_on_top(tmp_path):
    apply(copy := copy_code(tmp_path / "copy"), "modern")
    patches = {name: (ROOT / f"edits/{name}.patch").read_text(encoding="utf-8") for name in EDITS}
    on_top = [name for name, text in patches.items() if "a/model.py" not in text]
    assert {"normuon", "soap", "ema", "cautious_decay", "masks"} < {*on_top}
    for name in (*on_top, "loss", SMALL_GPT2):
        git(copy, "apply", "--check", str(ROOT / f"edits/{name}.patch"))


# --- combinations -----------------------------------------------------------------------------

CHECK_CACHE = """
import sys
import torch
from formats.load import load_model
from generation import generate_tokens

def sample(use_cache):
    logits = []
    on_token = lambda _, found: logits.append(found)
    options = {"temperature": 0.0, "stop_token": None, "use_cache": use_cache}
    rows = generate_tokens(model, prompt, 50, on_token=on_token, **options)
    return rows, torch.stack(logits)

model = load_model(sys.argv[1])
torch.manual_seed(0)
for parameter in model.parameters():  # after a few steps, attention hardly acts
    parameter.data.normal_(std=0.3)
prompt = torch.tensor([[5, 6, 50256, 7, 8], [9, 10, 11, 50256, 12]])
(rows, logits), (expected_rows, expected) = sample(True), sample(False)
assert rows == expected_rows
assert (logits - expected).norm() < 1e-4 * expected.norm()
"""


@pytest.fixture(scope="module")
def modern_code(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modern")
    apply(copy := copy_code(folder / "copy"), "modern")
    with Commands(folder, copy) as commands:
        yield commands


@pytest.fixture
def modern(modern_code):
    """Commands of a copy of the code with all switches, and no runs yet."""
    shutil.rmtree(modern_code.folder / "runs", ignore_errors=True)
    return modern_code


@pytest.mark.slow
def test_without_switches_the_runs_are_those_of_the_code_before_and_continue_them(
    commands, modern, tiny_data
):
    flags = run_flags(tiny_data, "--optimizer=muon")
    runs = modern.folder / "runs"
    train(commands, *flags, f"--out-dir={runs}", "--run-name=before")
    train(modern, *flags, "--run-name=off")
    names = ("train_loss", "val_loss")
    before = [logged(modern, "before", name) for name in names]
    assert [logged(modern, "off", name) for name in names] == before
    shutil.rmtree(runs / "before/checkpoints/step_00000008")
    done = succeed(modern, "train_gpt2", "--resume=runs/before")
    assert "\nnote: " not in done.stdout
    assert [logged(modern, "before", name) for name in names] == before


@pytest.mark.slow
def test_switches_that_keep_a_gpt2_export(modern, tiny_data):
    flags = run_flags(tiny_data, "--zero-init", "--documents", "--max-steps=1", "--run-name=a")
    train(modern, *flags)
    succeed(modern, "export", "--model=runs/a", "--out=exported")


@pytest.mark.slow
@pytest.mark.parametrize("row", range(17))
def test_switches_combine_in_training_resuming_sampling_and_exporting(modern, tiny_data, row):
    settings = settings_of(row)
    train_twice(modern, run_flags(tiny_data, *flags_of(settings), "--optimizer=muon"))
    script = modern.folder / "check.py"
    script.write_text(CHECK_CACHE, encoding="utf-8")
    done = succeed(modern, script, "runs/whole")
    no_cache = done.stderr.count("warning: sampling without the cache")
    assert done.stderr.count("warning") == no_cache == ("token_shift" in settings)
    done = modern.run("export", "--model=runs/whole", f"--out=exported{row}")
    if settings:
        assert_refused(done, "export")
    else:
        assert done.code == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("row", ON_RANKS)
def test_switches_combine_on_ranks_and_compiled(modern, tiny_data, row):
    switches = [*flags_of(settings_of(row)), "--optimizer=muon", "--micro-batch-size=2"]
    flags = run_flags(tiny_data, *switches, "--max-steps=4")
    train(modern, *flags, "--run-name=alone")
    ways = {"ddp": (2, ["--parallel=ddp"]), "fsdp": (2, ["--parallel=fsdp"])}
    if has_compiler:
        ways["compiled"] = (1, ["--compile", "--activation-checkpointing=full"])
    for name, (ranks, more) in ways.items():
        train(modern, *flags, *more, f"--run-name={name}", ranks=ranks)
        for metric in ("train_loss", "val_loss"):
            found, expected = (logged(modern, run, metric) for run in (name, "alone"))
            assert found == pytest.approx(expected, abs=2e-3)
