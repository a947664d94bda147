"""Checks of files, who else can read them and whether they have changed; and writes them whole."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from jaxserve.settings.schema import ConfigError

FORBIDDEN_MODE_BITS = 0o027  # a group may read: Kubernetes hands secrets to users that way
FileSignature = tuple[tuple[int, ...], ...]


def check_private(field: str, file: Path, info: os.stat_result) -> None:
    """Refuses a file unless it belongs to this user or to root, is writable by its owner alone, and
    readable by its owner and group alone. Errors: ConfigError of the setting `field`."""
    if info.st_uid not in (0, os.geteuid()):
        raise ConfigError(field, f"{file} belongs to another user")
    if info.st_mode & FORBIDDEN_MODE_BITS:
        raise ConfigError(
            field, f"{file} can be read or written by others; mend it with chmod 600 {file}"
        )


def file_signature(*files: Path) -> FileSignature | None:
    """A value that differs once one of the files was written, replaced or given another owner; None
    if one does not exist."""
    try:
        stats = [file.stat() for file in files]
    except OSError:
        return None
    return tuple((info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns) for info in stats)


def write_whole(file: Path, text: str) -> None:
    """Writes a file, readable by its owner alone (mode 0600), whole or not at all. Errors: OSError;
    then nothing is left of it."""
    with tempfile.NamedTemporaryFile(
        "w", dir=file.parent, prefix=f".{file.name}.", delete=False
    ) as out:
        try:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
            os.replace(out.name, file)
        except BaseException:
            os.unlink(out.name)
            raise
