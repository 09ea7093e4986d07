"""docs/edits.md has the committed measurements of `edits/`."""

import json

from conftest import ROOT

from bench.ledger import table

LEDGER = json.loads((ROOT / "bench/results/edits/ledger.json").read_text(encoding="utf-8"))


def test_the_table_is_the_one_that_the_command_prints_for_the_data():
    document = (ROOT / "docs/edits.md").read_text(encoding="utf-8").splitlines()
    start = document.index(table(LEDGER)[0])
    assert document[start : start + len(table(LEDGER))] == table(LEDGER)
