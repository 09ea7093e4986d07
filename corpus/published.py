"""Finished data sets on the hub: the shards and the manifest, as fineweb.py made them."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

from corpus.shards import SHARD_MANIFEST, Manifest, ShardInfo, check_same_dataset
from corpus.sources import resolve_revision
from runtime.files import sha256_of, sync_folder
from runtime.hub import download_file, push_folder

DOWNLOADS = ".downloads"  # in the data folder: files whose hash is not checked yet
ATTEMPTS = 2  # to fetch a shard undamaged


def push_shards(folder: Path, repo: str) -> str:
    """Upload a finished data set, and return its address.

    Raises:
        OSError: the hub cannot be reached, or does not let this user write there.
        ValueError: the folder holds no finished data set.
    """
    manifest = Manifest.load(folder)
    if manifest is None or not manifest.complete:
        raise ValueError(f"{folder} is not finished: it cannot be uploaded")
    files = [*(shard.file for shard in manifest.shards), SHARD_MANIFEST]
    return push_folder(folder, repo, "dataset", files)


def fetch_shards(
    repo: str, revision: str | None, folder: Path, earlier: Manifest | None
) -> Manifest:
    """Download a finished data set; shards that are there already are checked, and stay.

    The folder's manifest says that the data set is unfinished until every shard has the hash of
    the repository's manifest.

    Args:
        repo: OWNER/NAME.
        revision: commit, branch or tag; by default the newest.
        folder: gets the shards and the manifest, which is also returned.
        earlier: the manifest that the folder has.

    Raises:
        OSError: the hub cannot be reached, or a file is not there.
        ValueError: the repository has no finished data set, a shard of it is damaged, or the folder
            holds other data.
    """
    commit = resolve_revision(repo, revision)
    manifest = Manifest.load(download_file(repo, SHARD_MANIFEST, commit).parent)
    shards = manifest.shards if manifest else ()
    if manifest is None or not manifest.complete or not shards:
        raise ValueError(f"--source hub:{repo} has no finished data set of fineweb.py")
    if other := [shard.file for shard in shards if not shard.file.endswith(".npy")]:
        raise ValueError(f"--source hub:{repo}: the manifest lists {other[0]}, which is no shard")
    if earlier is not None:
        check_same_dataset(folder, earlier, manifest)
    try:
        for i, shard in enumerate(shards):
            path = folder / shard.file
            if not path.is_file() or sha256_of(path) != shard.sha256:
                replace(manifest, shards=shards[:i], complete=False).save(folder)
                _fetch_shard(repo, commit, folder, shard)
    finally:
        shutil.rmtree(folder / DOWNLOADS, ignore_errors=True)
    if manifest != Manifest.load(folder):
        manifest.save(folder)
    return manifest


def _fetch_shard(repo: str, commit: str, folder: Path, shard: ShardInfo) -> None:
    """Download a shard, which gets its name only if its hash is right; try again once."""
    for _ in range(ATTEMPTS):
        path = download_file(repo, shard.file, commit, folder / DOWNLOADS)
        if sha256_of(path) == shard.sha256:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            path.replace(folder / shard.file)
            sync_folder(folder)
            return
        path.unlink()
    raise ValueError(
        f"{shard.file} of {repo} is damaged: its SHA-256 is not the manifest's; verified shards "
        f"stay, and the same command resumes once its owner has mended it"
    )
