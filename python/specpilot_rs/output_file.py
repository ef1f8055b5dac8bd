"""Files that commands write: whole or not at all.

A result may take hours, so whether its file can be written is asked first (`writable`), and it takes the
file's place only when it is complete (`writing`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specpilot_rs.options import request_error


def writable(path: Path) -> Path:
    """Returns the file that results for `path` go to: where its symlinks lead, or the path itself.

    Raises:
        RequestError: Nothing can be written there; better said before decoding than after.
    """
    try:
        if path.is_dir():
            raise request_error(f"{path}: expected a file to write results to, got a directory")
        # Devices and pipes keep the name given: where /dev/stdout leads to need not be a name that opens.
        target = path if path.exists() and not path.is_file() else path.resolve()
        if not target.parent.is_dir():
            raise request_error(f"{path}: its directory does not exist")
        if not os.access(target if target.exists() else target.parent, os.W_OK):
            raise request_error(f"{path}: may not be written to")
    except (OSError, RuntimeError, ValueError) as error:  # an impossible name, a loop of symlinks
        raise request_error(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    return target


@contextmanager
def writing(target: Path) -> Iterator[Any]:
    """Opens what takes a regular file's place at the end, so that no half-written one is ever there.

    Anything else (a device, a pipe) is written directly, and so is a file whose directory takes no new ones.
    """
    exists = target.exists()
    if exists and not (target.is_file() and os.access(target.parent, os.W_OK)):
        with target.open("wb") as handle:
            yield handle
        return
    partial = target.with_name(f".specpilot.{os.getpid()}.partial")
    try:
        with partial.open("wb") as handle:
            yield handle
        if exists:
            partial.chmod(stat.S_IMODE(target.stat().st_mode))
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
