"""Renders a model's chat template in jinja2's sandbox, with the helpers of transformers.

The template comes with the model, never with a request; still it is not trusted: it cannot reach
attributes of Python objects, and the iterations of its loops, the size of its products and the
length of its output are bounded, whatever messages it is given.
"""

from __future__ import annotations

import datetime
import functools
import json
import logging
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
from jaxserve.api.log_once import LogOnce
from jaxserve.text.chat_output.formats import describes_tools
from jaxserve.text.conversation import Message, Remedies, plain_messages
from jaxserve.text.tool_prompt import with_tools_told

MAX_ITERATIONS = 1_000_000  # of all loops, and calls, of one rendering together
PROBE_ITERATIONS = 10_000  # of one that only tries what the template takes
MAX_VALUE_CHARS = 256
# a width, in what % formats, of 10,000 or of an argument
WIDE = re.compile(r"%[^a-zA-Z%]*([0-9]{5}|\*)")
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "iterations_left")
MAX_WRAPPING = 2**20  # characters that a template may add, besides four times those of the messages
END = "\ue0f0\ue0f1"  # behind the text that is continued, in letters that no text has
PROBE_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
log = logging.getLogger(__name__)


class ChatTemplate:
    """A chat template. specials: special tokens by the names that transformers gives them in
    templates (bos_token, eos_token, ...)."""

    def __init__(self, source: str, specials: Mapping[str, str]):
        self.source = source
        self.specials = dict(specials)
        self._notes = LogOnce(log)

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
        plain = plain_messages(messages, self._notes.warning)
        if continue_final_message:
            plain[-1] = _marked(plain[-1])
        if not describes_tools(self.source):
            plain = with_tools_told(plain, tools)
            tools = ()
        plain = self._remedies.apply(plain)
        limit = 4 * len(json.dumps([plain, list(tools)])) + MAX_WRAPPING
        given = {
            **_values(values),
            "messages": plain,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "tools": list(tools) or None,
        }
        try:
            text = self._generate(given, _Budget(limit))
        except Exception as error:  # whatever Python raises on the template's behalf
            raise RequestError(
                "messages", f"the model's chat template fails: {str(error) or type(error).__name__}"
            ) from None
        return _continued(text) if continue_final_message else text

    @functools.cached_property
    def _remedies(self) -> Remedies:
        """Changes that this template needs, which is tried once."""
        remedies = Remedies.of(self.source, self._probe)
        for remedy in remedies.needed:
            log.info("for the model's chat template, %s", remedy.does)
        return remedies

    def _probe(self, messages: Sequence[Message]) -> str | None:
        """The text of a short conversation with tools; None if the template fails."""
        return self._attempt(messages, self._probe_tools)

    @functools.cached_property
    def _probe_tools(self) -> list[Message] | None:
        """A tool, unless the template takes none."""
        tools = [PROBE_TOOL]
        question = [{"role": "user", "content": "x"}]
        return tools if self._attempt(question, tools) is not None else None

    def _attempt(self, messages: Sequence[Message], tools: list[Message] | None) -> str | None:
        given = {"messages": messages, "add_generation_prompt": True, "tools": tools}
        try:
            return self._generate(given, _Budget(MAX_WRAPPING, PROBE_ITERATIONS))
        except Exception:  # whatever Python raises on the template's behalf
            return None

    def _generate(self, given: Mapping[str, Any], budget: _Budget) -> str:
        """Writes the text for these variables. Errors: whatever the template raises."""
        variables = {"documents": None, **given, **self.specials}
        pieces = []
        size = 0
        for piece in self._template.generate(variables, iterations_left=budget):
            pieces.append(piece)
            size += len(piece)
            if size > budget.limit:
                raise jinja2.TemplateError(f"it writes more than {budget.limit} characters")
        return "".join(pieces)


def _marked(message: Message) -> Message:
    """A message with a mark at the end of its text. Errors: RequestError if it has none."""
    if not message["content"].strip():
        raise RequestError("continue_final_message", "the last message has no text")
    return {**message, "content": message["content"] + END}


def _continued(rendered: str) -> str:
    """Cuts a rendered text at the mark. Errors: RequestError if it is not there."""
    text, mark, _ = rendered.rpartition(END)
    if not mark:
        message = "the last message has no text that the model's chat template shows"
        raise RequestError("continue_final_message", message)
    return text


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
    """Budget of a rendering. limit: characters of any one text. iterations: of loops, and calls;
    left: those that may still come."""

    def __init__(self, limit: int, iterations: int = MAX_ITERATIONS) -> None:
        self.left = self.iterations = iterations
        self.limit = limit

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise jinja2.TemplateError(
                f"its loops and calls take more than {self.iterations} iterations"
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
