"""Reports of what a worker's tiers have, for the leader's index (`store.parts`)."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from jaxserve.cache.block_events import BlockEvents, Medium, StoredBlocks
from jaxserve.store.tiered import TieredBlocks

REPORT_SECONDS = 0.1  # between looks at what nothing announces: evictions, counts
MOST_KEYS = 4096  # of a report; more follow in others


class TierReports:
    """Reports of the tiers below one worker's devices. send: takes each, as JSON.

    A report has `changes`, [tier, whether blocks came, their keys] in their order; `settled`, keys
    of blocks that commands had stored, or that could not be stored, after what this changed;
    `counts`, `fetched`, `bandwidths` and `block_bytes` as the tiers have them.
    """

    def __init__(self, tiers: TieredBlocks, send: Callable[[bytes], None]):
        self._tiers = tiers
        self._send = send
        self._settled: deque[bytes] = deque()
        self._wake = threading.Event()
        self._changes: list[tuple[str, bool, list[str]]] = []
        self._last: dict[str, Any] = {}

    def settled(self, keys: Sequence[bytes]) -> None:
        """Has blocks reported as settled, soon. For any thread."""
        self._settled.extend(keys)
        self._wake.set()

    def run(self) -> None:
        """Reports what there is, and from then on what changes; returns when `send` raises."""
        events = BlockEvents(self._tiers.events.present, heard=lambda key: True)
        events.subscribe(self)
        self._report([])
        while True:
            self._wake.wait(REPORT_SECONDS)
            self._wake.clear()
            settled = [self._settled.popleft() for _ in range(len(self._settled))]
            self._tiers.events.tell(events)
            self._report(settled)

    def stored(self, blocks: StoredBlocks) -> None:
        self._note(blocks.medium, True, blocks.keys)

    def removed(self, keys: Sequence[bytes], medium: Medium) -> None:
        self._note(medium, False, keys)

    def cleared(self, medium: Medium) -> None:
        """Is not called by tiers."""

    def _note(self, medium: Medium, came: bool, keys: Sequence[bytes]) -> None:
        for first in range(0, len(keys), MOST_KEYS):
            named = [key.hex() for key in keys[first : first + MOST_KEYS]]
            self._changes.append((medium.value, came, named))

    def _report(self, settled: list[bytes]) -> None:
        """Sends what has changed, if anything has."""
        changes, self._changes = self._changes, []
        facts = {
            "counts": asdict(self._tiers.counts()),
            "fetched": [asdict(each) for each in self._tiers.fetched()],
            "bandwidths": self._tiers.bandwidths(),
            "block_bytes": self._tiers.block_bytes,
        }
        for change in changes[:-1]:
            self._send(json.dumps({**facts, "changes": [change], "settled": []}).encode())
        if not changes and not settled and facts == self._last:
            return
        keys = [key.hex() for key in settled]
        self._send(json.dumps({**facts, "changes": changes[-1:], "settled": keys}).encode())
        self._last = facts
