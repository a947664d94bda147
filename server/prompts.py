"""What callers put before a model, whichever protocol they speak: text, token ids or a chat; and
the ids that these become."""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.api.errors import RequestError

MAX_MESSAGES = 10_000
SLICE = 1 << 16  # ids that are read without a break
IDS_PER_CHAR = 4  # that are read in the same time
CHARS_PER_TOKEN = 128  # text longer than this times the model's limit is refused before it is read


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """special: names of special tokens in the text become these tokens, and the model's first token
    is added."""

    text: str
    special: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """Messages (role, content, and what the model's template makes use of), and the functions that
    the model may call."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # for the template, by name


Prompt = Text | Chat | Sequence[int] | np.ndarray


def size_of(prompt: Prompt) -> int:
    """How long reading a prompt may take, in characters of text."""
    match prompt:
        case Text():
            return len(prompt.text)
        case Chat():
            return _chars([prompt.messages, prompt.tools])
    return len(prompt) // IDS_PER_CHAR


def ids_of(prompt: Prompt, tokenizer: Any, max_len: int) -> np.ndarray:
    """Token ids of a prompt. Long ones take time. Errors: RequestError; FAILED_PRECONDITION where
    there is no tokenizer."""
    if not isinstance(prompt, (Text, Chat)):
        return array_of("prompt_ids", prompt)
    name = "prompt" if isinstance(prompt, Text) else "messages"
    if tokenizer is None:
        raise RequestError(
            name, "this model has no tokenizer: send token ids", "FAILED_PRECONDITION"
        )
    try:
        return array_of(name, _ids_of_text(name, prompt, tokenizer, max_len))
    # calls of functions hold JSON of their own, where there may be anything
    except UnicodeEncodeError:
        raise RequestError(
            name, "holds half a character: a surrogate without its other half"
        ) from None


def _ids_of_text(name: str, prompt: Text | Chat, tokenizer: Any, max_len: int) -> Sequence[int]:
    if isinstance(prompt, Text):
        _check_chars(name, size_of(prompt), max_len)
        return tokenizer.encode(prompt.text, special=prompt.special)
    if not prompt.messages:
        raise RequestError(name, "is empty")
    if len(prompt.messages) > MAX_MESSAGES:
        raise RequestError(name, f"has {len(prompt.messages)} entries; the limit is {MAX_MESSAGES}")
    _check_chars(name, size_of(prompt), max_len)
    return tokenizer.chat(prompt.messages, tools=prompt.tools, values=prompt.values)


def array_of(name: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Ids of a list, read in slices between which other threads get the interpreter. Errors:
    RequestError that names the field."""
    return (
        ids
        if isinstance(ids, np.ndarray)
        else np.frombuffer(b"".join(_slices(name, ids)), np.int64)
    )


def _slices(name: str, ids: Sequence[int]) -> Iterator[array.array[int]]:
    """Not by numpy, which gives every one of many ids the room that a long text among them
    needs."""
    for at in range(0, len(ids), SLICE):
        part = ids[at : at + SLICE]
        if not set(map(type, part)) <= {int}:
            raise RequestError(name, "must be a flat list of integers")
        try:
            yield array.array("q", part)
        except OverflowError:
            raise RequestError(name, "holds an integer beyond 64 bits") from None


def _chars(value: Any) -> int:
    """Of all texts in a value of JSON, and one for each other value in it."""
    line = [value]
    chars = 0
    while line:
        part = line.pop()
        if isinstance(part, str):
            chars += len(part)
            continue
        chars += 1
        if isinstance(part, Mapping):
            chars += sum(map(len, part))
            line.extend(part.values())
        elif isinstance(part, (list, tuple)):
            line.extend(part)
    return chars


def _check_chars(name: str, chars: int, max_len: int) -> None:
    if chars > CHARS_PER_TOKEN * max_len:
        raise RequestError(
            name,
            f"has {chars} characters; the limit is {CHARS_PER_TOKEN} for each of the model's {max_len} tokens",
        )
