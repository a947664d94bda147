"""Paths of a model's files: a path as given, for a fetched name a folder of the cache, for a
Hugging Face hub id a folder of the hub's own cache. Nothing is downloaded here; see
`checkpoint.fetch`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jaxserve.folders import cache_folder, private_folder
from jaxserve.settings.schema import ConfigError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What is needed of a hub repository: no pickles, no code, no weights in subfolders.
# consolidated.safetensors are the same weights once more, under other names.
HUB_FILES: dict[str, Any] = {
    "allow_patterns": [
        "config.json",
        "generation_config.json",
        "*.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "additional_chat_templates/*.jinja",
    ],
    "ignore_patterns": ["*/*.safetensors", "consolidated*", "adapter*"],
}
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


class CheckpointError(ConfigError):
    """Model files that cannot be used: missing, damaged, inconsistent, or of a kind that jaxserve
    does not run."""

    def __init__(self, message: str):
        super().__init__("model", message)


def reason(error: Exception) -> str:
    """The text of an error, without the field name that CheckpointError puts before it."""
    return str(error).removeprefix("model: ") if isinstance(error, CheckpointError) else str(error)


def is_hub_id(source: str | Path) -> bool:
    """Returns True if a model is given by a hub id, organisation/model, and not by a path."""
    text = str(source)
    return HUB_ID.fullmatch(text) is not None and not Path(text).exists()


def hub_name(name: str, revision: str | None) -> str:
    """A hub id with its revision, for errors."""
    return name if revision is None else f"{name}@{revision}"


def check_revision(source: str | Path, revision: str | None) -> None:
    """Checks a revision. Errors: ConfigError for one of a model that is not given by a hub id."""
    if revision is not None and not is_hub_id(source):
        raise ConfigError("revision", f"is for models given by a hub id, not for {str(source)!r}")


def cached(name: str) -> Path:
    """The cache folder of a fetched name, whether it exists or not. Errors: CheckpointError for
    what cannot be one."""
    if NAME.fullmatch(name):
        return cache_folder() / "models" / name
    raise CheckpointError(f"{name!r} is neither a name nor a hub id such as organisation/model")


def resolve(source: str | Path, revision: str | None = None) -> Path:
    """Finds the folder or .gguf file of a path, a fetched name or a fetched hub id. revision: of a
    hub id; None is main. Errors: CheckpointError for a missing one, with what to do;
    ConfigError for a revision of anything else."""
    text = str(source)
    check_revision(source, revision)
    if "://" in text:
        raise CheckpointError(
            f"{text!r} is a URL, and nothing is loaded from one; "
            "give a path, a fetched name or a hub id"
        )
    path = Path(source).expanduser()
    if path.exists():
        return path
    if is_hub_id(text):
        return _in_hub_cache(text, revision)
    if NAME.fullmatch(text):
        folder = cached(text)
        if folder.is_dir():
            return private_folder(folder, "model")
        raise CheckpointError(
            f"{text!r} is neither a path nor in the cache folder {cache_folder()}; "
            f"`jaxserve fetch {text}` downloads it if it is a known name"
        )
    raise CheckpointError(f"{text}: no such file or folder")


def _in_hub_cache(name: str, revision: str | None) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True, **HUB_FILES))
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        raise CheckpointError(
            f"{hub_name(name, revision)!r} is neither a path nor, whole, in the hub's cache "
            f"{constants.HF_HUB_CACHE}; `jaxserve fetch {name}` downloads it"
        ) from None


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
