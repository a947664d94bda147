"""Where the files of a model are: a path as given, or a folder of the cache for a fetched name or a
Hugging Face hub id. Nothing is downloaded here; see `checkpoint.fetch`.
"""

from __future__ import annotations

import re
from pathlib import Path

from jaxserve.folders import cache_folder, private_folder
from jaxserve.settings.schema import ConfigError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


class CheckpointError(ConfigError):
    """Model files that cannot be used: missing, damaged, inconsistent, or of a kind that jaxserve
    does not run."""

    def __init__(self, message: str):
        super().__init__("model", message)


def reason(error: Exception) -> str:
    """The text of an error, without the field name that CheckpointError puts before it."""
    return str(error).removeprefix("model: ") if isinstance(error, CheckpointError) else str(error)


def cached(name: str) -> Path:
    """The cache folder of a fetched name or hub id, whether it exists or not. Errors:
    CheckpointError for anything else."""
    if HUB_ID.fullmatch(name):
        return cache_folder() / "models" / ("hub--" + name.replace("/", "--"))
    if NAME.fullmatch(name):
        return cache_folder() / "models" / name
    raise CheckpointError(f"{name!r} is neither a name nor a hub id such as organisation/model")


def resolve(source: str | Path) -> Path:
    """The folder or .gguf file of a path, a fetched name or a fetched hub id. Errors:
    CheckpointError where there is none, with what to do."""
    text = str(source)
    if "://" in text:
        raise CheckpointError(
            f"{text!r} is a URL, and nothing is loaded from one; "
            "give a path, a fetched name or a hub id"
        )
    path = Path(source).expanduser()
    if path.exists():
        return path
    if HUB_ID.fullmatch(text) or NAME.fullmatch(text):
        folder = cached(text)
        if folder.is_dir():
            return private_folder(folder, "model")
        raise CheckpointError(
            f"{text!r} is neither a path nor in the cache folder {cache_folder()}; "
            f"`jaxserve fetch {text}` downloads it if it is a known name or a hub id"
        )
    raise CheckpointError(f"{text}: no such file or folder")


def model_file(path: Path) -> Path:
    """`path`, or the one .gguf file in it if it is a folder without config.json. Errors:
    CheckpointError where there are several."""
    if not path.is_dir() or (path / "config.json").exists():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise CheckpointError(
            f"{path} holds {len(files)} .gguf files; "
            f"name one of them: {', '.join(file.name for file in files)}"
        )
    return files[0] if files else path
