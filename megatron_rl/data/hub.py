"""Model names that are Hugging Face ids: owner/name, or owner/name@revision as in Hugging Face's own hf:// paths.

If a folder with the given name exists, `as_folder` returns it unchanged. For an id, huggingface_hub provides a folder of its
cache. The library's environment variables (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, ...) and its login apply. Only
safetensors, configs and the tokenizer are downloaded: no pickles and no code. This module does not import torch, because ids
are resolved before the import of torch.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError

logger = logging.getLogger(__name__)

WEIGHTS = "*.safetensors"
TEXTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""File patterns of configs, the index of the weights, the tokenizer and the chat template."""
MODEL = (WEIGHTS, *TEXTS)
CONFIG = ("config.json",)
_LEFT_OUT = ("*/*", "consolidated*")
"""File patterns of copies of the weights in other formats: files in subfolders, and files with this prefix."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_IN_CACHE = re.compile(r"models--(?P<owner>[^/]+)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})")


@dataclass(frozen=True)
class HubId:
    """A repository of the Hugging Face hub at one of its revisions."""

    repo: str
    revision: str | None = None
    """Branch, tag or commit; None for the newest commit of the main branch."""

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo

    @property
    def pinned(self) -> bool:
        """True if the revision is a full commit hash, which always names the same files."""
        return bool(self.revision and _COMMIT.fullmatch(self.revision))


def hub_id(text: str) -> HubId | None:
    """Parse a Hugging Face id. Return None if a folder with that name exists or if the text cannot be an id.

    An id is exactly owner/name by Hugging Face's own rule (`validate_repo_id`). ./x, ../x, /x, x, ~/x, x/ and a/b/c are names
    of folders.
    """
    repo, at, revision = text.partition("@")
    if Path(text).exists() or repo.count("/") != 1 or (at and not re.fullmatch(r"[\w.+-]+(/[\w.+-]+)*", revision)):
        return None
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError:
        return None
    return HubId(repo, revision or None)


def as_folder(text: str, key: str, wanted: Sequence[str] = MODEL) -> str:
    """Return the folder that a text names: the text itself if it is a folder, else the id's folder in the hub's cache.

    Files that are missing in the cache are downloaded. key: config key or command-line option, for error messages. wanted:
    patterns of the needed files.
    Errors: UserError if the text is neither a folder nor an id, or if the download fails.
    """
    found = hub_id(text)
    if found is None:
        check_folder(text, key)
        return text
    try:
        return str(_snapshot(found, wanted))
    except UserError as error:
        raise UserError(f"{key} = {text}: {error} (there is no folder {text} here either)") from None


def check_folder(text: str, key: str) -> None:
    """Raise UserError with the config key `key` if the folder of a model does not exist."""
    if not Path(text).is_dir():
        what = "is not a folder" if Path(text).exists() else "does not exist"
        raise UserError(f"{key} = {text}: {what}; give a Hugging Face folder, or an id of the hub (owner/name)")


def as_id(folder: str) -> str:
    """Return owner/name@commit if the folder is in huggingface_hub's cache. Return any other text unchanged."""
    from huggingface_hub import constants

    path = Path(folder)
    cache = Path(constants.HF_HUB_CACHE).expanduser().resolve()
    found = _IN_CACHE.fullmatch(path.relative_to(cache).as_posix()) if path.is_relative_to(cache) else None
    return f"{found['owner']}/{found['name']}@{found['commit']}" if found else folder


def _snapshot(model: HubId, wanted: Sequence[str]) -> Path:
    """Return the folder of a model's revision in the cache. The UserError states the problem, but not the config key."""
    import httpx
    from huggingface_hub import constants, get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, DryRunError, LocalEntryNotFoundError

    asked: dict[str, Any] = {"repo_id": model.repo, "revision": model.revision}
    asked |= {"allow_patterns": list(wanted), "ignore_patterns": list(_LEFT_OUT)}
    cache = Path(constants.HF_HUB_CACHE)

    def cached() -> Path:
        folder = Path(snapshot_download(**asked, local_files_only=True))
        if WEIGHTS in wanted and not any(folder.glob(WEIGHTS)):
            raise LocalEntryNotFoundError("no weights")  # a snapshot whose file list is not cached may be incomplete
        return folder

    nowhere = f"{model} is not, or not wholly, in the cache {cache}"
    with suppress(LocalEntryNotFoundError, CachedRepoTreeNotFoundError):
        if model.pinned and not constants.HF_HUB_OFFLINE:
            get_cached_repo_tree(model.repo, revision=model.revision)  # raises if it is not known to be complete
        if model.pinned or constants.HF_HUB_OFFLINE:
            return cached()
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{nowhere}, and HF_HUB_OFFLINE forbids the download: unset it, or give a folder")
    try:
        files = snapshot_download(**asked, dry_run=True, tqdm_class=_bars(quiet=True))
        _announce(model, files, wanted, cache)
        bars = _bars(quiet=not _first_here() or not any(file.will_download for file in files))
        return Path(snapshot_download(**asked, tqdm_class=bars))
    except UserError:
        raise
    except (OSError, RuntimeError, httpx.HTTPError) as error:
        wrapped = error.__cause__ if isinstance(error, DryRunError | LocalEntryNotFoundError) else None
        problem, unreachable = _problem(wrapped if isinstance(wrapped, Exception) else error, model, cache)
        if unreachable:
            try:
                folder = cached()
            except LocalEntryNotFoundError:
                raise UserError(f"{problem}, and {nowhere}") from None
            logger.warning(f"{problem}; using {as_id(str(folder))} from the cache")
            return folder
        raise UserError(problem) from None


def _announce(model: HubId, files: Sequence[Any], wanted: Sequence[str], cache: Path) -> None:
    """Log which files will be downloaded, once per machine.

    files: the result of `snapshot_download`'s dry run for each wanted file. Errors: UserError if there are no weights or too
    little disk space.
    """
    if WEIGHTS in wanted and not any(file.filename.endswith(WEIGHTS[1:]) for file in files):
        raise UserError(
            f"{model} has no .safetensors files, and other formats of weights (pickles) are never read: choose a revision that"
            " has them, or save the model again with transformers"
        )
    missing = [file for file in files if file.will_download]
    size = sum(file.file_size or 0 for file in missing)
    if not missing or not _first_here():
        return
    there = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    begun = any((cache / f"models--{model.repo.replace('/', '--')}" / "blobs").glob("*.incomplete"))
    if size > free and not begun:  # a download that has begun has part of the files on disk already
        raise UserError(
            f"{model} needs {size / 1e9:.1f} GB more, and the disk of {there} has {free / 1e9:.1f} GB: make room, or set"
            " HF_HOME"
        )
    logger.warning(f"downloading {model}: {len(missing)} files, {size / 1e9:.2f} GB, to {cache}")


def _first_here() -> bool:
    """Return True in the first process of a machine, which logs for all processes that wait for the same download."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def _bars(*, quiet: bool) -> type:
    from huggingface_hub.utils import tqdm

    class Quiet(tqdm):
        """A progress bar that is never shown. It is used if the cache already contains the files."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"disable": True})

    return Quiet if quiet else tqdm


def _problem(error: Exception, model: HubId, cache: Path) -> tuple[str, bool]:
    """Return (description of huggingface_hub's error in one line, True if the hub cannot be reached)."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = constants.ENDPOINT
    login = "log in (hf auth login), or set HF_TOKEN"
    if isinstance(error, GatedRepoError):
        return f"{model} is gated: accept its terms at {hub}/{model.repo}, and {login}", False
    if isinstance(error, RevisionNotFoundError):
        return f"{model.repo} has no revision '{model.revision or 'main'}' on {hub}", False
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"there is no {model.repo} on {hub}, or it is private: compare the name; for a private one {login}",
            False,
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {cache} is full: make room, or set HF_HOME", False
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{error.filename or cache} cannot be written: set HF_HOME to a folder that can", False
    said = " ".join(str(error).split())[:200] or type(error).__name__
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return f"{hub} refuses {model} (status {status}): {login}", False
        return f"{hub} answers with status {status} for {model}", status >= 500 or status == 429
    connection = isinstance(error, LocalEntryNotFoundError) or not isinstance(error, OSError | RuntimeError)
    return (f"{hub} cannot be reached ({said})" if connection else f"{model} cannot be downloaded ({said})"), connection
