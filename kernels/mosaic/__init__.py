"""Attention over pages on NVIDIA Hopper, written in Mosaic GPU (jax >= 0.11.2).

One kernel serves prefill and decode. A *query tile* is 64 rows of one head for each computing
warpgroup of a block; the warpgroups of a block share a kv head, and so the keys and values that
another warpgroup fetches for them, page by page, and take turns at the tensor cores. Rows are the
tokens of a head where there are many of them, else tokens by query heads of one kv head (`tiles`).

Work is dealt by key tiles, not by query tiles (`line`): the key tiles of all query tiles stand in
one line, and each of as many blocks as the device runs at once takes an equal stretch of it
(stream-K). So 32 new tokens against a million cached ones, and a batch of decodes of which one has
ten million, fill the machine alike. A query tile whose keys lie in one stretch is written at once
(`attention`); the others are written as pieces, at most two per block, which a second kernel merges
in place (`join`).
"""

from jaxserve.kernels.mosaic.launch import attend, attend_and_send, check
from jaxserve.kernels.mosaic.tiles import ROWS, Tiles, default_tiles, pack, tiles_for

__all__ = [
    "ROWS",
    "Tiles",
    "attend",
    "attend_and_send",
    "check",
    "default_tiles",
    "pack",
    "tiles_for",
]
