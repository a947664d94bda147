"""The kernels for Hopper lower on any machine, and compile to machine code where
`python -m experiments.gpu_targets.compiler` was run.

No number is computed here. These tests catch layouts and shapes that the compiler does not support,
too much shared memory, register spills, and copies of the pool of pages. The limits on spills are
measured values, or a little more.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11, 2):
    pytest.skip("Mosaic GPU kernels need jax 0.11.2", allow_module_level=True)

from experiments.gpu_targets import compiler
from experiments.gpu_targets.lowering import as_on_a_gpu
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.engine.machine import fitted
from jaxserve.engine.memory import RESERVED_GIB, DeviceRoom, sizes
from jaxserve.engine.sizing import kv_tokens, make_plan
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.step import LayersProgram, Weights
from jaxserve.engine.step_shapes import RowGroup, StepShape, layout
from jaxserve.kernels import mosaic
from jaxserve.kernels.kv_pages import KVPages, pool_shapes
from jaxserve.kernels.mosaic import ROWS, Tiles, default_tiles, page_copy
from jaxserve.kernels.qkv import Projected
from jaxserve.models.decoder import stage_modules
from jaxserve.settings.options import make
from jaxserve.settings.schema import EngineConfig
from jaxserve.sharding import attention
from jaxserve.sharding.attend import Attend
from jaxserve.sharding.exchange import compiler_options
from jaxserve.sharding.lane_groups import LaneGroups
from jaxserve.sharding.mesh import KVP
from jaxserve.sharding.rows import Groups, local_rows, spread_rows
from tests.kernels import cuda

PAGES = 4096
needs_compiler = pytest.mark.skipif(compiler.lacking() is not None, reason=str(compiler.lacking()))


@dataclass(frozen=True)
class AttendCase:
    """Shapes as in tests.kernels.test_attend; dtype: of queries and pages; out: dtype of results;
    hop: results are merged with earlier ones; spilled: limit of bytes of spills in a kernel."""

    R: int
    T: int
    K: int
    G: int
    H: int
    C: int
    W: int
    window: int | None = None
    dtype: str = "bfloat16"
    kv: str | None = None  # dtype of the pages, if it differs
    out: str = "bfloat16"
    tiles: Tiles | None = None
    softcap: float = 0
    hop: bool = False
    spilled: int = 0

    @property
    def q(self) -> tuple[int, ...]:
        return self.R, self.T, self.K, self.G, self.H

    @property
    def pool(self) -> KVPages:
        return pool_shapes((PAGES, self.K, 2, self.C, self.H), np.dtype(self.kv or self.dtype))

    @property
    def numbers(self) -> int:
        """Elements of the pool."""
        return math.prod(self.pool.kv.shape)

    @property
    def bytes(self) -> int:
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self.pool))

    @property
    def temp(self) -> int:
        """Limit of temporary bytes: two partial results of f32 per thread block; queries and
        results padded to tiles where query heads are rows; lse transposed; and a little for the
        split of the work."""
        tile = ROWS * default_tiles(self.T * self.G, self.H, self.kv or self.dtype).warpgroups
        rows = -(-self.T * self.G // tile) * tile if self.T < 64 else 0
        width = np.dtype(self.dtype).itemsize + np.dtype(self.out).itemsize + 4 * self.hop
        return (
            132 * 2 * tile * (self.H + 1) * 4
            + self.R * rows * self.K * self.H * width
            + 8 * math.prod(self.q[:-1])
            + 2**18
        )

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Arguments of `attend`."""
        pos = array((self.R, self.T))
        table = array((2, self.R, self.W))
        row = array((self.R,))
        before = (array(self.q, "float32"), array(self.q[:-1], "float32")) if self.hop else ()
        return array(self.q, self.dtype), pos, self.pool, table, row, row, *before

    def attend(self) -> Any:
        return functools.partial(
            attend,
            scale=0.1,
            softcap=self.softcap,
            window=self.window,
            dtype=np.dtype(self.out),
            tiles=self.tiles,
        )


def array(shape: tuple[int, ...], dtype: str = "int32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))


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
    return mosaic.attend(q, q_pos, pages, table, slot, entries, before=before or None, **settings)


SHAPES = {
    "prefill": AttendCase(1, 2048, 8, 4, 128, 64, 2048, spilled=80),
    "prefill, f32 out": AttendCase(1, 2048, 8, 4, 128, 64, 2048, out="float32", spilled=80),
    "prefill, float16": AttendCase(
        1, 2048, 8, 4, 128, 64, 2048, dtype="float16", out="float16", spilled=80
    ),
    "prefill, window": AttendCase(1, 2048, 8, 4, 128, 64, 2048, window=4096, spilled=80),
    "prefill, soft cap": AttendCase(1, 2048, 8, 4, 128, 64, 2048, softcap=50.0, spilled=80),
    "prefill, soft cap, H of 256": AttendCase(
        4, 256, 4, 2, 256, 64, 128, softcap=50.0, spilled=424
    ),
    "decode, soft cap": AttendCase(16, 1, 8, 4, 128, 64, 2048, softcap=50.0),
    "prefill, G of 7": AttendCase(2, 512, 4, 7, 128, 64, 512, spilled=80),
    "prefill, G of 16": AttendCase(1, 512, 2, 16, 128, 16, 512, spilled=200),
    "prefill, H of 64": AttendCase(4, 256, 2, 8, 64, 256, 128),
    "prefill, H of 256": AttendCase(
        4, 256, 2, 8, 256, 64, 128, tiles=Tiles(64, 2, 2, 132), spilled=424
    ),
    "prefill, H of 96": AttendCase(4, 256, 2, 8, 96, 64, 128),
    "decode, H of 96": AttendCase(8, 1, 8, 4, 96, 64, 128),
    "hop": AttendCase(1, 2048, 8, 4, 128, 64, 2048, out="float32", hop=True, spilled=80),
    "hop, 32 tokens": AttendCase(1, 32, 8, 4, 128, 64, 2048, out="float32", hop=True, spilled=88),
    "64 tokens": AttendCase(1, 64, 8, 4, 128, 64, 512, spilled=96),
    "32 tokens": AttendCase(1, 32, 8, 4, 128, 16, 65536, spilled=248),
    "decode": AttendCase(16, 1, 8, 4, 128, 64, 2048),
    "decode, f32 out": AttendCase(16, 1, 8, 4, 128, 64, 2048, out="float32"),
    "decode, window": AttendCase(16, 1, 8, 4, 128, 64, 2048, window=1024),
    "decode, G of 1": AttendCase(16, 1, 32, 1, 128, 64, 512),
    "decode, G of 16": AttendCase(8, 1, 1, 16, 128, 16, 512),
    "decode, H of 64": AttendCase(8, 1, 8, 4, 64, 256, 128),
    "decode, H of 256": AttendCase(8, 1, 8, 4, 256, 64, 128, spilled=208),
    "prefill, 8 bits": AttendCase(1, 2048, 8, 4, 128, 64, 2048, kv="float8_e4m3fn", spilled=180),
    "prefill, 8 bits, float16": AttendCase(
        1,
        2048,
        8,
        4,
        128,
        64,
        2048,
        dtype="float16",
        out="float16",
        kv="float8_e4m3fn",
        spilled=180,
    ),
    "prefill, 8 bits, H of 64": AttendCase(4, 256, 2, 8, 64, 256, 128, kv="float8_e4m3fn"),
    "prefill, 8 bits, H of 256": AttendCase(
        4, 256, 2, 8, 256, 64, 128, kv="float8_e4m3fn", spilled=436
    ),
    "32 tokens, 8 bits": AttendCase(1, 32, 8, 4, 128, 16, 65536, kv="float8_e4m3fn", spilled=424),
    "decode, 8 bits": AttendCase(16, 1, 8, 4, 128, 64, 2048, kv="float8_e4m3fn", spilled=84),
    "decode, 8 bits, H of 96": AttendCase(8, 1, 8, 4, 96, 64, 128, kv="float8_e4m3fn"),
    "decode, 8 bits, H of 256": AttendCase(
        8, 1, 8, 4, 256, 16, 128, kv="float8_e4m3fn", spilled=408
    ),
}
FEW = ["prefill", "decode, 8 bits, H of 256"]  # the rest: `-m matrix`
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@shapes
def test_lowers_to_two_kernels_that_fit_shared_memory(shape):
    lowered = cuda.lower(shape.attend(), *shape.arguments())
    assert lowered.as_text().count("stablehlo.custom_call @mosaic_gpu_v2") == 2
    out, lse = lowered.out_info
    assert (out.shape, out.dtype) == (shape.q, shape.out) and (lse.shape, lse.dtype) == (
        shape.q[:-1],
        "float32",
    )


@pytest.mark.parametrize("rows, K, N, E", [(512, 2048, 1536, 16), (64, 2048, 768, 128)])
def test_products_of_groups_lower_to_one_kernel(rows, K, N, E):
    lowered = cuda.lower(
        mosaic.grouped, array((rows, K), "bfloat16"), array((E, K, N), "bfloat16"), array((E,))
    )
    assert lowered.as_text().count("stablehlo.custom_call @mosaic_gpu_v2") == 1
    assert lowered.out_info.shape == (rows, N)


@needs_compiler
@pytest.mark.parametrize(
    "K, N, E",
    [
        pytest.param(2048, 768, 128, id="qwen3-30b-a3b"),
        pytest.param(2880, 2880, 32, id="gpt-oss-20b"),
        pytest.param(1440, 2880, 32, id="gpt-oss-20b on two ranks"),
    ],
)
def test_products_of_groups_compile_without_temporaries(K, N, E):
    compiled = cuda.compile(
        mosaic.grouped, array((64, K), "bfloat16"), array((E, K, N), "bfloat16"), array((E,))
    )
    assert len(compiled.kernels) == 1 and compiled.kernels[0].spilled == 0
    assert compiled.temp <= 2**20


@pytest.mark.parametrize(
    "x, w, message",
    [
        ((8, 80), (4, 80, 128), "80 inputs, which are no multiple of 32"),
        ((8, 64), (4, 64, 96), "96 outputs, which are no multiple of 64"),
    ],
)
def test_products_of_groups_that_the_kernel_lacks_are_refused_with_the_reason(x, w, message):
    with pytest.raises(NotImplementedError, match=message):
        mosaic.grouped(
            jnp.zeros(x, jnp.bfloat16), jnp.zeros(w, jnp.bfloat16), jnp.zeros(4, jnp.int32)
        )


def test_tiles_that_need_too_much_shared_memory_are_refused():
    shape = AttendCase(1, 2048, 8, 4, 128, 64, 2048, tiles=Tiles(128, 2, 8, 132))
    with pytest.raises((ValueError, NotImplementedError), match="shared memory"):
        cuda.lower(shape.attend(), *shape.arguments())


@needs_compiler
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, id=name, marks=[] if name in FEW else pytest.mark.matrix)
        for name, shape in SHAPES.items()
    ],
)
def test_compiles_without_many_spills_or_a_copy_of_the_pool(shape):
    compiled = cuda.compile(shape.attend(), *shape.arguments())
    assert (
        len(compiled.kernels) == 2
        and max(kernel.spilled for kernel in compiled.kernels) <= shape.spilled
    )
    assert 0 < max(compiled.shared) <= 227 * 1024
    assert compiled.made(shape.numbers) == set()
    assert compiled.temp <= shape.temp


@needs_compiler
@pytest.mark.parametrize(
    "name",
    [
        "decode, 8 bits",
        *(pytest.param(name, marks=pytest.mark.matrix) for name in ("prefill", "32 tokens")),
    ],
)
def test_a_donated_pool_is_written_and_attended_to_in_place(name):
    shape = SHAPES[name]
    compiled = cuda.compile(*step_of(shape), donate=(0,))
    assert compiled.aliased == shape.bytes
    # of the scatter, which writes its operand
    assert compiled.made(shape.numbers) == {"scatter", "fusion"}
    assert compiled.temp <= shape.temp


@needs_compiler
def test_a_pool_of_several_lanes_is_written_in_place():
    """Decodes of one sequence each, and 512 new tokens of a sequence that is spread over two lanes
    of two ranks."""
    shape = SHAPES["decode"]
    compiled = cuda.compile(*step_of(shape, spread=512), donate=(0,), mesh=(2, 2))
    assert (
        len(compiled.kernels) == 4 and "all-gather" in compiled.hlo and "all-to-all" in compiled.hlo
    )
    assert compiled.aliased == shape.bytes
    assert compiled.made(shape.numbers) == {"scatter", "fusion"}
    assert compiled.temp <= 2**26


@needs_compiler
@pytest.mark.skipif(
    jax.__version_info__ >= (0, 12),
    reason="how hops are hidden by the compiler of jax 0.12 is not known yet",
)
@pytest.mark.parametrize("exchange, hidden", [("pass_q", 3), ("pass_kv", 2)])
def test_hops_around_a_ring_run_beside_attention(exchange, hidden):
    """Four lanes of 256 tokens each: in the order in which the program runs, attention is between
    start and end of `hidden` of three."""
    shape = AttendCase(1, 1, 8, 4, 128, 64, 256)
    pages = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), shape.pool)
    kv = array((256, 8, 2, 128), "bfloat16")
    q = array((256, 8, 4, 128), "bfloat16")
    f = functools.partial(ring_step, exchange=exchange)
    row = array((4,))
    compiled = cuda.compile(
        f,
        pages,
        kv,
        q,
        array((2, 4, 256)),
        row,
        row,
        row,
        array((4, 4)),
        donate=(0,),
        mesh=(4, 1),
        options=compiler_options([exchange]),
    )
    assert compiled.aliased == shape.bytes and compiled.hlo.count(" collective-permute-start(") == 3
    computation = next(
        part for part in compiled.hlo.split("\n\n") if " collective-permute-start(" in part
    )
    lines = computation.splitlines()
    found = 0
    for number, line in enumerate(lines):
        if " collective-permute-start(" in line:
            name = line.split("=")[0].strip() + ")"
            end = next(
                at
                for at in range(number, len(lines))
                if " collective-permute-done(" in lines[at] and name in lines[at]
            )
            found += any(
                'custom_call_target="mosaic_gpu_v2"' in between for between in lines[number:end]
            )
    assert found >= hidden


ORDER = re.compile(
    r"^  .* = .* (?:(all-to-all)-(start|done)\(|custom-call\(.*(mosaic_gpu_v2)|.*kind=.*(scatter))"
    r".*op_name=\"[^\"]*/(query|init_transfer|put)/",
    re.M,
)


@pytest.mark.matrix
@needs_compiler
def test_new_kv_and_partials_of_visits_travel_beside_attention():
    """Sixteen decodes of each of eight lanes, four of which may visit each other lane: in the order
    in which the program runs. Each attention is two kernels."""
    shape = AttendCase(16, 1, 8, 4, 128, 64, 64)
    pages = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), shape.pool)
    kv = array((16, 8, 2, 128), "bfloat16")
    q = array((16, 8, 4, 128), "bfloat16")
    row = array((16,))
    arguments = pages, kv, q, array((2, 128, 64)), row, row, row, array((16, 8))
    options = compiler_options(["visit"])
    compiled = cuda.compile(visit_step, *arguments, donate=(0,), mesh=(8, 1), options=options)
    entry = compiled.hlo[compiled.hlo.index("\nENTRY") :]
    steps = [" ".join(filter(None, found)) for found in ORDER.findall(entry)]
    steps = [step for step in steps if not step.startswith("scatter query")]  # places what came
    attend = ["mosaic_gpu_v2 query"] * 2
    there = ["all-to-all start query", "all-to-all done query"]
    new = ["all-to-all start init_transfer", *attend, "all-to-all done init_transfer"]
    home = ["all-to-all start query", *attend, "all-to-all done query"]
    assert steps == [*there, *new, *home, "scatter put"]
    assert compiled.aliased == shape.bytes
    assert compiled.made(shape.numbers) == {"scatter", "fusion"}
    assert compiled.temp < 2**26


def visit_step(
    pages: KVPages,
    kv: jax.Array,
    q: jax.Array,
    table: jax.Array,
    slot: jax.Array,
    start: jax.Array,
    length: jax.Array,
    everywhere: jax.Array,
) -> tuple[jax.Array, KVPages]:
    P = pages.kv.shape[1]
    size = pages.kv.shape[4]
    lanes = LaneGroups(jax.lax.axis_size(KVP))
    fields = jnp.concatenate([jnp.stack([slot, start, length], 1), everywhere], 1)
    rows = spread_rows(lanes.gather_rows(fields), lanes.index(), 1, table, P, size, "visit")
    groups = Groups((), (rows,), table, lanes, 0.25)
    with as_on_a_gpu(mosaic.attend):
        return attention.attention(q, kv, pages, groups, Attend(0.1))


def ring_step(
    pages: KVPages,
    kv: jax.Array,
    q: jax.Array,
    table: jax.Array,
    slot: jax.Array,
    start: jax.Array,
    length: jax.Array,
    everywhere: jax.Array,
    *,
    exchange: str,
) -> tuple[jax.Array, KVPages]:
    P = pages.kv.shape[1]
    size = pages.kv.shape[4]
    lane = jax.lax.axis_index(KVP)
    fields = jnp.concatenate([jnp.stack([slot, start, length], 1), everywhere], 1)
    rows = spread_rows(fields, lane, len(q), table, P, size, exchange)
    groups = Groups((), (rows,), table, LaneGroups(jax.lax.axis_size(KVP)))
    with as_on_a_gpu(mosaic.attend):
        return attention.attention(q, kv, pages, groups, Attend(0.1))


@needs_compiler
def test_a_copy_of_the_pool_would_be_found():
    shape = SHAPES["decode"]
    compiled = cuda.compile(*step_of(shape))  # not donated
    assert compiled.aliased == 0 and "copy" in compiled.made(shape.numbers)


def step_of(shape: AttendCase, spread: int = 0) -> tuple[Any, ...]:
    """`step` and its arguments; spread: new tokens of a sequence on two lanes, half on each."""
    _, _, pool, table, row, _ = shape.arguments()
    tokens = shape.R * shape.T + spread // 2
    one = array((2,))
    pages = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), pool)
    kv, q = (array(x, shape.dtype) for x in ((tokens, shape.K, 2, shape.H), (tokens, *shape.q[2:])))
    f = functools.partial(step, width=shape.T, spread_width=spread // 2)
    return f, pages, kv, q, table, (row, row, row), (one, one, one, array((2, 2))) if spread else ()


def step(
    pages: KVPages,
    kv: jax.Array,
    q: jax.Array,
    table: jax.Array,
    local: Any,
    spread: Any,
    *,
    width: int,
    spread_width: int,
) -> tuple[jax.Array, KVPages]:
    """A layer's attention on one lane. local: slot, start and length of its rows; spread: those,
    and the entries of every lane."""
    P = pages.kv.shape[1]
    size = pages.kv.shape[4]
    others = []
    if spread:
        fields = jnp.concatenate([jnp.stack(spread[:3], 1), spread[3]], 1)
        lane = jax.lax.axis_index(KVP)
        others = [spread_rows(fields, lane, spread_width, table, P, size)]
    groups = Groups(
        (local_rows(jnp.stack(local, 1), width, table, P, size),),
        tuple(others),
        table,
        LaneGroups(jax.lax.axis_size(KVP) if spread else 1),
    )
    with as_on_a_gpu(mosaic.attend):
        return attention.attention(q, kv, pages, groups, Attend(0.1))


@needs_compiler
@pytest.mark.parametrize("tokens", [8, 2048])
def test_queries_keys_and_values_are_one_launch_that_writes_in_place(tokens):
    pool = array((1, 4096, 8, 2, 64, 128), "bfloat16")
    heads = array((tokens, 8, 6, 128), "bfloat16")
    table = array((tokens, 1, 1, 64), "float32")
    norm = array((128,), "float32")
    place = array((tokens,))
    compiled = cuda.compile(
        place_heads, pool, heads, norm, norm, table, table, place, place, donate=(0,)
    )
    assert compiled.launches == 1 and compiled.aliased == math.prod(pool.shape) * 2
    assert [kernel.spilled for kernel in compiled.kernels] == [0] and compiled.temp < 2**10


def place_heads(
    pool: jax.Array,
    heads: jax.Array,
    q_norm: jax.Array,
    k_norm: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *places: jax.Array,
) -> tuple[jax.Array, KVPages]:
    qkv = Projected(heads, heads.shape[2] - 2, (q_norm, k_norm), 1e-6, (cos, sin))
    return mosaic.write_qkv(qkv, KVPages(pool), *places)


@needs_compiler
def test_pages_are_copied_in_place():
    pool = array((4096, 8, 2, 64, 128), "bfloat16")
    ids = array((512,))
    values = array((512, 8, 2, 64, 128), "bfloat16")
    out = cuda.compile(page_copy.read_pages, pool, ids)
    back = cuda.compile(page_copy.write_pages, pool, ids, values, donate=(0,))
    assert back.aliased == math.prod(pool.shape) * 2 and out.temp < 2**16 and back.temp < 2**16
    assert out.made(math.prod(pool.shape)) <= {"bitcast"} and [
        kernel.spilled for kernel in (*out.kernels, *back.kernels)
    ] == [0, 0]


LLAMA = dataclasses.replace(MODELS["llama3-8b"], layers=2)
POOL = 8192
BLOCK = 64


@needs_compiler
@pytest.mark.parametrize(
    "shape, launches",
    [
        pytest.param(StepShape(decode=RowGroup(16, 1), samples=16), 3, marks=pytest.mark.matrix),
        pytest.param(StepShape(prefill=RowGroup(1, 2048)), 3, marks=pytest.mark.matrix),
        (StepShape(decode=RowGroup(16, 1), prefill=RowGroup(4, 512), samples=16), 5),
    ],
    ids=str,
)
def test_a_step_of_a_model_runs_on_the_kernels_and_copies_no_pages(shape, launches):
    """Two layers of Llama 3 8B, the step as the engine compiles it: `launches` kernels per layer,
    and small temporaries."""
    compiled = step_of_model(LLAMA, shape)
    numbers = POOL * LLAMA.kv_heads * 2 * BLOCK * LLAMA.head_dim
    assert compiled.hlo.count('custom_call_target="mosaic_gpu_v2"') == LLAMA.layers * launches
    assert len(compiled.kernels) == launches and compiled.aliased >= 2 * numbers * 2
    assert compiled.made(numbers) == {"custom-call"}  # in place, as `aliased` says
    assert compiled.temp < 2 * shape.tokens * LLAMA.d_ff * 2 * 3 + 64 * 2**20


@pytest.mark.matrix
@needs_compiler
@pytest.mark.parametrize("kv", ["bfloat16", "float8_e4m3fn"])
def test_a_layer_that_decodes_is_few_launches(kv):
    """Four products, a sum after three of them, two norms, the gate, the write before attention,
    attention and its merge. Counted as what a second layer adds."""
    one, two = (
        step_of_model(
            dataclasses.replace(LLAMA, layers=layers),
            StepShape(decode=RowGroup(16, 1), samples=16),
            kv,
        )
        for layers in (1, 2)
    )
    assert two.launches - one.launches <= 13


@pytest.mark.matrix
@needs_compiler
def test_a_plain_start_of_llama_3_8b_on_an_h200_runs_on_the_kernels_with_room_for_400k_tokens():
    """The sizes of a start without flags; two of the layers, compiled in the smallest and the
    largest step. What the estimate of a step's memory leaves is enough for what the compiler
    says."""
    model = MODELS["llama3-8b"]
    room = DeviceRoom("gpu", 141 * 10**9)
    config, _ = fitted(make(EngineConfig, {}), model, room, 1, kv_tokens(model, room))
    plan = make_plan(config, model, room)
    assert mosaic_supports(plan) and plan.pages * plan.block_size >= 400_000
    two = dataclasses.replace(plan, model=dataclasses.replace(model, layers=2))
    estimated = sizes(plan)
    assert estimated.total + RESERVED_GIB * 2**30 <= room.bytes
    numbers = plan.pages * model.kv_heads * 2 * plan.block_size * model.head_dim
    for shape in (plan.shapes[0], plan.shapes[-1]):
        compiled = step_of_model(two.model, shape, pool=two)
        launches = 1 + 2 * (bool(shape.decode.rows) + bool(shape.prefill.rows))
        assert compiled.hlo.count('custom_call_target="mosaic_gpu_v2"') == 2 * launches
        assert compiled.aliased >= 2 * numbers * 2
        assert compiled.temp <= estimated.work + estimated.tables + RESERVED_GIB * 2**30


def mosaic_supports(plan: StagePlan) -> bool:
    """True if the kernel takes this replica's pages; an error says why not."""
    pages = plan.pool().kv
    mosaic.check(jax.ShapeDtypeStruct(pages.shape[1:], pages.dtype))
    return True


@dataclass(frozen=True)
class Pool:
    """Sizes of a stage's tables and pages, as far as a step knows them."""

    slots: int = 16
    width: int = 2048
    pages: int = POOL
    block_size: int = BLOCK


def step_of_model(
    model: ModelConfig, shape: StepShape, kv: str = "bfloat16", pool: Pool | StagePlan = Pool()
) -> cuda.Compiled:
    stage, _ = stage_modules(model, range(model.layers), 1)
    values = [array(param.shape, "bfloat16") for _, param in Weights.of(stage).flat]
    block = pool.block_size
    pages = (1, pool.pages, model.kv_heads, 2, block, model.head_dim)
    pools = [pool_shapes(pages, np.dtype(kv))] * model.layers
    rest = (
        [array((1, 2, pool.slots, pool.width))],
        array((1, layout(shape, block).size)),
        array((1, pool.slots)),
    )
    return cuda.compile(
        functools.partial(model_step, model, shape, pool), values, pools, *rest, donate=(1, 2)
    )


def model_step(
    model: ModelConfig,
    shape: StepShape,
    pool: Pool | StagePlan,
    values: list[jax.Array],
    pages: list[KVPages],
    *rest: jax.Array,
) -> tuple[Any, ...]:
    stage, _ = stage_modules(model, range(model.layers), 1)
    sizes = (pool.pages, pool.block_size)
    with as_on_a_gpu(mosaic.attend, write_qkv=mosaic.write_qkv):
        return LayersProgram(Weights.of(stage), shape, True, jnp.bfloat16, *sizes).run(
            values, pages, *rest
        )


@needs_compiler
def test_a_hop_sends_its_pages_on_in_the_kernel_that_attends_over_them():
    """Four lanes, compiled without them: all launches are two kernels, and no collective permute is
    left."""
    shape = dataclasses.replace(SHAPES["hop"], R=1, W=32)
    q, pos, _, table, row, _, *before = shape.arguments()
    pages = pool_shapes((32, *shape.pool.kv.shape[1:]), np.dtype("bfloat16"))
    compiled = cuda.compile(hop_of, q, pos, pages, table, row, row, *before, mesh=(4, 1))
    assert len(compiled.kernels) == 2 and max(kernel.spilled for kernel in compiled.kernels) <= 104
    assert max(compiled.shared) <= 227 * 1024 and "collective-permute" not in compiled.hlo
    assert "collective_metadata_used" in compiled.hlo  # pointers of the other lanes


def hop_of(
    q: jax.Array,
    q_pos: jax.Array,
    pages: KVPages,
    table: jax.Array,
    slot: jax.Array,
    entries: jax.Array,
    *before: jax.Array,
) -> Any:
    return mosaic.attend_and_send(
        q, q_pos, pages, table, slot, entries, before=before, scale=0.1, ring=KVP
    )
