"""A model's chat template, rendered in jinja2's sandbox with the helpers that transformers gives it.

The template comes with the model, never with a request; still it is not trusted: no attribute of Python is in its reach, and the turns of
its loops, what it multiplies and what it writes are bounded, whatever messages it is given.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes, pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from jaxserve.request import RequestError

MAX_TURNS = 1_000_000                                # of all loops of one rendering together
MAX_WRAPPING = 2**20                                 # characters that a template may add, besides four times those of the messages


class ChatTemplate:
    """`specials`: names that transformers gives to templates (bos_token, eos_token, ...) and their texts."""

    def __init__(self, source: str, specials: Mapping[str, str]):
        self.source, self.specials = source, dict(specials)

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        return _Sandbox().from_string(self.source)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, ready to be continued. Errors: RequestError for what the template refuses or cannot take."""
        plain = [_message(m, i) for i, m in enumerate(_listed(messages))]
        limit = 4 * len(json.dumps(plain)) + MAX_WRAPPING
        given = {**self.specials, "messages": plain, "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        pieces, size = [], 0
        try:
            for piece in self._template.generate(given, turns_left=_Turns()):
                pieces.append(piece)
                size += len(piece)
                if size > limit:
                    raise jinja2.TemplateError(f"it writes more than {limit} characters")
        except Exception as error:                   # whatever Python raises on the template's behalf
            raise RequestError("messages", f"the model's chat template fails: {str(error) or type(error).__name__}") from None
        return "".join(pieces)


def _listed(messages: Any) -> Sequence[Any]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError("messages", "must be a list of at least one message")
    return messages


def _message(message: Any, number: int) -> dict[str, Any]:
    """A message as templates expect it: text parts of the OpenAI protocol become one text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError("messages", f"message {number} is not an object with a role")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        if len(texts) < len(content):
            raise RequestError("messages", f"message {number} has parts that are not text, which this model cannot take")
        content = "\n".join(texts)
    if not isinstance(content, str):
        raise RequestError("messages", f"message {number} has no content")
    return {**message, "content": content}


class _Turns:
    """Turns of loops that a rendering has left."""

    def __init__(self) -> None:
        self.left = MAX_TURNS


class _Bounding(NodeTransformer):
    """Counts what every `for` of a template iterates over."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "bounded", [], [], None, None, lineno=node.lineno)
        return node


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what an assistant wrote, for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.filters.update(tojson=_tojson, bounded=_bounded)
        self.globals.update(raise_exception=_raise, strftime_now=lambda form: datetime.datetime.now().strftime(form))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Bounding().visit(super()._parse(source, name, filename))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or _product_size(left, right) > MAX_WRAPPING:
            raise jinja2.TemplateError(f"it computes {operator!r} of values that are too large")
        return super().call_binop(context, operator, left, right)


def _product_size(left: Any, right: Any) -> int:
    sizes = [len(v) if isinstance(v, (str, list, tuple)) else abs(v) if isinstance(v, int) else 0 for v in (left, right)]
    return sizes[0] * sizes[1]


@pass_context
def _bounded(context: jinja2.runtime.Context, items: Iterable[Any]) -> Iterator[Any]:
    turns = context.resolve("turns_left")
    if not isinstance(turns, _Turns):
        raise jinja2.TemplateError("it sets turns_left, which is not its own")
    for item in items:
        turns.left -= 1
        if turns.left < 0:
            raise jinja2.TemplateError(f"its loops take more than {MAX_TURNS} turns")
        yield item


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
