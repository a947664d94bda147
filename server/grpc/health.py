"""The gRPC service grpc.health.v1: whether requests are accepted."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc


class Health(health_pb2_grpc.HealthServicer):
    """Answers health checks; all services serve, or none does. Must be made on the event loop.

    names: of the services; '' stands for all of them. Each watcher has a task of its own: one that
    does not read delays no other.
    """

    def __init__(self, names: Collection[str]):
        self.names = frozenset(names)
        self._serving = False
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Changes the status, and tells watchers if it differs."""
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

    async def List(self, message: Any, context: grpc.aio.ServicerContext) -> Any:
        """The status of every service; older packages of the protocol do not have this call."""
        statuses = {
            name: pb.HealthCheckResponse(status=self._status(name))
            for name in ("", *sorted(self.names))
        }
        return pb.HealthListResponse(statuses=statuses)

    async def Watch(
        self, message: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        last = None
        while True:
            changed = self._changed
            status = self._status(message.service)
            if status != last:
                await context.write(pb.HealthCheckResponse(status=status))
                last = status
            await changed.wait()

    def _status(self, name: str) -> pb.HealthCheckResponse.ServingStatus:
        if name and name not in self.names:
            return pb.HealthCheckResponse.SERVICE_UNKNOWN
        if self._serving:
            return pb.HealthCheckResponse.SERVING
        return pb.HealthCheckResponse.NOT_SERVING
