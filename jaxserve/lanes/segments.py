"""Chooses how many tokens of KV are placed as one: a segment.

A query that visits a segment on another lane sends its queries there and gets its part of attention
back. From a certain size on, attention over the segment takes longer than both messages, so that
reading it elsewhere costs no more time than reading it at home (TokenLake, 4.2).
"""

from __future__ import annotations

import math

from jaxserve.lanes.rates import ExchangeRates
from jaxserve.lanes.work import Heads


def least_segment(heads: Heads, rates: ExchangeRates) -> int:
    """Returns the least tokens of a segment that hides the messages of a visit: C >= 2 alpha / k +
    4 d / (k B_net), where alpha is a message's latency, d the width of the queries in elements of
    two bytes, and k the seconds of attention of one query over a token of KV: max(4 d / F, 4 d / B)
    with MHA, and the second times K / N with GQA, whose KV is that much smaller (TokenLake,
    4.2)."""
    computed = heads.pair_flops / rates.flops_per_s
    per_token = max(computed, heads.kv_bytes / rates.read_bytes_per_s)
    messages = rates.all_gather(heads.query_bytes) + rates.all_to_all(heads.query_bytes)
    if not per_token > 0:
        return 1
    return max(1, math.ceil(messages / per_token))
