"""Changes of conversations, by which templates take what they did not take."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxserve.text.conversation.messages import REASONING, Message

Messages = Sequence[Message]

FIRST_ROLES = ("system", "developer")
SEPARATOR = "\n\n"
ID_CHARS = 9  # of the ids of calls that Mistral's templates take
BLANK = " "  # where a template refuses an empty text


def user(content: str) -> Message:
    """Returns a message of a user."""
    return {"role": "user", "content": content}


def developer_as_system(messages: Messages) -> Iterator[Message]:
    for message in messages:
        if message["role"] == "developer":
            message = {**message, "role": "system"}
        yield message


def _split(messages: Messages) -> tuple[str, list[Message]]:
    """Returns the texts of a system, and the other messages."""
    texts = [message["content"] for message in messages if message["role"] in FIRST_ROLES]
    rest = [message for message in messages if message["role"] not in FIRST_ROLES]
    return SEPARATOR.join(filter(None, texts)), rest


def one_system(messages: Messages) -> Iterator[Message]:
    text, rest = _split(messages)
    if len(rest) < len(messages):
        first = next(message for message in messages if message["role"] in FIRST_ROLES)
        yield {**first, "content": text}
    yield from rest


def system_in_user(messages: Messages) -> list[Message]:
    text, rest = _split(messages)
    if not text:
        return rest
    if rest and rest[0]["role"] == "user":
        return [_joined(user(text), rest[0]), *rest[1:]]
    return [user(text), *rest]


def one_call_each(messages: Messages) -> Iterator[Message]:
    """Makes a message of each call, which its result follows."""
    taken: set[int] = set()
    for number, message in enumerate(messages):
        calls = message.get("tool_calls", ())
        if number in taken:
            continue
        if len(calls) < 2:
            yield message
            continue
        later = range(number + 1, len(messages))
        begun = message
        for call in calls:
            yield {**begun, "tool_calls": [call]}
            begun = {"role": "assistant", "content": ""}
            for i in _answers(messages, later, call["id"]):
                taken.add(i)
                yield messages[i]


def _answers(messages: Messages, places: Iterable[int], id: str) -> Iterator[int]:
    """Places of the results of a call, of those that come before another kind of message."""
    for i in places:
        if messages[i]["role"] != "tool":
            return
        if messages[i].get("tool_call_id") == id:
            yield i


def short_ids(messages: Messages) -> Iterator[Message]:
    for message in messages:
        changed = dict(message)
        if "tool_calls" in changed:
            calls = changed["tool_calls"]
            changed["tool_calls"] = [{**call, "id": _short(call["id"])} for call in calls]
        if "tool_call_id" in changed:
            changed["tool_call_id"] = _short(changed["tool_call_id"])
        yield changed


def _short(id: str) -> str:
    """An id of ID_CHARS letters and digits, made of a longer one."""
    if len(id) == ID_CHARS and id.isalnum():
        return id
    return hashlib.blake2b(id.encode(), digest_size=8).hexdigest()[:ID_CHARS]


def reasoning_in_content(messages: Messages) -> Iterator[Message]:
    """Puts reasoning before the text of messages with calls, which are allowed only one of them."""
    for message in messages:
        name = next((name for name in REASONING if name in message), "")
        if not (name and message["content"] and message.get("tool_calls")):
            yield message
            continue
        content = SEPARATOR.join((message[name], message["content"]))
        rest = {key: value for key, value in message.items() if key not in REASONING}
        yield {**rest, "content": content}


def reasoning_as_part(messages: Messages) -> Iterator[Message]:
    for message in messages:
        name = next((name for name in REASONING if name in message), "")
        if not name or not isinstance(message["content"], str):
            yield message
            continue
        thought = {"type": "thinking", "thinking": message[name]}
        text = {"type": "text", "text": message["content"]}
        yield {**message, "content": [thought, text]}


def stray_results_as_text(messages: Messages) -> Iterator[Message]:
    """Makes results that do not follow their calls messages of the user."""
    called: set[str] = set()
    for message in messages:
        if message["role"] != "tool":
            called = {call["id"] for call in message.get("tool_calls", ())}
        elif message.get("tool_call_id") not in called:
            message = _result_as_text(message)
        yield message


def calls_as_text(messages: Messages) -> Iterator[Message]:
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        written = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls]
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        yield {**rest, "content": "\n".join(filter(None, [message["content"], *written]))}


def results_as_text(messages: Messages) -> Iterator[Message]:
    for message in messages:
        if message["role"] == "tool":
            message = _result_as_text(message)
        yield message


def tools_as_text(messages: Messages) -> Iterator[Message]:
    """Writes calls and their results as plain text, in the format of Hermes models."""
    return results_as_text([*calls_as_text(messages)])


def _result_as_text(message: Message) -> Message:
    return user(f"<tool_response>\n{message['content']}\n</tool_response>")


def alternating(messages: Messages) -> Iterator[Message]:
    """Joins messages of one role that follow each other, but not calls."""
    last: Message | None = None
    for message in messages:
        if last is None:
            last = message
        elif message["role"] == last["role"] and _may_join(last, message):
            last = _joined(last, message)
        else:
            yield last
            last = message
    if last is not None:
        yield last


def _may_join(first: Message, second: Message) -> bool:
    has_calls = "tool_calls" in first or "tool_calls" in second
    return first["role"] in ("user", "assistant") and not has_calls


def _joined(first: Message, second: Message) -> Message:
    texts = {
        name: SEPARATOR.join(filter(None, (first.get(name), second.get(name))))
        for name in ("content", *REASONING)
        if name in first or name in second
    }
    return {**first, **second, **texts}


def some_user(messages: Messages) -> Iterable[Message]:
    """Adds an empty message of a user to a conversation without one."""
    if any(message["role"] == "user" for message in messages):
        return messages
    begin = _beginning(messages)
    return [*messages[:begin], user(""), *messages[begin:]]


def user_first(messages: Messages) -> Iterable[Message]:
    """Adds an empty message of a user before a conversation that begins with another's."""
    begin = _beginning(messages)
    if begin == len(messages) or messages[begin]["role"] == "user":
        return messages
    return [*messages[:begin], user(""), *messages[begin:]]


def _beginning(messages: Messages) -> int:
    """Returns the place of the first message that is not of a system."""
    places = (i for i, message in enumerate(messages) if message["role"] not in FIRST_ROLES)
    return next(places, len(messages))


def blank_answers(messages: Messages) -> Iterator[Message]:
    for message in messages:
        empty = message["role"] == "assistant" and not message["content"]
        if empty and "tool_calls" not in message:
            message = {**message, "content": BLANK}
        yield message


def answered_before_user(messages: Messages) -> Iterator[Message]:
    """Adds a blank answer where a user goes on after calls or their results."""
    asked = False
    last = ""
    for message in messages:
        role = message["role"]
        if role == "user":
            if asked and last != role:
                yield {"role": "assistant", "content": BLANK}
            asked = True
        elif role == "assistant" and "tool_calls" not in message:
            asked = False
        last = role
        yield message


def text_before_calls(messages: Messages) -> Iterator[Message]:
    """Makes a message of the text that comes with calls."""
    return _text_before_calls(messages)


def text_and_user_before_calls(messages: Messages) -> Iterator[Message]:
    """Makes a message of the text that comes with calls, and an empty one of the user behind it, as
    answers may not follow each other."""
    return _text_before_calls(messages, user(""))


def _text_before_calls(messages: Messages, *between: Message) -> Iterator[Message]:
    for message in messages:
        if message["content"] and "tool_calls" in message:
            yield {"role": message["role"], "content": message["content"]}
            yield from between
            message = {**message, "content": ""}
        yield message


def null_beside_calls(messages: Messages) -> Iterator[Message]:
    for message in messages:
        if "tool_calls" in message and not message["content"]:
            message = {**message, "content": None}
        yield message


def parts(messages: Messages) -> Iterator[Message]:
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        yield {**message, "content": content}


def arguments_as_text(messages: Messages) -> Iterator[Message]:
    for message in messages:
        if "tool_calls" in message:
            calls = [_with_text(call) for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        yield message


def null_beside_text_arguments(messages: Messages) -> Iterator[Message]:
    """Makes both changes: neither is of use alone for DeepSeek's templates."""
    return arguments_as_text([*null_beside_calls(messages)])


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
