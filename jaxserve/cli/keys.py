"""`jaxserve keys`: makes API keys, and keeps their hashes in the file that `jaxserve serve
--api_keys` reads."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxserve.cli.display import table
from jaxserve.files import write_whole
from jaxserve.server.auth.keys import NAME, Key, hash_of, read, text_of
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

ABOUT = """\
--add prints the new key, once: the file has only its hash. A running server sees the change
within a second or so. The file is rewritten each time, without its comments; limits are set in
it by hand, as {requests_per_minute: 600, concurrency: 64, queued_tokens: 2000000}.

  jaxserve keys --file=keys.yaml --add=alice

  jaxserve serve --api_keys=keys.yaml
"""
PREFIX = "jaxserve-"
KEY_BYTES = 32
ACTIONS = ("add", "remove", "list")
OPTIONS = [
    Option(
        "file",
        str,
        "keys.yaml",
        "the file of keys; --add makes it where it is missing, readable by its owner alone",
    ),
    Option("add", str, None, "make a key of this name, and print it"),
    Option("remove", str, None, "forget the key of this name: new requests with it are refused"),
    Option("list", bool, False, "show names, tenants and limits"),
    Option(
        "tenant",
        str,
        None,
        "with --add: keys of one tenant share KV prefixes; default: the key's name",
    ),
    Option("admin", bool, False, "with --add: the key works on the admin port, and nowhere else"),
]


def run(values: dict[str, Any]) -> int:
    asked = [name for name in ACTIONS if values[name] not in (None, False)]
    if len(asked) != 1:
        raise ConfigError("add", "give one of --add=NAME, --remove=NAME and --list")
    file = Path(values["file"]).expanduser().resolve()
    if asked == ["list"]:
        print(listed(_read(file)))
    elif asked == ["remove"]:
        with changing(file) as keys:
            _remove(keys, values["remove"])
    else:
        print(_add(file, values))
    return 0


def listed(keys: list[Key]) -> str:
    rows = [
        [
            key.name,
            key.tenant,
            "yes" if key.admin else "no",
            *("-" if limit is None else str(limit) for limit in dataclasses.astuple(key.limits)),
        ]
        for key in keys
    ]
    return table(["name", "tenant", "admin", "requests/min", "concurrency", "queued tokens"], rows)


def _add(file: Path, values: dict[str, Any]) -> str:
    """The key that was made."""
    name = values["add"]
    tenant = values["tenant"] or values["add"]
    for flag, text in (("add", name), ("tenant", tenant)):
        if not NAME.fullmatch(text):
            raise ConfigError(flag, f"{text!r} is not a name of 1 to 64 letters, digits, . - and _")
    made = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    with changing(file, make=True) as keys:
        if any(key.name == name for key in keys):
            raise ConfigError("add", f"{file} has a key {name!r} already; --remove it first")
        keys.append(Key(name, hash_of(made), tenant, values["admin"]))
    return made


def _remove(keys: list[Key], name: str) -> None:
    others = [key for key in keys if key.name != name]
    if len(others) == len(keys):
        raise ConfigError(
            "remove",
            f"there is no key {name!r}; known are {', '.join(key.name for key in keys) or 'none'}",
        )
    keys[:] = others


@contextlib.contextmanager
def changing(file: Path, make: bool = False) -> Iterator[list[Key]]:
    """The keys of a file, written back when the block ends well: whole or not at all, one at a
    time. Errors: ConfigError."""
    try:
        folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError("file", f"{file.parent}: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        keys = [] if make and not file.exists() else _read(file)
        yield keys
        write_whole(file, text_of(keys))
        os.fsync(folder)
    except OSError as error:
        raise ConfigError("file", f"{file}: {error.strerror}") from None
    finally:
        os.close(folder)


def _read(file: Path) -> list[Key]:
    try:
        return read(file)
    except ConfigError as error:  # the flag has another name here
        raise ConfigError("file", error.message) from None


COMMAND = Command({"keys": OPTIONS}, run, ABOUT)
