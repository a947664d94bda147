"""Tool calls: describes functions to a model, and parses calls in its output.

Each family of models writes calls in a format of its own; `FORMATS` lists them, and a model's chat
template shows which it uses. Where a template has no place for functions, a system message
describes them, in the format of Hermes models.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

MAX_CALLS = 64  # of one completion
TOLD = """\
You may call functions to answer. These are described in JSON between <tools></tools>:
<tools>
{tools}
</tools>
To call one, write its name and arguments in JSON between <tool_call></tool_call>:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call. arguments: JSON, as the model wrote it."""

    name: str
    arguments: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls: JSON between two marks, an object for one call or a list of them.

    end: '' where the end of the text ends a call. bare: JSON at the very start of the text is a
    call too. in_template: whether the model's chat template describes functions itself.
    """

    name: str
    begin: str
    end: str
    bare: bool = False
    in_template: bool = True

    def told(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Returns messages for a template without functions: a system message describes them, calls
        and results become plain text."""
        plain = [_as_text(message) for message in messages]
        if not tools:
            return plain
        told = TOLD.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if plain[0]["role"] == "system":
            return [{**plain[0], "content": f"{plain[0]['content']}\n\n{told}"}, *plain[1:]]
        return [{"role": "system", "content": told}, *plain]


FORMATS = (  # (text in a template that uses the format, format); the first match counts
    ("<tool_call>", ToolFormat("hermes", "<tool_call>", "</tool_call>")),
    ("[TOOL_CALLS]", ToolFormat("mistral", "[TOOL_CALLS]", "")),
    ("<|python_tag|>", ToolFormat("llama3", "<|python_tag|>", "", bare=True)),
    ("tools", ToolFormat("hermes", "<tool_call>", "</tool_call>", bare=True)),
)
UNTOLD = ToolFormat("hermes", "<tool_call>", "</tool_call>", in_template=False)


def format_of(template: str) -> ToolFormat:
    """Recognises a model's format by the source of its chat template."""
    return next(
        (form for mark, form in FORMATS if mark in template and "tools" in template), UNTOLD
    )


def call_schema(tools: Sequence[Mapping[str, Any]], name: str | None) -> dict[str, Any]:
    """Returns the JSON schema of a call of one of these functions, or of the one named. References
    inside a function's schema resolve within it."""
    functions = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    calls = [
        {
            "type": "object",
            "required": ["name", "arguments"],
            "additionalProperties": False,
            "properties": {
                "name": {"const": function["name"]},
                "arguments": _arguments(number, function.get("parameters")),
            },
        }
        for number, function in enumerate(functions)
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _arguments(number: int, schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a function's schema with an $id that its references are relative to, and without
    $schema: drafts before 6 know no $id."""
    kept = {
        name: value for name, value in (schema or {"type": "object"}).items() if name != "$schema"
    }
    return {"$id": f"json-schema:///{number}", **kept}


class CallReader:
    """Parses a stream of text into plain text and calls; what turns out not to be a call is
    text."""

    def __init__(self, form: ToolFormat):
        self._form = form
        self._held = ""
        # inside a call, the mark that it began with ('' for a bare one); None outside
        self._mark: str | None = None
        self._started = False  # whether there was any text but white space
        self._count = 0

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Takes a piece of text; returns the text that cannot belong to a call, and the calls that
        are complete."""
        self._held += text
        plain = ""
        calls = list[Call]()
        while True:
            if self._mark is not None:
                end = self._held.find(self._form.end) if self._form.end else -1
                if end < 0:
                    return plain, calls
                whole = self._held[:end]
                self._held = self._held[end + len(self._form.end) :]
                found = self._calls(whole)
                calls += found
                plain += "" if found else self._mark + whole + self._form.end
                self._mark = None
            elif self._bare:
                self._mark = ""
            elif self._form.begin in self._held:
                before, self._mark, self._held = self._held.partition(self._form.begin)
                plain = plain + before
                self._started = True
            else:
                return plain + self._certain(), calls

    def flush(self) -> tuple[str, list[Call]]:
        """Ends the text; returns what is left of it, and the calls that its end completes."""
        held = self._held
        self._held = ""
        if self._mark is None:
            return held, []
        calls = self._calls(held)
        return ("" if calls else self._mark + held), calls

    @property
    def _bare(self) -> bool:
        return self._form.bare and not self._started and self._held.lstrip()[:1] in ("{", "[")

    def _certain(self) -> str:
        """Takes and returns the part of the held text that cannot begin a call."""
        if not self._started and not self._held.strip() and self._form.bare:
            return ""
        mark = self._form.begin
        kept = next(
            (
                n
                for n in range(min(len(mark) - 1, len(self._held)), 0, -1)
                if self._held.endswith(mark[:n])
            ),
            0,
        )
        certain = self._held[: len(self._held) - kept]
        self._held = self._held[len(self._held) - kept :]
        self._started = self._started or bool(certain.strip())
        return certain

    def _calls(self, text: str) -> list[Call]:
        """Parses JSON of calls; returns none where it is malformed or the completion has too many
        calls."""
        try:
            found = json.loads(text)
            calls = [_call(entry) for entry in (found if isinstance(found, list) else [found])]
        except (ValueError, TypeError, KeyError, RecursionError):
            return []
        self._count += len(calls)
        self._started = True
        return calls if self._count <= MAX_CALLS else []


def _call(entry: Any) -> Call:
    name = entry["name"]
    arguments = entry.get("arguments", entry.get("parameters", {}))
    if not isinstance(name, str):
        raise TypeError(name)
    return Call(
        name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    )


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with its calls, or its result of one, written as plain text."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [{"name": f["name"], "arguments": f["arguments"]} for f in functions]
    written = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls]
    content = "\n".join(filter(None, [message["content"], *written]))
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    return {"role": message["role"], "content": content}
