"""The file of API keys: the names behind them, and how much each may ask for.

    keys:
      - name: alice sha256: 5e88...           # of the key, which is 256 random bits: nobody finds
        it from a plain hash tenant: team-a            # default: the name; keys of one tenant share
        KV prefixes admin: false              # admin keys work on the admin port only, others never
        there limits: {requests_per_minute: 600, concurrency: 64, queued_tokens: 2000000}

The file is read again when it changes. One that cannot be used is logged and changes nothing, so a
slip of the editor locks nobody out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from jaxserve.server.files import check_private, signature
from jaxserve.settings.schema import ConfigError

log = logging.getLogger(__name__)
FIELD = "api_keys"
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
MAX_KEY_CHARS = 512
MAX_FILE_BYTES = 4 << 20
MAX_LIMIT = 10**12


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Of one key; None: no limit. As many requests as a minute has may come at once after a quiet
    minute. queued_tokens: of the prompts of requests without a first token."""

    requests_per_minute: int | None = None
    concurrency: int | None = None
    queued_tokens: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    name: str
    sha256: bytes = dataclasses.field(repr=False)
    tenant: str
    admin: bool = False
    limits: Limits = Limits()


class Keys:
    """The keys of a file, found without telling by the time it takes how near a guess was. Errors:
    ConfigError where it cannot be used."""

    def __init__(self, file: str | Path):
        self._file = Path(file)
        self._secret = secrets.token_bytes(32)
        self._seen = signature(self._file)
        self._keys = self._table(read(self._file))

    @property
    def names(self) -> set[str]:
        return {key.name for key in self._keys.values()}

    def find(self, presented: str) -> Key | None:
        """The key that was presented, if the file has it."""
        if len(presented) > MAX_KEY_CHARS:
            return None
        digest = hash_of(presented)
        key = self._keys.get(self._place(digest))
        return key if hmac.compare_digest(digest, key.sha256 if key else bytes(32)) else None

    @property
    def changed(self) -> bool:
        """Whether the file is another than the one that was read last. Costs a stat."""
        return signature(self._file) != self._seen

    def refresh(self) -> bool:
        """Reads the file again; returns whether the keys are new ones. Takes a second for thousands
        of keys; any thread may call it."""
        self._seen = signature(self._file)
        try:
            self._keys = self._table(read(self._file))
        except ConfigError as error:
            log.error("%s; the keys stay as they were", error)
            return False
        log.info("%s has changed and holds %d keys", self._file, len(self._keys))
        return True

    def _table(self, keys: Iterable[Key]) -> dict[bytes, Key]:
        return {self._place(key.sha256): key for key in keys}

    def _place(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def hash_of(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def read(file: Path) -> list[Key]:
    """The keys of a file that belongs to this user or to root and that nobody but its group can
    read. Errors: ConfigError."""
    try:
        with open(file, "rb") as opened:
            info = os.fstat(opened.fileno())
            data = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(FIELD, f"{file}: {error.strerror}") from None
    check_private(FIELD, file, info)
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(FIELD, f"{file} has more than {MAX_FILE_BYTES} bytes")
    try:
        return parse(data.decode(), str(file))
    except UnicodeDecodeError:
        raise ConfigError(FIELD, f"{file} is not UTF-8 text") from None


def parse(text: str, name: str) -> list[Key]:
    """The keys of a file's text. name: the file's. Errors: ConfigError that names the line."""
    try:
        loader = yaml.SafeLoader(text)
        loader.name = name
        root = loader.get_single_node()  # nodes know their lines; no object is made
    except (yaml.YAMLError, RecursionError) as error:  # whose own text would quote the file
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(
            FIELD, f"{name}{f', line {mark.line + 1}' if mark else ''}: is not YAML"
        ) from None
    if root is None:
        raise ConfigError(FIELD, f"{name} is empty; where there is no key it says keys: []")
    listed = _fields(root, "the file", {"keys"}).get("keys")
    if listed is None or listed.id != "sequence":
        raise _fault(root, "keys must be a list")
    keys: list[Key] = []
    seen: set[str | bytes] = set()  # names and keys
    for node in listed.value:
        key = _key(node)
        if key.name in seen or key.sha256 in seen:
            raise _fault(node, f"{key.name}: its name or its key is there twice")
        seen |= {key.name, key.sha256}
        keys.append(key)
    return keys


def text_of(keys: Iterable[Key]) -> str:
    """What `parse` reads back."""
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


def _fault(node: Any, message: str) -> ConfigError:
    return ConfigError(FIELD, f"{node.start_mark.name}, line {node.start_mark.line + 1}: {message}")


def _key(node: Any) -> Key:
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


def _fields(node: Any, what: str, known: set[str]) -> dict[str, Any]:
    """The values of a mapping, as nodes."""
    if node.id != "mapping":
        raise _fault(node, f"{what} must be a mapping")
    found: dict[str, Any] = {}
    for key, value in node.value:
        name = _text(key)
        if name not in known:
            raise _fault(
                key, f"{what} has no field {name[:64]!r}; known are {', '.join(sorted(known))}"
            )
        if name in found:
            raise _fault(key, f"{name} is there twice")
        found[name] = value
    return found


def _text(node: Any) -> str:
    """As it is written: a hash of digits alone is no number."""
    if node.id != "scalar":
        raise _fault(node, "here must be a text")
    return node.value


def _name(node: Any) -> str:
    if not NAME.fullmatch(name := _text(node)):
        raise _fault(node, f"{name[:64]!r} is not a name of 1 to 64 letters, digits, . - and _")
    return name


def _flag(node: Any) -> bool:
    if _text(node) not in ("true", "false"):
        raise _fault(node, f"admin must be true or false, not {node.value[:64]!r}")
    return node.value == "true"


def _count(name: str, node: Any) -> int:
    text = _text(node)
    if not (re.fullmatch(r"[0-9]{1,13}", text) and 1 <= int(text) <= MAX_LIMIT):
        raise _fault(
            node, f"{name} must be a whole number from 1 to {MAX_LIMIT}, not {text[:64]!r}"
        )
    return int(text)
