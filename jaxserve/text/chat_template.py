"""Renders a model's chat template in jinja2's sandbox, with the helpers of transformers.

The template comes with the model, never with a request; still it is not trusted: it cannot reach
attributes of Python objects, and the iterations of its loops, the size of its products and the
length of its output are bounded, whatever messages it is given.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes, pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from jaxserve.api.errors import RequestError
from jaxserve.text.chat_output.formats import describes_tools
from jaxserve.text.tool_prompt import with_tools_told

MAX_ITERATIONS = 1_000_000  # of all loops, and calls, of one rendering together
MAX_VALUE_CHARS = 256
# a width, in what % formats, of 10,000 or of an argument
WIDE = re.compile(r"%[^a-zA-Z%]*([0-9]{5}|\*)")
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "iterations_left")
MAX_WRAPPING = 2**20  # characters that a template may add, besides four times those of the messages


class ChatTemplate:
    """A chat template. specials: special tokens by the names that transformers gives them in
    templates (bos_token, eos_token, ...)."""

    def __init__(self, source: str, specials: Mapping[str, str]):
        self.source = source
        self.specials = dict(specials)

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        return _Sandbox().from_string(self.source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        values: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Renders a conversation, ready to be continued.

        continue_final_message: end behind the text of the last message, without what ends it.
        tools: functions that the model may call, as in the OpenAI protocol. values: more variables
        for the template, such as enable_thinking. Errors: RequestError for messages that are
        malformed, or that the template refuses or fails on.
        """
        plain: Sequence[Mapping[str, Any]] = [
            _message(m, i) for i, m in enumerate(_listed(messages))
        ]
        if not describes_tools(self.source):
            plain = with_tools_told(plain, tools)
            tools = ()
        limit = 4 * len(json.dumps([plain, list(tools)])) + MAX_WRAPPING
        given = {
            **_values(values),
            **self.specials,
            "messages": plain,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "tools": list(tools) or None,
            "documents": None,
        }
        pieces = []
        size = 0
        try:
            for piece in self._template.generate(given, iterations_left=_Budget(limit)):
                pieces.append(piece)
                size += len(piece)
                if size > limit:
                    raise jinja2.TemplateError(f"it writes more than {limit} characters")
        except Exception as error:  # whatever Python raises on the template's behalf
            raise RequestError(
                "messages", f"the model's chat template fails: {str(error) or type(error).__name__}"
            ) from None
        text = "".join(pieces)
        if continue_final_message:
            return _continued(text, plain[-1]["content"])
        return text


def _continued(rendered: str, content: str) -> str:
    """Cuts a rendered text at the end of the last message's content."""
    at = rendered.rfind(content.strip())
    if not content.strip() or at < 0:
        message = "the last message has no text that the model's chat template shows"
        raise RequestError("continue_final_message", message)
    whole = content.lstrip()  # templates may strip a content
    return rendered[:at] + (whole if rendered.startswith(whole, at) else whole.rstrip())


def _listed(messages: Any) -> Sequence[Any]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError("messages", "must be a list of at least one message")
    return messages


def _message(message: Any, number: int) -> dict[str, Any]:
    """A message as templates expect it: text parts of the OpenAI protocol become one text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError("messages", f"message {number} is not an object with a role")
    content = message.get("content")
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, (list, tuple)):
            raise RequestError("messages", f"message {number} has tool_calls that are no list")
        message = {**message, "tool_calls": [_call(call, number) for call in calls]}
        if content is None:
            content = ""
    if isinstance(content, (list, tuple)):
        texts = [
            part["text"]
            for part in content
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        ]
        if len(texts) < len(content):
            raise RequestError(
                "messages",
                f"message {number} has parts that are not text, which this model cannot take",
            )
        content = "\n".join(texts)
    if not isinstance(content, str):
        raise RequestError("messages", f"message {number} has no content")
    return {**message, "content": content}


def _call(call: Any, number: int) -> dict[str, Any]:
    """A call as templates expect it: its arguments are an object, not a text of JSON."""
    try:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        return {
            **call,
            "function": {**function, "name": str(function["name"]), "arguments": arguments},
        }
    except (TypeError, KeyError, ValueError, RecursionError):
        raise RequestError(
            "messages",
            f"message {number} has a tool call without a function's name and arguments in JSON",
        ) from None


def _values(values: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        if (
            name in RESERVED
            or not isinstance(value, (bool, int, float, str))
            or len(str(value)) > MAX_VALUE_CHARS
        ):
            raise RequestError(
                "chat_template_kwargs",
                f"{name[:100]!r} must be a number, true, false or a text of at most "
                f"{MAX_VALUE_CHARS} characters, and none of {', '.join(RESERVED)}",
            )
    return dict(values)


class _Budget:
    """Budget of a rendering. left: iterations of loops, and calls. limit: characters of any
    one text."""

    def __init__(self, limit: int) -> None:
        self.left = MAX_ITERATIONS
        self.limit = limit

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise jinja2.TemplateError(
                f"its loops and calls take more than {MAX_ITERATIONS} iterations"
            )

    def sized(self, value: Any) -> Any:
        if isinstance(value, str) and len(value) > self.limit:
            raise jinja2.TemplateError(f"it makes a text of more than {self.limit} characters")
        return value


class _Bounding(NodeTransformer):
    """Makes every `for` of a template count its iterations, and every `~` check the size of its
    result."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "bounded", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return nodes.Filter(node, "sized", [], [], None, None, lineno=node.lineno)


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what an assistant wrote, for training; here its body is just
    rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        self.filters.update(
            tojson=_tojson,
            bounded=_bounded,
            sized=pass_context(lambda context, value: _budget(context).sized(value)),
        )
        self.globals.update(
            raise_exception=_raise, strftime_now=lambda form: datetime.datetime.now().strftime(form)
        )

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Bounding().visit(super()._parse(source, name, filename))

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        large = operator == "*" and _product_size(left, right) > MAX_WRAPPING
        if (
            operator == "**"
            or large
            or (operator == "%" and isinstance(left, str) and WIDE.search(left))
        ):
            raise jinja2.TemplateError(f"it computes {operator!r} of values that are too large")
        return _budget(context).sized(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *arguments: Any, **rest: Any) -> Any:
        budget = _budget(__context)
        budget.spend()
        # as of ljust
        if any(isinstance(value, int) and abs(value) > MAX_WRAPPING for value in arguments):
            raise jinja2.TemplateError("it calls a function with a number that is too large")
        return budget.sized(super().call(__context, __obj, *arguments, **rest))


def _product_size(left: Any, right: Any) -> int:
    """Length of a text or list times a number, in either order; 0 for other products."""
    return _extent(left) * _extent(right)


def _extent(value: Any) -> int:
    if isinstance(value, (str, list, tuple)):
        return len(value)
    return abs(value) if isinstance(value, int) else 0


@pass_context
def _bounded(context: jinja2.runtime.Context, items: Iterable[Any]) -> Iterator[Any]:
    budget = _budget(context)
    for item in items:
        budget.spend()
        yield item


def _budget(context: jinja2.runtime.Context) -> _Budget:
    budget = context.resolve("iterations_left")
    if not isinstance(budget, _Budget):
        raise jinja2.TemplateError("it sets iterations_left, which is not its own")
    return budget


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
