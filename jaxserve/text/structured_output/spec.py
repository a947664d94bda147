"""Guides that a caller may ask for, and the limits by which they are refused before compilation.

The limits keep native code, which recurses over a grammar, within its stack, and the time to
compile within a second.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.text.structured_output.calls import CallsGrammar, read_calls
from jaxserve.text.structured_output.grammar import Grammar, SchemaGrammar, json_text, wrapped
from jaxserve.text.structured_output.lark import endless_rule
from jaxserve.text.structured_output.limits import MAX_CHARS, parsed

KINDS = ("json_schema", "json_object", "regex", "grammar", "choice", "calls")
MAX_CALLS_CHARS = 1 << 20  # of all tools of a request, of which each may have as many as a schema
MAX_CHOICES = 1024
MAX_RULES = 256

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
        most = MAX_CALLS_CHARS if self.kind == "calls" else MAX_CHARS
        if chars > most:
            raise RequestError(field, f"has {chars} characters; the limit is {most}")
        if not all(text.isascii() or _encodes(text) for text in texts):
            raise RequestError(field, "is not valid Unicode")

    def grammar(self, field: str = "") -> Grammar:
        """Returns what llguidance compiles. Errors: RequestError, as of `check`, and for what is
        too deep or has too many parts, asks for what no guide can enforce, or what nothing finite
        matches."""
        self.check(field)
        field = field or self.kind
        match self.kind:
            case "json_object":
                return Grammar(json_text({"type": "object"}))
            case "json_schema":
                return SchemaGrammar.of(field, parsed(field, self.text))
            case "grammar":
                _check_grammar(field, self.text)
                return Grammar(wrapped(lark_grammar=self.text))
            case "calls":
                return CallsGrammar.of(read_calls(field, self.text))
            case "choice":
                return Grammar("|".join(map(_escaped, self.choices)), is_regex=True)
        return Grammar(self.text, is_regex=True)


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _escaped(text: str) -> str:
    """A regular expression that matches the text alone."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _check_grammar(field: str, text: str) -> None:
    rules = _TEXTS.sub("", text).count(":")
    if rules > MAX_RULES:
        raise RequestError(field, f"has {rules} rules; the limit is {MAX_RULES}")
    if found := _EMBEDDED.search(text):
        raise RequestError(field, f"{found[0]} is not supported")
    if rule := endless_rule(text):
        raise RequestError(field, f"no finite text matches its rule {rule!a:.80}")
