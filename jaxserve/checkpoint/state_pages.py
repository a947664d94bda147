"""Counts the KV pages that a copy of a sequence's recurrent states takes.

A copy lies on pages of the same pools as keys and values: a page has one part in each pool of a
group of layers, and the states of this group's layers, one after the other, are cut into such
parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from jaxserve.checkpoint.delta_net import DeltaNetSpec
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.page_groups import Windows, pool_count, pool_page

STATE_BYTES = 4  # of a number of a state, which is f32


def state_pages(
    model: ModelConfig,
    groups: Iterable[range],
    windows: Windows,
    block_size: int,
    kv_bytes: int,
    window_bytes: int,
) -> int:
    """Returns the pages that a copy of a sequence's states takes, in the group of layers that needs
    most; 0 where no layer has states, or a group has states and no pages. groups: of layers that
    run together, see `StagePlan.groups`. kv_bytes, window_bytes: of a number on a page, and of one
    of the last inputs of a convolution. Any degree of `tp` splits both alike."""
    page = pool_page(model).size * block_size * kv_bytes
    most = 0
    for group in groups:
        taken = sum(_bytes(model, layer, kv_bytes, window_bytes) for layer in group)
        if not taken:
            continue
        pools = pool_count(model, windows, group)
        if not pools:
            return 0
        most = max(most, -(-taken // (pools * page)))
    return most


def _bytes(model: ModelConfig, layer: int, kv_bytes: int, window_bytes: int) -> int:
    """Returns the bytes that the states of a layer take on pages: numbers narrower than those
    of pages are widened to f32."""
    spec = model.mixer(layer)
    if not isinstance(spec, DeltaNetSpec):
        return 0
    window = max(window_bytes, STATE_BYTES if kv_bytes > window_bytes else 0)
    return STATE_BYTES * math.prod(spec.state) + window * math.prod(spec.window)
