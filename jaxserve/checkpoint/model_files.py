"""Reads the small files of a checkpoint, JSON and text, and says what is wrong with them.

A byte order mark is skipped. A git-lfs pointer in place of a file is named as what it is. What a
checkpoint has and jaxserve does not use is logged once.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from jaxserve.api.log_once import LogOnce
from jaxserve.checkpoint.model_paths import CheckpointError

# what of checkpoints is left out; one is opened several times at a start
notes = LogOnce(logging.getLogger(__name__))
MAX_JSON_BYTES = 100 * 2**20  # of a header or a JSON file
_POINTER = b"version https://git-lfs"


def read_text(path: Path) -> str:
    """Reads a UTF-8 text. Errors: CheckpointError if it is missing, too large, no UTF-8 or a
    git-lfs pointer."""
    refuse_pointer(path)
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text ({error})") from None


def read_json(path: Path) -> Any:
    """Reads a JSON file. Errors: CheckpointError, as of `read_text`, or if it is not JSON."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object; a missing file is an empty one. Errors: CheckpointError, as of
    `read_json`, or if the file holds something else."""
    if not path.exists():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold an object")
    return content


def refuse_pointer(path: Path) -> None:
    """Raises CheckpointError if a file is a git-lfs pointer."""
    try:
        with open(path, "rb") as file:
            beginning = file.read(len(_POINTER))
    except OSError:
        return  # the read that follows says why
    if beginning == _POINTER:
        raise CheckpointError(
            f"{path}: is a git-lfs pointer and not the file itself; "
            "run `git lfs pull` in its folder, or download it again"
        )
