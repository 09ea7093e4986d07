"""The Hugging Face hub: a folder to it, a file from it, and its errors as one line."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from runtime.files import finish_within, redact_secrets

RepoType = Literal["model", "dataset"]
DOWNLOAD_SECONDS = 3 * 3600  # of a file
REPO_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check_repo_name(flag: str, repo: str) -> None:
    """Refuse what cannot be a repository's name.

    Raises:
        ValueError: it is not OWNER/NAME.
    """
    if not REPO_NAME.fullmatch(repo):
        raise ValueError(f"{flag} {repo} is not OWNER/NAME, such as my-name/my-gpt2")


def push_folder(
    folder: Path, repo: str, repo_type: RepoType, files: Sequence[str] | None = None
) -> str:
    """Upload a folder; called again after an interruption, it sends only what is missing.

    Args:
        folder: what to upload.
        repo: OWNER/NAME; if there is no such repository, a private one is made.
        repo_type: its kind.
        files: names of the files to upload; by default all.

    Returns:
        The repository's address.

    Raises:
        OSError: the hub cannot be reached, or does not let this user write there.
    """
    from huggingface_hub import HfApi

    with explain_hub_errors(f"{folder} was not uploaded to {repo}"):
        api = HfApi()
        url = api.create_repo(repo, repo_type=repo_type, private=True, exist_ok=True)
        api.upload_folder(
            folder_path=folder,
            repo_id=repo,
            repo_type=repo_type,
            allow_patterns=None if files is None else list(files),
            ignore_patterns=[".*"],
        )
    return str(url)


def download_file(repo: str, name: str, revision: str, folder: Path | None = None) -> Path:
    """Fetch a file of a data set's repository, into a folder or the hub's own cache.

    Raises:
        OSError: the hub cannot be reached, or has no such file for this user.
    """
    from huggingface_hub import hf_hub_download

    def fetch() -> str:
        return hf_hub_download(repo, name, repo_type="dataset", revision=revision, local_dir=folder)

    with explain_hub_errors(f"{name} of {repo} was not downloaded"):
        return Path(finish_within(DOWNLOAD_SECONDS, fetch))


@contextmanager
def explain_hub_errors(failure: str) -> Iterator[None]:
    """Say what failed and what to do after any error of the hub's libraries; they vary by version.

    A server may repeat the token in its message, so only the first line, the client's own, is told.
    """
    try:
        yield
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = redact_secrets(str(error).strip().partition("\n")[0])
        remedy = "the same command resumes, once the hub can be reached"
        if status in (401, 403, 404):
            remedy = "it is not there, or not open to you: log in by `hf auth login`, with a token "
            remedy += "that may write to upload, and check OWNER/NAME"
        elif type(error).__name__ == "OfflineModeIsEnabled":
            remedy = "HF_HUB_OFFLINE is set: unset it"
        raise OSError(f"{failure} ({type(error).__name__}: {reason}); {remedy}") from None
