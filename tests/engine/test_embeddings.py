"""The embedding of a prompt is the final hidden state of its last token, whatever mesh, chunks,
company and cache it has."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Progress, Token
from jaxserve.engine.build import build
from jaxserve.engine.engine import Engine
from jaxserve.settings.schema import CacheConfig, EngineConfig, ModelSource, SchedulerConfig
from tests.engine.harness import SHARED, Runner, assert_empty, engine, fresh, watch_batches
from tests.engine.test_generation import with_pages
from tests.models.reference import final_states, random_weights
from tests.weights.models import TINY, write_folder

MESHES = ["", "tp=2", "kvp=2", "spp=2"]
WEIGHTS = random_weights(TINY, 0)
EMBED = {"embed": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model"), TINY, WEIGHTS)


@pytest.fixture(scope="module")
def built(model) -> dict[str, Engine]:
    return {mesh: engine(model, mesh, **SHARED) for mesh in MESHES}


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 512, length).tolist()


def reference(ids: list[int]) -> np.ndarray:
    return final_states(TINY, WEIGHTS, ids)[-1]


def embeddings(
    real: Engine, prompts: list[list[int]], chunks: tuple[int, ...] = (), **rest
) -> list[np.ndarray]:
    """Embeds prompts that run together."""
    runner = Runner(real)
    ids = [runner.submit(ids, rest={**EMBED, **rest}) for ids in prompts]
    runner.run(chunks)
    assert_empty(real)
    return [runner.completion(id).finished.embedding for id in ids]


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("mesh", MESHES)
def test_it_is_the_references_hidden_state_on_every_mesh_and_in_chunks_of_all_sizes(built, mesh):
    prompts = [prompt(seed, length) for seed, length in enumerate((1, 2, 16, 37, 150))]
    expected = [reference(ids) for ids in prompts]
    for chunks in ((), (1, 7, 32)):
        real = fresh(built[mesh], "random" if "kvp" in mesh else "grow")
        for got, one in zip(embeddings(real, prompts, chunks), expected, strict=True):
            assert_close(got, one)


@pytest.mark.parametrize("exchange", ["pass_q", "pass_kv"])
def test_it_is_the_references_where_a_ring_ends_on_any_lane(model, exchange):
    real = engine(model, "kvp=2", **SHARED, exchange=exchange, placement="striped", lane_tokens=32)
    prompts = [prompt(seed, length) for seed, length in enumerate((150, 161, 177, 200))]
    for got, ids in zip(embeddings(real, prompts), prompts, strict=True):
        assert_close(got, reference(ids))


def test_a_prefix_that_is_cached_changes_nothing(built):
    real = fresh(built[""], "grow")
    ids = prompt(5, 100)
    runs = []
    for _ in range(2):
        runner = Runner(real)
        id = runner.submit(ids, rest=EMBED)
        runner.run()
        runs.append(runner.completion(id).finished)
    miss, hit = runs
    assert miss.usage.cached == 0 and hit.usage.cached == 96
    assert_close(hit.embedding, miss.embedding)


def test_there_are_no_tokens_and_no_decodes_and_the_usage_is_the_prompts(built):
    real = fresh(built[""], "grow")
    batches: list = []
    watch_batches(real, batches.append)
    runner = Runner(real)
    id = runner.submit(prompt(6, 70), max_tokens=20, rest=EMBED)
    runner.run()
    end = runner.completion(id).finished
    assert not any(isinstance(event, Token) for event in runner.events[id])
    assert any(isinstance(event, Progress) for event in runner.events[id])
    assert end.reason == "stop" and end.usage.prompt == 70 and end.usage.completion == 0
    assert end.ttft == end.timing.total
    assert not any(batch.is_decode.any() or batch.sample.any() for batch in batches)


@pytest.mark.parametrize("mesh", ["", "spp=2"])
def test_others_in_the_same_steps_say_what_they_say_alone(built, mesh):
    words = [prompt(7, 20), prompt(8, 45)]
    alone = Runner(fresh(built[mesh], "grow"))
    ids = [alone.submit(one, max_tokens=15, ignore_eos=True) for one in words]
    alone.run()
    said = [alone.ids(id) for id in ids]
    real = fresh(built[mesh], "grow")
    runner = Runner(real)
    ids = [runner.submit(one, max_tokens=15, ignore_eos=True) for one in words]
    embedded = [prompt(seed, 40) for seed in range(20, 30)]
    others = [runner.submit(one, rest=EMBED) for one in embedded]
    runner.run((16, 32))
    assert [runner.ids(id) for id in ids] == said
    for id, one in zip(others, embedded):
        assert_close(runner.completion(id).finished.embedding, reference(one))
    assert runner.completion(ids[0]).finished.embedding is None
    assert_empty(real)


def test_many_end_in_one_step(model):
    """More than one launch embeds."""
    config = EngineConfig(
        ModelSource(model=str(model), max_model_len=256, dtype="float32"),
        cache=CacheConfig(block_size=16, pages=400),
        scheduler=SchedulerConfig(max_seqs=100, chunk_tokens=100, min_chunk=1),
    )
    real = build(config, progress=False, warm_up=False)
    prompts = [[seed + 3] for seed in range(100)]
    batches: list = []
    watch_batches(real, batches.append)
    got = embeddings(real, prompts)
    assert max(len(batch.slot) for batch in batches) > 64
    for one, ids in zip(got, prompts, strict=True):
        assert_close(one, reference(ids))


def test_a_request_that_is_cancelled_gives_its_pages_back(built):
    real = fresh(built[""], "grow")
    runner = Runner(real)
    id = runner.submit(prompt(9, 200), rest={**EMBED, "bypass_prefix_cache": True})
    real.step()
    assert real.load().pages_free < real.load().pages_total
    assert real.cancel(id)
    runner.run()
    end = runner.completion(id).finished
    assert end.reason == "cancelled" and end.embedding is None
    assert_empty(real)


def test_it_survives_the_loss_of_its_pages(built):
    prompts = [prompt(seed, 60) for seed in range(30, 34)]
    real = with_pages(fresh(built[""], "grow"), 9)
    runner = Runner(real)
    writers = [runner.submit(prompt(40, 30), max_tokens=60, ignore_eos=True) for _ in range(2)]
    ids = [runner.submit(one, rest=EMBED) for one in prompts]
    runner.run((16,))
    for id, one in zip(ids, prompts):
        assert_close(runner.completion(id).finished.embedding, reference(one))
    assert len(runner.ids(writers[0])) == 60
    assert_empty(real)


def test_one_that_is_not_finite_is_an_error_and_its_blocks_serve_no_other(tmp_path):
    broken = {**WEIGHTS, "model.norm.weight": np.full(TINY.d_model, np.inf, np.float32)}
    real = engine(write_folder(tmp_path, TINY, broken), **SHARED)
    runner = Runner(real)
    id = runner.submit(prompt(1, 40), rest=EMBED)
    runner.run()
    end = runner.completion(id).finished
    assert end.reason == "error" and "not finite" in str(end.error)
    assert real.load().pages_cached == 0
    assert_empty(real)


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt_logprobs": 1}])
def test_what_asks_for_more_than_the_prompt_is_refused(built, fields):
    with pytest.raises(RequestError, match="where a prompt is embedded") as refused:
        Runner(built[""]).submit([5, 6], rest=EMBED, **fields)
    assert refused.value.field == next(iter(fields))


def test_steps_without_such_a_request_launch_nothing_for_it(built):
    """The program is part of the warm-up, and steps that embed nothing do not run it."""
    real = fresh(built[""], "grow")
    stages = real.worker.stages
    assert "pool" in dict(stages.programs.of_all_shapes())
    calls: list = []
    own = stages.pool
    stages.pool = lambda *work: calls.append(1) or own(*work)  # type: ignore[method-assign]
    try:
        runner = Runner(real)
        runner.submit(prompt(3, 100), max_tokens=4)
        runner.run()
        assert not calls
        embeddings(real, [prompt(3, 100)])
        assert len(calls) == 1  # of four steps
    finally:
        del stages.pool
