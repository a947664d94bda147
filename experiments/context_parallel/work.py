"""Sums up the work that the paper's exchanges share: chunks of any lengths, dealt evenly."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.lanes.choice import Decision, ExchangeChooser
from jaxserve.lanes.exchange import ExchangeBytes
from jaxserve.lanes.work import ExchangeWork, pairs_of, require


def work_of(
    chunks: Sequence[tuple[int, int]], lanes: int, shards: Sequence[int] | None = None
) -> ExchangeWork:
    """Sums up chunks of (cached, new) tokens. New tokens are dealt evenly, decodes sequence by
    sequence (Alg. 4).

    shards: per chunk, tokens of KV with the new ones on the lane that holds most; default: an even
    split of both (section 3.5.1). Errors: ConfigError that names lanes, chunks, cached, new or
    shards."""
    require(lanes >= 1, "lanes", lanes, "1 or more")
    require(len(chunks) > 0, "chunks", list(chunks), "one or more")
    require(shards is None or len(shards) == len(chunks), "shards", shards, "one for each chunk")
    tokens = context = share = decodes = prefill = decode = 0
    pairs = 0.0
    for index, (cached, new) in enumerate(chunks):
        require(cached >= 0, "cached", cached, "0 or more")
        require(new >= 1, "new", new, "1 or more")
        shard = -(-cached // lanes) - (-new // lanes)
        if shards is not None:
            shard = shards[index]
        tokens += new
        context += cached + new
        pairs += pairs_of(cached, new)
        if new == 1:
            decodes += 1
            decode += shard
        else:
            share -= -new // lanes
            prefill += shard
    visits = -(-decodes // lanes)
    touched = prefill + decode * visits / max(decodes, 1)
    return ExchangeWork(lanes, tokens, context, pairs, share + visits, prefill + decode, touched)


def choose(chooser: ExchangeChooser, chunks: Sequence[tuple[int, int]]) -> Decision:
    """Decides for a step's spread chunks of (cached, new) tokens. Errors: see `work_of`."""
    return chooser.decide(work_of(chunks, chooser.lanes))


def bytes_of(sent: ExchangeBytes) -> int:
    """Bytes that one lane sends in all."""
    return sent.hops * sent.hop + sent.gathered + sent.returned + sent.visiting + sent.put
