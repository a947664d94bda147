"""Fields of a body that the protocol's models here do not have.

Clients send fields of other servers and of newer protocols. They have no effect and are reported:
in the header `x-jaxserve-ignored` of the answer, and once each in the log. `--strict_fields`
refuses them instead.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.api.log_once import LogOnce
from jaxserve.server.generation.fields import OpenModel
from jaxserve.server.http_errors import header_value

HEADER = "x-jaxserve-ignored"
MOST = 16  # names that an answer tells
MAX_NAME_CHARS = 64
log = logging.getLogger(__name__)


class UnknownFields:
    """Reports unknown fields, or refuses them. strict: refuse."""

    def __init__(self, strict: bool):
        self._strict = strict
        self._notes = LogOnce(log)

    def headers(self, body: OpenModel) -> dict[str, str]:
        """Headers of the answer to a request with this body. Errors: RequestError for the first
        unknown field, where that is strict."""
        names = list(itertools.islice(_names(body, ""), MOST))
        if not names:
            return {}
        if self._strict:
            raise RequestError(names[0], "is not a field that is known here (--strict_fields)")
        for name in names:
            self._notes.warning("a request had the field %a, which has no effect", name)
        return {HEADER: header_value(", ".join(names))}


def _names(value: Any, prefix: str) -> Iterator[str]:
    """Names of unknown fields that are not null, those inside others behind a point."""
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _names(part, prefix)
    if not isinstance(value, OpenModel):
        return
    if value.ignored_as:
        yield f"{prefix}{value.ignored_as}"
        return
    for name in value.left_out:
        yield f"{prefix}{name[:MAX_NAME_CHARS]}"
    for name, extra in (value.model_extra or {}).items():
        if extra is not None:
            yield f"{prefix}{name[:MAX_NAME_CHARS]}"
    for name in type(value).model_fields:
        yield from _names(getattr(value, name), f"{prefix}{name}.")
