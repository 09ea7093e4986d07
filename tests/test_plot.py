import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from plot import PlotConfig, Series, _references_for, format_count, plot_comparison, plot_run
from runtime.metrics import MetricsLogger

ROOT = Path(__file__).resolve().parent.parent
BATCH = 8192


def write_run(run_dir, steps, val_every=0, hellaswag_every=0, total=10042, **extra):
    """A run's metrics, as train_gpt2.py logs them."""
    with MetricsLogger(run_dir / "metrics.jsonl") as logger:
        for step in range(steps + 1):
            loss = 3 + 8 / (1 + step / 20)
            evaluation = {}
            if val_every and step % val_every == 0:
                evaluation["val_loss"] = loss + 0.05
            if hellaswag_every and step % hellaswag_every == 0:
                evaluation |= {"hellaswag_acc_norm": 0.3, "hellaswag_total": total}
            if evaluation:
                logger.log(step=step, tokens_seen=step * BATCH, **evaluation)
            if step < steps:
                logger.log(
                    step=step + 1,
                    tokens_seen=(step + 1) * BATCH,
                    train_loss=loss,
                    **({"tokens_per_second": 15000.0, "mfu": None} | extra),
                )
    return run_dir


def ink(path):
    """The share of a picture's pixels that are not white; it must be a whole PNG."""
    with Image.open(path) as image:
        assert image.format == "PNG"
        pixels = np.asarray(image.convert("L"))
    assert pixels.shape == (540, 960)
    return float((pixels < 250).mean())


def test_plot_run_draws_every_figure(tmp_path):
    run_dir = write_run(tmp_path / "run", steps=200, val_every=50, hellaswag_every=100, mfu=0.5)

    drawn = plot_run(run_dir)

    assert [path.relative_to(run_dir).as_posix() for path in drawn] == [
        "figures/loss.png",
        "figures/hellaswag.png",
        "figures/throughput.png",
    ]
    for path in drawn:
        assert 0.005 < ink(path) < 0.5
        assert path.stat().st_size < 120_000


def test_plot_run_of_a_full_length_run_stays_small(tmp_path):
    run_dir = tmp_path / "run"
    noise = np.random.default_rng(1).normal(0, 0.05, 19073)
    with MetricsLogger(run_dir / "metrics.jsonl") as logger:
        for step, error in enumerate(noise, start=1):
            logger.log(
                step=step,
                tokens_seen=step * 524288,
                train_loss=3 + 8 / (1 + step / 60) + error,
                tokens_per_second=1.5e6 * (1 + error),
            )

    for path in plot_run(run_dir):
        assert path.stat().st_size < 120_000


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"steps": 1, "tokens_per_second": None}, ["loss"]),
        ({"steps": 1}, ["loss", "throughput"]),
        ({"steps": 0, "val_every": 1}, ["loss"]),
        ({"steps": 0, "val_every": 1, "hellaswag_every": 1}, ["loss", "hellaswag"]),
        ({"steps": 5, "hellaswag_every": 5, "total": 40}, ["loss", "hellaswag", "throughput"]),
    ],
)
def test_plot_run_draws_what_there_is(tmp_path, settings, names, recwarn):
    run_dir = write_run(tmp_path / "run", **settings)

    drawn = plot_run(run_dir)

    assert [path.stem for path in drawn] == names
    assert all(ink(path) > 0.005 for path in drawn)
    assert [str(warning.message) for warning in recwarn] == []


def test_plot_run_in_progress_draws_what_is_whole(tmp_path):
    run_dir = write_run(tmp_path / "run", steps=20)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "tokens_seen": 172032, "train_l')

    assert ink(plot_run(run_dir)[0]) > 0.005


def test_plot_run_bridges_steps_without_a_finite_loss(tmp_path):
    run_dir = write_run(tmp_path / "run", steps=20)
    with MetricsLogger(run_dir / "metrics.jsonl") as logger:
        logger.log(step=21, tokens_seen=21 * BATCH, train_loss=float("nan"))

    assert ink(plot_run(run_dir)[0]) > 0.005


def test_plot_run_changes_with_the_metrics(tmp_path):
    first = plot_run(write_run(tmp_path / "a" / "run", steps=20))[0].read_bytes()
    again = plot_run(write_run(tmp_path / "b" / "run", steps=20))[0].read_bytes()
    other = plot_run(write_run(tmp_path / "c" / "run", steps=40))[0].read_bytes()

    assert first == again != other


def test_plot_run_without_losses_says_to_wait(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")

    with pytest.raises(ValueError, match=r"metrics\.jsonl has no losses yet: wait"):
        plot_run(tmp_path)


def test_plot_run_of_another_folder_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no metrics\.jsonl"):
        plot_run(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no run folder .*none"):
        plot_run(tmp_path / "none")


@pytest.mark.parametrize("val_every", [5, 0])
def test_plot_comparison_draws_runs_of_different_length(tmp_path, val_every):
    runs = [write_run(tmp_path / name, steps, val_every) for name, steps in (("a", 40), ("b", 10))]

    plot_comparison(runs, tmp_path / "ab.png")

    assert ink(tmp_path / "ab.png") > 0.005


def test_series_takes_each_step_once_in_order_and_leaves_out_what_is_missing():
    records = [
        {"step": 2, "tokens_seen": 20, "train_loss": 2.0},
        {"step": 1, "tokens_seen": 10, "train_loss": 1.0},
        {"step": 3, "tokens_seen": 30, "train_loss": None},
        {"step": 4, "tokens_seen": 40, "val_loss": 9.0},
        {"step": 2, "tokens_seen": 20, "train_loss": 2.5},
    ]

    series = Series.of(records, "train_loss")

    assert series.tokens.tolist() == [10, 20]
    assert series.values.tolist() == [1.0, 2.5]


def test_series_smoothed_is_a_centred_mean_worked_by_hand():
    values = np.arange(200.0) ** 2

    smooth = Series(np.arange(200.0), values).smoothed().values  # 2 % of 200: two to each side

    assert smooth[0] == 0.0
    assert smooth[1] == pytest.approx((0 + 1 + 4) / 3)
    assert smooth[100] == pytest.approx(values[98:103].mean())
    assert smooth[199] == pytest.approx(values[197:].mean())


@settings(deadline=None)
@given(values=st.lists(st.floats(min_value=-10, max_value=10), min_size=1, max_size=300))
def test_series_smoothed_stays_within_the_values(values):
    smooth = Series(np.arange(len(values), dtype=float), np.array(values)).smoothed()

    assert len(smooth.values) == len(values)
    assert smooth.values.min() >= min(values) - 1e-9
    assert smooth.values.max() <= max(values) + 1e-9


@pytest.mark.parametrize(
    ("best", "shown"),
    [
        (0.26, ["GPT-2 124M", "GPT-3 124M"]),
        (0.31, ["GPT-2 124M", "GPT-3 124M"]),
        (0.34, ["GPT-2 124M", "GPT-3 124M", "GPT-2 350M"]),
        (0.434, ["GPT-2 124M", "GPT-3 124M", "GPT-2 350M", "GPT-2 774M", "GPT-3 350M"]),
    ],
)
def test_references_are_the_124m_pair_and_up_to_the_next_one_to_reach(best, shown):
    assert list(_references_for(best)) == shown


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (24_576, "24.6K"),
        (999_900, "1M"),
        (2_457_600, "2.46M"),
        (250e6, "250M"),
        (9_999_220_736, "10B"),
        (2.5e9, "2.5B"),
    ],
)
def test_format_count_has_three_digits_and_a_unit(count, text):
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"runs": ()}, "no run folder given"),
        ({"runs": (Path("x"),), "compare": Path("x.pdf")}, r"--compare x\.pdf must end in \.png"),
    ],
)
def test_plot_config_refuses_what_it_cannot_draw(settings, message):
    with pytest.raises(ValueError, match=message):
        PlotConfig(**settings)


def run_plot(*args):
    return subprocess.run(
        [sys.executable, str(ROOT / "plot.py"), *map(str, args)],
        capture_output=True,
        text=True,
        env=os.environ | {"MPLBACKEND": "TkAgg"},  # must not matter: there may be no screen
        check=False,
    )


def test_plot_command_draws_several_runs_and_prints_where(tmp_path):
    runs = [write_run(tmp_path / name, steps=10) for name in "ab"]

    done = run_plot(*runs, "--compare", tmp_path / "ab.png")

    assert (done.returncode, done.stderr) == (0, "")
    paths = [Path(line) for line in done.stdout.splitlines()]
    assert len(paths) == 5
    assert all(path.is_file() for path in paths)


@pytest.mark.parametrize("args", [[], ["no-such-run"]])
def test_plot_command_without_a_run_ends_with_one_line_and_code_2(args):
    done = run_plot(*args)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "python plot.py runs/NAME" in done.stderr
