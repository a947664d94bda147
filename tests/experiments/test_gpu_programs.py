"""What is read out of compiled programs: launches, bytes by what they are of, and operations."""

from __future__ import annotations

import pytest

from experiments.gpu_targets.hlo import ATTENTION, PRODUCT, Program, Sizes
from experiments.gpu_targets.sheets import TARGETS
from experiments.gpu_targets.thunks import Pieces

POOL = 1000 * 8
WEIGHTS = 64 * 32 * 2
HLO = """HloModule jit_run, entry_computation_layout={}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%product (p0: bf16[4,64], p1: bf16[64,32]) -> bf16[4,32] {
  %p0 = bf16[4,64]{1,0} parameter(0)
  %p1 = bf16[64,32]{1,0} parameter(1)
  ROOT %dot = bf16[4,32]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%write (q0: bf16[1000,8], q1: s32[4,1], q2: bf16[4,8]) -> bf16[1000,8] {
  %q0 = bf16[1000,8]{1,0} parameter(0)
  %q1 = s32[4,1]{1,0} parameter(1)
  %q2 = bf16[4,8]{1,0} parameter(2)
  ROOT %written = bf16[1000,8]{1,0} scatter(%q0, %q1, %q2), update_window_dims={1}, to_apply=%add
}

%read (r0: bf16[1000,8], r1: s32[4,1]) -> bf16[4,8] {
  %r0 = bf16[1000,8]{1,0} parameter(0)
  %r1 = s32[4,1]{1,0} parameter(1)
  %flat = bf16[1000,8]{1,0} bitcast(%r0)
  ROOT %gathered = bf16[4,8]{1,0} gather(%flat, %r1), offset_dims={1}, slice_sizes={1,8}
}

%body (t: (s32[], f32[16])) -> (s32[], f32[16]) {
  %t = (s32[], f32[16]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[16]{0} get-tuple-element(%t), index=1
  %twice = f32[16]{0} multiply(%x, %x)
  ROOT %next = (s32[], f32[16]{0}) tuple(%i, %twice)
}

%condition (u: (s32[], f32[16])) -> pred[] {
  %u = (s32[], f32[16]{0}) parameter(0)
  %j = s32[] get-tuple-element(%u), index=0
  ROOT %less = pred[] compare(%j, %j), direction=LT
}

ENTRY %main (x: bf16[4,64], w: bf16[64,32], pool: bf16[1000,8], at: s32[4,1]) -> bf16[4,8] {
  %x.1 = bf16[4,64]{1,0} parameter(0)
  %w.1 = bf16[64,32]{1,0} parameter(1)
  %pool.1 = bf16[1000,8]{1,0} parameter(2)
  %at.1 = s32[4,1]{1,0} parameter(3)
  %fusion.1 = bf16[4,32]{1,0} fusion(%x.1, %w.1), kind=kCustom, calls=%product
  %rows = bf16[4,8]{1,0} slice(%fusion.1), slice={[0:4], [0:8]}
  %fusion.2 = bf16[1000,8]{1,0} fusion(%pool.1, %at.1, %rows), kind=kInput, calls=%write
  %seen = (bf16[4,8]{1,0}, f32[4]{0}) custom-call(%rows, %fusion.2), custom_call_target="mosaic"
  %fusion.3 = bf16[4,8]{1,0} fusion(%fusion.2, %at.1), kind=kLoop, calls=%read
  %start = (s32[], f32[16]{0}) tuple(%zero, %state)
  %loop = (s32[], f32[16]{0}) while(%start), condition=%condition, body=%body, LOOP
  ROOT %out = bf16[4,8]{1,0} copy(%fusion.3)
}
"""


SIZES = Sizes(POOL, frozenset({WEIGHTS}))


def traffic(loop: str = "", sizes: Sizes = SIZES):
    return Program(HLO.replace(", LOOP", loop), sizes).traffic()


def test_weights_are_counted_apart_and_products_by_their_operations():
    product = traffic()[PRODUCT]
    assert product.weights == WEIGHTS and product.launches == 1
    assert product.moved == (4 * 64 + 4 * 32) * 2
    assert product.flops == 2 * 4 * 64 * 32


def test_a_scatter_counts_what_it_touches():
    scatter = traffic()["scatter"]
    updates = 4 * 8 * 2
    assert scatter.moved == 4 * 4 + 2 * updates  # indices, and updates read and written


def test_a_kernel_of_attention_is_known_by_the_pool_which_is_not_read_whole():
    attention = traffic()[ATTENTION]
    assert attention.pool == 0 and attention.moved == 2 * 4 * 8 * 2 + 4 * 4


def test_a_gather_reads_its_rows_of_the_pool():
    other = traffic()["other"]
    assert other.pool == 4 * 8 * 2


def test_loops_run_as_often_as_is_known_or_said():
    backend = ', backend_config={"known_trip_count":{"n":"31"}}'
    once, known = traffic()["other"].launches, traffic(backend)["other"].launches
    said = traffic(sizes=Sizes(POOL, frozenset(), loop=5))["other"].launches
    assert known - once == 30 * 2 and said - once == 4 * 2  # a body and a condition each


THUNKS = """000: kCommandBuffer [source       | next=003 (1)]
    001: kCustomKernel [source       | next=002 (1)] fusion grid: [2048, 1, 1]
    002: kCopy         [source       | sink        ] kCopy
003: kWhile         [prev=000 (1) | next=000 (1)]
condition:
    004: kCustomKernel [source | sink] wrapped_compare grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        005: kCustomKernel [source       | next=006 (1)] loop_fusion grid: [32, 1, 1]
        006: kWhile         [prev=005 (1) | sink]
006: kAllReduce     [prev=003 (1) | sink]
"""


def test_what_a_graph_holds_is_no_piece_of_its_own():
    assert Pieces.parse(THUNKS) == Pieces(graphs=2, loops=1, alone=2)


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_a_target_is_described_to_the_compiler_with_the_rate_of_its_sheet(target):
    assert target.number("memory_bandwidth") == target.bandwidth
    assert target.number("device_memory_size") <= 1.01 * target.memory
    assert 'runtime_version: "13.0.0"' in target.text
