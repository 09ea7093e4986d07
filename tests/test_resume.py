import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from checkpoints import rewrite_state
from conftest import ROOT, TINY_RUN, fake_checkpoint
from run_files import append_records

from formats.huggingface import save_pretrained
from model import GPT, GPTConfig
from runtime.cli import as_flags, flag_of
from runtime.errors import UserError
from runtime.files import write_json
from train_gpt2 import main
from training.config import NOT_SAVED, TrainConfig
from training.resume import check_resume_compatible, parse_config

# --- what is resumed ----------------------------------------------------------------------------


def test_resume_finds_a_checkpoint_by_path_or_by_the_runs_name(tmp_path, capsys):
    old, new = (fake_checkpoint(tmp_path / "a", step, max_lr=0.1) for step in (4, 8))
    auto = ["--resume=auto", f"--out-dir={tmp_path}"]
    for flags, found in (
        ([f"--resume={tmp_path}/a"], new),
        ([f"--resume={old.path}"], old),
        ([*auto, "--run-name=a", "--seed=3"], new),
    ):
        config, checkpoint = parse_config(flags)
        assert checkpoint == found
        assert config.max_lr == 0.1
        assert config.seed == (3 if "--seed=3" in flags else 1337)
    with pytest.raises(ValueError, match=f"requires --run-name; the runs in {tmp_path} are a$"):
        parse_config(auto)
    with pytest.raises(UserError, match="nowhere does not exist"):
        parse_config(["--resume=nowhere"])
    assert capsys.readouterr().out == ""


def test_names_of_runs_are_looked_up_in_out_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine, _ = (fake_checkpoint(Path(folder) / "mine", 4, max_lr=0.1) for folder in ("exp", "runs"))
    (tmp_path / "mine").mkdir()
    assert parse_config(["--out-dir=exp", "--resume=mine"])[1] == mine
    config, resumed = parse_config(["--out-dir=exp", "--init-from=mine"])
    assert (config.init_from, resumed) == ("exp/mine", None)
    append_records(Path("exp/mine"), {"step": 4, "val_loss": 3.0})
    assert parse_config(["--out-dir=exp", "--init-from=mine@best"])[0].init_from == "exp/mine@best"
    fake_checkpoint(tmp_path / "mine", 4)
    assert parse_config(["--out-dir=exp", "--init-from=./mine"])[0].init_from == "./mine"


def test_resume_of_a_damaged_checkpoint_is_an_error_or_goes_back_to_the_one_before(tmp_path):
    old, new = (fake_checkpoint(tmp_path / "a", step) for step in (4, 8))
    (new.path / "model.safetensors").write_text("damaged")
    with pytest.raises(ValueError, match=r"is damaged: .*: use an earlier checkpoint"):
        parse_config([f"--resume={tmp_path}/a"])
    assert parse_config([f"--resume={old.path}"])[1] == old
    auto = ["--resume=auto", f"--out-dir={tmp_path}", "--run-name=a"]
    assert parse_config(auto)[1] == old


def test_resume_of_a_run_that_is_not_there_names_those_that_are_and_begins(tmp_path, capsys):
    for name in ("small", "other"):
        fake_checkpoint(tmp_path / name, 4)
    assert parse_config(["--resume=auto", f"--out-dir={tmp_path}", "--run-name=smal"])[1] is None
    said = f"starting a new run: no run named smal yet; the runs in {tmp_path} are other, small\n"
    assert capsys.readouterr().out == said


def test_resume_says_that_it_does_not_use_a_given_config(tmp_path, capsys):
    recipe = tmp_path / "recipe.json"
    write_json(recipe, {"max_lr": 0.2})
    path = fake_checkpoint(tmp_path / "a", 4, max_lr=0.3).path
    assert parse_config([f"--config={recipe}", f"--resume={path}"])[0].max_lr == 0.3
    said = f"note: ignoring settings in --config {recipe}, because the run has other values: "
    assert capsys.readouterr().out == f"{said}max_lr 0.2 -> 0.3\n"


@pytest.mark.gpt2
def test_resume_with_the_command_of_the_start_prints_no_note(tmp_path, capsys):
    recipe, auto = tmp_path / "recipe.json", ["--resume=auto", f"--out-dir={tmp_path}"]
    write_json(recipe, {"max_steps": 60, "max_lr": 0.2, "seed": 5, "shuffle": True, "n_layer": 3})
    model = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 48}
    save_pretrained(GPT(GPTConfig(**model)), tmp_path / "model")
    flags = ["--max-minutes=3", "--seed", "7", "--no-shuffle", "--run-name=a"]
    flags += [f"--config={recipe}", f"--init-from={tmp_path}/model", *auto]
    first, _ = parse_config(flags)
    measured = replace(first, max_steps=35, max_minutes=None).saved()
    path = fake_checkpoint(tmp_path / "a", 4, **measured).path
    rewrite_state(path, lambda state: state | {"model_config": model})
    capsys.readouterr()
    assert parse_config(flags)[0].saved() == measured
    assert capsys.readouterr().out == ""


def test_check_resume_compatible_lists_what_may_not_change(tmp_path):
    config = TrainConfig()
    saved = fake_checkpoint(tmp_path / "a", 1, **config.saved())

    def check(data, **changes):
        changed = replace(config, **changes)
        check_resume_compatible(saved, changed, data, "v")

    check("a", max_steps=9, max_lr=1e-3)
    said = "n_layer 12 -> 3, total_batch_size 524288 -> 2048, "
    said = re.escape(f"belongs to another run ({said}shuffle True -> False): restore these")
    with pytest.raises(ValueError, match=said):
        check("b", n_layer=3, total_batch_size=2048, shuffle=False)
    with pytest.raises(ValueError, match="init_from None -> gpt2"):  # or it would be noted
        check("a", init_from="gpt2")
    with pytest.raises(ValueError, match="the data in data/fineweb-edu-10BT changed since"):
        check("b")


@pytest.mark.gpt2
def test_resume_ignores_values_that_this_version_does_not_have_and_prints_them_once(
    tmp_path, capsys, monkeypatch
):
    settings = TrainConfig().saved() | {"max_lr": 0.1, "old_flag": None, "z_loss": 0.5}
    settings |= {"logger": ["paper"], "lr_schedule": "flat", "parallel": "hsdp"}
    path = fake_checkpoint(tmp_path / "a", 4, **settings).path
    rewrite_state(path, lambda state: state | {"old": [1]})
    config, checkpoint = parse_config([f"--resume={path}"])
    expected = TrainConfig(resume=str(path), max_lr=0.1)
    assert config == expected
    names = "old, lr_schedule flat, logger ['paper'], parallel hsdp, old_flag None, "
    note = f"note: {path} has values that this version ignores: {names}z_loss 0.5\n"
    assert capsys.readouterr().out == note
    check_resume_compatible(checkpoint, config, "a", "v")
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "1")
    assert parse_config([f"--resume={path}"]) == (config, checkpoint)
    assert capsys.readouterr().out == ""


OTHER_VALUES = {  # of every flag, than those of `tiny_flags`
    **{"size": "gpt2-medium", "n_layer": 3, "n_head": 4, "n_embd": 96, "block_size": 8},
    **{"init_from": "gpt2-medium", "total_batch_size": 512, "seed": 5, "shuffle": False},
    **{"optimizer": "muon", "val_tokens": 512, "max_steps": 9, "max_lr": 0.1, "min_lr": 1e-9},
    **{"warmup_steps": 1, "lr_schedule": "wsd", "weight_decay": 0.3, "embedding_decay": 1.0},
    **{"spelling_share": 0.5, "beta1": 0.5, "beta2": 0.5},
    **{"momentum": 0.5, "grad_clip": 0.5, "val_every": 3, "hellaswag_every": 3, "sample_every": 3},
    **{"sample_prompt": "a", "checkpoint_every": 3, "keep_checkpoints": 3, "log_every": 3},
    **{"logger": ["tensorboard"], "hellaswag_data": "a.jsonl", "micro_batch_size": 2},
    **{"loss_chunks": 3, "activation_checkpointing": "full", "parallel": "fsdp"},
    **{"reshard_after_forward": False, "cpu_offload": True, "device": "cuda", "dtype": "bfloat16"},
    **{"cpu_attention": "blocks", "vocabulary": "text"},
    **{"deterministic": True, "compile": True, "step_timeout": 3.0, "out_dir": "other"},
}
TOGETHER = {"cpu_offload": ["--parallel=fsdp"]}


def flags_by_what_a_resume_does():
    """The fields in the table of docs/reliability.md, by the first word of the effect."""
    text = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    table = text.partition("## What a resume does with each flag")[2].partition("##")[0]
    rows = re.findall(r"^\| (`--.*?`) \| (\w+)", table, re.MULTILINE)
    split = [(flag.strip("`-"), does) for flags, does in rows for flag in flags.split(", ")]
    return {flag.replace("-", "_"): does for flag, does in split}


@pytest.fixture(scope="module")
def resumable(tiny_data, tmp_path_factory):
    """A run to resume."""
    runs = tmp_path_factory.mktemp("runs")
    flags = [*TINY_RUN, f"--data-dir={tiny_data}", f"--out-dir={runs}", "--max-steps=4"]
    main([*flags, "--run-name=a", "--val-every=0"])
    return runs / "a"


@pytest.mark.gpt2
@pytest.mark.parametrize("name", [field.name for field in fields(TrainConfig)])
def test_resume_does_with_each_flag_what_the_table_says(resumable, name):
    does = flags_by_what_a_resume_does().get(name)
    if does is None and name in GPTConfig.__dataclass_fields__:
        return  # a setting of an edited model: any other value is accepted
    assert does, f"say in docs/reliability.md what a resume does with {flag_of(name)}, and why"
    if does == "applies":
        assert name in NOT_SAVED
        return
    if name == "data_dir":
        return  # test_main_refuses_other_data_and_too_little_data
    value = OTHER_VALUES[name]
    resume = [f"--resume={resumable}", "--max-steps=8", *TOGETHER.get(name, ())]
    resume += as_flags({name: value})
    if does == "error":
        said = "this run builds Muon and AdamW" if name == "optimizer" else f"{name} .*-> {value}"
        saved = (resumable / "config.json").read_text()
        with pytest.raises(ValueError, match=said):
            main(resume)
        assert (resumable / "config.json").read_text() == saved
        return
    assert does == "accepted"
    config, checkpoint = parse_config(resume)
    fingerprints = checkpoint.state.data_fingerprint, checkpoint.state.val_fingerprint
    check_resume_compatible(checkpoint, config, *fingerprints)
    assert config.saved()[name] == value != checkpoint.state.train_config[name]


# --- flags and saved settings -------------------------------------------------------------------


def test_warmup_is_shorter_than_the_run():
    for steps, warmup in ((TrainConfig.max_steps, 715), (2000, 200), (9, 0)):
        config, _ = parse_config([f"--max-steps={steps}"])
        assert config.warmup == warmup
    for steps, warmup, remedy in ((2000, 2000, 200), (90, 500, 9)):
        error = rf"--warmup-steps {warmup} is not shorter than .*: use --warmup-steps {remedy}\b"
        with pytest.raises(ValueError, match=error):
            parse_config([f"--max-steps={steps}", f"--warmup-steps={warmup}"])


def test_warmup_of_saved_settings_stays_whatever_the_length_becomes(tmp_path):
    settings = {"max_steps": 5000, "warmup_steps": 500}
    write_json(tmp_path / "config.json", settings)
    for source in ("config.json", f"{fake_checkpoint(tmp_path, 1, **settings).path}"):
        flag = "--config" if source == "config.json" else "--resume"
        given = f"{flag}={tmp_path / source}"
        assert parse_config([given, "--max-steps=3000"])[0].warmup == 500


@pytest.mark.gpt2
def test_default_that_follows_from_other_settings_is_saved_as_a_default(tmp_path, capsys):
    """A new run has that of its own settings; a resumed run keeps its warm-up."""
    settings = replace(TrainConfig(), max_steps=40, weight_decay=0.5).saved()
    derived = ("warmup_steps", "embedding_decay", "beta2")
    assert {settings[name] for name in derived} == {None}
    write_json(tmp_path / "config.json", settings)
    resume = f"--resume={fake_checkpoint(tmp_path / 'a', 1, **settings).path}"
    new, _ = parse_config(
        [f"--config={tmp_path}/config.json", "--max-steps=10", "--total-batch-size=262144"]
    )
    assert (new.warmup, new.embedding_weight_decay, new.adam_beta2) == (1, 0.5, 0.95**0.5)
    assert parse_config([resume])[0].saved() == settings
    resumed, _ = parse_config([resume, "--max-steps=80"])
    assert (resumed.warmup, resumed.saved()["warmup_steps"]) == (4, 4)
    assert parse_config([resume, "--max-steps=80", "--warmup-steps=7"])[0].warmup == 7
    assert capsys.readouterr().out == ""
    timed, _ = parse_config([resume, "--max-minutes=3", "--max-steps=80"])
    assert timed.saved() == settings
    said = "note: ignoring --max-steps 80: leave out --max-minutes\n"
    assert capsys.readouterr().out == said
    parse_config([resume, "--max-minutes=3"])
    assert capsys.readouterr().out == ""


def test_saved_settings_have_flags_laid_over_them(tmp_path):
    settings = {"data_dir": "d", "max_lr": 1, "micro_batch_size": 4, "n_layer": None}
    write_json(tmp_path / "config.json", settings)
    fake_checkpoint(tmp_path / "run", 1, **settings)
    for source in (f"--config={tmp_path}/config.json", f"--resume={tmp_path}/run"):
        config, _ = parse_config([source, "--micro-batch-size=auto", "--max_steps=3"])
        assert (config.data_dir, config.max_lr) == (Path("d"), 1)
        assert (config.micro_batch_size, config.max_steps) == ("auto", 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_steps": True}, "config.json: --max-steps: expected one argument"),
        ({"max_lr": -1}, "config.json: --max-lr must be above 0, not -1"),
        ({"layers": 3}, "config.json: unknown flag --layers: did you mean --n-layer"),
        ([], "config.json is neither a recipe nor a run's config.json"),
    ],
)
def test_saved_setting_that_is_none_is_refused(settings, message, tmp_path):
    write_json(tmp_path / "config.json", settings)
    with pytest.raises(ValueError, match=message):
        parse_config([f"--config={tmp_path}/config.json"])


@pytest.mark.gpt2
def test_init_from_takes_the_models_size_and_context_unless_another_is_given(tmp_path):
    own = GPTConfig(block_size=48, n_layer=1, n_head=2, n_embd=8)
    save_pretrained(GPT(own), tmp_path / "model")
    init, recipe = [f"--init-from={tmp_path}/model"], tmp_path / "recipe.json"
    write_json(recipe, {"block_size": 128, "n_layer": 3, "max_steps": 60})
    for flags in ([], [f"--config={recipe}"], ["--n-layer=1"]):
        config, _ = parse_config([*init, *flags])
        assert config.model_config() == own
        assert config.saved()["block_size"] == 48
    config, _ = parse_config([*init, "--block_size", "32"])
    assert config.model_config() == replace(own, block_size=32)
    write_json(recipe, {"init_from": f"{tmp_path}/model"})
    assert parse_config([f"--config={recipe}"])[0].model_config() == own
    write_json(tmp_path / "config.json", config.saved())  # of a run that began so
    assert parse_config([f"--config={tmp_path}/config.json", *init])[0].block_size == 32
    wider = replace(own, n_embd=16)
    save_pretrained(GPT(wider), tmp_path / "wider")
    flags = [f"--config={tmp_path}/config.json", f"--init-from={tmp_path}/wider"]
    assert parse_config(flags)[0].model_config() == wider
    error = "has another size (n_embd 8 -> 16, block_size 48 -> 49): leave out --n-layer, "
    with pytest.raises(ValueError, match=re.escape(error)):
        parse_config([*init, "--n-embd=16", "--block-size=49"])
    for value in ("scratch", "resume"):
        with pytest.raises(ValueError, match=f"{value} is not a model: leave it out for new"):
            parse_config([f"--init-from={value}"])
    # It is not read where a checkpoint is resumed, whose version may not have saved the size.
    model = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 512}
    path = fake_checkpoint(tmp_path / "run", 5, block_size=512, init_from="gone").path
    rewrite_state(path, lambda state: state | {"model_config": model})
    assert parse_config([f"--resume={path}"])[0].model_config() == GPTConfig(**model)
