"""`jaxserve generate`: prompts from the command line or a file, completions to standard output."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Logprobs
from jaxserve.api.sampling import SamplingParams
from jaxserve.cli.engine_flags import ALL, engine_groups
from jaxserve.cli.sampling_flags import NAMES, sampling_fields, sampling_options
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError
from jaxserve.text.output import Completion, Delta

PROMPTS = ("prompt", "prompt_ids", "messages")
KNOWN = (*PROMPTS, "class_name", *NAMES)  # fields of a line
ABOUT = """\
Give --prompt, or --input with a file of JSON lines (- for standard input). A line has prompt
(text), prompt_ids or messages (a list of {"role": ..., "content": ...}), and class_name and
sampling fields named as the flags; the flags are the defaults of the lines.

With --json, each completion is a line with prompt_ids, output_ids, text and finish_reason, and
logprobs where asked for, in the order of the input.

  jaxserve generate smollm2-135m --prompt="The capital of France is" --max_tokens=20
  jaxserve generate smollm2-135m --input=prompts.jsonl --json --mesh=spp=2,kvp=2,tp=3
"""
INPUT = [
    Option("prompt", str, None, "the text to go on with"),
    Option("input", str, None, "a file with a prompt in each line"),
    Option("json", bool, False, "write JSON lines"),
    Option("class_name", str, None, "class of the requests, one of --classes"),
]


@dataclasses.dataclass(frozen=True)
class InputLine:
    """A prompt, how to answer it, and where it stood."""

    prompt: Any
    sampling: SamplingParams
    class_name: str | None
    place: str


def run(values: dict[str, Any]) -> int:
    lines = read(values)
    from jaxserve.llm import LLM, PromptError

    with LLM(**{name: values[name] for name in ALL}, progress=sys.stderr.isatty()) as llm:
        show = None
        if not values["json"] and sum(line.sampling.n for line in lines) == 1:
            show = _Live()
        try:
            completions = llm.generate(
                [line.prompt for line in lines],
                [line.sampling for line in lines],
                class_name=[line.class_name for line in lines],
                progress=len(lines) > 1 and sys.stderr.isatty(),
                watch=show,
            )
        except PromptError as error:
            raise _at(lines[error.number].place, error) from None
    if show is not None:
        print()
    elif values["json"]:
        for completion in completions:
            print(json.dumps(record(completion), ensure_ascii=False))
    else:
        _print(lines, completions)
    return 0


def read(values: dict[str, Any]) -> list[InputLine]:
    """The prompts of a command line. Errors: ConfigError, RequestError with file, line and
    field."""
    defaults = sampling_fields(values)
    if (values["prompt"] is None) == (values["input"] is None):
        raise ConfigError("prompt", "give either --prompt or --input")
    if values["prompt"] is not None:
        return [
            InputLine(values["prompt"], SamplingParams.make(**defaults), values["class_name"], "")
        ]
    SamplingParams.make(**defaults)
    name = {"-": "standard input"}.get(values["input"], values["input"])
    try:
        with sys.stdin if values["input"] == "-" else open(name, encoding="utf-8") as file:
            lines = [
                parse(text, f"{name} line {number}", defaults, values["class_name"])
                for number, text in enumerate(file, 1)
                if text.strip()
            ]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "input", f"{name}: {getattr(error, 'strerror', None) or 'is not UTF-8 text'}"
        ) from None
    if not lines:
        raise ConfigError("input", f"{name} has no prompts")
    return lines


def parse(
    text: str, place: str, defaults: dict[str, Any], class_name: str | None = None
) -> InputLine:
    """Parses a line of input. Errors: RequestError that names place and field."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError("", f"{place}: not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise RequestError("", f"{place}: must be an object with a prompt")
    names = [name for name in PROMPTS if name in fields]
    if not names:
        raise RequestError("", f"{place}: must have one of {', '.join(PROMPTS)}")
    if len(names) > 1:
        one_of = ", ".join(PROMPTS)
        raise RequestError("", f"{place}: must have one of {one_of}, not {' and '.join(names)}")
    for name in fields:
        if name not in KNOWN:
            raise RequestError("", f"{place}: unknown field {name!r}; known are {', '.join(KNOWN)}")
    try:
        _check_prompt(names[0], prompt := fields.pop(names[0]))
        class_name = fields.pop("class_name", class_name)
        return InputLine(prompt, SamplingParams.make(**defaults | fields), class_name, place)
    except RequestError as error:
        raise _at(place, error) from None


def record(completion: Completion) -> dict[str, Any]:
    """Returns a completion as an object of JSON."""
    fields = {
        "prompt_ids": list(completion.prompt_ids),
        "output_ids": list(completion.ids),
        "text": completion.text,
        "finish_reason": completion.reason,
    }
    for name, logprobs in (
        ("logprobs", completion.logprobs),
        ("prompt_logprobs", completion.prompt_logprobs),
    ):
        if logprobs is not None:
            fields |= _logprobs(name, logprobs)
    return fields


def _logprobs(name: str, logprobs: Sequence[Logprobs | None]) -> dict[str, Any]:
    """Returns log-probabilities of the tokens, and of the likeliest ones, where these were asked
    for, as [id, log-probability]."""
    fields: dict[str, Any] = {name: [None if p is None else p.chosen for p in logprobs]}
    if any(p is not None and p.top for p in logprobs):
        fields[f"top_{name}"] = [
            None if p is None else [list(pair) for pair in p.top] for p in logprobs
        ]
    return fields


def _check_prompt(name: str, prompt: Any) -> None:
    is_list = isinstance(prompt, list) and bool(prompt)
    if name == "prompt" and not isinstance(prompt, str):
        raise RequestError(name, "must be a text")
    if name == "prompt_ids" and not (is_list and all(type(id) is int for id in prompt)):
        raise RequestError(name, "must be a list of token ids")
    if name == "messages" and not (
        is_list and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in prompt)
    ):
        raise RequestError(name, 'must be a list of {"role": ..., "content": ...}')


def _at(place: str, error: RequestError) -> RequestError:
    return RequestError("", f"{place}: {error}" if place else str(error), error.status)


class _Live:
    """Prints the text of a single completion as it comes."""

    def __call__(self, number: int, delta: Delta) -> None:
        print(delta.text, end="", flush=True)


def _print(lines: Iterable[InputLine], completions: Iterable[Completion]) -> None:
    remaining = iter(completions)
    for line in lines:
        for completion in itertools.islice(remaining, line.sampling.n):
            words = ["---", line.place]
            if line.sampling.n > 1:
                words.append(f"completion {completion.index}")
            words.append(f"({completion.usage.completion} tokens, {completion.reason})")
            print(" ".join(filter(None, words)), completion.text, sep="\n")


COMMAND = Command(
    {"input and output": INPUT, "sampling": sampling_options(temperature=0.0), **engine_groups()},
    run,
    ABOUT,
    argument="[MODEL]",
)
