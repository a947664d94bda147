"""Handlers of gRPC methods: messages are parsed, and failures become gRPC statuses.

Messages that are too large, do not parse, or have fields unknown to this version are refused. A
method refuses a call by raising `RequestError`; any other exception is logged, and the caller gets
INTERNAL without details.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxserve.api.errors import RequestError, internal_error
from jaxserve.server.frontend_metrics import FrontendMetrics
from jaxserve.server.grpc.errors import abort

log = logging.getLogger(__name__)
MAX_CONTROL_BYTES = 1 << 20  # of a message to jaxserve.v1.Control
MAX_WALK_BYTES = 1 << 18  # in larger messages unknown fields are noticed but not named


def method_handlers(
    servicer: object, service: ServiceDescriptor, max_bytes: int, metrics: FrontendMetrics
) -> grpc.GenericRpcHandler:
    """Handlers of all methods of a service. servicer: has a coroutine method of each name.
    max_bytes: of a message."""
    methods = {}
    for method in service.methods:
        request = message_factory.GetMessageClass(method.input_type)
        make = (
            grpc.unary_stream_rpc_method_handler
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        methods[method.name] = make(
            functools.partial(_handle, getattr(servicer, method.name), method.name, metrics),
            request_deserializer=functools.partial(parse, request, max_bytes),
            response_serializer=message_factory.GetMessageClass(
                method.output_type
            ).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service.full_name, methods)


def parse(kind: type[Message], max_bytes: int, data: bytes) -> Message | RequestError:
    """Parses a message; returns, not raises, the error if it is refused: gRPC drops what a
    deserializer raises."""
    if len(data) > max_bytes:
        return RequestError("", f"the message has {len(data)} bytes; the limit is {max_bytes}")
    try:
        message = kind.FromString(data)
    except DecodeError:
        return RequestError("", f"not a valid {kind.DESCRIPTOR.full_name} message")
    if len(data) > MAX_WALK_BYTES:
        unknown = _has_unknown_fields(kind, data, message)
        return RequestError("", "unknown fields") if unknown else message
    name = unknown_field(message)
    return message if name is None else RequestError("", f"unknown field number {name}")


def _has_unknown_fields(kind: type[Message], data: bytes, message: Message) -> bool:
    """Drops the unknown fields of a large message; returns whether there were any. There may be
    millions, so this compares sizes rather than making an object of each."""
    message.DiscardUnknownFields()
    size = message.ByteSize()
    # it may also shrink because the caller has not written it in the shortest form
    return size < len(data) and size < kind.FromString(data).ByteSize()


def unknown_field(message: Message) -> str | None:
    """The first field that this version does not know, as 'NUMBER in TYPE'; None if there is
    none."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        return f"{unknown[0].field_number} in {message.DESCRIPTOR.full_name}"
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in [value] if isinstance(value, Message) else value:
            found = unknown_field(part)
            if found is not None:
                return found
    return None


async def _handle(
    method: Callable[..., Awaitable[Message | None]],
    name: str,
    metrics: FrontendMetrics,
    message: Message | RequestError,
    context: grpc.aio.ServicerContext,
) -> Message | None:
    """Runs a method; turns what it raises into a status, and counts the call."""
    status = "CANCELLED"
    try:
        if isinstance(message, RequestError):
            raise message
        response = await method(message, context)
        status = "OK"
        return response
    except RequestError as error:
        status = error.status
        await abort(context, error)
    except (grpc.aio.AbortError, asyncio.CancelledError):
        raise
    except Exception:
        if context.done():  # the caller went away during a write
            return None
        log.exception("%s failed", name)
        status = "INTERNAL"
        await abort(context, internal_error())
    finally:
        metrics.answered("grpc", status)
    return None  # not reached: `abort` raises
