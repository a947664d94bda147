"""The cached blocks of a cluster, as operators ask a conductor for them; see `replica.kv_pool`."""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Callable, Sequence

import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Event, Finished
from jaxserve.api.request import KvSource, Request
from jaxserve.cluster.member import Member
from jaxserve.cluster.prefill_job import ONE_TOKEN
from jaxserve.cluster.router import Router
from jaxserve.replica.kv_pool import HasKvPool, KvHolding, KvLease, KvPool, check_lease_seconds

COPY_SECONDS = 600.0  # in which the blocks of a prompt must have been copied
DONE = ("length", "stop")  # reasons of ends of requests whose KV is there


class ClusterKvPool:
    """Blocks of the members of a cluster; implements `KvPool`. router: knows which member has what.
    now: clock seconds."""

    def __init__(self, router: Router, now: Callable[[], float]):
        self._router = router
        self._now = now

    # --- who has what

    def find(self, prompt: np.ndarray, salt: str) -> list[KvHolding]:
        """Returns what members have reported, without asking them, on whichever medium."""
        tokens = self._tokens(prompt, salt)
        return [self._holding(member, prompt, tokens) for member in self._joined()]

    def _joined(self) -> list[Member]:
        return [member for member in self._router.table.all if member.joined]

    def _tokens(self, prompt: np.ndarray, salt: str) -> list[int]:
        """Tokens at a prompt's beginning that members have, by number."""
        padded = np.append(prompt, np.int32(0))  # for all of its full blocks to be looked up
        return self._router.prefixes(Request("", padded, ONE_TOKEN, cache_salt=salt))

    @staticmethod
    def _holding(member: Member, prompt: np.ndarray, tokens: Sequence[int]) -> KvHolding:
        size = member.replica.info.block_size
        held = tokens[member.number] if member.number < len(tokens) else 0
        return KvHolding(member.name, size, len(prompt) // size, held // size, -1)

    def _named(self, field: str, name: str) -> Member:
        """Returns the member with a name. Errors: RequestError."""
        for member in self._joined():
            if member.name == name:
                if not member.usable:
                    raise RequestError(field, f"{name!r} takes no requests now", "UNAVAILABLE")
                return member
        known = ", ".join(member.name for member in self._joined())
        raise RequestError(field, f"{name!r:.200} is unknown; there are {known}", "NOT_FOUND")

    def _holder(self, prompt: np.ndarray, salt: str, to: Member | None = None) -> Member:
        """Returns the usable member that has most of a prompt. to: of those that this one can fetch
        KV from. Errors: RequestError, NOT_FOUND."""
        tokens = self._tokens(prompt, salt)
        held = {
            member: self._holding(member, prompt, tokens).held
            for member in self._joined()
            if member is not to and member.usable and (to is None or to.takes_kv_of(member))
        }
        most = max(held, key=held.__getitem__, default=None)
        if most is None or not held[most]:
            others = "other replica" if to is not None else "replica"
            raise RequestError("prompt", f"no {others} has a block of it", "NOT_FOUND")
        return most

    # --- leases

    def lease(self, prompt: np.ndarray, salt: str, seconds: float, replica: str) -> KvLease:
        check_lease_seconds(seconds)
        if replica:
            member = self._named("replica", replica)
        else:
            member = self._holder(prompt, salt)
        made = pool_of(member).lease(prompt, salt, seconds, "")
        return dataclasses.replace(made, replica=member.name)

    def release(self, lease: str) -> bool:
        return any(pool.release(lease) for _, pool in self._pools())

    def leases(self) -> list[KvLease]:
        return [
            dataclasses.replace(lease, replica=member.name)
            for member, pool in self._pools()
            for lease in pool.leases()
        ]

    def _pools(self) -> list[tuple[Member, KvPool]]:
        """The pools of all members that answer."""
        members = [member for member in self._joined() if member.alive]
        return [(one, pool_of(one)) for one in members if isinstance(one.replica, HasKvPool)]

    # --- copies

    def replicate(self, prompt: np.ndarray, salt: str, target: str, source: str) -> KvHolding:
        """Has the target serve the prompt as a job that fetches the blocks, as for a request whose
        prompt another member has computed; what does not come is computed there."""
        to = self._named("replica", target)
        if not to.moves_kv:
            raise RequestError("replica", f"{target!r} moves no KV: it needs --host_cache_gib")
        if source:
            holder = self._named("source", source)
            if holder is to or not to.takes_kv_of(holder):
                raise RequestError("source", f"{source!r} has no KV for {target!r}")
        else:
            holder = self._holder(prompt, salt, to)
        tokens = self._tokens(prompt, salt)
        size = holder.replica.info.block_size
        blocks = self._holding(holder, prompt, tokens).held
        if not blocks:
            raise RequestError("prompt", f"{holder.name!r} has no block of it", "NOT_FOUND")
        length = min(blocks * size + 1, len(prompt))
        assert holder.kv_address is not None
        request = Request(
            f"kv-{secrets.token_hex(8)}",
            prompt[:length],
            ONE_TOKEN,
            arrival=self._now(),
            cache_salt=salt,
            kv_source=KvSource(holder.kv_address, blocks, block_size=size),
            job=True,
        )
        _serve(to, request)
        return self._copied(to, prompt, min(length, blocks * size))

    @staticmethod
    def _copied(member: Member, prompt: np.ndarray, tokens: int) -> KvHolding:
        size = member.replica.info.block_size
        return KvHolding(member.name, size, len(prompt) // size, tokens // size, -1)


def pool_of(member: Member) -> KvPool:
    """The pool of a member. Errors: RequestError where it has none."""
    if not isinstance(member.replica, HasKvPool):
        raise RequestError("replica", f"{member.name!r} has no pool of KV", "UNIMPLEMENTED")
    return member.replica.kv_pool


def _serve(member: Member, request: Request) -> None:
    """Waits until a member has served a request. Errors: RequestError where it does not."""
    ends: list[Finished] = []
    ended = threading.Event()

    def sink(events: Sequence[Event]) -> None:
        ends.extend(event for event in events if isinstance(event, Finished))
        if ends:
            ended.set()

    refusal = member.submit(request, sink)
    if refusal is not None:
        raise refusal
    if not ended.wait(COPY_SECONDS):
        member.ask(lambda replica: replica.cancel(request.id))
        said = f"{member.name!r} did not have them after {COPY_SECONDS:g} s"
        raise RequestError("replica", said, "DEADLINE_EXCEEDED")
    if ends[0].reason not in DONE:
        said = f"{member.name!r} ended the copy: {ends[0].error or ends[0].reason}"
        raise RequestError("replica", said, "UNAVAILABLE")
