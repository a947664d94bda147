"""/v1/embeddings: a vector for each input, of any model that is served.

A text's embedding is the hidden state of its last token after the model's final norm (last-token
pooling). The inputs of one request are prefilled together with everybody else's prompts; a few of
them at a time wait or run, so that many inputs do not fill the queue.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import functools
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import fastapi
import numpy as np
from pydantic import Field
from starlette.responses import Response

from jaxserve.api.errors import RequestError, check_integer
from jaxserve.api.events import Finished
from jaxserve.api.sampling import SamplingParams
from jaxserve.server.auth.access import Caller
from jaxserve.server.errors import caller_gone
from jaxserve.server.event_stream import cancelled_on_disconnect
from jaxserve.server.frontend import Frontend
from jaxserve.server.generate_call import GenerateCall, Origin
from jaxserve.server.http_errors import header_value
from jaxserve.server.json_body import JsonObject, dump_in_thread_if
from jaxserve.server.openai.answers import load_headers, usage_of
from jaxserve.server.openai.load_report import wanted_format
from jaxserve.server.openai.schemas import PromptField, PromptRequest
from jaxserve.server.prompts import Prompt, prompts_of

MAX_INPUTS = 2048  # of one request
INPUTS_AT_ONCE = 64  # of one request, that wait or run
INLINE_VALUES = 4096  # more numbers than these are written in a thread
OPERATION = "embeddings"  # its name in traces
_PROMPT_FIELDS = ("prompt", "prompt_ids")  # names of an input in errors of the frontend


class EmbedRequest(PromptRequest):
    """Fields that all routes share which embed texts."""

    add_special_tokens: bool | None = Field(
        None, description="as in vLLM: false leaves out the tokens that the tokenizer adds"
    )


class EmbeddingsRequest(EmbedRequest):
    input: PromptField = Field(...)
    dimensions: int | None = Field(
        None, description="only the first so many numbers of each embedding"
    )
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = Field(
        None, description="as in vLLM: whether embeddings have length 1, as they do by default"
    )

    def inputs(self) -> list[Input]:
        """Errors: RequestError."""
        special = self.add_special_tokens is not False
        prompts = prompts_of("input", self.input, MAX_INPUTS, special)
        if len(prompts) == 1:
            return [Input("input", prompts[0])]
        return [Input(f"input.{number}", prompt) for number, prompt in enumerate(prompts)]


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """Something to embed, and the field of the request that it is from."""

    field: str
    prompt: Prompt


async def embed(
    frontend: Frontend,
    body: EmbedRequest,
    inputs: Sequence[Input],
    id: str,
    request: fastapi.Request,
) -> list[Finished]:
    """Embeds all inputs; returns their ends, in order. Errors: RequestError, which names the input
    at fault; the others are then cancelled."""
    ends: dict[int, Finished] = {}
    caller = request.state.caller
    work = iter(enumerate(zip(inputs, _calls(body, inputs, id, request), strict=True)))

    async def embed_some() -> None:
        for number, (one, call) in work:
            ends[number] = await _embed_one(frontend, call, one.field, caller)

    async with cancelled_on_disconnect(request.receive):
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(len(inputs), _inputs_at_once(caller))):
                    group.create_task(embed_some())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
    if len(ends) < len(inputs):
        raise caller_gone()
    return [ends[number] for number in range(len(inputs))]


def _inputs_at_once(caller: Caller) -> int:
    """How many inputs may wait or run: no more than the caller's key has room for."""
    concurrency = caller.limits.concurrency
    if concurrency is None:
        return INPUTS_AT_ONCE
    return min(INPUTS_AT_ONCE, max(1, concurrency - caller.usage.running))


def _calls(
    body: EmbedRequest, inputs: Sequence[Input], id: str, request: fastapi.Request
) -> Iterator[GenerateCall]:
    headers = request.headers
    origin = Origin("http", headers.get("traceparent"), headers.get("tracestate", ""), OPERATION)
    for number, one in enumerate(inputs):
        yield GenerateCall(
            prompt=one.prompt,
            sampling=SamplingParams(max_tokens=1),
            request_id=id if len(inputs) == 1 else f"{id}-{number}",
            model=body.model,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            ids_only=True,
            embed=True,
            origin=origin,
        )


async def _embed_one(
    frontend: Frontend, call: GenerateCall, field: str, caller: Caller
) -> Finished:
    """The end of one input. Errors: RequestError of `field`, where that is at fault."""
    ends: list[Finished] = []
    try:
        async with frontend.generate(call, caller) as stream:
            while outputs := await stream.take():
                ends += [output for output in outputs if isinstance(output, Finished)]
    except RequestError as error:
        if error.field not in _PROMPT_FIELDS:
            raise
        message = str(error).removeprefix(f"{error.field}: ")
        raise RequestError(field, message, error.status, error.retry_after, error.reason) from None
    return ends[0]


def vector_of(end: Finished, dimensions: int | None = None, normalize: bool = True) -> np.ndarray:
    """The first so many numbers of an embedding [D] f32, scaled to length 1 after that. A vector of
    zeros stays as it is."""
    assert end.embedding is not None, "the replica computes no embeddings"
    vector = end.embedding[:dimensions]
    if not normalize:
        return vector
    length = np.linalg.norm(vector.astype(np.float64))
    return (vector / length).astype(np.float32) if length > 0 else vector


def new_id(given: str, prefix: str) -> str:
    """The id that a request has, or else a new one."""
    return given or f"{prefix}-{secrets.token_hex(8)}"


async def respond_of_ends(
    frontend: Frontend,
    body: EmbedRequest,
    inputs: Sequence[Input],
    id: str,
    request: fastapi.Request,
    headers: Mapping[str, str],
    content: Callable[[list[Finished]], JsonObject],
    large: bool,
) -> Response:
    """Embeds all inputs; returns the response whose content is made of their ends. headers: to be
    sent too. large: whether it is made and written in a thread. Errors: as of `embed`."""
    report = wanted_format(request.headers)
    ends = await embed(frontend, body, inputs, id, request)
    written = await dump_in_thread_if(large, functools.partial(content, ends))
    load = await load_headers(frontend, report)
    sent = {"x-request-id": header_value(id), **headers, **load}
    return Response(written, 200, sent, "application/json")


def as_list(
    frontend: Frontend,
    body: EmbedRequest,
    id: str,
    data: Sequence[JsonObject],
    ends: Sequence[Finished],
) -> JsonObject:
    """The content of a response that lists what was made of these ends."""
    return {
        "id": id,
        "object": "list",
        "created": int(time.time()),
        "model": body.model or frontend.info.served_name,
        "data": data,
        "usage": usage_of(ends),
    }


async def answer(
    frontend: Frontend,
    body: EmbeddingsRequest,
    id: str,
    request: fastapi.Request,
    headers: Mapping[str, str],
) -> Response:
    """The response to a request for embeddings. Errors: RequestError."""
    inputs = body.inputs()
    size = frontend.info.d_model
    if body.dimensions is not None:
        check_integer("dimensions", body.dimensions, 1, size)
        size = body.dimensions
    id = new_id(id, "embd")

    def content(ends: list[Finished]) -> JsonObject:
        data = [
            {"object": "embedding", "index": number, "embedding": _written(body, end)}
            for number, end in enumerate(ends)
        ]
        return as_list(frontend, body, id, data, ends)

    large = len(inputs) * size > INLINE_VALUES
    return await respond_of_ends(frontend, body, inputs, id, request, headers, content, large)


def _written(body: EmbeddingsRequest, end: Finished) -> str | list[float]:
    """An embedding as the body asks for it; as base64 of f32, little-endian."""
    vector = vector_of(end, body.dimensions, body.normalize is not False)
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
