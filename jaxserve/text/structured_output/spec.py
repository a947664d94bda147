"""Guides that a caller may ask for, and the limits by which they are refused before compilation.

The limits keep native code, which recurses over a schema or grammar, within its stack, and the time
to compile within a second.
"""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from math import lcm
from typing import Any

from llguidance import StructTag

from jaxserve.api.errors import RequestError

KINDS = ("json_schema", "json_object", "regex", "grammar", "choice", "calls")
MAX_CHARS = 65_536  # of a schema, regular expression or grammar, and of all choices together
MAX_CHOICES = 1024
MAX_DEPTH = 64  # of objects and lists in a schema
MAX_REACH = 1024  # depth times references: how deep a schema may be once these are followed
MAX_PROPERTIES = 1024  # of one object
MAX_MULTIPLE = 10_000  # least common multiple of all of a schema's multipleOf, as whole numbers
MAX_ITEMS = 4096  # that a list or object may be said to have, at least or at most
MAX_PATTERNS = 32  # of patternProperties, in all of a schema
MAX_RULES = 256
MAX_TOOLS = 128
SPACE = r"[ \n\r\t]{1,40}"  # between the tokens of JSON: bounded, so that no model indents for ever
CALL_SPACE = " "  # within calls, which no user reads: models write them with single blanks

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_NAMES = ("$id", "id")  # of what references within are relative to
_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties")
# of a grammar: comments, strings, regular expressions
_TEXTS = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\\n])*/?')
_EMBEDDED = re.compile(r"%(json|llguidance)\b")


@dataclass(frozen=True, slots=True)
class Guided:
    """A constraint on completions.

    kind: json_schema, regex or grammar (Lark, as llguidance takes it), each with its `text`;
    choice, with `choices`; json_object, any JSON object; or calls, any text in which calls of tools
    obey schemas, as `tools.calls_guide` makes it. A regular expression matches the whole
    completion.
    """

    kind: str
    text: str = ""
    choices: tuple[str, ...] = ()

    def check(self, field: str = "") -> None:
        """Refuses an unknown kind, a wrong type and what is too large. Errors: RequestError that
        names `field` (else the kind)."""
        field = field or str(self.kind)
        if self.kind not in KINDS:
            raise RequestError(field, f"{self.kind!r:.100} is not one of {', '.join(KINDS)}")
        texts: Any = (self.text,)
        if self.kind == "choice":
            texts = self.choices
        if not isinstance(texts, tuple) or not all(isinstance(text, str) for text in texts):
            raise RequestError(field, "must be text")
        if self.kind == "choice" and not 0 < len(texts) <= MAX_CHOICES:
            raise RequestError(field, f"has {len(texts)} entries; 1 to {MAX_CHOICES} are possible")
        if self.kind == "choice" and not all(texts):
            raise RequestError(field, "has an empty entry")
        chars = sum(map(len, texts))
        if chars > MAX_CHARS:
            raise RequestError(field, f"has {chars} characters; the limit is {MAX_CHARS}")
        if not all(text.isascii() or _encodes(text) for text in texts):
            raise RequestError(field, "is not valid Unicode")

    def grammar(self, field: str = "") -> str:
        """Returns what llguidance compiles. Errors: RequestError, as of `check`, and for what is
        too deep or has too many parts."""
        self.check(field)
        field = field or self.kind
        match self.kind:
            case "json_object":
                return _wrapped(json_schema=_with_spaces({"type": "object"}))
            case "json_schema":
                return _wrapped(json_schema=_with_spaces(_schema(field, self.text)))
            case "grammar":
                _check_grammar(field, self.text)
                return _wrapped(lark_grammar=self.text)
            case "calls":
                return _wrapped(**_calls_grammar(field, self.text))
            case "choice":
                return "|".join(map(_escaped, self.choices))
        return self.text


def _calls_grammar(field: str, text: str) -> dict[str, Any]:
    """A grammar of text with calls in it, or of one call and nothing else. Errors: RequestError."""
    try:
        given = json.loads(text)
        if "forced" in given:
            return {"json_schema": _call_schema(field, given["forced"])}
        trigger, is_token, calls = (
            given[name] for name in ("trigger", "trigger_is_token", "calls")
        )
        if not (0 < len(calls) <= MAX_TOOLS and trigger):
            raise ValueError(f"1 to {MAX_TOOLS} calls are possible, behind a trigger")
        tags = [
            StructTag(
                trigger=trigger,
                begin=trigger + call["begin"],
                grammar=_call_schema(field, call["schema"]),
                end=call["end"],
            )
            for call in calls
        ]
        return {"lark_grammar": StructTag.to_grammar(tags, assume_special=is_token is True)}
    except RequestError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError, AssertionError) as error:
        raise RequestError(field, f"is not what calls_guide makes: {error!r:.100}") from None


def _call_schema(field: str, schema: Any) -> Any:
    return _with_spaces(_schema(field, json.dumps(schema)), CALL_SPACE)


def _wrapped(**grammar: Any) -> str:
    return json.dumps({"grammars": [grammar]})


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _escaped(text: str) -> str:
    """A regular expression that matches the text alone."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _with_spaces(schema: Any, pattern: str = SPACE) -> Any:
    if not isinstance(schema, dict):
        return schema
    return {**schema, "x-guidance": {"whitespace_pattern": pattern}}


def _schema(field: str, text: str) -> Any:
    """Parses and checks a schema; it is passed on as parsed, so that what was checked is what is
    compiled."""
    try:
        schema = json.loads(text)
    except RecursionError:
        raise RequestError(field, f"is nested too deeply; the limit is {MAX_DEPTH}") from None
    except ValueError as error:
        raise RequestError(field, f"is not JSON: {str(error)[:100]}") from None
    if not isinstance(schema, (dict, bool)):
        raise RequestError(field, "a JSON schema is an object")
    _check_schema(field, schema)
    return schema


def _check_schema(field: str, schema: Any) -> None:
    deepest = 0
    references = collections.defaultdict[int, set[str]](set)
    multiples = []
    patterns = 0
    for part, depth, place in _parts(schema):
        deepest = max(deepest, depth)
        if depth > MAX_DEPTH:
            raise RequestError(field, f"is nested too deeply; the limit is {MAX_DEPTH}")
        if isinstance(part, dict):
            _check_part(field, part)
            references[place] |= {
                part[name] for name in _REFERENCES if isinstance(part.get(name), str)
            }
            if isinstance(part.get("multipleOf"), (int, float)):
                multiples.append(part["multipleOf"])
            if isinstance(part.get("patternProperties"), dict):
                patterns += len(part["patternProperties"])
    counts = [len(found) for found in references.values()]
    local = all(reference.startswith("#") for found in references.values() for reference in found)
    count = max(counts, default=0) if local else sum(counts)  # the others lead from place to place
    if deepest * count > MAX_REACH:
        said = f"has {count} references and {deepest} levels"
        raise RequestError(field, f"{said}; the limit is {MAX_REACH} for the one times the other")
    if _least_multiple(multiples) > MAX_MULTIPLE:
        raise RequestError(
            field,
            "has a common multiple of all multipleOf, as whole numbers, above the limit "
            f"{MAX_MULTIPLE}",
        )
    if patterns > MAX_PATTERNS:
        raise RequestError(field, f"has {patterns} patternProperties; the limit is {MAX_PATTERNS}")


def _check_part(field: str, part: dict[str, Any]) -> None:
    if len(part) > MAX_PROPERTIES or (
        isinstance(part.get("required"), list) and len(part["required"]) > MAX_PROPERTIES
    ):
        raise RequestError(field, f"has an object with more than {MAX_PROPERTIES} properties")
    if "x-guidance" in part:
        raise RequestError(field, "x-guidance is not supported")
    for name in _COUNTS:
        if isinstance(part.get(name), (int, float)) and part[name] > MAX_ITEMS:
            raise RequestError(field, f"has {name} above the limit {MAX_ITEMS}")


def _parts(schema: Any) -> Iterator[tuple[Any, int, int]]:
    """Yields every object and list with its depth and a number for what its references are relative
    to."""
    pending = [(schema, 1, 0)]
    places = 0
    while pending:
        part, depth, place = pending.pop()
        if isinstance(part, dict) and any(isinstance(part.get(name), str) for name in _NAMES):
            place = places = places + 1
        yield part, depth, place
        if isinstance(part, bool):  # a schema that allows everything, or nothing
            continue
        inner = part
        if isinstance(part, dict):
            inner = part.values()
        pending.extend(
            (value, depth + 1, place) for value in inner if isinstance(value, (dict, list))
        )


def _least_multiple(multiples: list[int | float]) -> int:
    """Least common multiple after scaling all to whole numbers: 0.5 and 3 become 5 and 30."""
    try:
        numbers = [Decimal(str(abs(value))) for value in multiples if value]
        places = max((-min(int(number.as_tuple().exponent), 0) for number in numbers), default=0)
        if places < 20:
            return lcm(*(int(number.scaleb(places)) for number in numbers))
        return MAX_MULTIPLE + 1
    except (InvalidOperation, OverflowError, ValueError):  # the last: of what is no finite number
        return MAX_MULTIPLE + 1


def _check_grammar(field: str, text: str) -> None:
    rules = _TEXTS.sub("", text).count(":")
    if rules > MAX_RULES:
        raise RequestError(field, f"has {rules} rules; the limit is {MAX_RULES}")
    if found := _EMBEDDED.search(text):
        raise RequestError(field, f"{found[0]} is not supported")
