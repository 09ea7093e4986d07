"""One data set from many machines: each tokenises a part, then one of them merges the parts.

    python fineweb.py --part 0 --parts 2             # on one machine, or in one task of an array
    python fineweb.py --part 1 --parts 2             # on another
    python fineweb.py --parts 2                      # once both have ended: the data set

    data/fineweb-edu-10BT/parts/part_00000_of_00002/
        train_000000.npy    the part's tokens; a part has no validation split
        manifest.json       as of a data set, its source with `part` and `parts`

The data folder is on a disk that the machines share, or the parts are copied into it. The merged
shards are those that one machine would have made, so merging copies every token.
"""

import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from corpus.shards import PARTS_FOLDER, Manifest, ShardWriter, is_complete, verify_shards
from corpus.sources import Part

POLL_SECONDS = 0.5


def part_folder(folder: Path, part: Part) -> Path:
    """Where a part of the data set in `folder` is."""
    return folder / PARTS_FOLDER / f"part_{part.index:05}_of_{part.count:05}"


def of_part(whole: Manifest, part: Part) -> Manifest:
    """A new manifest of a part, from one of the whole data set."""
    return replace(whole, source={**whole.source, "part": part.index, "parts": part.count})


def find_parts(folder: Path) -> dict[Path, Manifest]:
    """The parts of a data set that were begun: their folders, in order, and manifests."""
    folders = sorted((folder / PARTS_FOLDER).glob("part_*_of_*"))
    manifests = {path: Manifest.load(path) for path in folders}
    return {path: manifest for path, manifest in manifests.items() if manifest is not None}


def finished_parts(folder: Path, count: int) -> dict[Path, Manifest]:
    """All parts of a data set, in order: their folders and manifests.

    Raises:
        ValueError: some are missing or not finished; the message names them.
    """
    missing = unfinished_parts(folder, count)
    if missing:
        raise ValueError(
            f"{folder / PARTS_FOLDER}: {_named(missing)} of {count} not finished: "
            f"give the same command with --part {missing[0]} first"
        )
    found = find_parts(folder)
    return {path: found[path] for path in _folders(folder, count)}


def unfinished_parts(folder: Path, count: int) -> list[int]:
    """The parts of `count` that are missing or not finished."""
    return [i for i, path in enumerate(_folders(folder, count)) if not is_complete(path)]


def wait_for_parts(folder: Path, count: int) -> None:
    """Wait until all parts are finished, or the data set is."""
    if missing := unfinished_parts(folder, count):
        tqdm.write(f"waiting for {_named(missing)} of {count} in {folder / PARTS_FOLDER}")
    while unfinished_parts(folder, count) and not is_complete(folder):
        time.sleep(POLL_SECONDS)


def merge_parts(parts: Mapping[Path, Manifest], manifest: Manifest, folder: Path) -> Manifest:
    """Cut the tokens of all parts into the shards that `manifest` does not have yet.

    Args:
        parts: folders and manifests of all parts, in order.
        manifest: of an unfinished data set, or of a new one.
        folder: gets the shards and the finished manifest, which is also returned.

    Raises:
        FileNotFoundError: a part's shard is missing.
        OSError: the disk is full; finished shards stay.
        ValueError: a part's shard has changed since it was written.
    """
    # The finished shards alone say where to resume; a cursor would belong to the source.
    writer = ShardWriter(folder, replace(manifest, documents=0, skipped=0, progress=None))
    shards = [(path, shard) for path, part in parts.items() for shard in part.shards]
    written = writer.tokens_written
    total = sum(shard.tokens for _, shard in shards)
    with tqdm(unit="tok", unit_scale=True, total=total, desc="merging", disable=None) as bar:
        for part_path, shard in shards:
            done = min(written, shard.tokens)  # in finished shards
            written -= done
            if done < shard.tokens:
                verify_shards(part_path, [shard])
                path = part_path / shard.file
                tokens = np.load(path, mmap_mode="r", allow_pickle=False)
                writer.add(tokens[done:])
            bar.update(shard.tokens)
    return writer.close(
        documents=sum(part.documents for part in parts.values()),
        skipped=sum(part.skipped for part in parts.values()),
    )


def remove_parts(folder: Path, count: int) -> None:
    """Delete the parts of a finished data set."""
    for path in _folders(folder, count):
        shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # there is no such folder, or it holds something else
        (folder / PARTS_FOLDER).rmdir()


def _folders(folder: Path, count: int) -> list[Path]:
    return [part_folder(folder, Part(i, count)) for i in range(count)]


def _named(parts: list[int]) -> str:
    """`part 0, 2, 3`, or `part 0, 1, 2 and 61 more`."""
    more = f" and {len(parts) - 10} more" if len(parts) > 10 else ""
    return f"part {', '.join(map(str, parts[:10]))}{more}"
