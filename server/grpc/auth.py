"""API keys over gRPC, in the metadata `authorization`.

Every method but those of grpc.health.v1 requires one, methods that do not exist included, and it is
checked before the message is read. A refused call's message stays on the wire: flow control limits
how much of it a stranger can make the server hold.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc

from jaxserve.api.errors import RequestError
from jaxserve.server.auth.access import HEADER, Authenticator, Caller, sole_header
from jaxserve.server.frontend_metrics import FrontendMetrics
from jaxserve.server.grpc.errors import abort

OPEN_PREFIX = "/grpc.health.v1.Health/"  # of methods that need no API key
THROTTLED_METHODS = frozenset({"/jaxserve.v1.Inference/Generate"})  # those that compute
_caller: contextvars.ContextVar[Caller] = contextvars.ContextVar("caller")


def current_caller() -> Caller:
    """The caller of the call that is being handled."""
    return _caller.get()


class GrpcGuard(grpc.aio.ServerInterceptor):
    """An interceptor that authenticates calls, refuses some at overload, and counts those it
    refuses. throttled: methods whose calls are refused unread at overload, see `Throttle`."""

    def __init__(
        self,
        authenticator: Authenticator,
        metrics: FrontendMetrics,
        throttled: frozenset[str] = frozenset(),
    ):
        self._authenticator = authenticator
        self._metrics = metrics
        self._throttled = throttled

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if details.method.startswith(OPEN_PREFIX):
            return await continuation(details)
        keys = [value for name, value in details.invocation_metadata or () if name == HEADER]
        try:
            caller = self._authenticator.authenticate(sole_header(keys))
            _caller.set(caller)
            if details.method in self._throttled:
                caller.usage.throttle.check(asyncio.get_running_loop().time())
        except RequestError as error:
            self._metrics.answered("grpc", error.status)
            # of streams, whatever the method is: its handler need not read a message
            return grpc.stream_stream_rpc_method_handler(functools.partial(_refuse, error))
        return await continuation(details)


async def _refuse(
    error: RequestError, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext
) -> None:
    await abort(context, error)
