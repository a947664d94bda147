"""The gRPC service jaxserve.v1.Inference: generation, tokenization."""

from __future__ import annotations

import asyncio
import dataclasses
import functools

import grpc

from jaxserve.api.events import Finished
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.event_loop import run_in_thread_if
from jaxserve.server.generate_call import Origin
from jaxserve.server.grpc.auth import current_caller
from jaxserve.server.grpc.proto import event_message, generate_call, prompt_of
from jaxserve.server.models import Models
from jaxserve.server.streams import Stream
from jaxserve.text.output import Delta, Output

INLINE_LOGPROBS = 256  # tokens; messages with the log-probabilities of more are made in a thread


class Inference:
    """Methods of the service; see jaxserve.proto."""

    def __init__(self, models: Models):
        self._models = models

    async def Generate(
        self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        loop = asyncio.get_running_loop()
        metadata = dict(context.invocation_metadata() or ())
        origin = Origin("grpc", metadata.get("traceparent"), str(metadata.get("tracestate", "")))
        frontend = self._models.open(message.model)
        call = generate_call(message, context.time_remaining(), frontend.info)
        call = dataclasses.replace(call, origin=origin)
        async with frontend.generate(call, current_caller()) as stream:
            while outputs := await stream.take():
                for output in outputs:
                    event = await _event(stream, output)
                    stream.write_began(loop.time())
                    await context.write(event)
                    stream.write_ended(loop.time())

    async def Tokenize(
        self, message: pb.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.TokenizeResponse:
        frontend = self._models.open(message.model)
        ids = await frontend.tokenize(prompt_of(message), current_caller())
        return pb.TokenizeResponse(ids=ids.tolist())

    async def Detokenize(
        self, message: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        frontend = self._models.open(message.model)
        skip = message.skip_special if message.HasField("skip_special") else True
        text = await frontend.detokenize(message.ids, current_caller(), skip)
        return pb.DetokenizeResponse(text=text)


async def _event(stream: Stream, output: Output) -> pb.GenerateEvent:
    """The message for an output; made in a thread if it is large."""
    logprobs = 0
    if isinstance(output, Delta):
        logprobs = len(output.logprobs)
    elif isinstance(output, Finished):
        logprobs = len(output.prompt_logprobs or ())
    make = functools.partial(event_message, stream.id, len(stream.request.prompt), output)
    return await run_in_thread_if(logprobs > INLINE_LOGPROBS, make)
