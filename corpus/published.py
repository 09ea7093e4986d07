"""Finished data sets on the hub: the shards and the manifest, as fineweb.py made them."""

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from corpus.shards import SHARD_MANIFEST, Manifest, check_same_dataset
from runtime.files import sha256_of
from runtime.hub import explain_hub_errors, push_folder, resolve_revision
from tokenizer import VOCAB_SHA256


def push_shards(folder: Path, repo: str) -> str:
    """Upload a finished data set, and return its address."""
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
        folder: gets the shards and the manifest.
        earlier: the manifest that the folder has.
    """
    from huggingface_hub import snapshot_download

    commit = resolve_revision(repo, revision)
    manifest = _fetch_manifest(repo, commit)
    if earlier is not None:
        check_same_dataset(folder, earlier, manifest)
        if not set(earlier.shards) <= set(manifest.shards):
            raise ValueError(
                f"{repo} has other tokens at commit {commit} than {folder}: give the --revision of "
                f"these, choose another --data-dir, or delete it"
            )
        for path in _damaged_shards(folder, earlier):
            path.unlink(missing_ok=True)
    replace(manifest, complete=False).save(folder)
    names = [shard.file for shard in manifest.shards]
    with explain_hub_errors(f"the shards of {repo} were not downloaded"):
        snapshot_download(
            repo, repo_type="dataset", revision=commit, local_dir=folder, allow_patterns=names
        )
    if damaged := _damaged_shards(folder, manifest):
        damaged[0].unlink(missing_ok=True)
        raise ValueError(
            f"{damaged[0].name} of {repo} came damaged: its SHA-256 is not the manifest's; the "
            f"other shards stay, and the same command resumes"
        )
    manifest.save(folder)
    return manifest


def _damaged_shards(folder: Path, manifest: Manifest) -> list[Path]:
    """The shards that are missing, or whose hash is not the manifest's."""
    paths = {folder / shard.file: shard.sha256 for shard in manifest.shards}
    return [path for path, sha in paths.items() if not path.is_file() or sha256_of(path) != sha]


def _fetch_manifest(repo: str, commit: str) -> Manifest:
    """Download the manifest of a finished data set into the library's cache, and check it."""
    from huggingface_hub import hf_hub_download

    manifest = None
    with (
        suppress(FileNotFoundError),
        explain_hub_errors(f"the manifest of {repo} was not downloaded"),
    ):
        path = hf_hub_download(repo, SHARD_MANIFEST, repo_type="dataset", revision=commit)
        manifest = Manifest.load(Path(path).parent)
    if manifest is None or not manifest.complete or not manifest.shards:
        raise ValueError(
            f"--source hub:{repo} has no finished shards of fineweb.py; for its texts: "
            f"--source {repo}"
        )
    for shard in manifest.shards:  # they are patterns of the files to download
        if not re.fullmatch(r"[\w.-]+\.npy", shard.file):
            raise ValueError(f"--source hub:{repo}: the manifest lists {shard.file}, no shard")
    if manifest.tokenizer_sha256 != VOCAB_SHA256:
        raise ValueError(
            f"--source hub:{repo}: tokenizer_sha256 {manifest.tokenizer_sha256} is not GPT-2's, "
            f"{VOCAB_SHA256}: tokenise its texts again"
        )
    return manifest
