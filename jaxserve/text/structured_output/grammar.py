"""Grammars as the library compiles them, and those of JSON schemas."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.text.structured_output.finite import FiniteParts
from jaxserve.text.structured_output.schema import (
    ReadSchema,
    Schema,
    Unenforced,
    read_schema,
    shown,
)

SPACE = r"[ \n\r\t]{1,40}"  # between the tokens of JSON: bounded, so that no model indents for ever
SEARCH_SECONDS = 0.5  # to find out which part of a grammar does not compile


@dataclasses.dataclass(frozen=True)
class Grammar:
    """A grammar, or a regular expression. unenforced: what its schemas ask and it does not."""

    text: str
    is_regex: bool = False
    unenforced: Sequence[Unenforced] = ()

    def tried(self, error_of: ErrorOf) -> tuple[Grammar, str]:
        """Returns the grammar to compile, and what is wrong with it, '' where nothing is."""
        return self, error_of(self)


ErrorOf = Callable[[Grammar], str]  # compiles one for trial


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchemaGrammar(Grammar):
    """The grammar of JSON that matches a schema."""

    schema: ReadSchema

    @classmethod
    def of(cls, field: str, given: Any) -> SchemaGrammar:
        """Reads a caller's schema. Errors: RequestError for one that asks for what no guide can
        enforce, or that nothing finite matches."""
        read = read_schema(given)
        for unenforced in read.unenforced:
            raise RequestError(field, str(unenforced))
        return cls(text=json_text(finite(field, read)), schema=read)

    def tried(self, error_of: ErrorOf) -> tuple[Grammar, str]:
        begin = time.monotonic()
        error = error_of(self)
        if error and time.monotonic() < begin + SEARCH_SECONDS:
            error = self._place(error_of) + error
        return self, error

    def _place(self, error_of: ErrorOf) -> str:
        """Names the innermost part that does not compile by itself, if one is found."""
        end = time.monotonic() + SEARCH_SECONDS
        for part, path in self.schema.parts:
            if time.monotonic() > end:
                break
            if error_of(Grammar(json_text({**part, "$defs": self.schema.definitions}))):
                return f"{shown(path)}: "
        return ""


def finite(field: str, read: ReadSchema) -> Schema:
    """Returns a schema without what nothing finite matches. Errors: RequestError where that is all
    of it."""
    parts = FiniteParts(read)
    if fault := parts.fault():
        raise RequestError(field, fault)
    return parts.root()


def json_text(schema: Schema, space: str = SPACE) -> str:
    """The grammar of JSON that matches a schema, with blanks that match `space`."""
    return wrapped(json_schema=with_spaces(schema, space))


def with_spaces(schema: Schema, space: str) -> dict[str, Any]:
    """Returns a schema, of which something matches, that says which blanks may come between the
    tokens of JSON."""
    asked = schema if isinstance(schema, dict) else {}
    return {**asked, "x-guidance": {"whitespace_pattern": space}}


def wrapped(**grammar: Any) -> str:
    """A grammar as the library reads it, by the name of its kind."""
    return json.dumps({"grammars": [grammar]})
