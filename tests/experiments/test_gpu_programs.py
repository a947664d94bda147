"""Compiled programs for GPUs: what is read out of their text, and what steps need."""

from __future__ import annotations

import dataclasses

import pytest

from experiments.benchmarks import gpu_programs
from experiments.gpu_targets import compiler
from experiments.gpu_targets.hlo import ATTENTION, PRODUCT, Program, Sizes, Traffic
from experiments.gpu_targets.sheets import TARGETS
from experiments.gpu_targets.thunks import Pieces
from jaxserve.kernels.kv_pages import FP8

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

%sliced (s0: bf16[4,32], s1: bf16[1000,8]) -> (bf16[4,8], f32[4]) {
  %s0 = bf16[4,32]{1,0} parameter(0)
  %s1 = bf16[1000,8]{1,0} parameter(1)
  %part = bf16[4,8]{1,0} slice(%s0), slice={[0:4], [0:8]}
  ROOT %called = (bf16[4,8], f32[4]) custom-call(%part, %s1), custom_call_target="mosaic"
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
  %also = (bf16[4,8], f32[4]) fusion(%fusion.1, %fusion.2), kind=kCustom, calls=%sliced
  %q = (bf16[4,4], bf16[1000,8]) custom-call(%rows, %fusion.2), output_to_operand_aliasing=ALIAS
  %fusion.3 = bf16[4,8]{1,0} fusion(%fusion.2, %at.1), kind=kLoop, calls=%read
  %start = (s32[], f32[16]{0}) tuple(%zero, %state)
  %loop = (s32[], f32[16]{0}) while(%start), condition=%condition, body=%body, LOOP
  ROOT %out = bf16[4,8]{1,0} copy(%fusion.3)
}
"""


SIZES = Sizes(POOL, frozenset({WEIGHTS}))


def traffic(loop: str = "", sizes: Sizes = SIZES):
    return Program(HLO.replace(", LOOP", loop).replace("ALIAS", "{{1}: (1, {})}"), sizes).traffic()


def test_weights_are_counted_apart_and_products_by_their_operations():
    product = traffic()[PRODUCT]
    assert product.weights == WEIGHTS and product.launches == 1
    assert product.cached == (4 * 64 + 4 * 32) * 2
    assert product.flops == 2 * 4 * 64 * 32


def test_a_scatter_counts_what_it_touches():
    without = "\n".join(line for line in HLO.splitlines() if "ALIAS" not in line)
    scatter = Program(without, SIZES).traffic()["scatter"]
    updates = 4 * 8 * 2
    assert scatter.cached == 4 * 4 + 2 * updates  # indices, and updates read and written


def test_a_kernel_that_changes_the_pool_writes_there_what_it_reads_and_writes_nowhere_else():
    scatter = traffic()["scatter"]
    updates = 4 * 8 * 2
    queries = 4 * 4 * 2
    assert scatter.launches == 2 and scatter.pool == 0
    assert scatter.cached - (4 * 4 + 2 * updates) == updates + queries + (updates - queries)


def test_a_kernel_of_attention_is_known_by_the_pool_which_is_not_read_whole():
    attention = traffic()[ATTENTION]
    alone = 2 * 4 * 8 * 2 + 4 * 4
    assert attention.launches == 2, "the other one reads a slice"
    assert attention.pool == 0 and attention.cached == 2 * alone


def test_a_gather_reads_its_rows_of_the_pool():
    other = traffic()["other"]
    assert other.pool == 4 * 8 * 2


def test_arrays_that_the_cache_does_not_hold_are_streamed():
    product = traffic(sizes=dataclasses.replace(SIZES, cache=4 * 32 * 2))[PRODUCT]
    assert product.cached == 4 * 32 * 2 and product.streamed == 4 * 64 * 2


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


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_a_target_is_described_to_the_compiler_with_the_rate_of_its_sheet(target):
    assert target.number("memory_bandwidth") == target.bandwidth
    assert target.number("device_memory_size") <= 1.01 * target.memory
    assert 'runtime_version: "13.0.0"' in target.text()
    assert "device_memory_size: 5" in target.text(memory=5)


def test_a_decode_needs_weights_and_kv_once():
    step = gpu_programs.STEPS["decode 64 x 1K"]
    needed = gpu_programs.needs(gpu_programs.Replica("h100", "qwen3-8b", 1).plan(), step)
    matrices = 36 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12288) + 4096 * 151936
    assert needed.weights == pytest.approx(2 * matrices, rel=1e-3)
    assert needed.kv == 64 * 1024 * 36 * 2 * 8 * 128 * 2
    assert needed.flops == pytest.approx(64 * 2 * matrices + needed.attention, rel=1e-3)
    assert needed.seconds(TARGETS["h100"]) == (needed.weights + needed.kv) / 3.35e12


def test_a_chunk_sees_what_is_cached_and_needs_no_head_where_it_samples_nothing():
    replica = gpu_programs.Replica("h100", "qwen3-8b", 1)
    of = lambda **fields: gpu_programs.needs(replica.plan(), gpu_programs.Step(**fields))
    first = of(chunk=512)
    later = of(chunk=512, cached=2**15)
    assert later.kv == first.kv * (2**15 + 512) / 512
    assert later.attention - first.attention == 4 * 36 * 32 * 128 * 512 * 2**15
    head = 4096 * 151936
    unsampled = of(chunk=512, variant="")
    assert first.weights - unsampled.weights == 2 * head
    assert first.flops - unsampled.flops == 2 * head


def test_kv_of_8_bits_has_a_scale_for_each_vector():
    plan = gpu_programs.Replica("h100", "qwen3-8b", 1).plan()
    narrow = dataclasses.replace(plan, kv_dtype=FP8)
    step = gpu_programs.STEPS["decode 64 x 1K"]
    assert gpu_programs.needs(narrow, step).kv == 64 * 1024 * 36 * 2 * 8 * (128 + 2)


def test_of_experts_those_are_read_that_some_token_chose():
    replica = gpu_programs.Replica("h100", "qwen3-30b-a3b", 1)
    few, many = (
        gpu_programs.needs(replica.plan(), gpu_programs.Step(count)).weights for count in (1, 256)
    )
    expert = 3 * 2048 * 768 * 2
    assert many - few == pytest.approx(48 * (128 - 8) * expert, rel=1e-3)


def test_further_layers_add_what_the_last_one_did():
    two, three = (
        gpu_programs.Counts({PRODUCT: Traffic(launches=launches)}, Pieces(graphs=1), temp=temp)
        for launches, temp in ((9.0, 5), (13.0, 7))
    )
    six = two.deeper(three, 3)
    assert six.classes[PRODUCT].launches == 25 and six.pieces == Pieces(graphs=1) and six.temp == 7


def test_a_step_that_does_not_compile_is_a_row_with_the_reason(monkeypatch, capsys):
    refused = gpu_programs.Compiled(reason="it needs 300 KiB of shared memory")
    monkeypatch.setattr(gpu_programs, "compiled", lambda _, names: dict.fromkeys(names, refused))
    arguments = ["--targets=l40s", "--models=qwen3-8b,qwen3-30b-a3b", "--steps=prefill 2048"]
    assert gpu_programs.main(arguments) == 0
    out = capsys.readouterr().out
    assert "l40s, qwen3-8b, 1: prefill 2048: it needs 300 KiB of shared memory" in out
    assert "l40s, qwen3-30b-a3b, 1: prefill 2048: gpu_memory_utilization: " in out


def test_unknown_names_are_refused(capsys):
    assert gpu_programs.main(["--targets=h100,v100"]) == 2
    assert "targets: 'v100' is none of" in capsys.readouterr().err


# Steps of Qwen3-8B on an H100: most launches, graphs, loops and branches of the host, launches
# outside graphs, and estimated over ideal time.
LIMITS = {
    "decode 64 x 1K": (500, 2, 0, 0, 1.30),
    "decode 64 x 1K, sampled": (575, 2, 0, 0, 1.34),
    "decode 256 x 1K": (500, 2, 0, 0, 1.24),
    "decode 256 x 1K, sampled": (575, 2, 0, 0, 1.32),
    "decode 256 x 1K, penalties": (585, 2, 0, 0, 1.35),
    "decode 256 x 1K, guided": (595, 2, 0, 0, 1.36),
    "decode 8 x 128K": (500, 2, 0, 0, 1.14),
    "prefill 2048": (430, 2, 0, 0, 1.65),
    "8 decodes + 2048": (545, 2, 0, 0, 1.69),
}


def counts(row):
    """What limits are of."""
    pieces = row.pieces
    return row.launches, pieces.graphs, pieces.loops, pieces.alone, row.seconds / row.ideal


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.skipif(compiler.lacking() is not None, reason=str(compiler.lacking()))
def test_steps_on_an_h100_stay_within_their_limits():
    found = {row.step: counts(row) for row in gpu_programs.rows_of("h100", "qwen3-8b")}
    assert found.keys() == LIMITS.keys()
    over = {
        step: (ours, LIMITS[step])
        for step, ours in found.items()
        if any(count > most for count, most in zip(ours, LIMITS[step]))
    }
    assert not over


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.skipif(compiler.lacking() is not None, reason=str(compiler.lacking()))
def test_steps_on_two_ranks_are_a_graph_for_each_program():
    """With the sums over ranks inside: none is launched by the host."""
    names = ["decode 64 x 1K", "decode 64 x 1K, sampled", "decode 8 x 128K"]
    found = {row.step: row.pieces for row in gpu_programs.rows_of("h100", "qwen3-8b", 2, names)}
    assert found == dict.fromkeys(names, Pieces(graphs=2))


# The same of other GPUs.
OTHER_LIMITS = {
    ("a100", "decode 64 x 1K"): (640, 2, 0, 0, 1.28),
    ("a100", "8 decodes + 2048"): (765, 2, 0, 0, 1.60),
    ("l40s", "decode 64 x 1K"): (640, 2, 0, 0, 1.17),
    ("b200", "decode 64 x 1K"): (610, 2, 0, 0, 1.60),
}


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.skipif(compiler.lacking() is not None, reason=str(compiler.lacking()))
@pytest.mark.parametrize("target, step", OTHER_LIMITS)
def test_steps_on_other_gpus_stay_within_their_limits(target, step):
    (row,) = gpu_programs.rows_of(target, "qwen3-8b", names=[step])
    found = counts(row)
    assert not any(count > most for count, most in zip(found, OTHER_LIMITS[target, step])), found
