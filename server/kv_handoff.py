"""Hands the KV of prompts from this replica to another one, and takes that of others, as a router
says by tickets (`server.kv_tickets`).

The blocks of a prompt that another replica is to decode are read to host memory while it is
computed, and wait there for `lease` seconds; then they are as any others there. What is fetched
comes as between the replicas of a conductor (`server.peer_blocks`): whatever does not come is
computed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Finished
from jaxserve.api.request import Request
from jaxserve.replica.info import ReplicaInfo
from jaxserve.server.frontend_metrics import FrontendMetrics
from jaxserve.server.json_body import JsonObject
from jaxserve.server.kv_tickets import KvTransfer, write_ticket
from jaxserve.store.peers import OfferedBlocks


class Ask(Protocol):
    """Runs what may wait for the replica's thread; see `Frontend.ask_replica`."""

    def __call__(self, work: Callable[[], Any]) -> Awaitable[Any]: ...


@dataclasses.dataclass(frozen=True)
class KvHandoff:
    """Tickets of one replica. secret: of its cluster. address: host:port at which other replicas
    ask it for blocks. lease: seconds that KV waits to be fetched. All methods belong to the event
    loop."""

    secret: bytes
    address: str
    lease: int
    info: ReplicaInfo
    exporter: OfferedBlocks
    ask: Ask
    metrics: FrontendMetrics

    def applied(self, request: Request, transfer: KvTransfer) -> Request:
        """Returns the request with what a router asks for. A ticket of another cluster is counted,
        and has no effect."""
        if transfer.offers:
            retention = max(request.cache_retention, self.lease)
            return dataclasses.replace(request, cache_retention=retention)
        ticket = transfer.ticket
        if ticket is None or not ticket.written_with(self.secret):
            self.metrics.count_ticket("foreign")
            return request
        return dataclasses.replace(request, kv_source=ticket.source)

    @contextlib.contextmanager
    def offered(self, request: Request, transfer: KvTransfer) -> Iterator[JsonObject | None]:
        """Has the prompt's blocks read to host memory as they are computed, until the exit. Gives
        the ticket for them, or None for a prompt with nothing to fetch."""
        size = self.info.block_size
        blocks = len(request.prompt) // size
        if not transfer.offers or not blocks or request.bypass_prefix_cache:
            yield None
            return
        wanting = asyncio.ensure_future(self.ask(lambda: self._want(request, blocks)))
        try:
            yield write_ticket(self.secret, self.address, blocks, size, request.id)
            self.metrics.count_ticket("issued")
        finally:
            wanting.add_done_callback(self._unwant)

    def _want(self, request: Request, blocks: int) -> list[bytes]:
        """Runs on a thread of its own; returns the keys of the blocks."""
        hashes = self.info.block_hashes(request.prompt, request.key_salt)
        keys = self.exporter.keys_of(hashes, blocks)
        self.exporter.want(keys)
        return keys

    def _unwant(self, wanting: asyncio.Future[list[bytes]]) -> None:
        if not wanting.cancelled() and wanting.exception() is None:
            self.exporter.unwant(wanting.result())

    def ended(self, request: Request, finished: Sequence[Finished]) -> None:
        """Counts a request that had a ticket: `fetched` where none of the blocks was computed
        here."""
        source = request.kv_source
        if source is None or not finished:
            return
        size = self.info.block_size
        blocks = min(source.blocks * source.block_size, len(request.prompt) - 1) // size
        whole = finished[0].usage.cached >= blocks * size
        self.metrics.count_ticket("fetched" if whole else "computed")


def offered_kv(
    handoff: KvHandoff | None, request: Request, transfer: KvTransfer | None
) -> contextlib.AbstractContextManager[JsonObject | None]:
    """Offers a prompt's KV until the exit, if that is asked for; see `KvHandoff.offered`."""
    if handoff is None or transfer is None:
        return contextlib.nullcontext()
    return handoff.offered(request, transfer)


def refuse_transfer(transfer: KvTransfer) -> None:
    """Refuses what a replica without a port for others, or without host memory for blocks, cannot
    do. Errors: RequestError."""
    what = "remote decode" if transfer.offers else "remote prefill"
    raise RequestError(
        transfer.field,
        f"{what} is not supported by this replica: it needs --replica_port and --host_cache_gib",
        "FAILED_PRECONDITION",
    )
