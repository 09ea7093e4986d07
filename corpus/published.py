"""Finished data sets on the hub: the shards and the manifest, as fineweb.py made them."""

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from corpus.shards import SHARD_MANIFEST, Manifest, ShardInfo, check_same_dataset
from runtime.files import read_object, sha256_of, sync_folder, write_json
from runtime.hub import download_file, push_folder, resolve_revision
from tokenizer import VOCAB_SHA256

DOWNLOADS = ".downloads"  # in the data folder: files whose hash is not checked yet
ORIGIN = ".hub.json"  # in the data folder: the commit that its shards are of, by repository


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
) -> tuple[Manifest, Manifest | None]:
    """Download a finished data set; shards that are there already are checked, and stay.

    The folder's manifest says that the data set is unfinished until every shard has the hash of
    the repository's manifest. A rerun stays at the commit of the first run, and needs no network
    where the data set is whole.

    Args:
        repo: OWNER/NAME.
        revision: commit, branch or tag; by default the newest or, in a rerun, the same.
        folder: gets the shards and the manifest.
        earlier: the manifest that the folder has.

    Returns:
        The manifest, and the earlier one without shards that are damaged or gone.

    Raises:
        OSError: the hub cannot be reached, or a file is not there.
        ValueError: the repository has no finished data set, a shard of it is damaged, or the folder
            holds other data.
    """
    whole, commit = earlier and _without_damage(folder, earlier), None
    if earlier is not None and revision is None:
        commit = read_object(folder / ORIGIN).get(repo)
    if commit and whole and whole.complete:
        return whole, whole
    commit = commit or resolve_revision(repo, revision)
    try:
        manifest = _fetch_manifest(repo, commit, folder)
        if earlier is not None:
            check_same_dataset(folder, earlier, manifest)
            if not set(earlier.shards) <= set(manifest.shards):
                raise ValueError(
                    f"{repo} has other tokens at commit {commit} than {folder}: choose another "
                    f"--data-dir, or delete it"
                )
        write_json(folder / ORIGIN, {repo: commit})
        shards = whole.shards if whole else ()
        for shard in manifest.shards:
            if shard not in shards:
                replace(manifest, shards=shards, complete=False).save(folder)
                _fetch_shard(repo, commit, folder, shard)
                shards += (shard,)
    finally:
        shutil.rmtree(folder / DOWNLOADS, ignore_errors=True)
    manifest.save(folder)
    return manifest, whole


def _without_damage(folder: Path, manifest: Manifest) -> Manifest:
    """A manifest of the shards that are there and have their hash; unfinished if some have not."""
    there = [shard for shard in manifest.shards if (folder / shard.file).is_file()]
    shards = tuple(shard for shard in there if sha256_of(folder / shard.file) == shard.sha256)
    complete = manifest.complete and shards == manifest.shards
    return replace(manifest, shards=shards, complete=complete)


def _fetch_manifest(repo: str, commit: str, folder: Path) -> Manifest:
    """Download the manifest of a finished data set, and check it."""
    with suppress(FileNotFoundError):
        download_file(repo, SHARD_MANIFEST, commit, folder / DOWNLOADS)
    manifest = Manifest.load(folder / DOWNLOADS)
    if manifest is None or not manifest.complete or not manifest.shards:
        raise ValueError(
            f"--source hub:{repo} has no finished shards of fineweb.py; for its texts: "
            f"--source {repo}"
        )
    if other := [shard.file for shard in manifest.shards if not shard.file.endswith(".npy")]:
        raise ValueError(f"--source hub:{repo}: the manifest lists {other[0]}, which is no shard")
    if manifest.tokenizer_sha256 != VOCAB_SHA256:
        raise ValueError(
            f"--source hub:{repo}: tokenizer_sha256 {manifest.tokenizer_sha256} is not GPT-2's, "
            f"{VOCAB_SHA256}: tokenise its texts again"
        )
    return manifest


def _fetch_shard(repo: str, commit: str, folder: Path, shard: ShardInfo) -> None:
    """Download a shard, which gets its name only if its hash is right."""
    path = download_file(repo, shard.file, commit, folder / DOWNLOADS)
    if sha256_of(path) != shard.sha256:
        raise ValueError(
            f"{shard.file} of {repo} came damaged: its SHA-256 is not the manifest's; verified "
            f"shards stay, and the same command resumes; once its owner has mended it, add "
            f"--revision main"
        )
    with path.open("rb") as file:
        os.fsync(file.fileno())
    path.replace(folder / shard.file)
    sync_folder(folder)
