"""The border between the towers: what the host tells the device about one step, as arrays of
integers.

Its size depends on the tokens of the step, never on the length of a context: a page table entry is
sent once, when it is new.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class PageStores:
    """Pages whose blocks lower tiers are to keep: lane [m], page on that lane [m] and retention of
    the block (see `Request`) [m], all int32, and the block's key."""

    lanes: np.ndarray
    pages: np.ndarray
    retention: np.ndarray
    keys: list[bytes]

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, part: slice) -> PageStores:
        return PageStores(self.lanes[part], self.pages[part], self.retention[part], self.keys[part])

    @property
    def nbytes(self) -> int:
        """Bytes of all fields."""
        numbers = self.lanes.nbytes + self.pages.nbytes + self.retention.nbytes
        return numbers + sum(map(len, self.keys))


_NONE = np.zeros(0, np.int32)
NO_COPIES = np.zeros((0, 2), np.int32)
# the exchange of steps for which no other was chosen; any step may use it
DEFAULT_EXCHANGE = "gather"
NO_STORES = PageStores(_NONE, _NONE, _NONE, [])


@dataclass(frozen=True, slots=True)
class Batch:
    """The chunks of one step, one row of the arrays each; int32 unless said otherwise. Chunks that
    feed come first.

    A chunk's tokens are at positions `start` to before `start + length`. The row of a page table,
    per lane and slot, lists that lane's blocks of the sequence (in which order: `cache.manager`).
    """

    number: int  # counts up from 0
    seq: np.ndarray  # [n] int64, number of the sequence: never used again by this scheduler
    slot: np.ndarray  # [n] row of the device's tables, 0 to max_seqs - 1
    # [n] home lane: computes the linear layers of the chunk's tokens and samples for it
    lane: np.ndarray
    start: np.ndarray  # [n]
    length: np.ndarray  # [n] 1 for a decode
    # [n] bool; True: the one token is what the device sampled last for the slot; False: tokens are
    # in `tokens`
    is_decode: np.ndarray
    sample: np.ndarray  # [n] bool; a token is sampled after the chunk's last one
    # [n] lanes that compute the chunk and meet in attention: the group of this size (see
    # `lanes.groups`) that has the home lane; all the sequence's blocks lie in it; 1: a local chunk
    group_size: np.ndarray
    blocks_per_lane: (
        np.ndarray
    )  # [n, lanes] blocks of the sequence on each lane, those of this step included
    # [k] lane of each block that tokens of spread chunks of more than one token fall in, chunk
    # after chunk
    block_lane: np.ndarray
    tokens: np.ndarray  # [sum of length where not feed] token ids, chunk after chunk
    # [m, 4] pages that the step moves or copies: lane, page, to lane, page. At once: all are read
    # before any is written, and both before its layers read or write
    moves: np.ndarray
    # [m, 5] new page table entries: lane, slot, index in the row, page, block
    table_updates: np.ndarray
    seconds: float  # predicted time in the slowest stage
    # rows of this batch whose sequence has just got its slot: set its sampling state
    admitted: tuple[int, ...]
    # lanes over which a spread chunk is dealt where these are not all of its group, by its row in
    # this batch; its last tokens are computed at home
    dealt: Mapping[int, range] = field(default_factory=dict)
    # how spread chunks of more than one token reach KV on other lanes, and how those of one, which
    # are decodes, do: names of `lanes.exchange.EXCHANGES`
    exchange: str = DEFAULT_EXCHANGE
    decode_exchange: str = DEFAULT_EXCHANGE
    stores: PageStores = NO_STORES  # read before the step
    # [m, 2 + pages] copies of recurrent states: lane, slot and pages on that lane. The first are
    # made from pages to slots, before the layers; the others from slots to pages, behind them
    restores: np.ndarray = field(default_factory=lambda: NO_COPIES)
    saves: np.ndarray = field(default_factory=lambda: NO_COPIES)
    # rows of one token that is proposed, each behind another row of its slot: what is sampled
    # behind it counts if it is what is sampled behind the token before it
    drafts: range = range(0)
    drafting: float = 0.0  # predicted seconds in which these were made, before the step
    # [n] place on the devices of the adapter that a row is computed with, -1: none; [0]: no row has
    # one. [m, 2] adapters that come to the devices before the layers: place, number of the adapter
    adapters: np.ndarray = field(default_factory=lambda: _NONE)
    adapter_loads: np.ndarray = field(default_factory=lambda: NO_COPIES)

    @property
    def first_chunk(self) -> int:
        """Row of the first part of a prefill, behind decodes and proposed tokens."""
        return int(np.count_nonzero(self.is_decode)) + len(self.drafts)

    @property
    def is_chunk(self) -> np.ndarray:
        """[n] bool; whether a row is part of a prefill: neither a decode nor a proposed token."""
        out = ~self.is_decode
        out[self.drafts] = False
        return out

    @property
    def before_drafts(self) -> np.ndarray:
        """[m] row of the token before each proposed one: of the decode, or of another proposed
        token."""
        slots = self.slot[self.drafts]
        before = np.arange(self.drafts.start - 1, self.drafts.stop - 1)
        first = np.r_[True, slots[1:] != slots[:-1]]
        decodes = {slot: row for row, slot in enumerate(self.slot[: self.drafts.start].tolist())}
        before[first] = [decodes[slot] for slot in slots[first].tolist()]
        return before

    @property
    def spread(self) -> np.ndarray:
        """[n] bool; whether a chunk meets other lanes than its home."""
        return self.group_size > 1

    @property
    def nbytes(self) -> int:
        """Size of the step's message, in bytes."""
        return sum(
            getattr(self, each.name).nbytes
            for each in fields(self)
            if each.name
            not in (
                "number",
                "seconds",
                "admitted",
                "dealt",
                "exchange",
                "decode_exchange",
                "drafts",
                "drafting",
            )
        )
