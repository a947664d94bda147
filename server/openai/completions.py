"""/v1/completions: prompts of text or token ids, one or many, n completions of each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Finished, Logprobs
from jaxserve.api.request import MAX_PROMPT_LOGPROBS, numbered_id
from jaxserve.api.sampling import RANGES
from jaxserve.replica.info import ReplicaInfo
from jaxserve.server.frontend import Frontend
from jaxserve.server.generate_call import GenerateCall
from jaxserve.server.generation.bodies import GenerateRequest
from jaxserve.server.generation.fields import Integer, OnlyValues, PromptField
from jaxserve.server.generation.token_writer import TokenWriter, usage_of
from jaxserve.server.generation.weight_version import version_field
from jaxserve.server.http_errors import error_body
from jaxserve.server.json_body import JsonObject
from jaxserve.server.kv_tickets import KvTransfer, ticket_fields
from jaxserve.server.openai.completion_logprobs import CompletionLogprobs
from jaxserve.server.prompts import Text, prompts_of
from jaxserve.server.streams import Stream
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.output import Completion, Delta, Output

COMPLETION_TOKENS = 16  # the protocol's default where a body has no max_tokens
MAX_PROMPTS = 128  # of one request
MAX_ECHO_TOKENS = 2**20  # tokens of prompts in one response


class CompletionRequest(GenerateRequest):
    """The body of /v1/completions."""

    prompt: PromptField = Field(...)
    max_tokens: Integer | None = Field(
        None,
        json_schema_extra={"minimum": 0},
        description="0: no output, for the log-probabilities of an echoed prompt",
    )
    echo: bool | None = None
    logprobs: Integer | None = None
    best_of: Integer | None = Field(
        None,
        description="how many to make, of which the n likeliest by token are shown; not streamed",
    )
    suffix: Annotated[Any, OnlyValues("", None, why="is not supported")] = None


def completion_calls(
    body: CompletionRequest, headers: Mapping[str, str], info: ReplicaInfo
) -> list[GenerateCall]:
    """Returns the calls that a body asks for, one for each prompt. Errors: RequestError."""
    transfer = KvTransfer.read(body.kv_transfer_params)
    _check_best_of(body)
    if body.echo and body.stream and body.logprobs is not None:
        raise RequestError(
            "echo", "with logprobs it cannot be streamed: the prompt's are known at the end"
        )
    prompt_only = body.max_tokens == 0
    sampling = body.sampling(
        info,
        COMPLETION_TOKENS,
        max_tokens=1 if prompt_only else body.max_tokens,
        n=body.best_of or body.n,
        logprobs=0 if body.logprobs is None and _chooses(body) else body.logprobs,
        prompt_logprobs=_prompt_logprobs(body),
    )
    prompts = prompts_of("prompt", body.prompt, MAX_PROMPTS)
    if transfer is not None and len(prompts) > 1:
        raise RequestError(transfer.field, f"is for one prompt; there are {len(prompts)}")
    fields = body.call_fields(headers)
    id = fields.pop("request_id")
    ids = [id]
    if len(prompts) > 1:
        ids = [id and numbered_id(id, number) for number in range(len(prompts))]
    return [
        GenerateCall(
            prompt,
            sampling,
            request_id=each,
            prompt_only=prompt_only,
            kv_transfer=transfer,
            **fields,
        )
        for prompt, each in zip(prompts, ids)
    ]


def _chooses(body: CompletionRequest) -> bool:
    """Returns whether more completions are made than shown."""
    return body.best_of is not None and body.best_of > (body.n or 1)


def _check_best_of(body: CompletionRequest) -> None:
    """Refuses `best_of` that is too large or below `n`, and streaming of its choice. Errors:
    RequestError."""
    if body.best_of is None:
        return
    RANGES["n"].check("best_of", body.best_of)
    if body.n is not None:
        RANGES["n"].check("n", body.n)
    if body.best_of < (body.n or 1):
        raise RequestError("best_of", f"{body.best_of} is below n, {body.n or 1}")
    if _chooses(body) and body.stream:
        raise RequestError("best_of", "above n cannot be streamed: the best are known at the end")


def _prompt_logprobs(body: CompletionRequest) -> int | None:
    """Returns the number of log-probabilities for each token of the prompt. Errors: RequestError
    for two different numbers."""
    if not body.echo or body.logprobs is None:
        return body.prompt_logprobs
    if body.prompt_logprobs not in (None, body.logprobs):
        raise RequestError("prompt_logprobs", "must equal logprobs where echo shows these too")
    return body.logprobs


class CompletionWriter:
    """Writes completions; see `ResponseWriter`."""

    operation = "text_completion"
    named_events = False

    def __init__(self, frontend: Frontend, body: CompletionRequest, calls: Sequence[GenerateCall]):
        self.echoes = body.echo or False
        self.head: JsonObject = {}
        self._body = body
        self._calls = calls
        self._n = body.n or 1
        self._tokenizer = frontend.tokenizer
        self._token_writer = TokenWriter(
            frontend.tokenizer, body.return_tokens_as_token_ids or False
        )
        self._logprobs = CompletionLogprobs(self._token_writer)
        self._model = body.model or frontend.info.served_name
        self._echo_texts: Sequence[str] = ()  # by prompt, if they are echoed
        self._prompts: Sequence[np.ndarray] = ()
        self._detokenizers: dict[int, Detokenizer] = {}  # by choice, where it is streamed
        self._ticket_fields: JsonObject = {}

    def open(self, streams: Sequence[Stream]) -> None:
        self._prompts = [stream.request.prompt for stream in streams]
        self._ticket_fields = ticket_fields(self._body.kv_transfer_params, streams[0].kv_ticket)
        if self.echoes:
            self._check_echo(streams)
            self._echo_texts = [
                self._prompt_text(call, ids) for call, ids in zip(self._calls, self._prompts)
            ]
        self.head = {
            "id": streams[0].id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._model,
        }

    def _check_echo(self, streams: Sequence[Stream]) -> None:
        entries = 0
        tokens = 0
        for stream in streams:
            length = len(stream.request.prompt)
            entries += stream.request.sampling.prompt_entries(length)
            tokens += self._n * length
        if entries > MAX_PROMPT_LOGPROBS:
            raise RequestError(
                "echo",
                f"of {entries} log-probabilities is too much; the limit is {MAX_PROMPT_LOGPROBS}",
            )
        if tokens > MAX_ECHO_TOKENS:
            raise RequestError(
                "echo", f"of {tokens} tokens is too much; the limit is {MAX_ECHO_TOKENS}"
            )

    def first_chunks(self) -> Iterator[JsonObject]:
        for number, text in enumerate(self._echo_texts):
            for index in range(self._n):
                yield self._chunk(number, index, text)

    def chunks(self, number: int, output: Output) -> Iterator[JsonObject]:
        if isinstance(output, Delta):
            logprobs = None
            if output.logprobs:
                offsets = self._streamed_offsets(number, output)
                logprobs = self._logprobs.write(output.ids, output.logprobs, offsets)
            # without text, too: a chunk tells that tokens came
            chunk = self._chunk(number, output.index, output.text, logprobs)
            if self._body.return_token_ids:
                chunk["choices"][0]["token_ids"] = list(output.ids)
            yield chunk
        elif isinstance(output, Finished):
            chunk = self._chunk(number, output.index, "", None, output.reason)
            chunk["choices"][0] |= {"stop_reason": output.stop, "in_time": output.in_time}
            yield {**chunk, **version_field([output]), **self._ticket_fields}

    def whole(self, completions: Sequence[Sequence[Completion]]) -> JsonObject:
        choices = [
            self._choice(number, index, completion)
            for number, group in enumerate(completions)
            for index, completion in enumerate(self._best(group))
        ]
        every = [completion for group in completions for completion in group]
        usage = self.usage(every)
        answer = {**self.head, "choices": choices, "usage": usage}
        return {**answer, **version_field(every), **self._ticket_fields}

    def usage(self, ended: Sequence[Finished | Completion]) -> JsonObject:
        return usage_of(ended)

    def failed(self, error: RequestError) -> JsonObject:
        return error_body(error)

    def _chunk(
        self,
        number: int,
        index: int,
        text: str,
        logprobs: JsonObject | None = None,
        reason: str | None = None,
    ) -> JsonObject:
        choice = {
            "index": number * self._n + index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        return {**self.head, "choices": [choice]}

    def _best(self, group: Sequence[Completion]) -> Sequence[Completion]:
        """Returns the completions to show: all, or the n whose tokens have the highest mean
        log-probability."""
        if not _chooses(self._body):
            return group
        return sorted(group, key=_mean_logprob, reverse=True)[: self._n]

    def _choice(self, number: int, index: int, completion: Completion) -> JsonObject:
        echo = self._echo_texts[number] if self.echoes else ""
        logprobs = None
        if self._body.logprobs is not None:
            ids = completion.ids
            values: Sequence[Logprobs | None] = completion.logprobs or ()
            offsets = self._offsets(number, completion, len(echo))
            if self.echoes:
                ids = [*completion.prompt_ids, *ids]
                values = [*(completion.prompt_logprobs or ()), *values]
                offsets = [*self._prompt_offsets(number), *offsets]
            logprobs = self._logprobs.write(ids, values, offsets)
        choice = {
            "index": number * self._n + index,
            "text": echo + completion.text,
            "logprobs": logprobs,
            "finish_reason": completion.reason,
            "stop_reason": completion.stop,
            "in_time": completion.in_time,
        }
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._token_writer.prompt_logprobs(completion)
        if self._body.return_token_ids:
            choice["token_ids"] = list(completion.ids)
            choice["prompt_token_ids"] = list(completion.prompt_ids)
        return choice

    def _prompt_text(self, call: GenerateCall, ids: np.ndarray) -> str:
        if isinstance(call.prompt, Text) and call.truncate_prompt_tokens is None:
            return call.prompt.text
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(ids.tolist(), skip_special=False)

    def _prompt_offsets(self, number: int) -> list[int]:
        """Places of an echoed prompt's tokens."""
        ids = self._prompts[number].tolist()
        if self._tokenizer is None:
            return [0] * len(ids)
        return self._tokenizer.positions(self._echo_texts[number], ids)

    def _offsets(self, number: int, completion: Completion, begin: int) -> list[int]:
        """Places of a completion's tokens in a choice's text, where it begins at `begin`; the end
        of the text for those that a stop string cut off."""
        end = begin + len(completion.text)
        found = self._positions(number).positions(*completion.ids)
        return [min(begin + position, end) for position in found]

    def _streamed_offsets(self, number: int, delta: Delta) -> list[int]:
        """Places of the next tokens of a choice. Text may lag behind them."""
        choice = number * self._n + delta.index
        if choice not in self._detokenizers:
            self._detokenizers[choice] = self._positions(number)
        begin = len(self._echo_texts[number]) if self.echoes else 0
        return [begin + position for position in self._detokenizers[choice].positions(*delta.ids)]

    def _positions(self, number: int) -> Detokenizer:
        """Makes a detokenizer of a prompt's completions, for the places of their tokens."""
        if self._tokenizer is None:
            return Detokenizer((), frozenset(), False)
        keep = self._calls[number].keep_special
        return self._tokenizer.stream(not keep, self._prompts[number].tolist())


def _mean_logprob(completion: Completion) -> float:
    values = [value.chosen for value in completion.logprobs or ()]
    return sum(values) / max(len(values), 1)
