"""The cache folder for models, profiles and compiled programs, and the check that only its owner
can write to it.

What lies there is trusted: compiled programs are native code, and a model is taken for the one that
its folder is named after. So a folder that another user could write to is refused.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from jaxserve.settings.schema import ConfigError


def cache_folder() -> Path:
    """`JAXSERVE_CACHE`, or ~/.cache/jaxserve. It need not exist."""
    return Path(os.environ.get("JAXSERVE_CACHE") or Path.home() / ".cache" / "jaxserve")


def private_folder(folder: Path, field: str) -> Path:
    """Creates `folder` if needed and checks that no other user can write to it, nor to the cache
    folder and the folders in it that lead there.

    field: the setting to name in errors. Returns `folder`. Errors: ConfigError where a folder
    belongs to a user other than this one or root, or is writable by group or others.
    """
    root = cache_folder()
    leading = []
    if root in folder.parents:
        leading = [root, *reversed([parent for parent in folder.parents if root in parent.parents])]
    for part in (*leading, folder):
        try:
            part.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = part.stat()
        except OSError as error:
            raise ConfigError(field, f"{part}: {error.strerror}") from None
        if info.st_uid not in (0, os.geteuid()):
            raise ConfigError(
                field,
                f"{part} belongs to another user; change its owner with chown, "
                "or set JAXSERVE_CACHE to another folder",
            )
        if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(
                field,
                f"{part} is writable by other users, who could make jaxserve run their code; "
                f"run chmod go-w {part}",
            )
    return folder
