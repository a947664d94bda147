"""Files of secrets, which are read again when they change: who else may read them, and whether they have changed."""

from __future__ import annotations

import os
from pathlib import Path

from jaxserve.config import ConfigError

Signature = tuple[tuple[int, ...], ...]


def check_private(field: str, file: Path, info: os.stat_result, others: int) -> None:
    """others: bits of the mode that must not be set.

    Errors: ConfigError of `field` where one is, or the file is neither this user's nor root's.
    """
    if info.st_uid not in (0, os.geteuid()):
        raise ConfigError(field, f"{file} belongs to another user")
    if info.st_mode & others:
        raise ConfigError(field, f"{file} can be read or written by others; mend it with chmod 600 {file}")


def signature(*files: Path) -> Signature | None:
    """What differs when one of the files was written, replaced, or given to somebody else; None where one is not there."""
    try:
        found = [file.stat() for file in files]
    except OSError:
        return None
    return tuple((info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns) for info in found)
