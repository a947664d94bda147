"""Models of the Hugging Face hub, by way of the hub's own library and its cache, which other
programs share.

Its variables hold: HF_HOME (where the cache is), HF_TOKEN (else the login that `hf auth login`
saved), HF_ENDPOINT (a mirror), HF_HUB_OFFLINE=1 (only the cache). The library reads them when it is
first imported, which is when a hub id is first asked for.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxserve.checkpoint.model_paths import HUB_FILES, CheckpointError, hub_name
from jaxserve.settings.schema import ConfigError

_MAX_NAMES = 10  # cached models that an error lists
_ELSEWHERE = "download it elsewhere and give the folder instead"


def download(name: str, revision: str | None = None, progress: bool = True) -> Path:
    """Downloads what the cache lacks of a model's configs, tokenizer and safetensors; returns its
    folder in the cache. Where the hub cannot be reached, what is cached is enough.

    revision: a branch, tag or commit; None is main. A process that asks again gets the same commit.
    Errors: CheckpointError, with what to do; ConfigError for a revision that does not exist.
    """
    if not progress:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
    return _download(name, revision)


@functools.cache
def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    wanted: dict[str, Any] = {"repo_id": name, "revision": revision, **HUB_FILES}
    with _explained(name, revision):
        _check_room(name, wanted)
        folder = Path(snapshot_download(**wanted))
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{name}: the hub repository has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{name}: the hub repository has no .safetensors files, and others are never read"
        )
    return folder


def _check_room(name: str, wanted: dict[str, Any]) -> None:
    """Raises CheckpointError if what is to be downloaded is larger than the free disk space."""
    from huggingface_hub import constants, errors, snapshot_download

    try:
        files = snapshot_download(**wanted, dry_run=True)
    except errors.DryRunError:
        return  # the hub cannot be reached: nothing will be downloaded
    needed = sum(file.file_size for file in files if file.will_download)
    cache = Path(constants.HF_HUB_CACHE)
    place = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise CheckpointError(
            f"{name}: {needed / 1e9:.1f} GB are to be downloaded, and there are {free / 1e9:.1f} "
            f"GB free for the hub's cache {cache}; set HF_HOME to a folder with more room"
        )


@contextlib.contextmanager
def _explained(name: str, revision: str | None) -> Iterator[None]:
    """Turns errors of the hub's library into ones that say what to do."""
    from huggingface_hub import constants, errors

    try:
        yield
    except CheckpointError:
        raise
    except errors.GatedRepoError:
        raise CheckpointError(f"{name}: {_gated(name)}") from None
    except errors.RevisionNotFoundError:
        raise ConfigError("revision", f"{name} has no revision {revision!r}") from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"{name}: there is no such folder, and {constants.ENDPOINT} has no such model, or a "
            f"private one; check the spelling, and for a private one {_login()}"
        ) from None
    except errors.LocalEntryNotFoundError as error:
        raise CheckpointError(f"{hub_name(name, revision)}: {_unreachable(error)}") from None
    except Exception as error:  # the library raises its own, those of its HTTP client, and OSError
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise CheckpointError(
                f"{name}: no room is left for the hub's cache {constants.HF_HUB_CACHE}; "
                "set HF_HOME to a folder with more room"
            ) from None
        raise CheckpointError(
            f"{name}: download from the hub failed ({type(error).__name__}: {_first_line(error)}); "
            f"what came whole is kept: try again, or {_ELSEWHERE}"
        ) from None


def _gated(name: str) -> str:
    from huggingface_hub import constants, get_token

    page = f"{constants.ENDPOINT}/{name}"
    if get_token() is None:
        return f"it is gated: accept its terms at {page}, then {_login()}"
    return f"the token in use has no access: ask for it at {page}, or {_login()} of another user"


def _login() -> str:
    return "set HF_TOKEN or run `hf auth login` with a token"


def _unreachable(error: Exception) -> str:
    """Says why nothing could be downloaded, and what is cached."""
    from huggingface_hub import constants

    why = f"the hub {constants.ENDPOINT} cannot be reached ({_first_line(error)})"
    advice = _ELSEWHERE
    if constants.HF_HUB_OFFLINE:
        why = "nothing is downloaded, since HF_HUB_OFFLINE is set"
        advice = "unset it, or give a model that is cached"
    return (
        f"{why}, and it is not, whole, in the hub's cache {constants.HF_HUB_CACHE} "
        f"({_cached_names()}); {advice}"
    )


def _cached_names() -> str:
    from huggingface_hub import errors, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except errors.CacheNotFound:
        repositories = frozenset()
    names = sorted(
        repository.repo_id for repository in repositories if repository.repo_type == "model"
    )
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"which has {', '.join(names[:_MAX_NAMES]) or 'no models'}{more}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
