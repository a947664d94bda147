"""Chooses among the members of a live cluster: what `routing` decides, on what the members have
cached, as they tell, and on what was routed to them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container, Mapping, Sequence

from jaxserve.api.request import Request
from jaxserve.cache.hashes import BlockHashes, root_key
from jaxserve.cluster.directory import Directory, DirectoryFeed
from jaxserve.cluster.member import Member
from jaxserve.cluster.routing import (
    ROUTING,
    PrefillChoice,
    PrefillView,
    RoutingQuery,
)
from jaxserve.replica.info import ReplicaInfo
from jaxserve.settings.schema import ConfigError

GOLDEN_RATIO = 0.6180339887498949  # its multiples, without their whole parts, are evenly spread


class Router:
    """Routes prompts to members. policy: a row of ROUTING; as members fetch nothing from each
    other, `cache_aware` is refused. info: of all members. Calls may come from any thread.

    Errors: ConfigError for members or a policy that it cannot route to or by.
    """

    def __init__(self, members: Sequence[Member], info: ReplicaInfo, policy: str):
        if policy not in ROUTING or policy == "cache_aware":
            known = ", ".join(name for name in ROUTING if name != "cache_aware")
            raise ConfigError("routing", f"must be one of {known}, not {policy!r}")
        for member in members:
            if not (member.role.prefills and member.role.decodes):
                said = f"{member.name} has the role {member.role.value}; only mixed is served"
                raise ConfigError("role", said)
        self.members = members
        self.info = info
        self._policy: Callable[[RoutingQuery], PrefillChoice] = ROUTING[policy]
        self._directory = Directory()
        # members' threads that tell of blocks wait for look-ups, and for nothing else
        self._lock = threading.Lock()
        self._draws = 0
        for number, member in enumerate(members):
            feed = DirectoryFeed(self._directory, number, self._lock)
            events = member.replica.block_events
            member.replica.post(functools.partial(events.subscribe, feed))

    def forget(self, member: int) -> None:
        """Forgets what a member had cached, as it is lost."""
        with self._lock:
            self._directory.cleared(member)

    def prefixes(self, request: Request) -> list[int]:
        """Tokens at a prompt's beginning that each member has cached [members]. A prompt's last
        token is always computed."""
        info = self.info
        prompt = request.prompt
        root = root_key(
            info.cache_fingerprint, info.cache_dtype, info.block_size, request.cache_salt
        )
        chain = BlockHashes(root, info.block_size, lambda first, last: prompt[first:last])
        blocks = (len(prompt) - 1) // info.block_size
        if blocks:
            chain[blocks - 1]  # hashes all of them before anybody waits for the lock
        with self._lock:
            depths = self._directory.prefix_blocks(chain, blocks, len(self.members))
        return [depth * info.block_size for depth in depths]

    def usable(self, tried: Container[int]) -> list[int]:
        """Members that can be sent a request, but for those that were tried."""
        return [
            number
            for number, member in enumerate(self.members)
            if number not in tried and member.usable
        ]

    def choose(
        self,
        total: int,
        prefixes: Sequence[int],
        usable: Sequence[int],
        held: Mapping[int | None, int],
        now: float,
    ) -> PrefillChoice:
        """The member, one of `usable`, for a prompt of `total` tokens. prefixes: see `prefixes`.
        held: requests that each member has."""
        views = [
            PrefillView(
                number, prefixes[number], self.members[number].work.queue(now), held.get(number, 0)
            )
            for number in usable
        ]
        self._draws += 1
        draw = (self._draws * GOLDEN_RATIO) % 1.0
        return self._policy(RoutingQuery(views, total, self, draw=draw))

    def prefill(self, member: int, cached: int, total: int) -> float:
        """Predicted seconds to compute a part of a prompt; see `RoutingCosts`."""
        return self.members[member].prefill(cached, total)

    def transfer(self, source: int, target: int, tokens: int) -> float:
        """Members fetch nothing from each other; see `RoutingCosts`."""
        return float("inf")
