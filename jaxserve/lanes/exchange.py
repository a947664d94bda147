"""The exchanges: strategies by which queries of spread sequences attend over KV on other lanes.

A sequence that is spread over N lanes has a share of its KV on each, and each lane computes a share
of its new tokens. Four strategies give the same attention (Context Parallelism paper, section 3.5,
Medha, section 3.4, and TokenLake, section 3.4):

- `gather`: all lanes get all queries in one all-gather, attend over their own KV, and send the
  partials home in one all-to-all. With the queries go the new keys and values, for a token's KV
  need not belong where the token is computed. Nothing depends on what is cached.
- `pass_q`: KV stays and queries go round a ring of lanes in N - 1 hops; a hop runs beside the
  attention of the step before. The partials, which are as long as the queries, come home in one
  all-to-all, which nothing hides. Decodes may go so too: their new keys and values are gathered
  first.
- `pass_kv`: queries stay and KV goes round in N - 1 hops.
- `visit`: queries go to the lanes that hold blocks of their sequence, and new keys and values with
  them, in all-to-alls with room for a share of a lane's rows per pair of lanes. The partials go
  home beside the attention of a lane's own queries.

`EXCHANGES` is the one table of them, which settings, compiled shapes, metrics, profiles and costs
read; `sharding.exchange.EXCHANGES` has the device function of each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from jaxserve.api.batch import DEFAULT_EXCHANGE
from jaxserve.lanes.rates import LINKS, ExchangeTimes
from jaxserve.lanes.work import ExchangeWork, Heads

PIECE_TOKENS = 2048  # of KV, that a lane of the engine sends on at once round a ring
# shares of a lane's spread rows, of which a program with `visit` has room for one per pair of lanes
ROOMS = (0.25, 0.5, 1.0)


@dataclasses.dataclass(frozen=True, slots=True)
class ExchangeBytes:
    """Bytes that one lane sends (and receives) per layer. `rounds` times `lanes - 1` hops of `hop`
    bytes each; then bytes of an all-gather and of all-to-alls, of partials that return, of queries
    that visit and of new KV that is put, each in `lanes - 1` messages; 0 if it sends none."""

    lanes: int
    rounds: int = 0
    hop: int = 0
    gathered: int = 0
    returned: int = 0
    visiting: int = 0
    put: int = 0

    @property
    def hops(self) -> int:
        return self.rounds * (self.lanes - 1)


# bytes sent for work, by heads and tokens of a piece
Traffic = Callable[[ExchangeWork, Heads, int], ExchangeBytes]
# seconds per layer of what is sent and, for chunks, of their attention
Seconds = Callable[[ExchangeBytes, ExchangeWork, ExchangeTimes], float]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One strategy.

    name: as settings, metrics and profiles have it. summary: what it does, for help texts. ring:
    whether messages go from lane to lane in hops. settled: whether a chunk's tokens must be
    computed by the lanes that hold their blocks. rooms: shares of a lane's spread rows that may
    reach one other lane, by program. links: those of `rates.LINKS` that messages of chunks take.
    traffic, seconds: of chunks. decode_traffic, decode_seconds: of spread decodes, besides the
    attention of as many decodes of a lane's own; None: decodes cannot use it.
    """

    name: str
    summary: str
    traffic: Traffic
    seconds: Seconds
    decode_traffic: Traffic | None = None
    decode_seconds: Seconds | None = None
    ring: bool = False
    settled: bool = False
    rooms: tuple[float, ...] = (1.0,)
    links: tuple[str, ...] = LINKS

    @property
    def has_rooms(self) -> bool:
        """True if its programs differ in how many rows may reach one other lane."""
        return len(self.rooms) > 1

    def of_chunks(self, work: ExchangeWork, times: ExchangeTimes) -> float:
        """Seconds per layer of attention and of what lanes send for it."""
        return self.seconds(self.traffic(work, times.heads, times.piece), work, times)

    def of_decodes(self, work: ExchangeWork, times: ExchangeTimes) -> float:
        """Seconds per layer that decodes take besides the attention of as many of a lane's own."""
        assert self.decode_traffic is not None and self.decode_seconds is not None
        return self.decode_seconds(self.decode_traffic(work, times.heads, 0), work, times)


# --- bytes


def gather_traffic(work: ExchangeWork, heads: Heads, piece: int = 0) -> ExchangeBytes:
    """Sends (N-1) T/N (N_H + 2 N_KV) H e of queries, keys and values; (N-1) T/N N_H (H + 1) partial
    of partials."""
    others = (work.lanes - 1) * (work.even or work.share)
    return ExchangeBytes(
        work.lanes,
        gathered=others * (heads.query_bytes + heads.new_kv_bytes),
        returned=others * heads.partial_bytes,
    )


def pass_kv_traffic(work: ExchangeWork, heads: Heads, piece: int = 0) -> ExchangeBytes:
    """Sends (N-1) 2 (T+P)/N N_KV H e, with the fullest lane's shard for (T+P)/N: messages of a ring
    are of equal size (section 3.5.2). KV goes as it is stored, in pieces of `piece` tokens, the
    last one padded; 0: a shard at once, as in the paper."""
    piece = piece or max(work.shard, 1)
    return ExchangeBytes(work.lanes, rounds=-(-work.shard // piece), hop=piece * heads.kv_bytes)


def pass_q_traffic(work: ExchangeWork, heads: Heads, piece: int = 0) -> ExchangeBytes:
    """Sends (N-1) T/N N_H H e round the ring. Then a lane has partials of all N shares of T/N
    tokens over its KV and sends N-1 of them home: (N-1) T/N N_H (H + 1) partial (appendix C, which
    counts one log-sum-exp per token, not per head)."""
    return ExchangeBytes(
        work.lanes,
        rounds=1,
        hop=work.share * heads.query_bytes,
        returned=(work.lanes - 1) * work.share * heads.partial_bytes,
    )


def pass_q_decode_traffic(work: ExchangeWork, heads: Heads, piece: int = 0) -> ExchangeBytes:
    """Sends what `pass_q_traffic` does and (N-1) T/N 2 N_KV H e of new keys and values of decodes:
    these may belong on any lane, and are gathered."""
    gathered = (work.lanes - 1) * work.share * heads.new_kv_bytes
    return dataclasses.replace(pass_q_traffic(work, heads), gathered=gathered)


def visit_traffic(work: ExchangeWork, heads: Heads, piece: int = 0) -> ExchangeBytes:
    """Sends what `gather_traffic` does, of the share of a lane's tokens that there is room for."""
    tokens = (work.lanes - 1) * _visiting(work)
    return ExchangeBytes(
        work.lanes,
        returned=tokens * heads.partial_bytes,
        visiting=tokens * heads.query_bytes,
        put=tokens * heads.new_kv_bytes,
    )


def _visiting(work: ExchangeWork) -> int:
    """New tokens of a lane that a program has room for per pair of lanes."""
    room = next(room for room in ROOMS if room >= work.visits)
    return rows_with_room(room, work.even or work.share)


def rows_with_room(room: float, rows: int) -> int:
    """Rows that may reach one other lane, of the `rows` of a lane. room: see `Exchange.rooms`."""
    return math.ceil(room * rows)


# --- seconds


def gather_seconds(sent: ExchangeBytes, work: ExchangeWork, times: ExchangeTimes) -> float:
    """Adds up an all-gather, one call of attention and an all-to-all."""
    attention = times.attention(work.gathered_pairs, work.shard, work.tokens)
    return times.rates.all_gather(sent.gathered) + attention + times.rates.all_to_all(sent.returned)


def ring_seconds(sent: ExchangeBytes, work: ExchangeWork, times: ExchangeTimes) -> float:
    """Adds up each hop beside the attention of what came before it; the last attention; the
    all-to-all, if partials come home. The ring passes all lanes of a group, also those that hold
    nothing."""
    rates = times.rates
    rounds = sent.rounds
    attention = times.attention(
        work.step_pairs / rounds, work.touched / rounds, work.share / rounds
    )
    hop = rates.hop(sent.hop)
    back = 0.0
    if sent.returned:
        back = rates.all_to_all(sent.returned)
    hidden = (work.holders or times.lanes) - 1  # hops with attention beside them
    hops = hidden * rates.beside(hop, attention) + (times.lanes - 1 - hidden) * hop
    return rounds * (hops + attention) + back


def gather_decode_seconds(sent: ExchangeBytes, work: ExchangeWork, times: ExchangeTimes) -> float:
    """Adds up an all-gather and an all-to-all."""
    return times.rates.all_gather(sent.gathered) + times.rates.all_to_all(sent.returned)


def ring_decode_seconds(sent: ExchangeBytes, work: ExchangeWork, times: ExchangeTimes) -> float:
    """Adds up new keys and values in an all-gather; the part of each hop that the attention beside
    it does not hide; a call of attention more for each; partials home in an all-to-all."""
    rates = times.rates
    attention = times.attention_of_decodes(work.share, work.touched)
    exposed = rates.beside(rates.hop(sent.hop), attention) - attention
    return (
        rates.all_gather(sent.gathered)
        + sent.hops * (exposed + times.decode_call)
        + rates.all_to_all(sent.returned)
    )


def visit_seconds(sent: ExchangeBytes, work: ExchangeWork, times: ExchangeTimes) -> float:
    """Adds up queries and new KV on their way; the attention of visitors; partials on their way
    home beside the attention of a lane's own queries."""
    rates = times.rates
    lanes = work.lanes
    own = times.attention(work.gathered_pairs / lanes, work.shard, work.tokens / lanes)
    others = work.gathered_pairs * (lanes - 1) / lanes
    visitors = times.attention(others, work.shard, (lanes - 1) * _visiting(work))
    there = rates.all_to_all(sent.visiting) + rates.all_to_all(sent.put)
    return there + visitors + rates.beside(rates.all_to_all(sent.returned), own)


def visit_decode_seconds(sent: ExchangeBytes, work: ExchangeWork, times: ExchangeTimes) -> float:
    """Adds up queries on their way; the part of what partials and new KV take that the attention
    of a lane's own decodes does not hide; a call of attention more."""
    rates = times.rates
    attention = times.attention_of_decodes(work.share, work.touched)
    beside = rates.all_to_all(sent.returned) + rates.all_to_all(sent.put)
    exposed = rates.beside(beside, attention) - attention
    return rates.all_to_all(sent.visiting) + exposed + times.decode_call


# --- the table

ROWS = (
    Exchange(
        DEFAULT_EXCHANGE,
        "queries go to all lanes",
        gather_traffic,
        gather_seconds,
        gather_traffic,
        gather_decode_seconds,
        links=("all_gather", "all_to_all"),
    ),
    Exchange(
        "pass_q",
        "queries go round a ring",
        pass_q_traffic,
        ring_seconds,
        pass_q_decode_traffic,
        ring_decode_seconds,
        ring=True,
        settled=True,
        links=("hop", "all_to_all"),
    ),
    Exchange(
        "pass_kv",
        "KV goes round a ring",
        pass_kv_traffic,
        ring_seconds,
        ring=True,
        settled=True,
        links=("hop",),
    ),
    Exchange(
        "visit",
        "queries go to lanes that hold their sequence",
        visit_traffic,
        visit_seconds,
        visit_traffic,
        visit_decode_seconds,
        rooms=ROOMS,
        links=("all_to_all",),
    ),
)
EXCHANGES: dict[str, Exchange] = {row.name: row for row in ROWS}


def decode_exchanges() -> dict[str, Exchange]:
    """The exchanges that spread decodes may have."""
    return {name: row for name, row in EXCHANGES.items() if row.decode_traffic}
