"""What callers put before a model, whichever protocol they speak: text, token ids or a chat; and the ids that these become."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.request import RequestError

MAX_MESSAGES = 10_000
SLICE = 1 << 16                                         # ids that are read without a break
IDS_PER_CHAR = 4                                        # that are read in the same time
CHARS_PER_TOKEN = 128                                   # text longer than this times the model's limit is refused before it is read


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """special: names of special tokens in the text become these tokens, and the model's first token is added."""

    text: str
    special: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """Messages (role, content, and what the model's template makes use of), and the functions that the model may call."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)      # for the template, by name


Prompt = Text | Chat | Sequence[int] | np.ndarray


def size_of(prompt: Prompt) -> int:
    """How long reading a prompt may take, in characters of text."""
    match prompt:
        case Text():
            return len(prompt.text)
        case Chat():
            return _chars([prompt.messages, prompt.tools])
    return len(prompt) // IDS_PER_CHAR


def ids_of(prompt: Prompt, tokenizer: Any, max_len: int) -> Sequence[int] | np.ndarray:
    """Token ids of a prompt. Long ones take time. Errors: RequestError; FAILED_PRECONDITION where there is no tokenizer."""
    if not isinstance(prompt, (Text, Chat)):
        return array_of("prompt_ids", prompt)
    if tokenizer is None:
        raise RequestError("prompt", "this model has no tokenizer: send token ids", "FAILED_PRECONDITION")
    if isinstance(prompt, Text):
        _check_chars("prompt", size_of(prompt), max_len)
        return tokenizer.encode(prompt.text, special=prompt.special)
    if not prompt.messages:
        raise RequestError("messages", "is empty")
    if len(prompt.messages) > MAX_MESSAGES:
        raise RequestError("messages", f"has {len(prompt.messages)} entries; the limit is {MAX_MESSAGES}")
    _check_chars("messages", size_of(prompt), max_len)
    return tokenizer.chat(prompt.messages, tools=prompt.tools, values=prompt.values)


def array_of(name: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Ids of a list, read in slices between which other threads get the interpreter. Errors: RequestError that names the field."""
    if isinstance(ids, np.ndarray):
        return ids
    try:
        slices = [np.asarray(ids[at : at + SLICE]) for at in range(0, len(ids), SLICE)]
    except ValueError:                                  # lists of several lengths
        slices = [np.empty(0)]
    if any(part.dtype.kind not in "iu" or part.ndim != 1 for part in slices):
        raise RequestError(name, "must be a flat list of integers, none of them beyond 64 bits")
    return np.concatenate(slices) if slices else np.zeros(0, np.int64)


def _chars(value: Any) -> int:
    """Of all texts in a value of JSON, and one for each object and list."""
    line, chars = [value], 0
    while line:
        part = line.pop()
        if isinstance(part, str):
            chars += len(part)
        elif isinstance(part, Mapping):
            chars += 1 + sum(map(len, part))
            line.extend(part.values())
        elif isinstance(part, (list, tuple)):
            chars += 1
            line.extend(part)
    return chars


def _check_chars(name: str, chars: int, max_len: int) -> None:
    if chars > CHARS_PER_TOKEN * max_len:
        raise RequestError(name, f"has {chars} characters; the limit is {CHARS_PER_TOKEN} for each of the model's {max_len} tokens")
