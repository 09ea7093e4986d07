"""The ledger of a base: each edit that was tried on it, with its patch, flags and answers.

`runs/trials/HASH/ledger.json` is also the memory of an interrupted trial: the seeds that
confirmations use and the measured speeds are decided once.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.statistics import BETTER_BY_CHANCE
from runtime.files import read_json

TRIALS, NAME = Path("runs/trials"), "ledger.json"
COMMITTED = Path(__file__).parent / "results/edits"  # the ledger of docs/edits.md
SCREENING, CONFIRMATION = "screening", "confirmation"


def read(folder: Path) -> dict[str, Any]:
    """Return the ledger in a folder, or nothing if there is none."""
    path = folder / NAME
    return dict(read_json(path)) if path.is_file() else {}


def gain(answer: Mapping[str, Any]) -> float:
    """Return the improvement over the base; minus infinity if an answer lacks a number."""
    mean = answer["mean"]
    return -math.inf if mean is None else mean if answer["higher"] else -mean


def ranked(ledger: Mapping[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the answers, best first, each with its edit.

    An edit that was confirmed has only the answers of its confirmations.
    """
    rows = []
    for edit in ledger["edits"].values():
        answers = [*edit["answers"].values()]
        confirmed = [answer for answer in answers if answer["stage"] == CONFIRMATION]
        rows += [(edit, answer) for answer in confirmed or answers]
    return sorted(rows, key=lambda row: -gain(row[1]))


def table(ledger: Mapping[str, Any]) -> list[str]:
    """Return the answers as the lines of a Markdown table, best first.

    `lines` has the lines that the patch adds and removes.
    """
    rows = [("edit", "lines", "difference", "pairs", "verdict"), ("---",) * 5]
    for edit, answer in ranked(ledger):
        patch = edit["patch"].splitlines()
        lines = [sum(s[:1] == sign and s[:3] != 3 * sign for s in patch) for sign in "+-"]
        verdict, mean, half = answer["text"].partition(":")[0], answer["mean"], answer["half"]
        difference = "" if mean is None else f"{mean:+.3f}" + (f"±{half:.3f}" if half else "")
        name = ", ".join((f"`{edit.get('edit', edit['name'])}`", *answer.get("changed", ())))
        numbers = ("+{}/-{}".format(*lines), difference, str(len(answer["seeds"])))
        rows.append((name, *numbers, verdict))
    return [f"| {' | '.join(row)} |" for row in rows]


def list_trials() -> Iterator[str]:
    """Yield the lines of all ledgers or, if there are no trials here, of the committed one."""
    for folder in sorted(path for path in TRIALS.glob("*") if path.is_dir()) or [COMMITTED]:
        if not (ledger := read(folder)):
            yield f"{folder}: not read, because an earlier version made it"
            continue
        base, rows = ledger["base"], ranked(ledger)
        yield f"{folder}: commit {base['commit']}, {base['device']}, {' '.join(base['flags'])}"
        for key, design in ledger.get("designs", {}).items():
            yield from (f"--factors {key}", *design["lines"])
        yield from table(ledger)
        confirmed = [answer for _, answer in rows if answer["stage"] == CONFIRMATION]
        better = sum(answer["text"].startswith("better") for answer in confirmed)
        chance = f"chance alone gives {BETTER_BY_CHANCE * len(confirmed):.2g}"
        count = f"edits tried: {len(ledger['edits'])}; confirmations: {len(confirmed)}"
        yield f"{count}; better: {better}, of which {chance} if no edit has an effect"
