"""States of Gated DeltaNet layers follow their sequences, whatever becomes of these."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter

import numpy as np
import pytest

from jaxserve.api.batch import Batch
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.model_config import from_hf
from jaxserve.engine.build import build
from jaxserve.engine.engine import Engine
from jaxserve.engine.memory import DeviceRoom, sizes, state_bytes
from jaxserve.engine.sizing import make_plan
from jaxserve.settings.options import make
from jaxserve.settings.schema import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)
from tests.engine.harness import Runner, assert_empty, fresh, shapes_of, watch_batches
from tests.models import oracle
from tests.models.oracle.cases import CASES
from tests.models.test_families import write_model

NAME = "qwen3_5"
CPU = DeviceRoom("cpu", None)
NEXT_80B = {  # its config.json, as far as it says something
    "architectures": ["Qwen3NextForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "max_position_embeddings": 262144,
    "vocab_size": 151936,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Engine:
    """An engine for two sequences, with pages for one and a half of the longest, which keeps none
    free for what sequences will put out."""
    folder = write_model(tmp_path_factory.mktemp("states") / "model", NAME)
    config = EngineConfig(
        ModelSource(str(folder), max_model_len=80, dtype="float32"),
        MeshConfig(),
        CacheConfig(block_size=8, pages=14),
        SchedulerConfig(max_seqs=2, chunk_tokens=32, decode_reserve=0.0),
        profile="none",
    )
    return build(config, progress=False, warm_up=False)


@pytest.fixture
def answer() -> oracle.Answer:
    return oracle.load(NAME)


def test_preempted_sequences_begin_again_and_say_the_same(tiny, answer):
    runner = Runner(tiny)
    asked = dict(max_tokens=60, ignore_eos=True)
    prompts = [answer.prompt[first : first + 8] for first in (0, 8, 16)]
    alone = []
    for prompt in prompts:
        id = runner.submit(prompt, **asked)
        runner.run()
        alone.append(runner.ids(id))
    before = tiny.scheduler.slots.preemptions
    ids = [runner.submit(prompt, **asked) for prompt in prompts]
    runner.run(chunks=(3, 8, 32))
    assert tiny.scheduler.slots.preemptions > before
    assert [runner.ids(id) for id in ids] == alone
    assert_empty(tiny)


def test_a_slot_forgets_the_state_of_a_cancelled_sequence(tiny, answer):
    runner = Runner(tiny)
    asked = dict(max_tokens=len(answer.tokens), ignore_eos=True)
    gone = [runner.submit([5 + i] * 40, **asked) for i in range(2)]
    for _ in range(3):
        tiny.step()
    for id in gone:
        tiny.cancel(id)
    after = runner.submit(answer.prompt, **asked)
    runner.run()
    assert runner.ids(after) == answer.tokens
    assert_empty(tiny)


def test_each_completion_of_a_request_has_its_own_state(tiny, answer):
    runner = Runner(tiny)
    sampled = dict(max_tokens=8, ignore_eos=True, temperature=1.0, seed=3)
    together = runner.submit(answer.prompt, n=3, **sampled)
    runner.run()
    again = runner.submit(answer.prompt, n=3, **sampled)
    runner.run(chunks=(5, 7))
    completions = [runner.ids(together, i) for i in range(3)]
    assert len(set(map(tuple, completions))) == 3
    assert completions == [runner.ids(again, i) for i in range(3)]
    assert_empty(tiny)


SLOW = ("tp=2", "kvp=4", "kvp=8", "kvp=2,tp=2")
MESHES = ["", *(pytest.param(mesh, marks=pytest.mark.matrix) for mesh in ("kvp=2", *SLOW))]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.matrix)])
def test_prompts_that_go_on_from_checkpoints_say_the_same(mesh, dtype, tmp_path):
    """Prompts begin alike, pages are short: checkpoints are taken up, evicted, preempted."""
    folder = write_model(tmp_path / "model", NAME)
    rng = random.Random(3)
    common = [rng.randrange(120) for _ in range(60)]
    prompts = []
    for _ in range(10):
        tail = [rng.randrange(120) for _ in range(rng.randint(1, 40))]
        prompts.append(common[: rng.choice((20, 40, 60))] + tail)
    config = EngineConfig(
        ModelSource(str(folder), max_model_len=160, dtype=dtype),
        MeshConfig.parse(mesh),
        CacheConfig(block_size=8, pages=400, prefix_caching=False),
        SchedulerConfig(max_seqs=4, chunk_tokens=32, decode_reserve=0.0),
        profile="none",
    )
    alone = build(config, progress=False, warm_up=False)
    lanes = alone.worker.plan.mesh.kvp
    asked = dict(max_tokens=24, ignore_eos=True)
    runner = Runner(alone)
    right = []
    for prompt in prompts:
        right.append(runner.submit(prompt, **asked))
        runner.run(chunks=(32,))
    restored = Counter[int]()

    def count(pages: int, batch: Batch) -> None:
        restored[pages] += len(batch.restores)

    for pages, chunks in ((400, (32,)), (400, (5, 24)), (100 // lanes, (1, 3, 32))):
        cache = dataclasses.replace(config.cache, prefix_caching=True, checkpoint_tokens=16)
        alone.config = dataclasses.replace(config, cache=cache)
        again = fresh(alone, "grow", pages=pages)
        watch_batches(again, functools.partial(count, pages))
        found = Runner(again)
        for _ in range(2):
            ids = [found.submit(prompt, **asked) for prompt in prompts]
            found.run(chunks=chunks)
            if dtype == "float32":  # of others rounding depends on the chunks
                assert [found.ids(id) for id in ids] == [runner.ids(id) for id in right]
        assert_empty(again)
    assert restored[400] > 20 and (restored[100 // lanes] or lanes > 2)


SPREAD = [
    ("kvp=2", "pass_kv", "zigzag"),
    ("kvp=2", "visit", "random"),
    ("kvp=4", "pass_q", "striped"),
    ("kvp=4", "visit", "random"),
    ("kvp=4", "gather", "zigzag"),
    ("spp=2,kvp=2,tp=2", "pass_kv", "striped"),
    ("kvp=8", "pass_kv", "zigzag"),
]


@pytest.mark.parametrize(
    "mesh, exchange, placement",
    [SPREAD[0], *(pytest.param(*case, marks=pytest.mark.matrix) for case in SPREAD[1:])],
)
def test_chunks_on_several_lanes_say_what_one_lane_says(
    mesh, exchange, placement, tiny, answer, tmp_path
):
    """Rows are short, so that lanes have several, and lie as exchanges and placements have them;
    prompts are computed beside each other and beside decodes."""
    rng = random.Random(exchange)
    prompts = [[rng.randrange(120) for _ in range(count)] for count in (41, 30)]
    asked = dict(max_tokens=len(answer.tokens), ignore_eos=True)
    right = [answer.tokens]
    for prompt in prompts:
        alone = Runner(tiny)
        id = alone.submit(prompt, **asked)
        alone.run()
        right.append(alone.ids(id))
    lane_tokens = None if placement == "random" else 16
    config = EngineConfig(
        ModelSource(str(write_model(tmp_path / "model", NAME)), max_model_len=80, dtype="float32"),
        MeshConfig.parse(mesh),
        CacheConfig(block_size=4, pages=60, placement=placement, lane_tokens=lane_tokens),
        SchedulerConfig(max_seqs=2, chunk_tokens=16, min_chunk=4, exchange=exchange),
        profile="none",
    )
    real = build(config, progress=False, warm_up=False, profiled=False)
    spread: list[int] = []
    watch_batches(real, lambda batch: spread.extend(batch.length[batch.spread].tolist()))
    shapes = shapes_of(real)
    runner = Runner(real)
    ids = [runner.submit(prompt, **asked) for prompt in (answer.prompt, *prompts)]
    runner.run(chunks=(16, 6), seed=1)
    assert [runner.ids(id) for id in ids] == right
    assert max(spread) > 8 and any(shape.spread_prefill.rows > 1 for shape in shapes)
    assert exchange in {shape.exchange for shape in shapes}
    assert_empty(real)


def test_a_checkpoint_takes_the_pages_of_its_bytes():
    model = from_hf(NEXT_80B)
    plan = planned(model, mesh="tp=2", pages=100, max_seqs=4, dtype="bfloat16", block_size=64)
    window = 36 * 3 * (2 * 2048 + 4096) * 2
    page = 64 * model.kv_bytes_per_token()
    assert plan.state_pages == -(-(model.state_bytes() + window) // page) == 50


def planned(model: ModelConfig, room: DeviceRoom = CPU, **settings):
    config = make(EngineConfig, settings)
    return make_plan(config, model.with_tp(config.mesh.tp), room)


def test_memory_for_states_is_set_aside_before_that_for_pages():
    model = from_hf(NEXT_80B)
    assert (
        sum(model.mixer(layer).has_pages for layer in range(48)) == 12
        and model.state_bytes() == 36 * 32 * 128 * 128 * 4
    )
    gpu = DeviceRoom("gpu", 141 * 10**9)
    small, large = (planned(model, gpu, mesh="tp=2", max_seqs=n) for n in (16, 64))
    window = 36 * 3 * (2 * 2048 + 4096) * 2
    assert state_bytes(large, range(48)) == 64 * (model.state_bytes() + window) // 2
    assert sizes(small).kv - sizes(large).kv >= sizes(large).states - sizes(small).states > 0
    assert sizes(large).total < gpu.bytes
    with pytest.raises(ConfigError, match=r"kv_memory_gib: 1 GiB hold 0 pages .* of 64 sequences"):
        planned(model, max_seqs=64)


@pytest.mark.parametrize(
    "name, settings",
    [
        ("host_cache_gib", {"host_cache_gib": 1.0, "mesh": "spp=2"}),
        ("prefix_copies", {"prefix_copies": True, "mesh": "kvp=2"}),
        ("drafts", {"drafts": "ngram"}),
        ("role", {"role": "prefill", "mesh": "spp=2"}),
        ("planner", {"planner": "elastic", "placement": "hashed", "mesh": "kvp=2"}),
    ],
)
def test_settings_that_states_rule_out_are_refused_by_name(name, settings):
    model = dataclasses.replace(from_hf(CASES[NAME].config), name="mine")
    with pytest.raises(ConfigError, match=rf"{name}: mine .*states"):
        planned(model, **settings)


def test_bytes_of_kv_are_those_of_layers_with_pages(tiny):
    assert tiny.info.layers == 4 and tiny.info.kv_bytes_per_token == 4 * 2 * 2 * 32
    model = from_hf(NEXT_80B)
    assert model.kv_bytes_per_token() == 12 * 2 * 2 * 256 * 2
    made = planned(model, mesh="tp=2", pages=10, max_seqs=4, dtype="bfloat16")
    assert sizes(made).kv == 10 * 16 * model.kv_bytes_per_token() // 2
    assert np.prod(made.cache(0).state.shape) == 4 * model.state_bytes() // 36 // 4
