"""Grammars of outputs with calls of tools in them, or of a call and nothing else."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Sequence, Set
from typing import Any

from llguidance import StructTag

from jaxserve.api.errors import RequestError
from jaxserve.text.structured_output.closing import close_objects
from jaxserve.text.structured_output.grammar import (
    SEARCH_SECONDS,
    ErrorOf,
    Grammar,
    finite,
    json_text,
    with_spaces,
    wrapped,
)
from jaxserve.text.structured_output.limits import check_limits
from jaxserve.text.structured_output.schema import Schema, Unenforced, read_schema

MAX_CALLS = 128
CALL_SPACE = " "  # within calls, which no user reads: models write them with single blanks
ANY_OBJECT: Schema = {"type": "object"}


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """The rules for calls of one tool. strict: whether its arguments may not be less than what they
    should be."""

    name: str
    arguments: Schema
    strict: bool
    unenforced: Sequence[Unenforced] = ()

    def freed(self) -> Call:
        """Returns a call with any object for arguments."""
        unenforced = [Unenforced("parameters", "#", "they do not compile")]
        return dataclasses.replace(self, arguments=ANY_OBJECT, unenforced=unenforced)

    @classmethod
    def of(cls, field: str, name: str, parameters: Any, strict: bool) -> Call:
        """Reads a tool's parameters. Where it is not strict, what cannot be enforced is left out,
        or all of it. Errors: RequestError."""
        try:
            schema = _of_object(parameters)
            check_limits("", schema)
            read = read_schema(schema)
            arguments = finite("", read)
            if strict and read.unenforced:
                raise RequestError("", str(read.unenforced[0]))
        except RequestError as error:
            if strict:
                raise RequestError(field, f"{name!a:.80}: {error}") from None
            return cls(name, ANY_OBJECT, strict, [Unenforced("parameters", "#", str(error))])
        close_objects(arguments)
        return cls(name, arguments, strict, read.unenforced)


@dataclasses.dataclass(frozen=True, slots=True)
class Calls:
    """Calls in an output: any number, each between marks, or one that is the whole output.

    begin: the mark before a call; '': the output is a call. begin_is_token: whether the model has a
    token for it.
    """

    calls: Sequence[Call]
    begin: str = ""
    end: str = ""
    begin_is_token: bool = False

    def alone(self, number: int) -> Calls:
        """Returns the calls of one tool."""
        return dataclasses.replace(self, calls=[self.calls[number]])

    def freed(self, numbers: Set[int]) -> Calls:
        """Returns the calls with any object for the arguments of some tools."""
        calls = list(self.calls)
        for number in numbers:
            calls[number] = calls[number].freed()
        return dataclasses.replace(self, calls=calls)

    def text(self) -> str:
        """The grammar of an output."""
        if self.begin:
            return wrapped(lark_grammar=self._between_marks())
        calls = [
            {
                "type": "object",
                "required": ["name", "arguments"],
                "additionalProperties": False,
                "properties": {
                    "name": {"const": call.name},
                    "arguments": _addressed(number, call.arguments),
                },
            }
            for number, call in enumerate(self.calls)
        ]
        return json_text({"anyOf": calls}, CALL_SPACE)

    def _between_marks(self) -> str:
        tags = [
            StructTag(
                trigger=self.begin,
                begin=f'{self.begin}\n{{"name": {json.dumps(call.name)}, "arguments": ',
                grammar=with_spaces(call.arguments, CALL_SPACE),
                end=f"}}\n{self.end}",
            )
            for call in self.calls
        ]
        return StructTag.to_grammar(tags, assume_special=self.begin_is_token)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallsGrammar(Grammar):
    """The grammar of an output with calls."""

    calls: Calls

    @classmethod
    def of(cls, calls: Calls) -> CallsGrammar:
        unenforced = itertools.chain.from_iterable(call.unenforced for call in calls.calls)
        return cls(text=calls.text(), unenforced=list(unenforced), calls=calls)

    def tried(self, error_of: ErrorOf) -> tuple[Grammar, str]:
        """Does without the schemas of tools that are not strict, where these do not compile, or
        all of them do not together."""
        begin = time.monotonic()
        error = error_of(self)
        calls = self.calls.calls
        free = {number for number, call in enumerate(calls) if not call.strict}
        if not error:
            return self, error
        faulty = set()
        for number, call in enumerate(calls):
            if time.monotonic() > begin + SEARCH_SECONDS:
                faulty |= {*range(number, len(calls))}
                break
            if fault := error_of(CallsGrammar.of(self.calls.alone(number))):
                faulty.add(number)
                if call.strict:
                    return self, f"{call.name!a:.80}: {fault}"
        if not free:
            return self, error
        rest = CallsGrammar.of(self.calls.freed(faulty & free or free))
        return rest, error_of(rest)


def read_calls(field: str, text: str) -> Calls:
    """Reads the calls that `tools` writes. Errors: RequestError."""
    try:
        given = json.loads(text)
        entries = [(call["name"], call["parameters"], call["strict"]) for call in given["calls"]]
        begin = given["begin"]
        end = given["end"]
        if not 0 < len(entries) <= MAX_CALLS:
            raise ValueError(f"1 to {MAX_CALLS} calls are possible")
        if not all(
            isinstance(text, str) for text in (begin, end, *(name for name, _, _ in entries))
        ):
            raise TypeError("names and marks are texts")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RequestError(field, f"is not what a guide of calls is: {error!r:.100}") from None
    calls = [
        Call.of(field, name, parameters, strict is True) for name, parameters, strict in entries
    ]
    return Calls(calls, begin, end, given.get("begin_is_token") is True)


def _of_object(parameters: Any) -> Schema:
    """A tool's parameters as the schema of an object, which arguments always are."""
    if not isinstance(parameters, dict):
        return ANY_OBJECT if parameters in (None, True) else parameters
    types = parameters.get("type")
    if types is None or (isinstance(types, list) and "object" in types):
        return {**parameters, "type": "object"}
    return parameters


def _addressed(number: int, schema: Schema) -> Schema:
    """A schema within others, with an address that its references are relative to."""
    if isinstance(schema, bool):
        return schema
    return {"$id": f"json-schema:///{number}", **schema}
