"""Hugging Face hub: find commits, download files, and report errors in one line."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from runtime.errors import UserError

TIMEOUT_SECONDS = 10  # for a response
FILES = "--source FILES (text, .jsonl, .parquet)"
NO_NETWORK = f"without a network, use --source stdlib (Python's standard library) or {FILES}"
RERUN = "fix this and rerun the command to resume"
REPO_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_revision(repo: str, revision: str | None) -> str:
    """Return the commit of a dataset's branch or tag; by default, of its main branch."""
    from huggingface_hub import HfApi

    name = repo if revision is None else f"--revision {revision} of {repo}"
    with explain_hub_errors(f"could not look up {name} on the Hugging Face hub", NO_NETWORK):
        return str(HfApi().dataset_info(repo, revision=revision, timeout=TIMEOUT_SECONDS).sha)


def fetch_files(repo: str, needed: str, **kwargs: Any) -> Path:  # noqa: ANN401
    """Return a repository's folder in the hub's cache; download it unless it has a `needed` file.

    Keyword arguments are passed to `snapshot_download`.
    """
    from huggingface_hub import HfApi, snapshot_download

    download = partial(snapshot_download, repo, **kwargs)
    with suppress(FileNotFoundError):
        if ((folder := Path(download(local_files_only=True))) / needed).is_file():
            return folder
    # Without a network, this fails immediately; a download would retry for half a minute.
    HfApi().repo_info(repo, repo_type=kwargs.get("repo_type"), timeout=TIMEOUT_SECONDS)
    return Path(download())


@contextmanager
def explain_hub_errors(failure: str, remedy: str = RERUN) -> Iterator[None]:
    """Turn any error in the body into a UserError that states what failed and how to fix it.

    The hub's libraries raise different errors in different versions. A server may repeat the token
    in its message, so only the first line, which the client writes, is shown.
    """
    try:
        yield
    except Exception as error:
        name = type(error).__name__
        status = getattr(getattr(error, "response", None), "status_code", None)
        # EntryNotFoundError and RevisionNotFoundError mean that the repository is accessible.
        if status in (401, 403, 404) and not re.search("Entry|Revision", name):
            fix = "check OWNER/NAME, or log in with `hf auth login`"
            remedy = f"the repository does not exist or is private: {fix}; {remedy}"
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{failure} ({name}: {reason}); {remedy}") from None
