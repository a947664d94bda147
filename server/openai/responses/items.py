"""Items of a conversation of /v1/responses, read as the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.server.json_body import JsonObject
from jaxserve.server.openai.responses.tools import qualified

MAX_ITEMS = 10_000
ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
_TEXT_PART: JsonObject = {
    "type": "object",
    "properties": {"type": {"enum": [*TEXT_PARTS]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
ITEM_SCHEMA: JsonObject = {  # of a message, or of what has another type
    "type": "object",
    "anyOf": [
        {
            "properties": {"type": {"not": {"enum": [None, False, 0, "", [], {}, "message"]}}},
            "required": ["type"],
        },
        {"properties": {"role": {"const": "assistant"}}, "required": ["role"]},
        {
            "properties": {
                "role": {"enum": [role for role in ROLES if role != "assistant"]},
                "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]},
            },
            "required": ["role", "content"],
        },
    ],
}
REFERENCE = "item_reference"
OUTPUT = "_call_output"  # ends the types of results
# what calls are named that have no name, and where they have their arguments, by type
CALLS = {
    "function_call": ("", "arguments"),
    "custom_tool_call": ("", "input"),
    "mcp_call": ("", "arguments"),
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "computer_call": ("computer", "action"),
}


def messages_of(
    instructions: str | None, earlier: Sequence[JsonObject], items: Sequence[JsonObject]
) -> list[JsonObject]:
    """Returns a conversation as the messages of a chat. earlier: items that it continues. Errors:
    RequestError that names the item."""
    reader = _ItemReader()
    if instructions:
        reader.messages.append({"role": "system", "content": instructions})
    if len(earlier) + len(items) > MAX_ITEMS:
        raise RequestError("input", f"must have at most {MAX_ITEMS} items, those before included")
    for item in earlier:
        reader.read(item, "previous_response_id")
    for number, item in enumerate(items):
        reader.read(item, f"input.{number}")
    if not reader.messages:
        raise RequestError("input", "is empty, and there are no instructions")
    return reader.messages


def is_read(item: Mapping[str, Any]) -> bool:
    """Returns True for items that are read, and False for those that are left out, such as searches
    that another server ran."""
    kind = _type(item)
    return kind in ("message", "reasoning") or kind in CALLS or kind.endswith(OUTPUT)


def resolved(items: Sequence[JsonObject], known: Mapping[str, JsonObject]) -> list[JsonObject]:
    """Returns items with those that references name in place of these. known: items by id."""
    return [known.get(str(item.get("id")), item) if _refers(item) else item for item in items]


def has_references(items: Sequence[JsonObject]) -> bool:
    return any(map(_refers, items))


def _refers(item: Mapping[str, Any]) -> bool:
    return item.get("type") == REFERENCE


def _type(item: Mapping[str, Any]) -> str:
    return str(item.get("type") or "message")


class _ItemReader:
    """Reads items in order, into messages."""

    def __init__(self) -> None:
        self.messages: list[JsonObject] = []
        self._thoughts: list[str] = []  # since the last message of an assistant

    def read(self, item: Mapping[str, Any], where: str) -> None:
        """Adds an item. Errors: RequestError."""
        kind = _type(item)
        if kind == "message":
            self._add_message(item, where)
        elif kind == "reasoning":
            self._thoughts += _texts(item.get("content")) or _texts(item.get("summary"))
        elif kind in CALLS:
            self._add_call(item, *CALLS[kind])
        elif kind.endswith(OUTPUT):
            self._add_result(item.get("call_id") or item.get("id"), item.get("output"))

    def _add_message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise RequestError(f"{where}.role", f"must be one of {', '.join(ROLES)}")
        content = item.get("content")
        if role != "assistant":
            _check_text(content, f"{where}.content")
            if self._thoughts:  # of an answer that was cut off
                self._add_answer("")
            self.messages.append({"role": role, "content": content})
        else:
            self._add_answer(content)

    def _add_answer(self, content: Any) -> None:
        self.messages.append({"role": "assistant", "content": content})
        self._add_thoughts()

    def _add_thoughts(self) -> None:
        """Gives the last message the reasoning before it."""
        message = self.messages[-1]
        texts = [message.get("reasoning_content", ""), *self._thoughts]
        self._thoughts = []
        if any(texts):
            message["reasoning_content"] = "\n".join(filter(None, texts))

    def _add_call(self, item: Mapping[str, Any], name: str, field: str) -> None:
        if not (self.messages and self.messages[-1]["role"] == "assistant"):
            self.messages.append({"role": "assistant", "content": ""})
        self._add_thoughts()
        arguments = item.get(field)
        if field == "input":  # a text of the tool's own
            arguments = {field: arguments}
        name = item.get("name") or name
        if isinstance(item.get("namespace"), str) and isinstance(name, str):
            name = qualified(item["namespace"], name)
        function = {"name": name, "arguments": arguments}
        id = item.get("call_id") or item.get("id")
        call = {"id": id, "type": "function", "function": function}
        self.messages[-1].setdefault("tool_calls", []).append(call)
        if "output" in item or "error" in item:  # the server that called has the result, too
            self._add_result(id, item.get("output") or item.get("error"))

    def _add_result(self, id: Any, content: Any) -> None:
        self.messages.append({"role": "tool", "tool_call_id": id, "content": content})


def _texts(parts: Any) -> list[str]:
    """The texts among parts."""
    if isinstance(parts, str):
        return [parts]
    if not isinstance(parts, list):
        return []
    return list(_part_texts(parts))


def _part_texts(parts: Sequence[Any]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            yield part["text"]


def _check_text(content: Any, where: str) -> None:
    """Checks that a content is text. Errors: RequestError."""
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise RequestError(where, "must be a text or a list of texts")
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") in TEXT_PARTS
        if not is_text or not isinstance(part.get("text"), str):
            raise RequestError(where, f"has a part that is none of {', '.join(TEXT_PARTS)}")
