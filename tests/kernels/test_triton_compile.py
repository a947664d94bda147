"""The Triton kernels compile to machine code for an A100, L40S and B200, where
`python -m experiments.gpu_targets.compiler` was run.

No number is computed here. These tests catch shapes and types that the compiler does not support,
too much shared memory, register spills, and copies of the pool of pages. The limits on spills are
measured values, or a little more.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

if jax.__version_info__ < (0, 11, 2):
    pytest.skip("the compiler is that of jax 0.11.2", allow_module_level=True)

from experiments.gpu_targets import compiler
from experiments.gpu_targets.sheets import TARGETS
from jaxserve.kernels import triton
from jaxserve.kernels.kv_pages import KVPages
from tests.kernels import cuda
from tests.kernels.test_compile import AttendCase

pytestmark = pytest.mark.skipif(compiler.lacking() is not None, reason=str(compiler.lacking()))

DECODE = AttendCase(64, 1, 8, 4, 128, 64, 64)
PREFILL = AttendCase(1, 2048, 8, 4, 128, 64, 512)
CASES = {
    "decode": DECODE,
    "decode, pages of 16": dataclasses.replace(DECODE, C=16, W=256),
    "decode, pages of 256": dataclasses.replace(DECODE, C=256, W=16),
    "decode, window": dataclasses.replace(DECODE, window=1024),
    "decode, soft cap": dataclasses.replace(DECODE, softcap=50.0),
    "decode, G of 1": dataclasses.replace(DECODE, K=32, G=1),
    "decode, G of 7": dataclasses.replace(DECODE, K=4, G=7),
    "decode, H of 64": dataclasses.replace(DECODE, H=64),
    "decode, H of 256": dataclasses.replace(DECODE, H=256),
    "decode, 8 bits": dataclasses.replace(DECODE, kv="float8_e4m3fn"),
    "decode, float16, f32 out": dataclasses.replace(
        DECODE, dtype="float16", out="float32", spilled=8
    ),
    "hop": dataclasses.replace(DECODE, hop=True, out="float32", spilled=8),
    "prefill": PREFILL,
    "prefill, window": dataclasses.replace(PREFILL, window=4096),
    "prefill, soft cap": dataclasses.replace(PREFILL, softcap=50.0),
    "prefill, pages of 16": dataclasses.replace(PREFILL, C=16, W=2048),
    "prefill, H of 64": dataclasses.replace(PREFILL, H=64),
    "prefill, H of 256": dataclasses.replace(PREFILL, H=256),
    "prefill, 8 bits": dataclasses.replace(PREFILL, kv="float8_e4m3fn"),
    "32 tokens": AttendCase(4, 32, 8, 4, 128, 16, 256),
}
FEW = ("decode", "prefill, 8 bits")  # the rest: `-m matrix`


def attend(
    q: jax.Array,
    q_pos: jax.Array,
    pages: KVPages,
    table: jax.Array,
    slot: jax.Array,
    entries: jax.Array,
    *before: jax.Array,
    **settings: Any,
) -> tuple[jax.Array, jax.Array]:
    return triton.attend(q, q_pos, pages, table, slot, entries, before=before or None, **settings)


@pytest.mark.parametrize("target", ["a100", "l40s", "b200"])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[] if name in FEW else pytest.mark.matrix)
        for name, case in CASES.items()
    ],
)
def test_compiles_without_many_spills_or_a_copy_of_the_pool(case, target):
    gpu = TARGETS[target]
    cores = int(gpu.number("core_count"))
    kv = np.dtype(case.kv or case.dtype)
    tiles = triton.tiles_for(gpu.capability, cores, case.q, kv)
    f = functools.partial(
        attend,
        scale=0.1,
        softcap=case.softcap,
        window=case.window,
        dtype=np.dtype(case.out),
        tiles=tiles,
    )
    compiled = cuda.compile(f, *case.arguments(), target=target)
    assert len(compiled.kernels) == 2
    assert max(kernel.spilled for kernel in compiled.kernels) <= case.spilled
    assert compiled.made(case.numbers) == set()
    # two partial results of f32 per thread block, results in f32 of a hop, the split of the work
    partial = tiles.blocks * 2 * tiles.rows * (case.H + 1) * 4
    results = (2 + 8 * case.hop) * np.prod(case.q) * 4 * case.hop + 8 * np.prod(case.q[:-1])
    assert compiled.temp <= partial + results + 2**18
