"""Attention over pages for NVIDIA GPUs since Ampere, written in Pallas for Triton.

One kernel serves prefill and decode on A100, L40S, B200 and the like. A *query tile* is 16 to 128
rows of one kv head: its query heads, token by token. Queries and results lie in memory as the
model has them; pages are read where they are. Work is split as by the Hopper kernel: each of as
many thread blocks as the device runs at once takes an equal range of the key tiles of all query
tiles (`kernels.work_split`), and a second kernel merges query tiles that several blocks share
(`combine`). Triton loads the next key tiles while it computes.

`launch` checks shapes and starts the kernels, `tiles` has their block shapes, `keys` finds and
loads keys and values. JAX calls its compiler for Triton deprecated; every version that can be
installed has it.
"""

from jaxserve.kernels.triton.launch import attend, check
from jaxserve.kernels.triton.tiles import Tiles, tiles_for

__all__ = ["Tiles", "attend", "check", "tiles_for"]
