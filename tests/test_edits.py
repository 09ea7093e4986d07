"""docs/edits.md has the committed measurements of `edits/`."""

import json
import re

import pytest
from conftest import ROOT

DATA = json.loads((ROOT / "bench/results/edits/trial.json").read_text(encoding="utf-8"))
DOCUMENT = (ROOT / "docs/edits.md").read_text(encoding="utf-8")


def measured(edit):
    """An edit as the table shows it: its patch, if any, and its flags."""
    words = [f"`{flag}`" for flag in edit["flags"]]
    patches = [path.stem for path in (ROOT / "edits").glob("*.patch")]
    named = [p for p in patches if edit["name"] == p or edit["name"].startswith(f"{p}-")]
    return " ".join([*(f"`{max(named, key=len)}`" for _ in named[:1]), *words])


def test_the_table_has_each_measurement_best_first():
    rows = [line.split("|")[1:-1] for line in DOCUMENT.splitlines() if line.startswith("| ")][1:]
    shown = {}
    for cell, _, difference, pairs, verdict, _ in rows:
        name = re.sub(r"\[(`\w+`)\]\(\.\./edits/\w+\.patch\)", r"\1", cell).strip()
        shown[name] = (
            float(difference.split("±")[0].replace("\N{MINUS SIGN}", "-")),
            int(pairs),
            verdict.strip(),
        )
    expected = {
        measured(edit): (pytest.approx(answer["mean"], abs=6e-4), len(answer["seeds"]), "screened")
        for edit in DATA["edits"].values()
        for answer in edit["answers"].values()
    }
    assert shown == expected
    differences = [mean for mean, _, _ in shown.values()]
    assert differences == sorted(differences)
