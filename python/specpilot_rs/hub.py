"""Where a model's files are: a local directory, or the hub's cache after a download.

A directory is taken as it is and touches no network. Anything else must be a hub id; only the files that an
engine reads are fetched. `HF_HUB_OFFLINE`, `HF_HOME` and the access token are huggingface_hub's own business.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from specpilot_rs.errors import CheckpointError, OptionError
from specpilot_rs.options import is_text, shown

WEIGHT_FILES = "*.safetensors"
"""Pattern of the files that hold weights."""
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    WEIGHT_FILES,
    "*.safetensors.index.json",
)
"""Patterns of the files fetched, from the top folder of a repository only."""
CONFIG_FILES = ("config.json", "generation_config.json")
"""What is fetched when no weights are needed."""


def model_directory(
    model: str | os.PathLike[str], revision: str | None = None, *, files: Sequence[str] = FILES
) -> Path:
    """Returns the directory with a model's files, downloading them if `model` is a hub id.

    Args:
        model: A local directory or a hub id such as "org/name".
        revision: Branch, tag or commit on the hub.
        files: Patterns of the files to fetch.

    Raises:
        CheckpointError: The directory or repository is not there or cannot be reached.
        OptionError: A revision is given for a directory, the name can be neither, or one is no string.
    """
    name = os.fspath(model) if isinstance(model, os.PathLike) else model
    if not isinstance(name, str):
        raise OptionError(f"a model should be a directory or a hub id, got {shown(model)}")
    if not (revision is None or is_text(revision)):
        raise OptionError(f"option `revision` should be a string or None, got {shown(revision)}")
    directory = _local_directory(name) if name else None
    if directory is not None:
        if revision is not None:
            raise OptionError(f"revision {revision!r} applies to hub ids, but {name} is a local directory")
        return directory
    if not name or name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise CheckpointError(
            f"{name or repr(name)}: no such directory, and not a hub id of the form org/name"
        )
    return _download(name, revision, files)


def _local_directory(name: str) -> Path | None:
    """Returns the directory of this name, or None if nothing has it."""
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            if not os.access(path, os.X_OK):  # every file in it would seem to be missing
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return path.resolve()
        found = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # no permission, an unknown home, a null character
        raise CheckpointError(
            f"{shown(name)}: expected a readable directory with a model's files, got: {_line(error)}"
        ) from error
    if found:
        raise CheckpointError(f"{name}: expected a directory with a model's files, got a file")
    return None


def _download(repo_id: str, revision: str | None, files: Sequence[str]) -> Path:
    from huggingface_hub import errors as hub_errors
    from huggingface_hub import snapshot_download

    at = f" at revision {revision!r}" if revision else ""
    try:
        return Path(
            snapshot_download(repo_id, revision=revision, allow_patterns=list(files), ignore_patterns=["*/*"])
        )
    except hub_errors.HFValidationError as error:
        raise OptionError(
            f"model {repo_id!r} is neither a local directory nor a hub id: {_line(error)}"
        ) from error
    except hub_errors.GatedRepoError as error:
        raise CheckpointError(
            f"{repo_id}: access is gated; accept its terms and log in to the hub"
        ) from error
    except hub_errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repo_id}: no such local directory, and no such repository on the hub"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{repo_id}: the hub has no revision {revision!r}") from error
    except (hub_errors.LocalEntryNotFoundError, hub_errors.OfflineModeIsEnabled) as error:
        raise CheckpointError(
            f"{repo_id}{at}: no such local directory, not in the hub's cache, and the hub is out of reach"
        ) from error
    except (hub_errors.HfHubHTTPError, OSError) as error:
        raise CheckpointError(f"{repo_id}{at}: download failed: {_line(error)}") from error


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
