"""Sampling parameters through the whole engine: the same request says the same, whatever mesh,
chunks, company and memory it has."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxserve.cache import CacheManager
from jaxserve.engine.engine import Engine
from jaxserve.scheduling import Scheduler
from tests.engine.harness import SHARED, Runner, assert_empty, engine, fresh
from tests.models.reference import random_weights
from tests.weights.models import TINY, write_folder

MESHES = ["", "spp=2,kvp=2", "tp=2"]
EOS = 2
KINDS = {
    "plain": dict(temperature=1.0, seed=11),
    "cut": dict(temperature=1.3, top_k=50, top_p=0.9, min_p=0.01, seed=12),
    "penalised": dict(
        temperature=0.8,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        seed=13,
    ),
    "greedy but penalised": dict(temperature=0, frequency_penalty=0.1, repetition_penalty=1.1),
    "biased": dict(temperature=0.9, logit_bias={7: 4.0, 400: 3.0}, min_tokens=5, seed=-5),
    "greedy": dict(temperature=0),
}


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 512, length).tolist()


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Engine]:
    model = write_folder(tmp_path_factory.mktemp("model"), TINY, random_weights(TINY, 0))
    return {mesh: engine(model, mesh, **SHARED) for mesh in MESHES}


@pytest.fixture
def engines(built) -> dict[str, Engine]:
    """Engines with empty caches. Those on the same devices write to the same pages: use the newest
    alone."""
    return {mesh: fresh(old, "grow", 80) for mesh, old in built.items()}


@pytest.fixture
def plain(engines) -> Engine:
    return engines[""]


def with_pages(old: Engine, pages: int) -> Engine:
    """A new engine on the same devices that uses few of their pages, and keeps none free."""
    plan = old.worker.plan
    cache = CacheManager(
        dataclasses.replace(old.config.cache, pages=pages), plan.mesh.kvp, plan.slots
    )
    max_len = old.info.max_model_len
    config = dataclasses.replace(old.config.scheduler, decode_reserve=0.0)
    scheduler = Scheduler(config, cache, plan.mesh, max_len, (EOS,))
    return Engine(old.config, old.worker, scheduler)


def say(real: Engine, requests: list[tuple[list[int], dict]], chunks=(), **rest) -> list[list[int]]:
    """Tokens of requests that run together."""
    runner = Runner(real)
    ids = [
        runner.submit(ids, **{"max_tokens": 12, "ignore_eos": True, **fields, **rest})
        for ids, fields in requests
    ]
    runner.run(chunks)
    assert_empty(real)
    return [runner.ids(id) for id in ids]


# --- the same tokens


@pytest.mark.parametrize("orders", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_a_request_says_the_same_alone_and_in_any_company_on_any_mesh_in_any_chunks(
    engines, orders
):
    requests = [(prompt(i, 20 + 23 * i), fields) for i, fields in enumerate(KINDS.values())]
    alone = [say(engines[""], [request])[0] for request in requests]
    assert len({tuple(tokens) for tokens in alone}) == len(alone)
    for mesh, real in engines.items():
        for chunks, placement in [
            ((), "grow"),
            ((1, 7, 32), "random" if "kvp" in mesh else "grow"),
        ]:
            real = fresh(real, placement)
            for order in (requests[::-1], requests)[:orders]:
                together = say(real, order, chunks)
                assert together[:: 1 if order is requests else -1] == alone, (
                    f"{mesh or 'one device'}, chunks {chunks}, {placement}"
                )


def test_a_request_without_a_seed_says_something_else_every_time(plain):
    tokens = [say(plain, [(prompt(0, 20), dict(temperature=1.0))])[0] for _ in range(4)]
    assert len({tuple(ids) for ids in tokens}) == 4


def test_completions_of_one_request_differ_and_come_back_the_same(engines):
    said = []
    for mesh in ("", "", "tp=2"):
        runner = Runner(engines[mesh])
        id = runner.submit(
            prompt(1, 50), n=6, seed=3, temperature=1.0, max_tokens=10, ignore_eos=True
        )
        runner.run()
        said.append([runner.ids(id, index) for index in range(6)])
        assert all(
            runner.completion(id, index).finished.usage.cached == 48 for index in range(1, 6)
        )
    assert len(set(map(tuple, said[0]))) == 6 and said[1] == said[0] and said[2] == said[0]
    assert (
        say(engines[""], [(prompt(1, 50), dict(seed=3, temperature=1.0, max_tokens=10))])
        == said[0][:1]
    )


@pytest.mark.parametrize("mesh", ["", "spp=2,kvp=2"])
def test_sequences_that_lose_their_pages_say_the_same_in_the_end(mesh, engines):
    real = engines[mesh]
    requests = [(prompt(i, 10 + 5 * i), fields) for i, fields in enumerate(KINDS.values())]
    right = say(real, requests, max_tokens=60)
    small = with_pages(real, 6 if not mesh else 3)
    admitted = []
    start = small.scheduler.start
    small.scheduler.start = lambda now: (
        (batch := start(now))
        and (admitted.extend(batch.seq[list(batch.admitted)].tolist()), batch)[1]
    )
    assert say(small, requests, max_tokens=60) == right
    again = len(admitted) - len(requests)
    assert again >= 3, f"only {again} came back"


# --- when it ends


def test_a_completion_ends_at_its_end_token_a_stop_id_or_its_length(plain):
    long = say(plain, [(prompt(2, 20), dict(max_tokens=30))])[0]
    assert len(long) == 30
    runner = Runner(plain)
    stop = runner.submit(
        prompt(2, 20), max_tokens=30, ignore_eos=True, stop_token_ids=[long[7], 511]
    )
    end = runner.submit(prompt(2, 20), max_tokens=30, logit_bias={EOS: 100})
    on_ = runner.submit(prompt(2, 20), max_tokens=30, logit_bias={EOS: 100}, ignore_eos=True)
    both = runner.submit(
        prompt(2, 20), max_tokens=30, logit_bias={EOS: 100}, ignore_eos=True, stop_token_ids=[EOS]
    )
    length = runner.submit(prompt(2, 20), max_tokens=1)
    runner.run()
    stopped = runner.completion(stop)
    assert stopped.ids == long[: long.index(long[7]) + 1] and stopped.finished.reason == "stop"
    assert runner.ids(end) == [EOS] and runner.completion(end).finished.reason == "stop"
    assert runner.ids(on_) == [EOS] * 30 and runner.completion(on_).finished.reason == "length"
    assert runner.ids(both) == [EOS] and runner.completion(both).finished.reason == "stop"
    assert runner.ids(length) == long[:1] and runner.completion(length).finished.reason == "length"
    assert runner.completion(length).finished.usage.completion == 1


def test_before_min_tokens_neither_end_nor_stop_ids_come(plain):
    runner = Runner(plain)
    bias = {EOS: 100, 300: 90}
    end = runner.submit(prompt(3, 20), max_tokens=30, logit_bias=bias, min_tokens=6)
    stop = runner.submit(
        prompt(3, 20), max_tokens=30, logit_bias=bias, min_tokens=6, stop_token_ids=[300]
    )
    free = runner.submit(
        prompt(3, 20),
        max_tokens=10,
        logit_bias=bias,
        min_tokens=6,
        ignore_eos=True,
        stop_token_ids=[300],
    )
    runner.run()
    assert runner.ids(end) == [300] * 6 + [EOS]
    assert not {EOS, 300} & set(runner.ids(stop)[:6]) and runner.ids(stop)[6:] == [EOS]
    assert runner.ids(free) == [EOS] * 10


def test_output_ends_where_the_model_has_no_more_room(plain):
    runner = Runner(plain)
    id = runner.submit(prompt(4, 500), max_tokens=100, ignore_eos=True)
    runner.run()
    assert len(runner.ids(id)) == 12 and runner.completion(id).finished.reason == "length"


# --- log-probabilities


@pytest.mark.parametrize(
    "mesh, chunks, placement",
    [
        ("", (), "grow"),
        ("", (1, 7, 32), "grow"),
        ("tp=2", (32,), "grow"),
        ("spp=2,kvp=2", (), "grow"),
        ("spp=2,kvp=2", (1, 7, 32), "random"),
    ],
)
def test_log_probabilities_of_a_prompt_are_those_its_tokens_had_when_they_were_said(
    mesh, chunks, placement, engines
):
    first = Runner(engines[""])
    id = first.submit(
        prompt(5, 5), max_tokens=90, ignore_eos=True, logprobs=5, temperature=1.0, seed=1
    )
    first.run()
    said = first.completion(id)
    second = Runner(fresh(engines[mesh], placement))
    company = second.submit(prompt(6, 70), max_tokens=20)
    id = second.submit(prompt(5, 5) + said.ids, max_tokens=3, logprobs=20, prompt_logprobs=4)
    second.run(chunks)
    scored = second.completion(id).finished.prompt_logprobs
    assert scored[0] is None and len(scored) == 95
    for before, after in zip(said.logprobs, scored[5:], strict=True):
        assert after.chosen == pytest.approx(before.chosen, abs=1e-4)
        np.testing.assert_allclose(
            [value for _, value in after.top], [value for _, value in before.top[:4]], atol=1e-4
        )
        assert dict(after.top).keys() <= dict(before.top).keys()
    assert len(second.completion(id).logprobs[0].top) == 20
    assert (
        second.completion(company).finished.prompt_logprobs is None
        and second.completion(company).logprobs[0] is None
    )


def test_log_probabilities_are_the_models_own_and_change_no_token(plain):
    fields = dict(temperature=1.5, top_k=3, frequency_penalty=1.0, logit_bias={9: 2.0}, seed=4)
    without = say(plain, [(prompt(7, 40), fields)])
    with_them = say(plain, [(prompt(7, 40), fields)], logprobs=2, prompt_logprobs=0)
    assert with_them == without
    runner = Runner(plain)
    ids = [runner.submit(prompt(7, 40), logprobs=20, max_tokens=1, **rest) for rest in (fields, {})]
    runner.run()
    changed, own = (runner.completion(id).logprobs[0].top for id in ids)
    assert changed == own


def test_a_prompt_of_one_token_and_none_of_the_likeliest_can_be_asked_for(plain):
    runner = Runner(plain)
    one = runner.submit([5], max_tokens=2, prompt_logprobs=3, logprobs=0)
    two = runner.submit([5, 6], max_tokens=2, prompt_logprobs=0)
    runner.run()
    assert runner.completion(one).finished.prompt_logprobs == (None,)
    assert all(
        logprobs.top == () and logprobs.chosen < 0 for logprobs in runner.completion(one).logprobs
    )
    assert runner.completion(two).finished.prompt_logprobs[1].top == ()


def test_log_probabilities_of_a_prompt_survive_the_loss_of_its_pages(plain):
    runs = []
    for real in (plain, with_pages(plain, 12)):
        runner = Runner(real)
        ids = [
            runner.submit(prompt(20 + i, 60), max_tokens=40, prompt_logprobs=1, ignore_eos=True)
            for i in range(4)
        ]
        runner.run(chunks=(16,))
        runs.append([runner.completion(id) for id in ids])
    for big, small in zip(*runs):
        assert small.ids == big.ids
        for a, b in zip(
            small.finished.prompt_logprobs[1:], big.finished.prompt_logprobs[1:], strict=True
        ):
            assert a.chosen == pytest.approx(b.chosen, abs=1e-4)
