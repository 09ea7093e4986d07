"""Parts of a dataset, for many machines: each part has the shards of some of the source's files.

    python fineweb.py --part 0/2      # on one machine
    python fineweb.py --part 1/2      # on another machine, in the same data folder

Each part has a manifest, such as `part_00003_of_00032.json`, and shards with names such as
`train_p00003_000001.npy`. Only the first part has a validation split. Once all parts are complete,
so is the dataset. (Earlier versions then wrote a `manifest.json`. It counts, so delete it before
adding tokens.)
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from runtime.files import read_json


@dataclass(frozen=True)
class Part:
    """Part `index` of a dataset of `count` parts; by default, the full dataset."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str | None) -> "Part":
        """Parse the value of `--part`, such as `3/32`."""
        found = re.fullmatch(r"(\d+)/(\d+)", text or "0/1")
        if not found or int(found[1]) >= int(found[2]):
            raise UserError(f"--part {text}: use PART/PARTS, such as 0/32 to 31/32")
        return cls(int(found[1]), int(found[2]))

    @property
    def identity(self) -> dict[str, Any]:
        """Values for the manifest that distinguish this part from others."""
        return {} if self.count == 1 else {"part": self.index, "parts": self.count}

    @property
    def manifest_name(self) -> str:
        """File name of the manifest that lists the part's shards."""
        if self.count == 1:
            return "manifest.json"
        return f"part_{self.index:05}_of_{self.count:05}.json"

    @property
    def prefix(self) -> str:
        """Prefix of shard numbers in file names, so that names sort by part, then by number."""
        return "" if self.count == 1 else f"p{self.index:05}_"

    def file_numbers(self, n_files: int) -> range:
        """Return the numbers of the source's files that are in this part."""
        if self.count > n_files:
            fix = f"use --part 0/{n_files} to {n_files - 1}/{n_files}"
            raise UserError(f"--part {self.index}/{self.count}: the source has fewer files: {fix}")
        start, stop = (n_files * i // self.count for i in (self.index, self.index + 1))
        return range(start, stop)


FULL_DATASET = Part()


def of_all_parts(source: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a manifest's source that are the same in all parts.

    The `contents` are not: the machines' copies of the files have different stamps.
    """
    return {k: v for k, v in source.items() if k not in ("part", "contents")}


def read_parts(folder: Path) -> dict[str, Any] | None:
    """Read the manifests of a dataset's parts as one manifest; without parts, return None.

    It is complete if all parts are complete, of the same source and with the same `--max-tokens`.
    """
    parts = [read_json(path) for path in sorted(folder.glob("part_*_of_*.json"))]
    if not parts:
        return None
    sources = [of_all_parts(part["source"]) for part in parts]
    datasets = [(source, part["max_tokens"]) for source, part in zip(sources, parts, strict=True)]
    has_all = datasets.count(datasets[0]) == len(parts) == sources[0]["parts"]
    return parts[0] | {
        "source": sources[0],
        "shards": [shard for part in parts for shard in part["shards"]],
        "documents": sum(part["documents"] for part in parts),
        "complete": has_all and all(part["complete"] for part in parts),
    }
