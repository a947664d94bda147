"""Cached prefixes of prompts on each member of a live cluster, as the members report them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable

from jaxserve.api.request import Request
from jaxserve.cluster.directory import Directory, DirectoryFeed
from jaxserve.cluster.member import Member
from jaxserve.replica.info import ReplicaInfo


class CachedPrefixes:
    """A directory that is fed by the members' block events. Calls may come from any thread."""

    def __init__(self) -> None:
        self._directory = Directory()
        # members' threads that tell of blocks wait for look-ups, and for nothing else
        self._lock = threading.Lock()
        self._feeds: dict[Member, DirectoryFeed] = {}

    def follow(self, member: Member) -> None:
        """Listens to what a member, which has its number, stores and loses."""
        feed = DirectoryFeed(self._directory, member.number, self._lock)
        self._feeds[member] = feed
        events = member.replica.block_events
        member.replica.post(functools.partial(events.subscribe, feed))

    def unfollow(self, member: Member) -> None:
        """Stops listening, and forgets what the member had: its number may be used again."""
        feed = self._feeds.pop(member)
        feed.close()
        events = member.replica.block_events
        member.ask(lambda replica: replica.post(functools.partial(events.unsubscribe, feed)))

    def forget(self, member: Member) -> None:
        """Forgets what a member had cached, as it is lost."""
        with self._lock:
            self._directory.cleared(member.number)

    def blocks(self, member: Member) -> int:
        """Returns the number of blocks of a member; 0 for one that is not followed."""
        if member not in self._feeds:
            return 0
        with self._lock:
            return self._directory.count(member.number)

    def tokens(self, request: Request, members: Iterable[Member], numbers: int) -> list[int]:
        """Tokens at a prompt's beginning that each member has cached, by the members' numbers
        [numbers]; 0 for those that have not joined. A prompt's last token is always computed."""
        depths = [0] * numbers
        if request.bypass_prefix_cache:
            return depths
        alike: dict[tuple[int, str, str], list[Member]] = {}  # by what keys depend on
        for member in members:
            if member.joined:
                info = member.replica.info
                keys = info.block_size, info.cache_layout, info.cache_fingerprint
                alike.setdefault(keys, []).append(member)
        for (size, *_), same in alike.items():
            blocks = self._blocks(request, same[0].replica.info, numbers)
            for member in same:
                depths[member.number] = blocks[member.number] * size
        return depths

    def _blocks(self, request: Request, info: ReplicaInfo, numbers: int) -> list[int]:
        """Blocks of `info`'s size at a prompt's beginning that members have, by number."""
        prompt = request.prompt
        size = info.block_size
        blocks = (len(prompt) - 1) // size
        if not blocks:
            return [0] * numbers
        chain = info.block_hashes(prompt, request.key_salt)
        chain[blocks - 1]  # hashes all of them before anybody waits for the lock
        with self._lock:
            return self._directory.prefix_blocks(chain, blocks, numbers)
