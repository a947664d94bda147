"""Finds what the references within a JSON schema lead to."""

from __future__ import annotations

import urllib.parse
from typing import Any

_ADDRESSES = ("$id", "id")
_ANCHORS = ("$anchor", "$dynamicAnchor")


class References:
    """The addresses and anchors of a schema, which is not changed meanwhile.

    References are followed within the schema only, wherever it lies: pointers (`#/$defs/a`),
    anchors (`#a`), and addresses that its parts give themselves (`$id`).
    """

    def __init__(self, root: Any):
        self._places = {"": root}  # by address, those with an anchor behind a '#'
        self._bases: dict[int, str] = {}  # by the identity of an object: its own address
        pending = [(root, "")]
        while pending:
            part, base = pending.pop()
            if isinstance(part, dict):
                base = self._register(part, base)
                pending += [(value, base) for value in part.values()]
            elif isinstance(part, list):
                pending += [(value, base) for value in part]

    def base(self, part: Any) -> str:
        """The address that references in a part of the schema are relative to."""
        return self._bases.get(id(part), "")

    def target(self, reference: str, base: str) -> Any:
        """Returns the part that a reference leads to. Errors: LookupError."""
        address, _, fragment = _joined(base, reference).partition("#")
        fragment = urllib.parse.unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._places[f"{address}#{fragment}"]
        part = self._places[address]
        for step in fragment.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            part = _entry(part, name)
        return part

    def _register(self, part: dict[str, Any], base: str) -> str:
        """Notes the names that an object gives itself; returns its address."""
        for name in _ADDRESSES:
            if isinstance(part.get(name), str):
                address = _joined(base, part[name]).removesuffix("#")
                self._places.setdefault(address, part)
                base = address.partition("#")[0]  # in draft 4, an anchor is an address too
        for name in _ANCHORS:
            if isinstance(part.get(name), str):
                self._places.setdefault(f"{base}#{part[name]}", part)
        self._bases[id(part)] = base
        return base


def _entry(part: Any, name: str) -> Any:
    """Returns the entry of an object or list. Errors: LookupError."""
    if isinstance(part, list) and name.isdecimal():
        return part[int(name)]
    if isinstance(part, dict):
        return part[name]
    raise LookupError(name)


def _joined(base: str, reference: str) -> str:
    """The address that a reference means, relative to one of any scheme: `urljoin` knows some."""
    if reference.startswith("#"):
        return base.partition("#")[0] + reference
    scheme, colon, rest = base.partition(":")
    if not colon or scheme in urllib.parse.uses_relative:
        scheme, colon, rest = "", "", base
    try:
        if urllib.parse.urlsplit(reference).scheme:
            return reference
        joined = urllib.parse.urljoin(rest, reference)
    except ValueError:  # such as an address of a network that is none
        return reference
    return f"{scheme}{colon}{joined}"
