"""Files of secrets, which are read again when they change: who else may read them, and whether they
have changed."""

from __future__ import annotations

import os
from pathlib import Path

from jaxserve.settings.schema import ConfigError

OTHERS = 0o027  # of a mode. A group may read: Kubernetes hands users secrets that way
Signature = tuple[tuple[int, ...], ...]


def check_private(field: str, file: Path, info: os.stat_result) -> None:
    """Errors: ConfigError of `field` where others than the owner can write the file, others than
    its group read it, or it is neither this user's nor root's."""
    if info.st_uid not in (0, os.geteuid()):
        raise ConfigError(field, f"{file} belongs to another user")
    if info.st_mode & OTHERS:
        raise ConfigError(
            field, f"{file} can be read or written by others; mend it with chmod 600 {file}"
        )


def signature(*files: Path) -> Signature | None:
    """What differs when one of the files was written, replaced, or given to somebody else; None
    where one is not there."""
    try:
        found = [file.stat() for file in files]
    except OSError:
        return None
    return tuple((info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns) for info in found)
