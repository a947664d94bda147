"""grpc.health.v1: whether requests are taken, for who asks and for who watches."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc


class Health(health_pb2_grpc.HealthServicer):
    """All services serve, or none does. Made on the event loop. A watcher who does not read what is
    written holds up nobody but itself.

    names: of the services; '' is all of them.
    """

    def __init__(self, names: Collection[str]):
        self.names = frozenset(names)
        self._serving = False
        self._changed = asyncio.Event()

    def tell(self, serving: bool) -> None:
        if serving != self._serving:
            self._serving = serving
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(
        self, message: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> pb.HealthCheckResponse:
        if (status := self._status(message.service)) == pb.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return pb.HealthCheckResponse(status=status)

    async def Watch(
        self, message: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        told = None
        while True:
            changed = self._changed
            status = self._status(message.service)
            if status != told:
                await context.write(pb.HealthCheckResponse(status=status))
                told = status
            await changed.wait()

    def _status(self, name: str) -> pb.HealthCheckResponse.ServingStatus:
        if name and name not in self.names:
            return pb.HealthCheckResponse.SERVICE_UNKNOWN
        return (
            pb.HealthCheckResponse.SERVING if self._serving else pb.HealthCheckResponse.NOT_SERVING
        )
