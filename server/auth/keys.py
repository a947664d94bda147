"""Reads and writes the file of API keys: the names behind them, and the limits of each.

    keys:
      - name: alice
        sha256: 5e88...        # of the key, which has 256 random bits: a plain hash reveals nothing
        tenant: team-a         # default: the name; keys of one tenant share cached prefixes
        admin: false           # admin keys work on the admin port only, others never there
        limits: {requests_per_minute: 600, concurrency: 64, queued_tokens: 2000000}

The file is read again when it changes. One that cannot be used is logged and changes nothing, so
that a slip of the editor locks no caller out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxserve.files import check_private, file_signature
from jaxserve.settings.schema import ConfigError
from jaxserve.settings.schema.tenants import NAME

log = logging.getLogger(__name__)
FIELD = "api_keys"  # the setting that names the file
MAX_KEY_CHARS = 512
GIVEN = "api_key"  # name and tenant of keys that the settings give
MAX_FILE_BYTES = 4 << 20
MAX_LIMIT = 10**12


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one key; None means none. A minute's requests may come at once after a quiet
    minute. queued_tokens: of the prompts of requests without a first token."""

    requests_per_minute: int | None = None
    concurrency: int | None = None
    queued_tokens: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One API key, known by its hash alone."""

    name: str
    sha256: bytes = dataclasses.field(repr=False)
    tenant: str
    admin: bool = False
    limits: Limits = Limits()


class Keys:
    """The keys of a file, if there is one, and those that were given (`api_key`), which have one
    name. Lookups take the same time however near a guess was. Errors: ConfigError if the file or a
    key cannot be used."""

    def __init__(self, file: str | Path | None, given: Sequence[str] = ()):
        self._file = None if file is None else Path(file)
        self._secret = secrets.token_bytes(32)
        self._given = [_given(key) for key in given]
        self._signature = self._file and file_signature(self._file)
        self._keys = self._table(read(self._file) if self._file else ())

    @property
    def names(self) -> set[str]:
        return {key.name for key in self._keys.values()}

    def find(self, presented: str) -> Key | None:
        """The key that a caller presented; None if the file does not have it."""
        if len(presented) > MAX_KEY_CHARS:
            return None
        digest = hash_of(presented)
        key = self._keys.get(self._index(digest))
        return key if hmac.compare_digest(digest, key.sha256 if key else bytes(32)) else None

    @property
    def changed(self) -> bool:
        """Returns whether the file has changed since it was read. Costs a stat."""
        return self._file is not None and file_signature(self._file) != self._signature

    def refresh(self) -> bool:
        """Reads the file again; returns whether the keys were replaced. Takes a second for
        thousands of keys; any thread may call it."""
        assert self._file is not None, "there is no file"
        self._signature = file_signature(self._file)
        try:
            self._keys = self._table(read(self._file))
        except ConfigError as error:
            log.error("%s; the keys stay as they were", error)
            return False
        log.info("%s has changed and holds %d keys", self._file, len(self._keys))
        return True

    def _table(self, keys: Iterable[Key]) -> dict[bytes, Key]:
        return {self._index(key.sha256): key for key in (*self._given, *keys)}

    def _index(self, digest: bytes) -> bytes:
        """The index of a key in the table: unpredictable, so that timing tells nothing of it."""
        return hmac.digest(self._secret, digest, "sha256")


def _given(key: str) -> Key:
    """A key that the settings give. Errors: ConfigError."""
    if not 0 < len(key) <= MAX_KEY_CHARS or not key.isprintable():
        raise ConfigError("api_key", f"must have 1 to {MAX_KEY_CHARS} characters that can be seen")
    return Key(GIVEN, hash_of(key), GIVEN)


def hash_of(key: str) -> bytes:
    """The SHA-256 of a key."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def read(file: Path) -> list[Key]:
    """Reads a key file, which must belong to this user or to root and be readable by them and the
    file's group alone. Errors: ConfigError."""
    try:
        with open(file, "rb") as opened:
            info = os.fstat(opened.fileno())
            data = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(FIELD, f"{file}: {error.strerror}") from None
    check_private(FIELD, file, info)
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(FIELD, f"{file} is larger than the limit, {MAX_FILE_BYTES} bytes")
    try:
        return parse(data.decode(), str(file))
    except UnicodeDecodeError:
        raise ConfigError(FIELD, f"{file} is not UTF-8 text") from None


def parse(text: str, name: str) -> list[Key]:
    """Parses the text of a key file. name: the file's, for errors. Errors: ConfigError that names
    the line."""
    try:
        loader = yaml.SafeLoader(text)
        loader.name = name
        root = loader.get_single_node()  # nodes keep their lines, and build no objects
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        # not with the error's own text, which quotes the file
        raise ConfigError(FIELD, f"{name}{line}: is not YAML") from None
    if root is None:
        raise ConfigError(FIELD, f"{name} is empty; write keys: [] for none")
    listed = _fields(root, "the file", {"keys"}).get("keys")
    if listed is None or listed.id != "sequence":
        raise _fault(root, "keys must be a list")
    keys: list[Key] = []
    taken_names: set[str | bytes] = set()  # names and hashes
    for node in listed.value:
        key = _key(node)
        if key.name in taken_names or key.sha256 in taken_names:
            raise _fault(node, f"{key.name}: its name or its key is given more than once")
        taken_names |= {key.name, key.sha256}
        keys.append(key)
    return keys


def text_of(keys: Iterable[Key]) -> str:
    """The text of a key file with these keys, for `parse` to read back."""
    entries = []
    for key in keys:
        entry: dict[str, Any] = {"name": key.name, "sha256": key.sha256.hex()}
        if key.tenant != key.name:
            entry["tenant"] = key.tenant
        if key.admin:
            entry["admin"] = True
        if limits := {
            name: value
            for name, value in dataclasses.asdict(key.limits).items()
            if value is not None
        }:
            entry["limits"] = limits
        entries.append(entry)
    return yaml.safe_dump({"keys": entries}, sort_keys=False)


def _fault(node: yaml.Node, message: str) -> ConfigError:
    return ConfigError(FIELD, f"{node.start_mark.name}, line {node.start_mark.line + 1}: {message}")


def _key(node: yaml.Node) -> Key:
    fields = _fields(node, "a key", {"name", "sha256", "tenant", "admin", "limits"})
    for name in ("name", "sha256"):
        if name not in fields:
            raise _fault(node, f"a key has no {name}")
    name = _name(fields["name"])
    digest = _text(fields["sha256"])
    if not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
        raise _fault(
            fields["sha256"],
            f"{name}: sha256 must be 64 hexadecimal digits, and never the key itself",
        )
    limits = (
        _fields(fields["limits"], "limits", {f.name for f in dataclasses.fields(Limits)})
        if "limits" in fields
        else {}
    )
    return Key(
        name,
        bytes.fromhex(digest),
        _name(fields["tenant"]) if "tenant" in fields else name,
        "admin" in fields and _flag(fields["admin"]),
        Limits(**{limit: _count(limit, value) for limit, value in limits.items()}),
    )


def _fields(node: yaml.Node, what: str, known: set[str]) -> dict[str, yaml.Node]:
    """The values of a YAML mapping, as nodes, by name. what: the mapping, for errors."""
    if node.id != "mapping":
        raise _fault(node, f"{what} must be a mapping")
    nodes: dict[str, yaml.Node] = {}
    for key, value in node.value:
        name = _text(key)
        if name not in known:
            raise _fault(
                key, f"{what} has no field {name[:64]!r}; known are {', '.join(sorted(known))}"
            )
        if name in nodes:
            raise _fault(key, f"{name} is given more than once")
        nodes[name] = value
    return nodes


def _text(node: yaml.Node) -> str:
    """A scalar as it is written: a hash that consists of digits is not a number."""
    if node.id != "scalar":
        raise _fault(node, "must be a text")
    return node.value


def _name(node: yaml.Node) -> str:
    if not NAME.fullmatch(name := _text(node)):
        raise _fault(node, f"{name[:64]!r} is not a name of 1 to 64 letters, digits, . - and _")
    return name


def _flag(node: yaml.Node) -> bool:
    if _text(node) not in ("true", "false"):
        raise _fault(node, f"admin must be true or false, not {node.value[:64]!r}")
    return node.value == "true"


def _count(name: str, node: yaml.Node) -> int:
    text = _text(node)
    if not (re.fullmatch(r"[0-9]{1,13}", text) and 1 <= int(text) <= MAX_LIMIT):
        raise _fault(
            node, f"{name} must be a whole number from 1 to {MAX_LIMIT}, not {text[:64]!r}"
        )
    return int(text)
