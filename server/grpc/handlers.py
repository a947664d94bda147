"""The door: every message is parsed and every failure becomes a gRPC status here.

Messages that are too large, do not parse, or carry fields unknown to this version are refused. A
handler says no by raising `RequestError`; any other exception is a fault of ours: it is logged, and
the caller gets INTERNAL without details.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxserve.api.errors import RequestError, internal_error
from jaxserve.server.frontend_metrics import FrontendMetrics
from jaxserve.server.grpc.errors import abort

log = logging.getLogger(__name__)
CONTROL_LIMIT = 1 << 20
WALKED = 1 << 18  # bytes of a message up to which an unknown field is found and named


def handlers(
    servicer: object, service: ServiceDescriptor, limit: int, metrics: FrontendMetrics
) -> grpc.GenericRpcHandler:
    """The methods of a service behind the door. `limit`: bytes of a message."""
    methods = {}
    for method in service.methods:
        request = message_factory.GetMessageClass(method.input_type)
        make = (
            grpc.unary_stream_rpc_method_handler
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        methods[method.name] = make(
            functools.partial(_guarded, getattr(servicer, method.name), method.name, metrics),
            request_deserializer=functools.partial(parse, request, limit),
            response_serializer=message_factory.GetMessageClass(
                method.output_type
            ).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service.full_name, methods)


def parse(kind: type[Message], limit: int, data: bytes) -> Message | RequestError:
    """The message, or why it is refused (gRPC loses the type of what a deserialiser raises)."""
    if len(data) > limit:
        return RequestError("", f"the message has {len(data)} bytes; the limit is {limit}")
    try:
        message = kind.FromString(data)
    except DecodeError:
        return RequestError("", f"not a valid {kind.DESCRIPTOR.full_name} message")
    if len(data) > WALKED:
        return RequestError("", "unknown fields") if _lost(kind, data, message) else message
    unknown = unknown_field(message)
    return message if unknown is None else RequestError("", f"unknown field number {unknown}")


def _lost(kind: type[Message], data: bytes, message: Message) -> bool:
    """Whether a large message loses anything with its unknown fields, which it does here. There may
    be millions: none becomes an object."""
    message.DiscardUnknownFields()
    size = message.ByteSize()
    # else the caller has just written it at greater length
    return size < len(data) and size < kind.FromString(data).ByteSize()


def unknown_field(message: Message) -> str | None:
    """The first field that this version does not know, as 'N in TYPE'."""
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


async def _guarded(
    handler: Callable[..., Awaitable],
    name: str,
    metrics: FrontendMetrics,
    message: Any,
    context: grpc.aio.ServicerContext,
) -> Any:
    status = "CANCELLED"
    try:
        if isinstance(message, RequestError):
            raise message
        answered = await handler(message, context)
        status = "OK"
        return answered
    except RequestError as error:
        status = error.status
        await abort(context, error)
    except (grpc.aio.AbortError, asyncio.CancelledError):
        raise
    except Exception:
        if context.done():  # the caller went away while we wrote
            return None
        log.exception("%s failed", name)
        status = "INTERNAL"
        await abort(context, internal_error())
    finally:
        metrics.answered("grpc", status)
