"""Renders a model's chat template, with what it needs to show all of a conversation."""

from __future__ import annotations

import copy
import datetime
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.meta

from jaxserve.api.errors import RequestError
from jaxserve.api.log_once import LogOnce
from jaxserve.text.chat_output.formats import describes_tools
from jaxserve.text.conversation import Message, Remedies, plain_messages
from jaxserve.text.template_sandbox import Budget, Sandbox
from jaxserve.text.tool_prompt import with_tools_told

PROBE_ITERATIONS = 10_000  # of one that only tries what the template takes
MAX_VALUE_CHARS = 2**14  # of a variable, in JSON
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
        return Sandbox().from_string(self.source)

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
            "tools": copy.deepcopy(list(tools)) or self._no_tools,
        }
        try:
            text = self._generate(given, Budget(limit))
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

    @functools.cached_property
    def _no_tools(self) -> list[Message] | None:
        """The value for no tools: None, or an empty list for templates that fail on None."""
        question = [{"role": "user", "content": "x"}]
        fails = self._attempt(question, None) is None
        return [] if fails and self._attempt(question, []) is not None else None

    @functools.cached_property
    def _takes_functions(self) -> bool:
        """True for templates that take tools as Firefunction's: as JSON, in `functions`."""
        names = jinja2.meta.find_undeclared_variables(Sandbox().parse(self.source))
        return "functions" in names and "tools" not in names

    def _attempt(self, messages: Sequence[Message], tools: list[Message] | None) -> str | None:
        given = {"messages": list(messages), "add_generation_prompt": True, "tools": tools}
        try:
            return self._generate(given, Budget(MAX_WRAPPING, PROBE_ITERATIONS))
        except Exception:  # whatever Python raises on the template's behalf
            return None

    def _generate(self, given: Mapping[str, Any], budget: Budget) -> str:
        """Writes the text for these variables. Errors: whatever the template raises."""
        variables = {"documents": None, **given, **self.specials}
        if self._takes_functions:
            functions = [tool["function"] for tool in given["tools"] or ()]
            variables["functions"] = json.dumps(functions, indent=4)
            variables["datetime"] = f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}"
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
        if name in RESERVED or len(json.dumps(value, ensure_ascii=False)) > MAX_VALUE_CHARS:
            raise RequestError(
                "chat_template_kwargs",
                f"{name[:100]!r} must have at most {MAX_VALUE_CHARS} characters in JSON, and be "
                f"none of {', '.join(RESERVED)}",
            )
    return dict(values)
