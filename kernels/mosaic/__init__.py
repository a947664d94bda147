"""Attention over pages for NVIDIA Hopper, written in Mosaic GPU (jax >= 0.11.2).

One kernel serves prefill and decode. A *query tile* is 64 rows of one head for each computing
warpgroup of a thread block; the warpgroups of a block share a kv head and hence the keys and
values, which another warpgroup loads page by page (`loader`), and they alternate between tensor
cores and softmax (`attention`, as in FlashAttention-3). Rows are the tokens of a head where there
are many of them, else tokens times query heads of one kv head (`tiles`).

Work is split by key tiles, not by query tiles (`work_split`): the key tiles of all query tiles form
one sequence of units, and each of as many thread blocks as the device runs at once takes an equal
range of it (stream-K; Osama et al., 2023). So 32 new tokens against a million cached ones, and a
batch of decodes of which one has ten million, both fill the machine. A query tile whose keys fall
in one range is written at once; the others are written as partial results, at most two per block,
which a second kernel merges in place (`combine`).

`qkv` is the launch before attention: norms and RoPE of queries and keys, and the write of keys and
values. `grouped` multiplies groups of rows, by jax's own kernel.

`page_copy` and `ring_send` (pages to the next device of a ring, within the attention kernel) are
not called by the engine yet. `launch` checks shapes and starts the kernels; `config` is what they
are compiled for.
"""

from jaxserve.kernels.mosaic.grouped import check as check_grouped
from jaxserve.kernels.mosaic.grouped import grouped
from jaxserve.kernels.mosaic.launch import attend, attend_and_send, check
from jaxserve.kernels.mosaic.qkv import check as check_write_qkv
from jaxserve.kernels.mosaic.qkv import write_qkv
from jaxserve.kernels.mosaic.tiles import ROWS, Tiles, default_tiles, pack, tiles_for

__all__ = [
    "ROWS",
    "Tiles",
    "attend",
    "attend_and_send",
    "check",
    "check_grouped",
    "check_write_qkv",
    "default_tiles",
    "grouped",
    "pack",
    "tiles_for",
    "write_qkv",
]
