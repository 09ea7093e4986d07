from pathlib import Path

import matplotlib.font_manager  # noqa: F401 - warns here of a HOME without its list of fonts
import numpy as np
import pytest
from forked import assert_refused
from matplotlib.colors import to_rgb
from PIL import Image
from run_files import BATCH, append_records, write_run

from plot import plot_comparison, plot_run


def pixels_of(path):
    """A PNG's pixels, (540, 960, 3); something is drawn, and nothing is cut off at the edges."""
    with Image.open(path) as image:
        assert image.format == "PNG"
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape == (540, 960, 3)
    edges = (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1])
    assert min(edge.min() for edge in edges) == 255
    assert (pixels < 250).any(axis=2).mean() > 0.005
    return pixels


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"steps": 1, "tokens_per_second": None}, ["loss"]),
        ({"steps": 0, "val_every": 1, "hellaswag_every": 1}, ["loss", "hellaswag"]),
        ({"steps": 5, "hellaswag_every": 5, "total": 40}, ["loss", "hellaswag"]),
        ({"steps": 19_073, "val_every": 250, "mfu": 0.5}, ["loss"]),
        ({"steps": 5, "spread": 0.5, "/tmp/x": 0.5}, ["loss", "own_spread"]),
        ({"steps": 5, "experts": 3}, ["loss", "own_experts"]),
    ],
)
def test_plot_run_draws_what_there_is(tmp_path, settings, names, recwarn):
    run_dir = write_run(tmp_path / "run", **settings)
    append_records(run_dir, {"step": 20_000, "tokens_seen": 20_000 * BATCH, "train_loss": None})
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20001, "tokens_seen": 180224, "train_l')  # it is in progress
    drawn = plot_run(run_dir)
    assert drawn == [run_dir / "figures" / f"{name}.png" for name in names]
    for path in drawn:
        pixels_of(path)
        assert path.stat().st_size < 120_000
    assert [str(warning.message) for warning in recwarn] == []


def test_plot_run_of_another_folder_says_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl does not exist: pass a run"):
        plot_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"metrics\.jsonl has no losses yet: wait"):
        plot_run(tmp_path)


def test_plot_comparison_draws_every_run_however_short(tmp_path):
    """The third run stopped at a loss far above the others' end."""
    lengths = {"long": 400, "a-third-of-it": 130, "_stopped-at-once": 1}
    runs = [
        write_run(tmp_path / name, steps, val_every=5, loss_at_end=3 + number / 2)
        for number, (name, steps) in enumerate(lengths.items())
    ]
    plot_comparison(runs, tmp_path / "three.png")
    left_third = pixels_of(tmp_path / "three.png")[:, :320]  # the legend is at the right
    for colour in ("C0", "C1", "C2"):
        rgb = np.round(np.array(to_rgb(colour)) * 255)
        assert (np.abs(left_third - rgb).max(axis=2) < 16).sum() > 10, colour


def test_plot_command_draws_several_runs_and_prints_where(commands, tmp_path):
    runs = [write_run(tmp_path / name, steps=10, val_every=5) for name in "ab"]
    no_screen = {"MPLBACKEND": "TkAgg"}  # must not matter: there may be no screen
    done = commands.run("plot", *runs, "--compare", tmp_path / "ab.png", **no_screen)
    assert (done.code, done.stderr) == (0, "")
    figures = [run / "figures" / "loss.png" for run in runs]
    assert done.stdout.splitlines() == [str(path) for path in (*figures, tmp_path / "ab.png")]
    assert all(Path(path).is_file() for path in done.stdout.splitlines())


def test_plot_command_writes_a_report_instead_of_figures(commands, tmp_path):
    runs = [write_run(tmp_path / name, steps=10) for name in "ab"]
    done = commands.run("plot", *runs, "--report")
    assert (done.code, done.stdout, done.stderr) == (0, f"{runs[0] / 'report.html'}\n", "")
    assert (runs[0] / "report.html").is_file()
    assert not (runs[0] / "figures").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the following arguments are required: RUNS"),
        (["no-such-run", "--report"], "no-such-run/metrics.jsonl does not exist: pass a"),
        (["--compare=x.text"], "'text' is not supported (supported formats:"),
    ],
)
def test_plot_command_refuses_in_one_line(commands, tmp_path, args, message):
    if args and args[0].startswith("--compare"):
        args = [write_run(tmp_path / "run", steps=2, val_every=1), *args]
    assert_refused(commands.run("plot", *args), message)
