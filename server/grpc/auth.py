"""Keys over gRPC: every method but those of grpc.health.v1 asks for one, in the metadata
`authorization`, before its message is read.

That is so for methods that do not exist too. A refused call's message stays on the wire: what flow
control lets a stranger send is all that is ever held of it.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from jaxserve.api.errors import RequestError
from jaxserve.server.auth.access import HEADER, Authenticator, Caller
from jaxserve.server.frontend_metrics import FrontendMetrics
from jaxserve.server.grpc.errors import abort

OPEN = "/grpc.health.v1.Health/"
_caller: contextvars.ContextVar[Caller] = contextvars.ContextVar("caller")


def caller() -> Caller:
    """Who the call is from that is handled right now."""
    return _caller.get()


class Guard(grpc.aio.ServerInterceptor):
    """An interceptor: lets in who has a key, and counts who has none."""

    def __init__(self, access: Authenticator, metrics: FrontendMetrics):
        self._access = access
        self._metrics = metrics

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        if details.method.startswith(OPEN):
            return await continuation(details)
        given = [value for name, value in details.invocation_metadata or () if name == HEADER]
        try:
            if len(given) > 1:  # which of them a proxy has looked at, nobody knows
                raise RequestError(HEADER, "is there twice", "UNAUTHENTICATED")
            _caller.set(self._access.authenticate(given[0] if given else None))
        except RequestError as error:  # a handler of streams reads no message by itself
            self._metrics.answered("grpc", error.status)
            return grpc.stream_stream_rpc_method_handler(functools.partial(_refused, error))
        return await continuation(details)


async def _refused(error: RequestError, messages: Any, context: grpc.aio.ServicerContext) -> None:
    await abort(context, error)
