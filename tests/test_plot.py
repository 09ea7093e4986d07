import os
from pathlib import Path

import matplotlib.font_manager  # noqa: F401 - warns here of a HOME without its list of fonts
import numpy as np
import pytest
from forked import assert_refused
from PIL import Image
from run_files import BATCH, append_records, write_run

import plot
from plot import plot_run
from report import warn_if_not_comparable
from runtime.errors import UserError


def check_figure(path):
    """Check that a PNG shows something, and that nothing is cut off at its edges."""
    with Image.open(path) as image:
        assert image.format == "PNG"
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape == (540, 960, 3)
    edges = (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1])
    assert min(edge.min() for edge in edges) == 255
    assert (pixels < 250).any(axis=2).mean() > 0.005
    assert path.stat().st_size < 120_000


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"steps": 1, "tokens_per_second": None}, ["loss"]),
        ({"steps": 0, "val_every": 1, "hellaswag_every": 1}, ["loss", "hellaswag"]),
        ({"steps": 5000, "val_every": 250, "mfu": 0.5}, ["loss"]),
    ],
)
def test_plot_run_draws_what_there_is(tmp_path, settings, names, recwarn):
    run_dir = write_run(tmp_path / "run", **settings)
    append_records(run_dir, {"step": 20_000, "tokens_seen": 20_000 * BATCH, "train_loss": None})
    append_records(run_dir, {"step": 20_000, "mine": 0.5})  # not placed on the axis of tokens
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20001, "tokens_seen": 180224, "train_l')  # it is in progress
    drawn = plot_run(run_dir)
    assert drawn == [run_dir / "figures" / f"{name}.png" for name in names]
    for path in drawn:
        check_figure(path)
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("name", ["$$", "a $b$ \\frac{", "中文"])
def test_plot_draws_a_run_of_any_name(tmp_path, name, recwarn):
    run_dir = write_run(tmp_path / name, steps=5, val_every=1)
    check_figure(plot_run(run_dir)[0])
    check_figure(plot.plot_comparison([run_dir, run_dir], tmp_path / "both.png"))
    assert not recwarn.list


def test_plot_command_draws_several_runs_or_one_report_and_prints_where(commands, tmp_path):
    runs = [write_run(tmp_path / name, steps=10, val_every=5) for name in "ab"]
    report, figures = runs[0] / "report.html", [run / "figures" / "loss.png" for run in runs]
    done = commands.run("plot", *runs, "--report")
    assert (done.code, done.stdout, done.stderr) == (0, f"{report}\n", "")
    assert report.is_file()
    assert not figures[0].exists()
    done = commands.run("plot", *runs, MPLBACKEND="TkAgg")  # must not matter: it needs a screen
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [str(path) for path in figures]
    assert all(path.is_file() for path in figures)


def test_plot_writes_elsewhere_if_a_runs_folder_is_read_only(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs/a", steps=10)
    write_run(tmp_path / "b/a", steps=10)
    (tmp_path / "a").mkdir()  # the name means runs/a
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, _: "figures" in str(path) and access(path, 0))

    def run(*flags):
        monkeypatch.setattr("sys.argv", ["plot.py", *flags])
        plot.main()
        return capsys.readouterr().out.splitlines()

    for flags in (["a"], ["a", "--report"]):
        with pytest.raises(
            UserError, match=r"^runs/a cannot be written: use --out FOLDER to write"
        ):
            run(*flags)
    assert run("a", "--out=figures") == ["figures/a/figures/loss.png"]
    assert run("a", "--out=figures", "--report") == ["figures/a/report.html"]
    names = [f"figures/{run}/figures/loss.png" for run in ("runs/a", "b/a")]
    assert run("a", "b/a", "--out=figures") == names
    assert {path.name for path in tmp_path.glob("*/a/*")} >= {"metrics.jsonl"}
    assert not [*tmp_path.glob("runs/a/*.html"), *tmp_path.glob("runs/a/figures")]


def test_plot_command_refuses_a_folder_without_losses_in_one_line(commands, tmp_path):
    done = commands.run("plot", tmp_path, "--report")
    assert_refused(done, f"{tmp_path}/metrics.jsonl does not exist: pass a run")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens_seen": 1, "lr": 1}\n')
    assert_refused(commands.run("plot", tmp_path), "metrics.jsonl has no losses yet: wait")


def test_plot_compares_runs_and_draws_numbers_of_ones_own(tmp_path, monkeypatch, capsys):
    runs = [write_run(tmp_path / name, 10, val_every=5, spread=0.5) for name in ("a", "_b")]
    (tmp_path / "notes.txt").touch()  # as with runs/*
    flags = [*map(str, runs), f"{tmp_path}/notes.txt", f"--compare={tmp_path}/ab.png"]
    monkeypatch.setattr("sys.argv", ["plot.py", *flags])
    plot.main()
    names = ["loss.png", "own_spread.png"] * 2 + ["ab.png"]
    done = capsys.readouterr()
    assert done.err == f"note: {tmp_path}/notes.txt is a file, not a run folder\n"
    printed = [Path(line) for line in done.out.splitlines()]
    assert [path.name for path in printed] == names
    assert all(path.is_file() for path in printed)
    monkeypatch.setattr("sys.argv", ["plot.py", str(write_run(tmp_path / "c", 2)), *flags])
    with pytest.raises(ValueError, match=r"validation losses, but \S+/c has none"):
        plot.main()


@pytest.mark.parametrize("flags", [["--compare=ab.svg"], ["--report"]])
def test_comparison_names_runs_that_do_not_measure_the_same(tmp_path, monkeypatch, capsys, flags):
    monkeypatch.chdir(tmp_path)
    runs = [write_run(tmp_path / name / "run", steps=10, val_every=5) for name in "abc"]
    for run, block_size, data, val in zip(runs, (64, 32, 64), "112", "334", strict=True):
        (run / "config.json").write_text(f'{{"block_size": {block_size}, "val_tokens": 9}}')
        append_records(run, {"data_fingerprint": data, "val_fingerprint": val})
    monkeypatch.setattr("sys.argv", ["plot.py", *map(str, runs), *flags])
    plot.main()
    said = "warning: the losses are not comparable: {} has {}, " + f"{runs[0]} has {{}}"
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        said.format(runs[1], "block_size 32", 64),
        said.format(runs[2], "data_fingerprint 2", 1),
        said.format(runs[2], "val_fingerprint 4", 3),
    ]
    written = Path(printed.out.splitlines()[-1]).read_text()
    for run in runs:  # all have one name
        assert f" {run} -->" in written or f'"name":"{run}"' in written
    (tmp_path / "a/run/config.json").unlink()  # what is not known is not different
    warn_if_not_comparable([runs[0], runs[1]])
    assert capsys.readouterr().err == ""
