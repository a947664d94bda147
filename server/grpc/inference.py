"""jaxserve.v1.Inference: messages in, streams of messages out."""

from __future__ import annotations

import asyncio
import dataclasses
import functools

import grpc

from jaxserve.api.events import Finished
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.event_loop import run_in_thread_if
from jaxserve.server.frontend import Frontend
from jaxserve.server.generate_call import Origin
from jaxserve.server.grpc.auth import caller
from jaxserve.server.grpc.proto import ask_of, event_message, prompt_of
from jaxserve.server.streams import Stream
from jaxserve.text.output import Delta, Output

INLINE_LOGPROBS = 256  # tokens: the message with more of them is made beside the event loop


class Inference:
    def __init__(self, front: Frontend):
        self._front = front

    async def Generate(
        self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        loop = asyncio.get_running_loop()
        sent = dict(context.invocation_metadata() or ())
        origin = Origin("grpc", sent.get("traceparent"), str(sent.get("tracestate", "")))
        ask = dataclasses.replace(ask_of(message, context.time_remaining()), origin=origin)
        async with self._front.answer(ask, caller()) as stream:
            while outputs := await stream.take():
                for output in outputs:
                    event = await _message(stream, output)
                    stream.writing(loop.time())
                    await context.write(event)
                    stream.written(loop.time())

    async def Tokenize(
        self, message: pb.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(
            ids=(await self._front.ids(prompt_of(message), caller())).tolist()
        )

    async def Detokenize(
        self, message: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        skip = message.skip_special if message.HasField("skip_special") else True
        return pb.DetokenizeResponse(text=await self._front.text(message.ids, caller(), skip))


async def _message(stream: Stream, output: Output) -> pb.GenerateEvent:
    make = functools.partial(event_message, stream.id, len(stream.request.prompt), output)
    logprobs = (
        output.logprobs
        if isinstance(output, Delta)
        else output.prompt_logprobs
        if isinstance(output, Finished)
        else None
    )
    return await run_in_thread_if(len(logprobs or ()) > INLINE_LOGPROBS, make)
