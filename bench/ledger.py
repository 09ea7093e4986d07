"""The ledger of a base: each edit that was tried on it, with its patch, flags and answers.

`runs/trials/HASH/ledger.json` is also the memory of an interrupted trial: the seeds that
confirmations use and the measured speeds are decided once.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import ScalarFormatter

from bench.statistics import BETTER_BY_CHANCE
from bench.variants import Variant
from plot import BLUE, GRAY, RED, new_axes, plain, save_figure
from runtime.files import read_json, write_json

TRIALS, LEDGER_NAME = Path("runs/trials"), "ledger.json"
FIRST_FRESH_SEED = 1001


class Ledger:
    """The ledger in a folder; each method that changes it writes the file."""

    def __init__(self, folder: Path, base: Mapping[str, Any]) -> None:
        self.folder = folder
        new: dict[str, Any] = {"edits": {}, "costs": {}, "confirmations": {}}
        self.values: dict[str, Any] = {**new, **read_ledger(folder), "base": dict(base)}

    def keep(self, kind: str, key: str, value: object) -> None:
        """Add an entry, or replace it."""
        self.values[kind][key] = value
        write_json(self.folder / LEDGER_NAME, self.values)

    def add_edit(self, edit: Variant, patch: str, n_base_flags: int) -> None:
        """Add an edit, with the answers that it already has."""
        known = self.values["edits"].get(edit.name, {"answers": {}})
        flags = edit.flags[n_base_flags:]
        self.keep("edits", edit.name, known | {"patch": patch, "flags": flags, **edit.conditions})

    def add_answer(self, edit: str, key: str, answer: Mapping[str, Any]) -> None:
        """Add an answer about an edit, or replace one about the same runs."""
        entry = self.values["edits"][edit]
        self.keep("edits", edit, entry | {"answers": entry["answers"] | {key: answer}})

    def fresh_seeds(
        self, pairs: Mapping[str, tuple[Variant, Variant]], metric: str, n: int
    ) -> dict[str, list[int]]:
        """Return the seeds of the confirmation of each pair.

        A new confirmation gets seeds that no other confirmation with this base has used; those that
        start together share them, and with them the runs of the base.
        """
        known: dict[str, list[int]] = self.values["confirmations"]
        first = 1 + max((max(seeds) for seeds in known.values()), default=FIRST_FRESH_SEED - 1)
        found = dict[str, list[int]]()
        for name, (base, edit) in pairs.items():
            key = f"{base.digest} {edit.digest} {metric} {n}"
            found[name] = known.get(key) or [*range(first, first + n)]
            self.keep("confirmations", key, found[name])
        return found


def read_ledger(folder: Path) -> dict[str, Any]:
    """Return the ledger in a folder, or nothing if there is none."""
    path = folder / LEDGER_NAME
    return dict(read_json(path)) if path.is_file() else {}


def ranked(ledger: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the answers, best first, each with its edit's name; those without a number last.

    An edit that was confirmed has only the answers of its confirmations.
    """
    rows = []
    for name, edit in ledger["edits"].items():
        answers = [*edit["answers"].values()]
        confirmed = [answer for answer in answers if answer["is_confirmed"]]
        rows += [(name, answer) for answer in confirmed or answers]
    return sorted(rows, key=lambda row: -row[1]["gain"] if row[1]["gain"] is not None else 1e300)


def list_trials() -> Iterator[str]:
    """Yield the lines of all ledgers; draw a figure for each."""
    for folder in sorted(path for path in TRIALS.glob("*") if path.is_dir()):
        if not (ledger := read_ledger(folder)):
            yield f"{folder}: not read, because an earlier version made it"
            continue
        base, rows = ledger["base"], ranked(ledger)
        yield f"{folder}: commit {base['commit']}, {base['device']}, {' '.join(base['flags'])}"
        yield from (f"  {name}: {answer['text']}" for name, answer in rows)
        confirmed = [answer for _, answer in rows if answer["is_confirmed"]]
        better = sum("better by" in answer["text"] for answer in confirmed)
        chance = f"chance alone gives {BETTER_BY_CHANCE * len(confirmed):.2g}"
        count = f"{len(ledger['edits'])} edits tried, {len(confirmed)} confirmations"
        yield f"  {count}: {better} better; {chance} if no edit has an effect"
        yield from (f"  {path}" for path in draw_forest(rows, folder))


def draw_forest(rows: Sequence[tuple[str, dict[str, Any]]], folder: Path) -> Iterator[Path]:
    """Draw the mean and the interval of each answer, a figure for each metric."""
    for metric in sorted({answer["metric"] for _, answer in rows}):
        shown = [row for row in rows if row[1]["metric"] == metric and row[1]["gain"] is not None]
        if not shown:
            continue
        [axes] = new_axes(f"{len(shown)} answers: edit minus base", "")
        axes.figure.set_figheight(1.8 + 0.28 * len(shown))  # type: ignore[union-attr]
        for is_confirmed, color, label in ((True, BLUE, "confirmed"), (False, GRAY, "screened")):
            lines = [(n, a) for n, (_, a) in enumerate(shown) if a["is_confirmed"] == is_confirmed]
            heights, answers = [n for n, _ in lines], [answer for _, answer in lines]
            means, halves = ([answer[key] for answer in answers] for key in ("mean", "half"))
            style: Any = {"fmt": "o", "color": color, "markersize": 4, "label": label}
            axes.errorbar(means, heights, xerr=[half or 0 for half in halves], **style)
        axes.axvline(0, color=RED, linewidth=1)
        axes.set_yticks(range(len(shown)), [plain(name) for name, _ in shown])
        axes.invert_yaxis()
        axes.grid(axis="x", color=axes.get_ygridlines()[0].get_color(), linewidth=0.8)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel(f"difference of {metric}, with the 95 % interval", color=GRAY)
        yield save_figure(axes, folder / f"{metric}.png", is_over_tokens=False)
