"""Finished data sets on the hub: the shards and the manifest, as fineweb.py made them."""

import re
from dataclasses import replace
from pathlib import Path

from corpus.shards import SHARD_MANIFEST, Manifest, verify_shards
from formats.hub import explain_hub_errors, push_folder, resolve_revision
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
    """Download a finished data set, or what is missing of it by the folder's `earlier` manifest.

    Until every shard has its hash, the folder's manifest says that the data set is unfinished.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    commit = resolve_revision(repo, revision)
    line = f"hf download {repo} --repo-type dataset --local-dir {folder}, for --data-dir {folder}"
    remedy = f"if it has texts and no shards, give --source {repo}; for shards of others, {line}"
    with explain_hub_errors(f"the manifest of {repo} was not downloaded", remedy):
        path = hf_hub_download(repo, SHARD_MANIFEST, repo_type="dataset", revision=commit)
    manifest = Manifest.load(Path(path).parent)
    if manifest is None or not manifest.complete or manifest.tokenizer_sha256 != VOCAB_SHA256:
        raise ValueError(f"{repo} has no finished shards of GPT-2's tokens: use --source {repo}")
    names = [shard.file for shard in manifest.shards]
    if not all(re.fullmatch(r"[\w.-]+\.npy", name) for name in names):  # they become patterns
        raise ValueError(f"{repo}: the manifest lists other files than .npy shards")
    if earlier is not None and replace(earlier, complete=True) != manifest:
        raise ValueError(
            f"{folder} holds other data than {repo} at commit {commit}: choose another --data-dir"
        )
    replace(manifest, complete=False).save(folder)
    with explain_hub_errors(f"the shards of {repo} were not downloaded"):
        snapshot_download(
            repo, repo_type="dataset", revision=commit, local_dir=folder, allow_patterns=names
        )
    verify_shards(folder, manifest.shards)
    manifest.save(folder)
    return manifest
