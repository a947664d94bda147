"""Embeds texts for any route: the hidden state of a text's last token after the model's final norm
(last-token pooling).

The inputs of one request are prefilled together with all other prompts; a few of them at a time
wait or run, so that many inputs do not fill the queue.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import fastapi
import numpy as np
from pydantic import Field
from starlette.responses import Response

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Finished
from jaxserve.api.request import numbered_id
from jaxserve.api.sampling import SamplingParams
from jaxserve.server.auth.access import Caller
from jaxserve.server.errors import caller_gone
from jaxserve.server.event_stream import cancelled_on_disconnect
from jaxserve.server.frontend import Frontend
from jaxserve.server.generate_call import GenerateCall, Origin
from jaxserve.server.generation.bodies import PromptRequest
from jaxserve.server.generation.load_report import wanted_format
from jaxserve.server.generation.responding import load_headers
from jaxserve.server.generation.routing import json_response
from jaxserve.server.generation.token_writer import usage_of
from jaxserve.server.http_errors import header_value
from jaxserve.server.json_body import JsonObject, dump_in_thread_if
from jaxserve.server.prompts import Prompt

MAX_INPUTS = 2048  # of one request
INPUTS_AT_ONCE = 64  # of one request, that wait or run
OPERATION = "embeddings"  # its name in traces


class EmbedRequest(PromptRequest):
    """Fields that all routes share which embed texts."""

    add_special_tokens: bool | None = Field(
        None, description="as in vLLM: false leaves out the tokens that the tokenizer adds"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """A text to embed, and the field of the request that it is from."""

    field: str
    prompt: Prompt


@dataclasses.dataclass(frozen=True, slots=True)
class Embedding:
    """A request of HTTP whose inputs are embedded. id: '' or the caller's. headers: to be sent with
    the response."""

    frontend: Frontend
    body: EmbedRequest
    request: fastapi.Request
    id: str
    headers: Mapping[str, str]

    @classmethod
    def of(
        cls,
        frontend: Frontend,
        body: EmbedRequest,
        request: fastapi.Request,
        headers: Mapping[str, str],
        prefix: str,
    ) -> Embedding:
        """prefix: of an id that the server chooses."""
        id = body.id_given(request.headers) or f"{prefix}-{secrets.token_hex(8)}"
        return cls(frontend, body, request, id, headers)

    @property
    def model(self) -> str:
        return self.body.model or self.frontend.info.served_name

    async def respond(
        self, inputs: Sequence[Input], content: Callable[[list[Finished]], JsonObject], large: bool
    ) -> Response:
        """Embeds all inputs; returns the response whose content is made of their ends. large:
        whether it is made and written in a thread. Errors: RequestError, which names the input at
        fault."""
        report = wanted_format(self.request.headers)
        ends = await self._embed(inputs)
        written = await dump_in_thread_if(large, functools.partial(content, ends))
        load = await load_headers(self.frontend, report)
        sent = {"x-request-id": header_value(self.id), **self.headers, **load}
        return json_response(written, sent)

    def as_list(self, data: Sequence[JsonObject], ends: Sequence[Finished]) -> JsonObject:
        """Returns the content of a response that lists what was made of these ends."""
        return {
            "id": self.id,
            "object": "list",
            "created": int(time.time()),
            "model": self.model,
            "data": data,
            "usage": usage_of(ends),
        }

    async def _embed(self, inputs: Sequence[Input]) -> list[Finished]:
        """Embeds all inputs; returns their ends, in order. An input that fails cancels the
        others."""
        ends: dict[int, Finished] = {}
        caller = self.request.state.caller
        work = iter(enumerate(zip(inputs, self._calls(inputs), strict=True)))

        async def embed_some() -> None:
            for number, (one, call) in work:
                ends[number] = await _embed_one(self.frontend, call, one.field, caller)

        async with cancelled_on_disconnect(self.request.receive):
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(len(inputs), _inputs_at_once(caller))):
                        group.create_task(embed_some())
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
        if len(ends) < len(inputs):
            raise caller_gone()
        return [ends[number] for number in range(len(inputs))]

    def _calls(self, inputs: Sequence[Input]) -> Iterator[GenerateCall]:
        headers = self.request.headers
        fields = {
            **self.body.call_fields(headers),
            "ids_only": True,
            "embed": True,
            "origin": Origin.of_http(headers, OPERATION),
        }
        for number, one in enumerate(inputs):
            id = self.id if len(inputs) == 1 else numbered_id(self.id, number)
            yield GenerateCall(
                one.prompt, SamplingParams(max_tokens=1), **{**fields, "request_id": id}
            )


def _inputs_at_once(caller: Caller) -> int:
    """Returns how many inputs may wait or run, within the concurrency of the caller's key."""
    concurrency = caller.limits.concurrency
    if concurrency is None:
        return INPUTS_AT_ONCE
    return min(INPUTS_AT_ONCE, max(1, concurrency - caller.usage.running))


async def _embed_one(
    frontend: Frontend, call: GenerateCall, field: str, caller: Caller
) -> Finished:
    """Returns the end of one input. Errors: RequestError of `field` if that is at fault."""
    ends: list[Finished] = []
    try:
        async with frontend.generate(call, caller) as stream:
            while outputs := await stream.take():
                ends += [output for output in outputs if isinstance(output, Finished)]
    except RequestError as error:
        if error.field != "prompt":  # the frontend's name of an input
            raise
        message = str(error).removeprefix("prompt: ")
        raise RequestError(field, message, error.status, error.retry_after, error.reason) from None
    return ends[0]


def vector_of(end: Finished, dimensions: int | None = None, normalize: bool = True) -> np.ndarray:
    """Returns the first `dimensions` numbers of an embedding [D] f32, then scaled to length 1. A
    vector of zeros stays as it is."""
    assert end.embedding is not None, "the replica computes no embeddings"
    vector = end.embedding[:dimensions]
    if not normalize:
        return vector
    length = np.linalg.norm(vector.astype(np.float64))
    return (vector / length).astype(np.float32) if length > 0 else vector
