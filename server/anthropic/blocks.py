"""Blocks of the messages of /v1/messages, read as the messages of a chat."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.server.generation.fields import text_in
from jaxserve.server.json_body import JsonObject

Block = Mapping[str, Any]

CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
RESULT = "tool_result"  # and what ends with it: of tools that another server ran
HIDDEN = "redacted_thinking"  # nothing of it can be read
# begins a text that Claude Code sends and changes with every request, so that no prefix of a prompt
# would be found in the cache
BILLING = "x-anthropic-billing-header:"


def system_text(content: str | Sequence[Block]) -> str:
    """Returns the text of a system. Errors: RequestError for anything but text."""
    if isinstance(content, str):
        return content
    texts = [_text(block, f"system.{number}") for number, block in enumerate(content)]
    return "\n".join(text for text in texts if not text.startswith(BILLING))


def user_messages(content: str | Sequence[Block], role: str, where: str) -> Iterator[JsonObject]:
    """Yields what a user or a system says; results of tools are messages of their own, and come
    first. Errors: RequestError for anything but text and results."""
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    texts = []
    for number, block in enumerate(content):
        if block.get("type") == RESULT and role == "user":
            yield _result(block)
        else:
            texts.append(_text(block, f"{where}.content.{number}"))
    if texts:
        yield {"role": role, "content": "\n".join(texts)}


def assistant_messages(content: str | Sequence[Block]) -> Iterator[JsonObject]:
    """Yields what an assistant said, and the results that are among it."""
    if isinstance(content, str):
        yield {"role": "assistant", "content": content}
        return
    said = _Said()
    for block in content:
        kind = _type(block)
        if kind.endswith(RESULT):
            yield from said.messages()
            said = _Said()
            yield _result(block)
        else:
            said.add(kind, block)
    yield from said.messages()


def left_out(content: str | Sequence[Block]) -> list[str]:
    """Returns the types of an assistant's blocks that are not read."""
    if isinstance(content, str):
        return []
    types = dict.fromkeys(map(_type, content))
    known = ("text", "thinking", HIDDEN, *CALLS)
    return [kind for kind in types if kind not in known and not kind.endswith(RESULT)]


@dataclasses.dataclass
class _Said:
    """Texts, reasoning and calls of an assistant, up to the next result."""

    texts: list[str] = dataclasses.field(default_factory=list)
    thoughts: list[str] = dataclasses.field(default_factory=list)
    calls: list[JsonObject] = dataclasses.field(default_factory=list)

    def add(self, kind: str, block: Block) -> None:
        if kind in CALLS:
            function = {"name": block.get("name"), "arguments": block.get("input")}
            call = {"id": block.get("id"), "type": "function", "function": function}
            self.calls.append(call)
        elif kind == "text":
            self.texts.append(str(block.get(kind) or ""))
        elif kind == "thinking":
            self.thoughts.append(str(block.get(kind) or ""))

    def messages(self) -> Iterator[JsonObject]:
        """Yields a message of it, unless it is nothing."""
        message: JsonObject = {"role": "assistant", "content": "\n".join(self.texts)}
        if self.thoughts:
            message["reasoning_content"] = "\n".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        if self.texts or self.thoughts or self.calls:
            yield message


def _result(block: Block) -> JsonObject:
    content = block.get("content")
    if isinstance(content, list):
        content = [_readable(part) for part in content]
    if block.get("is_error"):
        content = ["Error:", *_listed(content)]
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}


def _listed(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [content or ""]


def _readable(part: Any) -> Any:
    """A part of a result, as text if it is one."""
    try:
        return _text(part, "")
    except RequestError:
        return part


def _text(block: Any, where: str) -> str:
    """The text of a block. Errors: RequestError that names the place of another block."""
    match block:
        case {"type": "text"}:
            return text_in(block, "text", where)
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return text
        case {"type": "document", "source": {"type": "content", "content": str(text)}}:
            return text
        case {"type": "document", "source": {"type": "content", "content": [*parts]}}:
            place = f"{where}.source.content"
            return "\n".join(_text(part, f"{place}.{i}") for i, part in enumerate(parts))
        case {"type": "search_result", "content": [*parts]}:
            texts = [_text(part, f"{where}.content.{i}") for i, part in enumerate(parts)]
            heads = [block.get(name) for name in ("title", "source")]
            return "\n".join([*map(str, filter(None, heads)), *texts])
    message = f"is {_type(block)!a:.50}: parts that are not text cannot be taken by this model"
    raise RequestError(f"{where}.type", message)


def _type(block: Any) -> str:
    if not isinstance(block, Mapping):
        return ""
    return str(block.get("type"))
