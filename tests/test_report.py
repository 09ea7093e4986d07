import html
import json
import os
import re
import shutil
import subprocess

import pytest
from run_files import BATCH, append_records, write_run

from formats.metrics import read_metrics
from report import collect_run, write_report
from runtime.files import write_json

HOSTILE = "</script><script>alert('pwned')</script><img src=x onerror=alert(1)>"
FULL = {"lr": 6e-4, "grad_norm": 0.5, "peak_memory_gib": 1.5, "moe/spread": 0.25}
CHARTS = ["train_loss", "val_loss", "hellaswag_acc_norm", "lr", "grad_norm"]
CHARTS += ["tokens_per_second", "peak_memory_gib", "moe/spread"]  # the last a changed trainer's own


def report_of(*run_dirs):
    """The page of some runs: its text, and the JSON in it."""
    text = write_report(run_dirs).read_text(encoding="utf-8")
    before, data, after = re.split(
        r'(?<=id="data">)(.*?)(?=</script>)', text, maxsplit=1, flags=re.S
    )
    return before + after, json.loads(data)


def write_settings(run_dir, **settings):
    write_json(run_dir / "config.json", {"max_steps": 100, "seed": 1337} | settings)


def sampled(step, count):
    return {"step": step, "tokens_seen": step * BATCH, "samples": count}


def trained(step):
    return {"step": step, "tokens_seen": step * BATCH, "train_loss": 4.0} | FULL


@pytest.fixture
def run_dir(tmp_path):
    """A run of 100 steps that has everything, and was resumed once."""
    folder = write_run(tmp_path / "runs" / "full", 60, val_every=20, hellaswag_every=50, **FULL)
    again = [trained(step) for step in range(51, 101)]
    append_records(folder, sampled(50, 1), {"resumed_from": 50}, *again)
    for machine in ("1 x cpu", "8 x NVIDIA B200", "8 x NVIDIA B200"):
        fingerprints = {"data_fingerprint": "12ab", "val_fingerprint": "34cd"}
        append_records(folder, {"environment": machine} | fingerprints)
    write_settings(folder)
    (folder / "samples.txt").write_text("step 50 | sample: 'one\\n\"line\"'\nstep 100 | sample: 't")
    return folder


def test_page_has_what_the_run_measured(run_dir):
    _, page = report_of(run_dir)
    (run,) = page["runs"]
    assert run["settings"]["warmup_steps"] == 10  # the default for 100 steps
    records = read_metrics(run_dir / "metrics.jsonl")
    for name in CHARTS:
        expected = {r["tokens_seen"]: r[name] for r in records if r.get(name) is not None}
        series = run["series"][name]
        assert series["tokens"] == pytest.approx(list(expected)), name
        assert series["values"] == pytest.approx(list(expected.values()), rel=1e-5), name
        assert len(series.get("mean", series["tokens"])) == len(series["tokens"])
    assert (run["name"], run["step"], run["max_steps"]) == ("full", 100, 100)
    assert run["tokens"] == 100 * BATCH
    assert run["resumed"] == [50 * BATCH]
    assert run["environment"] == {
        **{"folder": str(run_dir), "resumed from step": "50"},
        **{"data fingerprint": "12ab", "val fingerprint": "34cd"},
        "environment": "1 x cpu; then 8 x NVIDIA B200",
    }
    assert run["samples"] == [{"step": 50, "texts": ['one\n"line"']}]


def test_page_loads_nothing_from_elsewhere(run_dir):
    text, _ = report_of(run_dir)
    assert not re.search(r"(https?:)?//\w+\.\w|@import|url\((?!#)|<[^>]+ (src|href)=", text)
    assert "default-src 'none'" in text  # what else there was, the browser would refuse


def test_hostile_texts_stay_texts(tmp_path):
    plain, _ = report_of(write_run(tmp_path / "plain", 5))
    run_dir = write_run(tmp_path / "<img src=x onerror=alert(1)>", 5)
    write_settings(run_dir, data_dir=HOSTILE)
    append_records(run_dir, sampled(5, 1))
    (run_dir / "samples.txt").write_text(f"step 5 | sample: {HOSTILE!r}\n")
    text, page = report_of(run_dir)
    assert text == plain  # all of it is in the JSON, and that ended where it should
    (run,) = page["runs"]
    assert run["name"] == run_dir.name
    assert run["settings"]["data_dir"] == run["samples"][0]["texts"][0] == HOSTILE


def test_references_are_shown_only_where_they_compare(tmp_path):
    runs = [
        write_run(tmp_path / str(total), 5, hellaswag_every=5, total=total) for total in (10042, 24)
    ]
    unscored = write_run(tmp_path / "unscored", 5)
    write_settings(runs[0], data_dir="data/fineweb-edu-10BT")
    write_settings(unscored, data_dir="data/fineweb-edu-10BT")
    shown = [
        {name: len(values) for name, values in report_of(*run_dirs)[1]["references"].items()}
        for run_dirs in ([runs[0], unscored], runs)
    ]
    assert shown[0] == {"val_loss": 2, "hellaswag_acc_norm": 6}
    assert shown[1] == {"val_loss": 0, "hellaswag_acc_norm": 1}


def test_page_of_a_long_run_stays_small_and_keeps_its_ends_and_spikes(tmp_path):
    run_dir = write_run(tmp_path / "run", 5000, val_every=250, **FULL)
    spikes = {1234: 50.0, 4321: 0.01}
    for step, norm in spikes.items():
        append_records(run_dir, {**trained(step), "grad_norm": norm})
    _, page = report_of(run_dir)
    assert (run_dir / "report.html").stat().st_size < 500_000
    norms = page["runs"][0]["series"]["grad_norm"]
    assert len(norms["tokens"]) == len(norms["values"]) == len(norms["mean"]) <= 1000
    assert (norms["tokens"][0], norms["tokens"][-1]) == (BATCH, 5000 * BATCH)
    shown = dict(zip(norms["tokens"], norms["values"], strict=True))
    assert {step: shown[float(f"{step * BATCH:.6g}")] for step in spikes} == spikes


def test_samples_are_of_the_branch_that_was_resumed_and_torn_lines_are_none(tmp_path):
    run_dir = write_run(tmp_path / "run", 5)
    append_records(run_dir, sampled(0, 2), sampled(2, 1), sampled(4, 1), {"resumed_from": 1})
    append_records(run_dir, sampled(0, 2), sampled(2, 1), sampled(3, 1))
    (run_dir / "samples.txt").write_text(
        "step 0 | sample: 'a'\nstep 0 | sample: \"b's\"\nstep 2 | sample: 'old'\nstep 4 | samp\n"
        "step 4 | sample: 'dropped'\nstep 0 | sample: 'a'\nstep 0 | sample: \"b's\"\n"
        "step 2 | sample: 'new'\nstep 3 | sample: 'd' + 'e'\nstep 3 | sample: 'f\n"
    )
    expected = [{"step": 0, "texts": ["a", "b's"]}, {"step": 2, "texts": ["new"]}]
    assert collect_run(run_dir)["samples"] == expected


# --- in a browser -------------------------------------------------------------------------------

SHOWN = """<script>  // what the page shows, before and after a zoom, as an attribute
const svg = document.querySelector("#train_loss svg"), box = svg.getBoundingClientRect();
SVGElement.prototype.setPointerCapture = () => {};  // there is no pointer to capture
const pointer = (type, share) => svg.dispatchEvent(
  new PointerEvent(type, { clientX: box.left + share * box.width, clientY: box.top + 50 }));
const texts = selector => [...document.querySelectorAll(selector)].map(each => each.textContent);
const curves = () => Object.fromEntries([...document.querySelectorAll("figure")].map(figure =>
  [figure.id, [...figure.querySelectorAll("path")].map(path => path.getAttribute("d"))]));
pointer("pointermove", 0.5);
const shown = { ...document.body.dataset, curves: curves(), tip: texts("#train_loss .tip")[0],
  marked: texts("mark"), samples: texts(".samples p"), ticks: texts("#level text"),
  width: document.documentElement.scrollWidth,
  card: getComputedStyle(document.querySelector(".card")).backgroundColor };
pointer("pointerdown", 0.4); pointer("pointermove", 0.6); pointer("pointerup", 0.6);
document.body.dataset.shown = JSON.stringify({ ...shown, zoomed: curves() });
</script></body>"""


def browse(path):
    """The page's DOM after its scripts. `.ci/run` names the browser: there it is never skipped."""
    browser = os.environ.get("TEST_BROWSER") or shutil.which("chromium")
    if browser is None or "/snap/" in os.path.realpath(browser):
        pytest.skip("needs a chromium that may read any folder, which a snap's may not")
    flags = ["--headless", "--no-sandbox", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-gpu", "--disable-dev-shm-usage"]  # in a container it is small
    flags += ["--blink-settings=preferredColorScheme=0"]  # dark
    flags += [f"--user-data-dir={path.parent}/profile", "--virtual-time-budget=2000"]
    command = [browser, *flags, "--window-size=500,900", "--dump-dom", path.as_uri()]
    return subprocess.run(command, capture_output=True, check=True).stdout.decode()


def test_page_draws_its_charts_in_a_browser(run_dir, tmp_path):
    """In the dark, on what is almost a phone: the narrowest of headless windows."""
    other = write_run(tmp_path / "other", 30, val_every=10, hellaswag_every=10, **FULL, level=5e-5)
    write_settings(other, max_lr=0.5)
    append_records(other, sampled(5, 1))
    (other / "samples.txt").write_text(f"step 5 | sample: {HOSTILE!r}\n")
    path = write_report([run_dir, other])
    path.write_text(path.read_text().replace("</body>", SHOWN))
    shown = json.loads(html.unescape(re.search('data-shown="(.*?)"', browse(path))[1]))
    assert shown.get("error") is None
    assert shown["ready"] == "yes"
    assert shown["width"] <= 500
    assert shown["card"] == "rgb(24, 29, 35)"
    assert sorted(shown["curves"]) == sorted([*CHARTS, "level"])
    lines = dict.fromkeys(("train_loss", "grad_norm", "tokens_per_second"), 4) | {"level": 1}
    for name, curves in shown["curves"].items():
        assert len(curves) == lines.get(name, 2)  # of each run, and of what is noisy its mean, too
        for curve in curves:
            assert re.fullmatch(r"M(-?[\d.]+ -?[\d.]+L)+-?[\d.]+ -?[\d.]+", curve), name
        assert curves != shown["zoomed"][name]
    assert {"5e-5", "0"} < {*shown["ticks"]}
    tip = re.fullmatch(r"(\d+)K tokensfull([\d.]+) \(mean [\d.]+\)", shown["tip"])
    step = round(int(tip[1]) * 1000 / BATCH)  # the only run that came so far; about half-way
    assert 40 < step < 60
    assert float(tip[2]) == pytest.approx(3 + 8 / (1 + (step - 1) / 20), abs=1e-4)
    assert "0.5" in shown["marked"]  # --max-lr, which only one run has
    assert HOSTILE in shown["samples"]
