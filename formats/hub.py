"""The Hugging Face hub: commits, downloads, and its errors as one line."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 10  # of an answer
NO_NETWORK = (
    "without network, use --source stdlib (Python's own sources) "
    "or --source FILES (text, .jsonl, .parquet)"
)
REPO_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_revision(repo: str, revision: str | None) -> str:
    """The commit of a data set's branch or tag; by default of its main branch."""
    from huggingface_hub import HfApi

    name = repo if revision is None else f"--revision {revision} of {repo}"
    with explain_hub_errors(f"asking the Hugging Face hub for {name} failed", NO_NETWORK):
        return str(HfApi().dataset_info(repo, revision=revision, timeout=TIMEOUT_SECONDS).sha)


def fetch_files(repo: str, is_complete: Callable[[Path], object], **wanted: Any) -> Path:  # noqa: ANN401
    """The hub's cached folder of a repository, from `snapshot_download` unless it is complete."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():  # a log
        disable_progress_bars()
    get = partial(snapshot_download, repo, **wanted)
    with suppress(FileNotFoundError):
        if is_complete(folder := Path(get(local_files_only=True))):
            return folder
    # Fails at once without a network, where a download tries again for half a minute.
    HfApi().repo_info(repo, repo_type=wanted.get("repo_type"), timeout=TIMEOUT_SECONDS)
    return Path(get())


@contextmanager
def explain_hub_errors(
    failure: str, remedy: str = "once that is mended, the same command resumes"
) -> Iterator[None]:
    """Say what failed and what to do after any error of the hub's libraries; they vary by version.

    A server may repeat the token in its message, so only the first line, the client's own, is told.
    """
    try:
        yield
    except Exception as error:
        name = type(error).__name__
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403, 404) and not re.search("Entry|Revision", name):  # these are seen
            remedy = (
                f"it is not there, or not open to you: log in by `hf auth login`, "
                f"and check OWNER/NAME; {remedy}"
            )
        reason = str(error).strip().partition("\n")[0]
        raise OSError(f"{failure} ({name}: {reason}); {remedy}") from None
