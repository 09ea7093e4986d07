"""The first chapter trains as train_gpt2.py does."""

import re

import pytest
from conftest import series

import train_gpt2
import train_plain
from runtime.errors import UserError


@pytest.mark.gpt2
def test_losses_are_those_of_train_gpt2_without_what_it_adds(
    tiny_data, tmp_path, capsys, monkeypatch
):
    """The windows of 80 steps are more than one epoch."""
    monkeypatch.setattr(train_plain, "STEPS", 80)
    shared = [f"--data-dir={tiny_data}", "--n-layer=2", "--n-head=2", "--n-embd=32"]
    shared += ["--block-size=32"]
    train_plain.main(shared)
    losses = [float(loss) for loss in re.findall(r"\| loss (\S+)", capsys.readouterr().out)]
    rate = train_plain.LEARNING_RATE
    train_gpt2.main(
        [
            *shared,
            *("--no-shuffle", "--warmup-steps=0", f"--max-lr={rate}", f"--min-lr={rate}"),
            *("--max-steps=80", f"--total-batch-size={32 * train_plain.BATCH_SIZE}"),
            *("--micro-batch-size=4", "--beta2=0.95", "--device=cpu", "--dtype=float32"),
            *("--no-compile", "--val-every=0", "--hellaswag-every=0", "--sample-every=0"),
            *(f"--out-dir={tmp_path}", "--run-name=a"),
        ]
    )
    expected = [*series(tmp_path / "a", "train_loss").values()]
    assert losses == pytest.approx(expected, abs=1e-5)
    assert losses[-1] < losses[0] - 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--block-size=20000"], "the text has 18000 tokens, .*: use a smaller --block-size, or"),
        (["--n-embd=100", "--n-head=3"], "n_embd 100 must be a multiple of n_head 3: change"),
    ],
)
def test_what_cannot_be_trained_is_an_error_in_one_line(tiny_data, flags, message):
    with pytest.raises(UserError, match=message):
        train_plain.main([f"--data-dir={tiny_data}", "--n-layer=1", *flags])
