"""The real model says what the reference says, token for token, on every mesh, chunking, placement,
batch mix and weight source.

The whole model, 30 layers, is compiled for long: by default it runs on one device, and its first
five layers run on meshes, one of all axes among them, against a reference of their own. `-m matrix`
runs the whole model everywhere, and its first layers on all meshes.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxserve.costs.coefficients import Costs
from jaxserve.kernels.cpu import library
from jaxserve.kernels.quantised import Quantised, dequantise
from tests.engine.harness import (
    InGroups,
    Plans,
    Runner,
    assert_empty,
    engine,
    fresh,
    hidden_states_of,
    shapes_of,
    watch_batches,
)

MESHES = [
    mesh for mesh in itertools.product((1, 2, 3, 5), (1, 2, 4), (1, 3)) if np.prod(mesh) <= 12
]
CHUNKS = {"1": (1,), "7": (7,), "64": (64,), "512": (512,), "mixed": (1, 7, 64, 512), "slack": ()}
# tokens of the longest prompt cut so small
LONGEST = {"1": 40, "7": 400, "64": 2000, "512": 8000, "mixed": 2000, "slack": 2000}
SLACK = dict(policy="slack", chunking="adaptive", tpot=2.2e-2, step_time=3e-2)
# with these a step takes 128 to 448 prompt tokens
SIMPLE = Costs(layers=30, linear_token=2e-6, pair=1e-9, decode_kv=1e-8)
FEW = [(2, 2, 3)]
PLAIN = dict(chunk=64, seqs=8, pages=640, max_len=8192)
FIRST_LAYERS = dict(chunk=64, seqs=8, pages=640, max_len=2048)
SMALL = dict(chunk=64, seqs=2, pages=64, max_len=512)  # few programs


def name_of(mesh: tuple[int, int, int]) -> str:
    spp, kvp, tp = mesh
    return f"spp={spp},kvp={kvp},tp={tp}"


def submit(runner: Runner, case: dict, **fields) -> str:
    return runner.submit(
        case["prompt_ids"], max_tokens=len(case["output_ids"]), ignore_eos=True, **fields
    )


def short(cases: list[dict], longest: int = 400) -> list[dict]:
    return [case for case in cases if len(case["prompt_ids"]) <= longest]


@pytest.fixture
def first_words(golden_first_layers) -> list[dict]:
    """Few of the first layers' cases, with few tokens each."""
    sizes = (5, 37, 333, 1500)
    cases = [case for case in golden_first_layers["cases"] if len(case["prompt_ids"]) in sizes]
    return [with_tokens(case, 8) for case in cases]


def with_tokens(case: dict, count: int) -> dict:
    """The case with its first tokens alone."""
    return {**case, **{key: case[key][:count] for key in ("output_ids", "output_logprobs")}}


def assert_golden(real, cases, modes, longest: int = 8000) -> None:
    """The reference's tokens in each mode, a (name of CHUNKS, placement of blocks over lanes)."""
    for chunks, placement in modes:
        slack = {**SLACK, "costs": SIMPLE} if chunks == "slack" else {}
        real = fresh(real, placement, **slack)
        some = short(cases, min(longest, LONGEST[chunks]))
        runner = Runner(real)
        ids = [submit(runner, case) for case in some]
        runner.run(CHUNKS[chunks])
        for id, case in zip(ids, some):
            assert runner.ids(id) == case["output_ids"], (
                f"chunks of {chunks}, {placement}, prompt of {len(case['prompt_ids'])}"
            )
        assert_empty(real)


@pytest.mark.parametrize(
    "mesh",
    [pytest.param(m, id=str(m), marks=[] if m in FEW else pytest.mark.matrix) for m in MESHES],
)
def test_the_first_layers_say_what_the_reference_says_on_every_mesh(
    mesh, first_words, smollm2_first_layers
):
    """Tokens and their log-probabilities, by chunks of mixed sizes, on random lanes."""
    assert_first_words(engine(smollm2_first_layers, name_of(mesh), **SMALL), mesh, first_words)


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if mesh[1] > 1], ids=str)
def test_the_first_layers_say_what_the_reference_says_with_mlps_over_lanes(
    mesh, first_words, smollm2_first_layers
):
    real = engine(smollm2_first_layers, name_of(mesh), **SMALL, ffn_over_lanes=True)
    split = [value for stage in real.worker.stages.stages for value in stage.values]
    inner = 1536 // (mesh[1] * mesh[2])
    assert any(inner in value.addressable_shards[0].data.shape for value in split)
    assert_first_words(real, mesh, first_words)


def assert_first_words(real, mesh, first_words) -> None:
    real = fresh(real, "random" if mesh[1] > 1 else "grow")
    runner = Runner(real)
    cases = short(first_words)
    ids = [submit(runner, case, logprobs=0) for case in cases]
    runner.run((7, 64))
    for id, case in zip(ids, cases):
        got = runner.completion(id)
        assert got.ids == case["output_ids"]
        np.testing.assert_allclose(
            [token.chosen for token in got.logprobs], case["output_logprobs"], atol=1e-3
        )
    assert_empty(real)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "mesh, modes",
    [
        pytest.param(
            (1, 1, 1),
            [("1", "grow"), ("512", "grow"), ("mixed", "grow"), ("slack", "grow")],
            id="alone",
        ),
        pytest.param((2, 2, 3), [("mixed", "random")], id="all-axes"),
        pytest.param((2, 2, 3), [("slack", "grow")], id="all-axes-slack"),
    ],
)
def test_the_first_layers_say_what_the_reference_says_in_chunks_of_all_sizes(
    mesh, modes, first_words, smollm2_first_layers
):
    real = engine(smollm2_first_layers, name_of(mesh), chunk=512, seqs=8, pages=160, max_len=2048)
    assert_golden(real, first_words, modes, longest=2000 if mesh == (1, 1, 1) else 400)


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_tokens_equal_the_reference_on_every_mesh(mesh, golden, smollm2_gguf):
    modes = [(chunks, "random" if mesh[1] > 1 else "grow") for chunks in CHUNKS]
    modes += [("64", "grow"), ("mixed", "grow")] if mesh[1] > 1 else []
    real = engine(smollm2_gguf, name_of(mesh), chunk=512, seqs=8, pages=640, max_len=8192)
    assert_golden(real, golden["cases"], modes)


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if mesh[1] > 1], ids=str)
def test_tokens_equal_the_reference_with_mlps_over_lanes(mesh, golden, smollm2_gguf):
    sizes = dict(chunk=512, seqs=8, pages=640, max_len=8192)
    real = engine(smollm2_gguf, name_of(mesh), **sizes, ffn_over_lanes=True)
    assert_golden(real, golden["cases"], [("mixed", "random")], longest=2000)


RINGS = [
    ("kvp=4", "pass_q", "zigzag", "mixed"),
    ("kvp=4", "pass_kv", "striped", "512"),
]
ALL_AXES_RING = ("spp=2,kvp=2,tp=3", "pass_kv", "zigzag", "512")


def assert_golden_around_a_ring(source, cases, mesh, exchange, placement, chunks) -> None:
    """Prompts of more than 64 tokens lie on all lanes, and steps that may go round a ring do."""
    real = engine(
        source,
        mesh,
        chunk=512,
        seqs=8,
        pages=128,
        max_len=2048,
        exchange=exchange,
        placement=placement,
        lane_tokens=64,
    )
    shapes = shapes_of(real)
    cases = short(cases)
    runner = Runner(real)
    ids = [submit(runner, case) for case in cases]
    runner.run(CHUNKS[chunks])
    assert [runner.ids(id) for id in ids] == [case["output_ids"] for case in cases]
    assert exchange in {shape.exchange for shape in shapes}
    assert_empty(real)


@pytest.mark.matrix
@pytest.mark.parametrize("mesh, exchange, placement, chunks", [*RINGS, ALL_AXES_RING])
def test_the_first_layers_say_what_the_reference_says_around_a_ring(
    mesh, exchange, placement, chunks, first_words, smollm2_first_layers
):
    assert_golden_around_a_ring(
        smollm2_first_layers, first_words, mesh, exchange, placement, chunks
    )


@pytest.mark.matrix
@pytest.mark.parametrize("mesh, exchange, placement, chunks", [*RINGS, ALL_AXES_RING])
def test_tokens_equal_the_reference_around_a_ring(
    mesh, exchange, placement, chunks, golden, smollm2_gguf
):
    assert_golden_around_a_ring(smollm2_gguf, golden["cases"], mesh, exchange, placement, chunks)


DECODE_RING = ("kvp=4", "zigzag")
DECODE_RINGS = [
    ("kvp=2", "grow"),
    ("kvp=4", "random"),
    ("spp=2,kvp=2,tp=3", "striped"),
    ("kvp=8", "striped"),
]


def assert_golden_with_decodes_around_a_ring(source, cases, mesh, placement) -> None:
    """Decodes of prompts of more than 64 tokens, which lie on all lanes, go round a ring, also in
    steps with chunks; their new blocks come to lie on several lanes."""
    real = engine(
        source,
        mesh,
        chunk=64,
        seqs=8,
        pages=128,
        max_len=2048,
        decode_exchange="pass_q",
        placement=placement,
        lane_tokens=64,
    )
    shapes = shapes_of(real)
    held: dict[int, set[tuple[int, ...]]] = {}
    see = lambda batch: [
        held.setdefault(seq, set()).add(tuple(row))
        for seq, row, fed in zip(
            batch.seq.tolist(), batch.blocks_per_lane.tolist(), batch.is_decode
        )
        if fed
    ]
    watch_batches(real, see)
    batches: list = []
    watch_batches(real, batches.append)
    runner = Runner(real)
    # the longest first, which decodes while others are prefilled
    cases = sorted(cases, key=lambda case: -len(case["prompt_ids"]))
    ids = [submit(runner, case) for case in cases]
    runner.run(CHUNKS["7"])
    assert [runner.ids(id) for id in ids] == [case["output_ids"] for case in cases]
    assert sum(shape.decode_ring for shape in shapes) > 5
    decodes = [
        (shape, batch)
        for shape, batch in zip(shapes, batches)
        if (batch.is_decode & batch.spread).any()
    ]
    assert all(shape.decode_ring for shape, _ in decodes)
    assert any(not batch.is_decode.all() for _, batch in decodes)
    grown = [np.ptp(np.array(list(rows)), 0) for rows in held.values()]
    assert max(np.count_nonzero(lanes) for lanes in grown) > 1
    assert_empty(real)


@pytest.mark.matrix
@pytest.mark.parametrize("mesh, placement", [DECODE_RING, *DECODE_RINGS])
def test_the_first_layers_say_what_the_reference_says_with_decodes_around_a_ring(
    mesh, placement, golden_first_layers, smollm2_first_layers
):
    cases = short(golden_first_layers["cases"])[-3:]
    assert_golden_with_decodes_around_a_ring(smollm2_first_layers, cases, mesh, placement)


@pytest.mark.matrix
@pytest.mark.parametrize("mesh, placement", [DECODE_RING, *DECODE_RINGS])
def test_tokens_equal_the_reference_with_decodes_around_a_ring(
    mesh, placement, golden, smollm2_gguf
):
    assert_golden_with_decodes_around_a_ring(smollm2_gguf, short(golden["cases"]), mesh, placement)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "exchange, placement", [("pass_q", "striped"), ("pass_kv", "zigzag"), ("gather", "striped")]
)
def test_tokens_equal_the_reference_by_random_plans_on_eight_lanes(
    exchange, placement, golden, smollm2_gguf
):
    real = engine(
        smollm2_gguf,
        "kvp=8",
        chunk=64,
        seqs=8,
        pages=100,
        max_len=2048,
        exchange=exchange,
        placement=placement,
        planned=True,
    )
    cases = [with_tokens(case, 8) for case in short(golden["cases"], 2000)]
    moved: list[int] = []
    for seed in (3, 5):  # groups grow within prompts
        real = fresh(real, placement, planner=Plans(seed, longest=500))
        watch_batches(real, lambda batch: moved.append(len(batch.moves)))
        runner = Runner(real)
        ids = [submit(runner, case) for case in cases]
        runner.run()
        assert [runner.ids(id) for id in ids] == [case["output_ids"] for case in cases]
        assert_empty(real)
    assert sum(moved) > 20


@pytest.fixture(scope="module")
def whole(smollm2_gguf):
    return engine(smollm2_gguf, **PLAIN)


@pytest.fixture
def plain(whole):
    """The whole model on one device, with an empty cache."""
    return fresh(whole, "grow")


PLACED_BY_PLAN = ("striped", "zigzag")


def assert_golden_in_groups(
    source, cases, exchange: str, sizes, placements, decode_exchange: str = "gather"
) -> None:
    """Prompts of eight lanes in groups of each size, beside short ones on one lane, then again with
    their blocks found. Where no plan says which lanes, random blocks lie on all of them, and those
    that grow on as few as hold them."""
    real = engine(
        source,
        "kvp=8",
        chunk=128,
        seqs=8,
        pages=100,
        max_len=2048,
        exchange=exchange,
        decode_exchange=decode_exchange,
        planned=True,
    )
    for placement in placements:
        for size in sizes if placement in PLACED_BY_PLAN else (8,):
            planned = placement in PLACED_BY_PLAN
            real = fresh(
                real,
                placement,
                pages=100 if planned else 16,
                planner=InGroups(size) if planned else None,
            )
            shapes = shapes_of(real)
            for _ in range(2):
                runner = Runner(real)
                ids = [submit(runner, case) for case in cases]
                runner.run()
                assert [runner.ids(id) for id in ids] == [case["output_ids"] for case in cases]
            met = {shape.group_size for shape in shapes if shape.spread}
            assert size in met or (placement == "grow" and met)
            assert exchange in {shape.exchange for shape in shapes} or not planned
            ringed = any(shape.decode_ring for shape in shapes)
            assert ringed == (decode_exchange == "pass_q")
            assert_empty(real)


IN_ALL_GROUPS = (2, 4, 8), ("striped", "zigzag", "random", "round_robin", "grow")


@pytest.mark.matrix
@pytest.mark.parametrize("exchange", ["gather", "pass_q", "pass_kv"])
def test_the_first_layers_say_what_the_reference_says_in_groups_of_lanes(
    exchange, first_words, smollm2_first_layers
):
    assert_golden_in_groups(smollm2_first_layers, short(first_words), exchange, *IN_ALL_GROUPS)


@pytest.mark.matrix
@pytest.mark.parametrize("exchange", ["gather", "pass_kv"])
def test_the_first_layers_say_what_the_reference_says_in_groups_with_decodes_around_rings(
    exchange, first_words, smollm2_first_layers
):
    cases = short(first_words)
    assert_golden_in_groups(smollm2_first_layers, cases, exchange, *IN_ALL_GROUPS, "pass_q")


@pytest.mark.matrix
@pytest.mark.parametrize("exchange", ["gather", "pass_q", "pass_kv", "visit"])
def test_tokens_equal_the_reference_in_groups_of_lanes(exchange, golden, smollm2_gguf):
    assert_golden_in_groups(
        smollm2_gguf, short(golden["cases"], 2000), exchange, (2, 4), ("striped", "random")
    )


@pytest.mark.matrix
def test_alone_equals_in_a_batch_and_after_prefix_hits(golden, plain):
    assert_alone_as_in_a_batch(plain, short(golden["cases"]))


@pytest.fixture(scope="module")
def first_layers(smollm2_first_layers):
    return engine(smollm2_first_layers, **FIRST_LAYERS)


@pytest.fixture
def plain_first_layers(first_layers):
    """The first layers on one device, with an empty cache."""
    return fresh(first_layers, "grow")


def test_the_first_layers_say_alone_what_they_say_in_a_batch_and_after_prefix_hits(
    golden_first_layers, plain_first_layers
):
    cases = [
        {**case, "output_ids": case["output_ids"][:8]}
        for case in short(golden_first_layers["cases"])
    ]
    assert_alone_as_in_a_batch(plain_first_layers, cases)


def assert_alone_as_in_a_batch(plain, cases) -> None:
    hits = []
    for _ in range(2):
        for case in cases:
            runner = Runner(plain)
            id = submit(runner, case)
            runner.run()
            assert runner.ids(id) == case["output_ids"]
            hits.append(runner.completion(id).finished.usage.cached)
    assert sum(hits[len(cases) :]) >= sum(
        len(case["prompt_ids"]) // 16 * 16 for case in cases[3:]
    ) - 16 * len(cases)
    runner = Runner(plain)
    ids = [submit(runner, case) for case in cases]
    runner.run()
    assert [runner.ids(id) for id in ids] == [case["output_ids"] for case in cases]


def test_chats_end_where_the_model_ends_them(golden, plain):
    for case in golden["cases"]:
        if "messages" in case:
            runner = Runner(plain)
            id = runner.submit(case["prompt_ids"], max_tokens=200)
            runner.run()
            assert runner.ids(id) == case["output_ids"]
            assert runner.completion(id).finished.reason == "stop"


def test_log_probabilities_equal_the_reference(golden, plain):
    for case in golden["cases"][:2]:
        runner = Runner(plain)
        id = submit(runner, case, logprobs=10)
        runner.run()
        got = runner.completion(id)
        assert got.ids == case["output_ids"]
        np.testing.assert_allclose(
            [token.chosen for token in got.logprobs], case["output_logprobs"], atol=1e-3
        )
        first = dict(got.logprobs[0].top)
        reference = dict(zip(*case["last_prompt_logits_top10"].values()))
        shift = first[case["output_ids"][0]] - reference[case["output_ids"][0]]
        assert {k: pytest.approx(v + shift, abs=1e-3) for k, v in reference.items()} == first


def floats_of(weights):
    """Dequantises weights that are kept quantised."""
    return dequantise(weights) if isinstance(weights, Quantised) else weights


@pytest.mark.parametrize(
    "mesh",
    [
        "",
        pytest.param("spp=2,tp=3", marks=pytest.mark.matrix),
        pytest.param("kvp=2", marks=pytest.mark.matrix),
    ],
)
def test_prompt_logits_equal_the_reference(mesh, golden, smollm2_gguf, plain):
    real = engine(smollm2_gguf, mesh, **PLAIN) if mesh else plain
    hidden = hidden_states_of(real)
    head = real.worker.stages.head
    weights = {
        keys[-1]: np.asarray(floats_of(value), np.float64)
        for (keys, _), value in zip(head.program.weights.flat, head.values)
    }
    for case in golden["cases"][:5]:
        hidden.clear()
        runner = Runner(real)
        runner.submit(case["prompt_ids"], max_tokens=1, ignore_eos=True)
        runner.run()
        picked = np.asarray(hidden[-1].picked, np.float64)
        normal = (
            picked
            / np.sqrt((picked**2).mean(-1, keepdims=True) + real.worker.plan.model.norms.eps)
            * weights["norm"]
        )
        logits = normal @ weights["head"]  # [lanes, S, V]
        ids, reference = case["last_prompt_logits_top10"].values()
        wrong = np.abs(logits[..., ids] - np.array(reference)).max(-1)
        assert wrong.min() < 1e-3  # the lane and row of the prompt's last token
    del real.worker.stages.step  # which kept them: other tests share the worker


@pytest.mark.matrix
def test_a_safetensors_folder_says_the_same_as_the_gguf(golden, smollm2_folder):
    real = engine(smollm2_folder, "tp=3", chunk=64, seqs=8, pages=64)
    runner = Runner(real)
    ids = [submit(runner, case) for case in golden["cases"][:5]]
    runner.run()
    assert [runner.ids(id) for id in ids] == [case["output_ids"] for case in golden["cases"][:5]]


def log_probabilities(real, cases) -> list[np.ndarray]:
    """Returns the log-probability of each token of prompt and reference output after those before
    it."""
    runner = Runner(real)
    ids = [
        runner.submit(case["prompt_ids"] + case["output_ids"], max_tokens=1, prompt_logprobs=0)
        for case in cases
    ]
    runner.run()
    assert_empty(real)
    return [
        np.array([token.chosen for token in runner.completion(id).finished.prompt_logprobs[1:]])
        for id in ids
    ]


@pytest.mark.matrix
@pytest.mark.skipif(library.unsupported() is not None, reason="no kernels for CPUs")
@pytest.mark.parametrize("method, most", [("int8", 0.1), ("fp8", 0.25)])
def test_weights_quantised_while_loading_cost_little(method, most, golden, smollm2_folder):
    """The mean difference of the log-probabilities of given tokens."""
    cases = [with_tokens(case, 40) for case in golden["cases"][:6]]
    real = engine(smollm2_folder, chunk=256, pages=300, quantization=method)
    found = np.concatenate(log_probabilities(real, cases))
    real.close()
    plain = engine(smollm2_folder, chunk=256, pages=300, quantization="none")
    expected = np.concatenate(log_probabilities(plain, cases))
    plain.close()
    assert 0 < np.abs(found - expected).mean() < most


def assert_eight_bits_cost_little(source, cases, plain, tokens: int, meshes) -> None:
    """Compares log-probabilities of more than `tokens` tokens with those of 32 bits: the mean, for
    each differs by what 4 significant bits of keys and values make of it. meshes: each with a
    placement of blocks."""
    right = log_probabilities(plain, cases)
    for mesh, placement in meshes:
        real = engine(source, mesh, placement=placement, kv_cache_dtype="fp8", **FIRST_LAYERS)
        pools = real.worker.stages.stages[0].caches[0]
        assert (
            str(pools.kv.dtype) == "float8_e4m3fn" and pools.kv.nbytes == 32 * pools.scales.nbytes
        )
        differences = np.concatenate(
            [one - other for one, other in zip(log_probabilities(real, cases), right)]
        )
        assert len(differences) > tokens
        assert abs(differences.mean()) < 0.03 and 0.01 < np.abs(differences).mean() < 0.2


ON_ONE_DEVICE = ("", "grow")
ON_LANES_AND_RANKS = ("kvp=2,tp=3", "random")
ON_ALL_AXES = ("spp=2,kvp=2,tp=3", "random")


@pytest.mark.matrix
def test_kv_of_eight_bits_costs_little_likelihood(golden, smollm2_gguf, plain):
    cases = short(golden["cases"])
    assert_eight_bits_cost_little(smollm2_gguf, cases, plain, 600, [ON_ONE_DEVICE, ON_ALL_AXES])


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(ON_ONE_DEVICE, id="alone", marks=pytest.mark.matrix),
        pytest.param(ON_LANES_AND_RANKS, id="lanes-and-ranks"),
        pytest.param(ON_ALL_AXES, id="all-axes", marks=pytest.mark.matrix),
    ],
)
def test_kv_of_eight_bits_costs_little_likelihood_in_the_first_layers(
    where, golden_first_layers, smollm2_first_layers, plain_first_layers
):
    cases = short(golden_first_layers["cases"])
    assert_eight_bits_cost_little(smollm2_first_layers, cases, plain_first_layers, 500, [where])


# Mean absolute difference of log-probabilities between bfloat16 and f32, over 569 tokens on the
# first layers, as measured for each instruction set of the CPU kernels and for XLA (None). bfloat16
# has 8 significant bits; which numbers are rounded to them, and in which order f32 sums are made,
# differs: avx512_bf16 multiplies and adds pairs of bfloat16, the others widen each number to f32.
BFLOAT16_DIFFERENCE = {"avx512_bf16": 0.0613, "avx512": 0.0558, "avx2": 0.0558, None: 0.0513}
# Other versions of jaxlib and other meshes sum in other orders; one significant bit less, as where
# sums were made in bfloat16, would double the difference.
MARGIN = 1.4


def assert_sixteen_bits_cost_little(source, cases, plain, tokens: int, mesh: str) -> None:
    """Compares log-probabilities of text that the model knows with those in f32. Weights, hidden
    states and KV are in bfloat16, sums in f32. tokens: least number of them."""
    right = log_probabilities(plain, cases)
    real = engine(source, mesh, dtype="bfloat16", **FIRST_LAYERS)
    assert str(real.worker.stages.stages[0].caches[0].kv.dtype) == "bfloat16"
    differences = np.concatenate(
        [one - other for one, other in zip(log_probabilities(real, cases), right)]
    )
    assert len(differences) > tokens
    worst = max(BFLOAT16_DIFFERENCE.values())
    measured = BFLOAT16_DIFFERENCE.get(library.instruction_set(), worst)
    assert abs(differences.mean()) < 0.01
    assert 0.001 < np.abs(differences).mean() < MARGIN * measured


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["", "spp=2,kvp=2,tp=3"], ids=["alone", "all-axes"])
def test_bfloat16_costs_little_likelihood(mesh, golden, smollm2_gguf, plain):
    assert_sixteen_bits_cost_little(smollm2_gguf, short(golden["cases"]), plain, 600, mesh)


def test_bfloat16_costs_little_likelihood_in_the_first_layers(
    golden_first_layers, smollm2_first_layers, plain_first_layers
):
    cases = short(golden_first_layers["cases"])
    assert_sixteen_bits_cost_little(smollm2_first_layers, cases, plain_first_layers, 500, "")
