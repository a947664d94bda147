"""Where a model's files lie: a path as it is, a fetched name in the cache folder, or a hub id whose
snapshot is there.

Shared by the weights and by the tokenizer, so it stands on the host side. It downloads nothing;
that is `weights.fetch`.

What lies in the cache folder is believed: compiled programs are native code, and a model is taken
for the one of its name. So a cache folder that anybody else could write to is not used.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from jaxserve.settings.schema import ConfigError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


class CheckpointError(ConfigError):
    """Model files that cannot be used: missing, damaged, not what they claim, or of a kind that
    jaxserve does not run."""

    def __init__(self, message: str):
        super().__init__("model", message)


def cache_folder() -> Path:
    """`JAXSERVE_CACHE`, or ~/.cache/jaxserve."""
    return Path(os.environ.get("JAXSERVE_CACHE") or Path.home() / ".cache" / "jaxserve")


def private_folder(folder: Path, field: str) -> Path:
    """`folder`, made where it is missing; of those above it, the ones in the cache folder and that
    itself are looked at too.

    field: the setting that led there. Errors: ConfigError where one of them belongs to neither this
    user nor root, or others can write to it.
    """
    root = cache_folder()
    above = (
        [root, *reversed([parent for parent in folder.parents if root in parent.parents])]
        if root in folder.parents
        else []
    )
    for part in (*above, folder):
        try:
            part.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = part.stat()
        except OSError as error:
            raise ConfigError(field, f"{part}: {error.strerror}") from None
        if info.st_uid not in (0, os.geteuid()):
            raise ConfigError(
                field,
                f"{part} belongs to another user; mend it with chown, or name another folder with JAXSERVE_CACHE",
            )
        if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(
                field,
                f"{part} can be written by others, who could have code run here; mend it with chmod go-w {part}",
            )
    return folder


def cached(name: str) -> Path:
    """The folder that a fetched name or hub id has in the cache, whether it is there or not.
    Errors: CheckpointError for other names."""
    if HUB_ID.fullmatch(name):
        return cache_folder() / "models" / ("hub--" + name.replace("/", "--"))
    if NAME.fullmatch(name):
        return cache_folder() / "models" / name
    raise CheckpointError(f"{name!r} is neither a name nor a hub id such as organisation/model")


def resolve(source: str | Path) -> Path:
    """The folder or .gguf file of a source. Errors: CheckpointError that says what to do where
    nothing is there."""
    text = str(source)
    if "://" in text:
        raise CheckpointError(
            f"{text!r} is a URL, and nothing is loaded from one; give a path, a fetched name or a hub id"
        )
    path = Path(source).expanduser()
    if path.exists():
        return path
    if HUB_ID.fullmatch(text) or NAME.fullmatch(text):
        if (folder := cached(text)).is_dir():
            return private_folder(folder, "model")
        raise CheckpointError(
            f"{text!r} is no path and not in {cache_folder()}; `jaxserve fetch {text}` gets it if fetch knows it"
        )
    raise CheckpointError(f"{text}: no such file or folder")


def model_file(path: Path) -> Path:
    """`path`, or its one .gguf file where it is a folder without config.json. Errors:
    CheckpointError where there are several."""
    if not path.is_dir() or (path / "config.json").exists():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise CheckpointError(
            f"{path} holds {len(files)} .gguf files; name one of them: {', '.join(f.name for f in files)}"
        )
    return files[0] if files else path
