"""Prompts of any protocol, text, token ids or a chat, and the token ids that these become."""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.server.json_body import whole
from jaxserve.text import Tokenizer

MAX_MESSAGES = 10_000
SLICE = 1 << 16  # ids converted without releasing the interpreter
IDS_PER_CHAR = 4  # ids that take as long to convert as a character to tokenize
# text longer than this times the model's maximum length is refused before it is tokenized
MAX_CHARS_PER_TOKEN = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """A prompt of text. special, added: as of `Tokenizer.encode`."""

    text: str
    special: bool = True
    added: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """A prompt of messages, to be rendered by the model's chat template.

    messages: mappings of role, content, and whatever else the template uses. tools: functions that
    the model may call. values: further variables of the template, by name. add_generation_prompt:
    end with the beginning of an answer. continue_final_message: end within the last message
    instead, which the model continues.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


Prompt = Text | Chat | Sequence[int] | np.ndarray


def is_continued(prompt: Prompt) -> bool:
    """Returns whether the output continues the prompt's text: that of a chat begins a message."""
    return not isinstance(prompt, Chat) or prompt.continue_final_message


def prompts_of(field: str, given: Any, most: int, added: bool = True) -> list[Prompt]:
    """Returns the prompts of a text, a list of ids, or a list of at most `most` of these. added: as
    of `Text`. Errors: RequestError of `field`."""
    if isinstance(given, str):
        return [Text(given, added=added)]
    if not isinstance(given, list):
        raise RequestError(field, "must be a text, a list of token ids, or a list of these")
    if not given:
        raise RequestError(field, "is empty")
    if not isinstance(given[0], (str, list)):
        return [given]
    if len(given) > most:
        raise RequestError(field, f"has {len(given)} entries; the limit is {most}")
    if {type(one) for one in given} not in ({str}, {list}):
        raise RequestError(field, "mixes texts and lists of token ids")
    return [Text(one, added=added) if isinstance(one, str) else one for one in given]


def prompt_cost(prompt: Prompt) -> int:
    """About how long a prompt takes to tokenize, in characters of text."""
    match prompt:
        case Text():
            return len(prompt.text)
        case Chat():
            return _count_chars([prompt.messages, prompt.tools])
    return len(prompt) // IDS_PER_CHAR


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer | None, max_model_len: int) -> np.ndarray:
    """Token ids of a prompt. Takes long for long ones.

    Errors: RequestError; FAILED_PRECONDITION for text or a chat without a tokenizer.
    """
    if not isinstance(prompt, (Text, Chat)):
        return to_array("prompt", prompt)
    field = "prompt" if isinstance(prompt, Text) else "messages"
    if tokenizer is None:
        raise RequestError(
            field, "this model has no tokenizer: send token ids", "FAILED_PRECONDITION"
        )
    try:
        return to_array(field, _tokenize(field, prompt, tokenizer, max_model_len))
    # also by JSON inside of tool calls, where there may be any character
    except UnicodeEncodeError:
        raise RequestError(
            field, "holds half a character: a surrogate without its other half"
        ) from None


def _tokenize(
    field: str, prompt: Text | Chat, tokenizer: Tokenizer, max_model_len: int
) -> Sequence[int]:
    if isinstance(prompt, Text):
        _check_chars(field, prompt_cost(prompt), max_model_len)
        return tokenizer.encode(prompt.text, prompt.special, prompt.added)
    if not prompt.messages:
        raise RequestError(field, "is empty")
    if len(prompt.messages) > MAX_MESSAGES:
        count = len(prompt.messages)
        raise RequestError(field, f"has {count} entries; the limit is {MAX_MESSAGES}")
    _check_chars(field, prompt_cost(prompt), max_model_len)
    return tokenizer.chat(
        prompt.messages,
        tools=prompt.tools,
        values=prompt.values,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
    )


def to_array(field: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """An int64 array of a list of ids, converted slice by slice: other threads may take the
    interpreter in between. Errors: RequestError of `field`."""
    if isinstance(ids, np.ndarray):
        return ids
    return np.frombuffer(b"".join(_slices(field, ids)), np.int64)


def _slices(field: str, ids: Sequence[int]) -> Iterator[array.array[int]]:
    """Arrays of SLICE ids. Not by numpy: a text among the ids would make every entry of its array
    as long as that text."""
    for begin in range(0, len(ids), SLICE):
        part = ids[begin : begin + SLICE]
        if not set(map(type, part)) <= {int}:
            part = list(map(whole, part))
        if not set(map(type, part)) <= {int}:
            raise RequestError(field, "must be a flat list of integers")
        try:
            yield array.array("q", part)
        except OverflowError:
            raise RequestError(field, "holds an integer beyond 64 bits") from None


def _count_chars(value: Any) -> int:
    """Characters of all texts in a JSON value, and one for each other value in it."""
    pending = [value]
    chars = 0
    while pending:
        part = pending.pop()
        if isinstance(part, str):
            chars += len(part)
            continue
        chars += 1
        if isinstance(part, Mapping):
            chars += sum(map(len, part))
            pending.extend(part.values())
        elif isinstance(part, (list, tuple)):
            pending.extend(part)
    return chars


def _check_chars(field: str, chars: int, max_model_len: int) -> None:
    if chars > MAX_CHARS_PER_TOKEN * max_model_len:
        raise RequestError(
            field,
            f"has {chars} characters; the limit is {MAX_CHARS_PER_TOKEN} for each of the model's "
            f"{max_model_len} tokens",
        )
