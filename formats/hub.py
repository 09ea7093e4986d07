"""The Hugging Face hub: names, commits, uploads, and its errors as one line."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

TIMEOUT_SECONDS = 10  # of an answer
NO_NETWORK = (
    "without network, use --source stdlib (Python's own sources) "
    "or --source FILES (text, .jsonl, .parquet)"
)
REPO_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check_repo_name(flag: str, repo: str) -> None:
    """Refuse what cannot be a repository's name."""
    if not REPO_NAME.fullmatch(repo):
        raise ValueError(f"{flag} {repo} is not OWNER/NAME, such as my-name/my-gpt2")


def resolve_revision(repo: str, revision: str | None) -> str:
    """The commit of a data set's branch or tag; by default of its main branch."""
    from huggingface_hub import HfApi

    name = repo if revision is None else f"--revision {revision} of {repo}"
    with explain_hub_errors(f"asking the Hugging Face hub for {name} failed", NO_NETWORK):
        return str(HfApi().dataset_info(repo, revision=revision, timeout=TIMEOUT_SECONDS).sha)


def fetch_files(repo: str, is_complete: Callable[[Path], object], **wanted: Any) -> Path:  # noqa: ANN401
    """The hub's cached folder of a repository, from `snapshot_download` unless it is complete."""
    from huggingface_hub import HfApi, snapshot_download

    get = partial(snapshot_download, repo, **wanted)
    with suppress(FileNotFoundError):
        if is_complete(folder := Path(get(local_files_only=True))):
            return folder
    # Fails at once without a network, where a download tries again for half a minute.
    HfApi().repo_info(repo, repo_type=wanted.get("repo_type"), timeout=TIMEOUT_SECONDS)
    return Path(get())


def push_folder(
    folder: Path, repo: str, repo_type: Literal["model", "dataset"], files: list[str] | None = None
) -> str:
    """Upload a folder, or some of its files, and return the repository's address.

    A new repository is private. Called again after an interruption, it sends only what is missing.
    """
    from huggingface_hub import HfApi

    with explain_hub_errors(f"{folder} was not uploaded to {repo}"):
        api = HfApi()
        url = api.create_repo(repo, repo_type=repo_type, private=True, exist_ok=True)
        api.upload_folder(
            folder_path=folder,
            repo_id=repo,
            repo_type=repo_type,
            allow_patterns=files,
            ignore_patterns=[".*"],
        )
    return str(url)


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
                f"it is not there, or not open to you: log in by `hf auth login`, with a token "
                f"that may write to upload, and check OWNER/NAME; {remedy}"
            )
        reason = str(error).strip().partition("\n")[0]
        kind = FileNotFoundError if status == 404 else OSError
        raise kind(f"{failure} ({name}: {reason}); {remedy}") from None
