"""Conversations whose next turn is expected, as those of agents between two calls of tools: the
blocks of KV that it will find stay on the devices for as long as such turns have taken to come.

A turn that ends locks its blocks (`cache.locks`), until a time by which most next turns of other
sessions came. Locks change what is evicted first, and nothing else: a prompt or a decode that needs
the pages has them at once, those of the turn that is expected last before others.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque

import numpy as np

from jaxserve.cache import CacheManager
from jaxserve.scheduling.sequence import Sequence

FIRST_SECONDS = 30.0  # for which blocks are kept, before any next turn has come
MOST_SECONDS = 600.0
SHARE = 0.9  # of the next turns that came, by the time until which blocks are kept
TURNS = 512  # newest next turns, of which this is learnt
LEAST_TURNS = 8
MAX_SESSIONS = 1 << 16  # that are remembered


class Sessions:
    """Sessions by their names, each under its requests' salt."""

    def __init__(self, cache: CacheManager):
        self._cache = cache
        # clock second at which each session's newest turn ended, the oldest first
        self._ended: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._gaps: deque[float] = deque(maxlen=TURNS)

    @property
    def keep_seconds(self) -> float:
        """Seconds for which the blocks of a turn are kept."""
        if len(self._gaps) < LEAST_TURNS:
            return FIRST_SECONDS
        return min(float(np.quantile(self._gaps, SHARE)), MOST_SECONDS)

    def began(self, sequence: Sequence, now: float) -> None:
        """Notes that a turn has come, which has promises of its own now."""
        session = _session(sequence)
        if session is None:
            return
        self._cache.sessions.release(session)
        ended = self._ended.pop(session, math.inf)
        if now >= ended:
            self._gaps.append(now - ended)

    def ended(self, sequence: Sequence, now: float) -> None:
        """Notes that a turn has ended, and keeps its blocks."""
        session = _session(sequence)
        if session is None:
            return
        self._ended[session] = now
        self._ended.move_to_end(session)
        if len(self._ended) > MAX_SESSIONS:
            self._ended.popitem(last=False)
        self._keep(session, now + self.keep_seconds, sequence)

    def _keep(self, session: tuple[str, str], due: float, sequence: Sequence) -> None:
        """Locks what is on the devices of a sequence's blocks, until clock second `due`."""
        cache = self._cache
        if not cache.prefix_caching:
            return
        hashes = sequence.block_hashes
        blocks = (len(sequence.history) - 1) // cache.block_size
        prefix = cache.published.reachable(hashes, blocks, cache.match(hashes, blocks).pages)
        on_pages, _ = cache.published.keys_of(prefix, hashes)
        cache.sessions.lock(session, due, on_pages)


def _session(sequence: Sequence) -> tuple[str, str] | None:
    """Returns the session of a sequence; None for one without."""
    request = sequence.request
    return (request.key_salt, request.session) if request.session else None
