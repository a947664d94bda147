"""The kernels for Hopper become machine code that fits: lowered on any machine, compiled where `python -m tests.kernels.cuda` was run.

No number is computed here. What is caught is a layout or shape that the compiler lacks, too much shared memory, registers that do not
suffice, and a pool of pages that is copied; the figures that are limits here are those of the day when they were written, or a little more.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest

if jax.__version_info__ < (0, 11, 2):
    pytest.skip("Mosaic GPU kernels need jax 0.11.2", allow_module_level=True)

from jaxserve.kernels import mosaic
from jaxserve.kernels.mosaic import Tiles
from jaxserve.sharding import lanes
from tests.kernels import cuda

PAGES = 4096
needs_compiler = pytest.mark.skipif(cuda.lacking() is not None, reason=str(cuda.lacking()))


@dataclass(frozen=True)
class Shape:
    """As of tests.kernels.test_attend, of types `dtype` of queries and pages and `out`; `spilled`: the most bytes of spills in a kernel."""

    R: int
    T: int
    K: int
    G: int
    H: int
    C: int
    W: int
    window: int | None = None
    dtype: str = "bfloat16"
    out: str = "bfloat16"
    tiles: Tiles | None = None
    spilled: int = 0

    @property
    def q(self) -> tuple[int, ...]:
        return self.R, self.T, self.K, self.G, self.H

    @property
    def pool(self) -> tuple[int, ...]:
        return PAGES, self.K, 2, self.C, self.H

    @property
    def temp(self) -> int:
        """Bytes beside arguments and results: two pieces of f32 per block; queries and results as whole tiles where the heads of a kv head
        are rows; and little for the line of key tiles."""
        warpgroups = 1 if self.T * self.G <= mosaic.ROWS else 2
        packing = mosaic.pack(self.T, self.K, self.G, warpgroups)
        packed = self.R * packing.rows * packing.heads * self.H * (np.dtype(self.dtype).itemsize + np.dtype(self.out).itemsize)
        return 132 * 2 * warpgroups * mosaic.ROWS * (self.H + 1) * 4 + packing.packed * packed + 2**18

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Of mosaic.attend."""
        pos, table, row = array((self.R, self.T)), array((2, self.R, self.W)), array((self.R,))
        return array(self.q, self.dtype), pos, array(self.pool, self.dtype), table, row, row

    def attend(self) -> Any:
        return functools.partial(mosaic.attend, scale=0.1, window=self.window, dtype=np.dtype(self.out), tiles=self.tiles)


def array(shape: tuple[int, ...], dtype: str = "int32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))


SHAPES = {
    "prefill": Shape(1, 2048, 8, 4, 128, 64, 2048, spilled=80),
    "prefill, f32 out": Shape(1, 2048, 8, 4, 128, 64, 2048, out="float32", spilled=80),
    "prefill, float16": Shape(1, 2048, 8, 4, 128, 64, 2048, dtype="float16", out="float16", spilled=80),
    "prefill, window": Shape(1, 2048, 8, 4, 128, 64, 2048, window=4096, spilled=80),
    "prefill, G of 7": Shape(2, 512, 4, 7, 128, 64, 512, spilled=80),
    "prefill, G of 16": Shape(1, 512, 2, 16, 128, 16, 512, spilled=112),
    "prefill, H of 64": Shape(4, 256, 2, 8, 64, 256, 128),
    "prefill, H of 256": Shape(4, 256, 2, 8, 256, 64, 128, tiles=Tiles(64, 2, 2, 132), spilled=360),
    "64 tokens": Shape(1, 64, 8, 4, 128, 64, 512, spilled=64),
    "32 tokens": Shape(1, 32, 8, 4, 128, 16, 65536, spilled=160),
    "decode": Shape(16, 1, 8, 4, 128, 64, 2048, spilled=56),
    "decode, f32 out": Shape(16, 1, 8, 4, 128, 64, 2048, out="float32", spilled=56),
    "decode, window": Shape(16, 1, 8, 4, 128, 64, 2048, window=1024, spilled=56),
    "decode, G of 1": Shape(16, 1, 32, 1, 128, 64, 512, spilled=56),
    "decode, G of 16": Shape(8, 1, 1, 16, 128, 16, 512, spilled=96),
    "decode, H of 64": Shape(8, 1, 8, 4, 64, 256, 128),
    "decode, H of 256": Shape(8, 1, 8, 4, 256, 64, 128, spilled=328),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@shapes
def test_lowers_to_two_kernels_that_fit_shared_memory(shape):
    lowered = cuda.lower(shape.attend(), *shape.arguments())
    assert lowered.as_text().count("stablehlo.custom_call @mosaic_gpu_v2") == 2
    out, lse = lowered.out_info
    assert (out.shape, out.dtype) == (shape.q, shape.out) and (lse.shape, lse.dtype) == (shape.q[:-1], "float32")


def test_tiles_that_need_too_much_shared_memory_are_refused():
    shape = Shape(1, 2048, 8, 4, 128, 64, 2048, tiles=Tiles(128, 2, 8, 132))
    with pytest.raises((ValueError, NotImplementedError), match="shared memory"):
        cuda.lower(shape.attend(), *shape.arguments())


@needs_compiler
@shapes
def test_compiles_without_many_spills_or_a_copy_of_the_pool(shape):
    compiled = cuda.compile(shape.attend(), *shape.arguments())
    assert len(compiled.kernels) == 2 and max(kernel.spilled for kernel in compiled.kernels) <= shape.spilled
    assert 0 < max(compiled.shared) <= 227 * 1024
    assert compiled.made(math.prod(shape.pool)) == set()
    assert compiled.temp <= shape.temp


@needs_compiler
@pytest.mark.parametrize("name", ["prefill", "32 tokens", "decode"])
def test_a_donated_pool_is_written_and_attended_to_in_place(name):
    shape = SHAPES[name]
    compiled = cuda.compile(*writing(shape), donate=(0,))
    assert compiled.aliased == math.prod(shape.pool) * 2
    assert compiled.made(math.prod(shape.pool)) == {"scatter", "fusion"}             # of the scatter, which writes its operand
    assert compiled.temp <= shape.temp


@needs_compiler
def test_a_copy_of_the_pool_would_be_found():
    shape = SHAPES["decode"]
    compiled = cuda.compile(*writing(shape))                                         # not donated
    assert compiled.aliased == 0 and "copy" in compiled.made(math.prod(shape.pool))


def writing(shape: Shape) -> tuple[Any, ...]:
    """Write and attend, with its arguments: the pool, keys and values, queries, table, and per row its slot, start and length."""
    q, _, pool, table, row, _ = shape.arguments()
    pages, kv = array((1, *pool.shape), shape.dtype), array((shape.R * shape.T, shape.K, 2, shape.H), shape.dtype)
    return functools.partial(write_and_attend, attend=shape.attend()), pages, kv, q, table, row, row, row


def write_and_attend(pages: jax.Array, kv: jax.Array, q: jax.Array, table: jax.Array, slot: jax.Array, start: jax.Array, length: jax.Array,
                     *, attend: Any) -> tuple[jax.Array, ...]:
    """As sharding.lanes does for local rows."""
    rows = lanes.local_rows(slot, start, length, q.shape[1], table, pages.shape[1], pages.shape[4])
    pages = lanes._write(pages, kv, (rows,))
    return pages, *attend(q, rows.pos, pages[0], table, rows.slot, rows.held)
