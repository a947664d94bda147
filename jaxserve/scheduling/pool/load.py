"""The share of all lanes that attention over cached prefixes takes (TokenLake, section 6.1)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxserve.lanes.work import Heads


class AttentionRates(NamedTuple):
    """Seconds that one lane takes in all layers: to read a token of KV, and to compute a pair of
    query and key."""

    read: float
    pair: float

    @classmethod
    def of(
        cls, layers: int, heads: Heads, flops_per_s: float, bytes_per_s: float
    ) -> AttentionRates:
        """Derives the rates of a lane from its arithmetic and its memory bandwidth.

        A token of KV is 4 d K / N bytes in 16 bit, a pair 4 d operations: two products, as in
        section 4.2 (section 6.1 prints 2 d). All layers count, as in a step's seconds.
        """
        return cls(
            layers * heads.kv_bytes / bytes_per_s,
            layers * heads.pair_flops / flops_per_s,
        )


def cache_load(
    prefix: np.ndarray, new: np.ndarray, lanes: int, seconds: float, rates: AttentionRates
) -> float:
    """Returns the share of the memory bandwidth or of the arithmetic of all lanes, whichever is
    larger, that attention over cached prefixes takes: max(M / (M + N B T), F / (F + N F_peak T)).

    prefix, new [n]: cached and new tokens of each request. seconds: T, of the requests without the
    cache on all lanes. Work without the cache is stretched by 1 / (1 - load).
    """
    reading = rates.read * float((prefix + new).sum())
    computing = rates.pair * float((prefix * new).sum())
    if not reading and not computing:
        return 0.0
    free = lanes * seconds
    return max(reading / (reading + free), computing / (computing + free))
