"""Reads the messages of a chat and gives them one form.

A plain message has a role, and a content that is text. An assistant's may have `reasoning_content`,
and `tool_calls` whose arguments are objects; a tool's has the id and the name of the call that it
answers. Legacy roles and fields become these. What an assistant or a tool said is never refused: it
may have been written by this server, and would make every later turn fail.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.text.conversation.arguments import read_arguments

Message = dict[str, Any]
Note = Callable[..., None]  # takes a message for the log, and values for its places

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
REASONING = ("reasoning_content", "reasoning", "thinking")  # the first one that has text
MEDIA = frozenset(  # types of parts that are left out of what tools said
    (
        *("image", "image_url", "input_image", "computer_screenshot", "document", "file"),
        *("input_file", "audio", "input_audio", "audio_url", "video", "video_url"),
    )
)
LENIENT = ("assistant", "tool")  # roles of which nothing is refused
LEFT_OUT = "[{} was left out: only text can be taken]"
_FORMS = ("tool_calls", "function_call", "refusal", *REASONING)  # fields that are read
_TEXTS = ("text", "refusal")  # of parts
_TEXT_TYPES = ("text", "input_text", "output_text", "refusal")
_THOUGHTS = ("thinking", "reasoning", "reasoning_text", "summary_text")  # types of parts


def plain_messages(messages: Any, note: Note) -> list[Message]:
    """Returns messages in their plain form. note: is called with what was repaired or left out.

    Errors: RequestError for what is no list of messages, and for contents of a user or a system
    that are not text.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError("messages", "must be a list of at least one message")
    reader = _Reader(note)
    return [reader.read(message, number) for number, message in enumerate(messages)]


class _Reader:
    """Reads the messages of one chat, in order."""

    def __init__(self, note: Note):
        self._note = note
        self._calls = 0  # so far
        self._names: dict[str, str] = {}  # of all calls, by id
        self._unanswered: list[str] = []  # ids

    def read(self, message: Any, number: int) -> Message:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError("messages", f"message {number} is not an object with a role")
        role = message["role"]
        if role not in ROLES:
            self._note("messages of the role %a are given to the chat template as they are", role)
        plain = {key: value for key, value in message.items() if value is not None}
        for key in _FORMS:
            plain.pop(key, None)
        if role == "assistant":
            return plain | self._assistant(message, number)
        if role in ("tool", "function"):
            return plain | self._result(message, number)
        return plain | {"content": self._text(message.get("content"), role, number)}

    # --- what an assistant said

    def _assistant(self, message: Mapping[str, Any], number: int) -> Message:
        content = message.get("content")
        thoughts = [message.get(key) for key in REASONING] + [_thoughts(content)]
        reasoning = next(filter(None, map(_joined_text, thoughts)), "")
        text = self._text(content, "assistant", number)
        plain: Message = {"content": text or _joined_text(message.get("refusal"))}
        if reasoning:
            plain["reasoning_content"] = reasoning
        if calls := [call for given in _calls(message) for call in self._call(given)]:
            plain["tool_calls"] = calls
        return plain

    def _call(self, call: Any) -> list[Message]:
        """A call as templates expect it, in a list; an empty one for what is none."""
        if not isinstance(call, Mapping):
            self._note("a call that is not an object was left out of a chat")
            return []
        function = next(
            (call[key] for key in ("function", "custom") if _is_object(call, key)), call
        )
        given = function.get("arguments", function.get("input"))
        if "arguments" not in function and isinstance(given, str):
            given = {"input": given}  # a text in a form of the tool's own
        arguments, sound = read_arguments(given)
        if not sound:
            self._note("arguments of a call that are not an object of JSON were repaired in a chat")
        name = function.get("name")
        if not isinstance(name, str):
            self._note("a call without a name was found in a chat")
            name = ""
        self._calls += 1
        id = _id(call.get("id")) or f"call_{self._calls}"
        self._names[id] = name
        self._unanswered.append(id)
        function = {"name": name, "arguments": arguments}  # alone: templates may write all of it
        return [{"id": id, "type": "function", "function": function}]

    # --- what a tool said

    def _result(self, message: Mapping[str, Any], number: int) -> Message:
        name = message.get("name")
        id = _id(message.get("tool_call_id")) or self._unanswered_call(name)
        if id in self._unanswered:
            self._unanswered.remove(id)
        text = self._result_text(message.get("content"), number)
        name = self._names.get(id) or _joined_text(name) or "tool"
        return {"role": "tool", "content": text, "tool_call_id": id, "name": name}

    def _result_text(self, content: Any, number: int) -> str:
        """The text of what a tool said: of data, in JSON."""
        parts = content
        if not isinstance(content, (list, tuple)):
            parts = [content]
        if content is not None and any(map(_is_data, parts)):
            return json.dumps(content, ensure_ascii=False)
        return self._text(content, "tool", number)

    def _unanswered_call(self, name: Any) -> str:
        """The id of the first call without a result, of this name if there is one; else a new
        one."""
        of_name = [id for id in self._unanswered if self._names[id] == name]
        return next(iter(of_name or self._unanswered), f"call_of_{len(self._names)}")

    # --- contents

    def _text(self, content: Any, role: str, number: int) -> str:
        """The text of a content. Errors: RequestError for anything else of a user or a system."""
        if isinstance(content, Mapping):
            content = [content]
        if isinstance(content, str):
            return content
        if isinstance(content, (list, tuple)):
            return "\n".join(self._part_texts(content, role, number))
        if content is None and role in LENIENT:
            return ""
        raise RequestError("messages", f"message {number} has no content")

    def _part_texts(self, parts: Sequence[Any], role: str, number: int) -> list[str]:
        texts = []
        for part in parts:
            text = _part_text(part)
            if text is not None:
                texts.append(text)
            elif role == "assistant" and _type(part) in _THOUGHTS:
                continue  # read as reasoning
            elif role in LENIENT:
                kind = _type(part) or "a part"
                self._note("a part of type %a was left out of a chat", kind)
                texts += [LEFT_OUT.format(kind)] * (role == "tool")
            else:
                message = "has parts that are not text, which this model cannot take"
                raise RequestError("messages", f"message {number} {message}")
        return texts


def _calls(message: Mapping[str, Any]) -> Sequence[Any]:
    """The calls of a message, in today's form or in that before it."""
    calls = message.get("tool_calls") or message.get("function_call") or ()
    if isinstance(calls, (list, tuple)):
        return calls
    return [calls]


def _is_object(value: Mapping[str, Any], key: str) -> bool:
    return isinstance(value.get(key), Mapping)


def _id(value: Any) -> str:
    return str(value) if isinstance(value, (str, int)) else ""


def _type(part: Any) -> str:
    return str(part.get("type", "")) if isinstance(part, Mapping) else ""


def _is_data(value: Any) -> bool:
    """True unless a value is a part of a content: a text, or something to be seen or heard."""
    if _type(value) in _TEXT_TYPES:
        return _part_text(value) is None
    return not isinstance(value, str) and _type(value) not in MEDIA


def _part_text(part: Any) -> str | None:
    """The text of a part; None if it is of another kind."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type") in _THOUGHTS:
        return None
    texts = [part[key] for key in _TEXTS if isinstance(part.get(key), str)]
    if not texts and "text" in part and part["text"] is None:
        return ""
    return next(iter(texts), None)


def _thoughts(content: Any) -> str:
    """The reasoning among the parts of a content."""
    if not isinstance(content, (list, tuple)):
        return ""
    parts = [part for part in content if _type(part) in _THOUGHTS]
    return "\n".join(filter(None, map(_joined_text, parts)))


def _joined_text(value: Any) -> str:
    """The text of a text, of an object with a text, or of a list of such."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        inner = [value.get(key) for key in (*_TEXTS, *REASONING, "content", "summary")]
        return next(filter(None, map(_joined_text, inner)), "")
    if isinstance(value, (list, tuple)):
        return "\n".join(filter(None, map(_joined_text, value)))
    return ""
