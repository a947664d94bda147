"""A replica over several processes says what one process says; a stranger is refused; a worker that
is lost is replaced."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.engine.engine import Engine
from jaxserve.engine.step_shapes import first_shapes
from jaxserve.group.member import LOST, REFUSED
from jaxserve.settings.options import make
from jaxserve.settings.schema import EngineConfig
from tests.engine import test_guides
from tests.engine.groups import SETTINGS, led
from tests.engine.harness import Runner, assert_empty, shapes_of
from tests.engine.test_golden import assert_golden, short, submit
from tests.waiting import eventually

TINY = "random:tiny"
LAYOUTS = [
    pytest.param("spp=2,kvp=2,tp=3", 2, id="a stage each"),
    pytest.param("spp=4", 2, id="two stages each"),
    pytest.param("kvp=2,tp=3", 2, id="a lane each"),
    pytest.param("spp=2,kvp=2,tp=3", 4, id="a lane of a stage each"),
]


@pytest.mark.matrix
@pytest.mark.parametrize("mesh, processes", LAYOUTS)
def test_tokens_equal_the_reference(mesh, processes, golden, smollm2_gguf, monkeypatch):
    modes = [("64", "random"), ("7", "striped"), ("512", "grow")]
    size = dict(chunk_tokens=512, pages=640, max_model_len=8192)
    with led(monkeypatch, smollm2_gguf, mesh, processes, **size) as (real, _):
        assert_golden(real, golden["cases"], modes, 1500)
        cases = short(golden["cases"])
        runner = Runner(real)
        for _ in range(2):  # and after prefix hits
            ids = [submit(runner, case) for case in cases]
            runner.run()
            assert [runner.ids(id) for id in ids] == [case["output_ids"] for case in cases]
        assert runner.completion(ids[-1]).finished.usage.cached > 0
        assert_empty(real)


@pytest.mark.matrix
@pytest.mark.parametrize("exchange", ["gather", "pass_q", "pass_kv"])
def test_prompts_spread_over_processes_say_what_the_reference_says(
    exchange, golden, smollm2_gguf, monkeypatch
):
    size = dict(chunk_tokens=512, pages=128, max_model_len=2048)
    spread = dict(exchange=exchange, placement="zigzag", lane_tokens=64)
    with led(monkeypatch, smollm2_gguf, "kvp=4", 4, **size, **spread) as (real, _):
        shapes = shapes_of(real)
        cases = short(golden["cases"], 1500)
        runner = Runner(real)
        ids = [submit(runner, case) for case in cases]
        runner.run()
        assert [runner.ids(id) for id in ids] == [case["output_ids"] for case in cases]
        assert any(shape.spread and shape.exchange == exchange for shape in shapes)


def everything(real: Engine) -> Runner:
    """Sampling in every variant, log-probabilities, embeddings, guides, prefix hits."""
    runner = Runner(real)
    prompt = list(range(5, 105))
    many = [
        dict(max_tokens=12),
        dict(max_tokens=9, temperature=1.0, seed=4, frequency_penalty=0.5),
        dict(max_tokens=9, temperature=0.7, seed=5, top_k=20, top_p=0.9, min_p=0.01),
        dict(max_tokens=5, logprobs=2, prompt_logprobs=1),
        dict(max_tokens=8, logit_bias={7: 3.5}, stop_token_ids=[9]),
        dict(max_tokens=6, n=2, temperature=0.9, seed=1),
    ]
    for lap in range(2):
        for number, fields in enumerate(many):
            runner.submit(prompt[number:], f"{lap}-{number}", **fields)
        runner.submit(prompt[50:], f"{lap}-embedded", {"embed": True})
        for number, spec in enumerate(test_guides.SPECS):
            guide = test_guides.guides(real).compile(spec)
            rest = {"guide": guide}
            runner.submit(prompt[:9], f"{lap}-guided-{number}", rest, max_tokens=30, seed=2)
        runner.run()
    return runner


def assert_same(found: Runner, right: Runner) -> None:
    """Equal tokens, and log-probabilities to the last digits of f32."""
    assert set(found.events) == set(right.events)
    for id in right.events:
        for index in range(2 if id.endswith("-5") else 1):
            ours, theirs = found.completion(id, index), right.completion(id, index)
            assert ours.ids == theirs.ids, id
            for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    assert np.isclose(a.chosen, b.chosen, atol=1e-4)
            vectors = ours.finished.embedding, theirs.finished.embedding
            assert (vectors[0] is None) == (not id.endswith("embedded"))
            if vectors[0] is not None:
                np.testing.assert_allclose(*vectors, atol=1e-4)
            prompts = ours.finished.prompt_logprobs, theirs.finished.prompt_logprobs
            for a, b in zip(*(each or () for each in prompts), strict=True):
                assert (a is None) == (b is None)
                assert a is None or np.isclose(a.chosen, b.chosen, atol=1e-4)


@pytest.mark.parametrize(
    "mesh, processes",
    [
        pytest.param("spp=2", 2, id="a stage each", marks=pytest.mark.matrix),
        pytest.param("spp=2,kvp=2", 2, id="lanes of a stage each", marks=pytest.mark.matrix),
        pytest.param("spp=2,tp=2", 1, id="all in one", marks=pytest.mark.matrix),
        pytest.param("kvp=2", 2, id="a lane each", marks=pytest.mark.matrix),
        pytest.param("spp=2,kvp=2", 4, id="a lane of a stage each", marks=pytest.mark.matrix),
    ],
)
def test_all_that_can_be_asked_says_what_one_process_says(mesh, processes, monkeypatch):
    from jaxserve.engine.build import build

    size = dict(chunk_tokens=32, max_seqs=4, pages=60, max_model_len=512)
    alone = build(
        make(EngineConfig, {**SETTINGS, **size, "model": TINY, "mesh": mesh}), False, False
    )
    right = everything(alone)
    with led(monkeypatch, TINY, mesh, processes, **size) as (real, _):
        assert_same(everything(real), right)
        assert_empty(real)
        assert [member["alive"] for member in real.worker.members()] == [True] * processes


@pytest.mark.parametrize(
    "replay, fault",
    [
        pytest.param("none", signal.SIGKILL, marks=pytest.mark.matrix),
        ("unsent", signal.SIGKILL),
        pytest.param("unsent", signal.SIGSTOP, marks=pytest.mark.matrix),
        pytest.param("all", signal.SIGKILL, marks=pytest.mark.matrix),
    ],
)
def test_a_worker_that_is_lost_is_replaced_and_requests_end_or_begin_anew(
    replay, fault, monkeypatch
):
    """Requests that go on say what they would have said."""
    size = dict(chunk_tokens=32, max_seqs=2, pages=60, max_model_len=512)
    with led(monkeypatch, TINY, "spp=2", 2, replay=replay, **size) as (real, workers):
        prompts = [list(range(5 + number, 60)) for number in range(4)]
        runner = Runner(real)
        ids = [runner.submit(prompt, max_tokens=40) for prompt in prompts]
        runner.run()
        right = [runner.ids(id) for id in ids]
        runner = Runner(real)
        real.start()
        ids = [runner.submit(prompt, max_tokens=40) for prompt in prompts]
        while not any(len(runner.events[id]) > 5 for id in ids):
            time.sleep(0.001)
        workers.processes[1].send_signal(fault)
        ended_at_once = {"none": 4, "unsent": 2, "all": 0}[replay]
        eventually(lambda: not real.available)
        with pytest.raises(RequestError, match="restarting"):
            runner.submit(prompts[0], "refused")
        assert len(real.registry.ids()) <= 4 - ended_at_once
        workers.processes[1].kill()
        workers.end()
        for number in range(2):
            workers.start(number)
        eventually(lambda: real.available, 300)  # all programs are read again
        eventually(lambda: not real.registry.ids())
        ends = [runner.completion(id) for id in ids]
        for end, said in zip(ends, right):
            error = end.finished.error
            if error is None:
                assert end.ids == said
            else:
                assert error.status == "UNAVAILABLE" and "again" in str(error)
        assert sum(end.finished.error is not None for end in ends) <= ended_at_once
        after = runner.submit(prompts[0], "after", max_tokens=40)
        eventually(lambda: not real.registry.ids())
        assert runner.ids(after) == right[0]
        real.close()


DIFFERENCES = [
    (dict(mesh="kvp=2"), "setting mesh is 'spp=1,kvp=2,tp=1'"),
    (dict(dtype="bfloat16"), "setting dtype is 'bfloat16'"),
    (dict(model="random:tiny-window"), "its weights are other ones"),
]


@pytest.mark.matrix
def test_a_worker_of_another_group_is_refused_before_it_computes_anything(monkeypatch):
    with led(monkeypatch, TINY, "spp=2", 2, max_model_len=512, pages=60) as (real, workers):
        for difference, told in DIFFERENCES:
            code, said = workers.stranger(1, **difference)
            assert code == REFUSED and told in said, said
        code, said = workers.stranger(1, secret="another one of enough characters")
        assert code == REFUSED and "secret: the leader's secret is another one" in said
        code, said = workers.stranger(1)
        assert code == LOST and "worker 1 is here already" in said
        runner = Runner(real)
        id = runner.submit([1, 2, 3], max_tokens=3)
        runner.run()
        assert len(runner.ids(id)) == 3


@pytest.mark.matrix
def test_steps_have_only_programs_that_all_workers_have_until_the_others_are_compiled(monkeypatch):
    size = dict(chunk_tokens=32, pages=64, max_model_len=256, max_seqs=2)
    prompts = [list(range(3, 3 + length)) for length in (1, 5, 40)]
    with led(monkeypatch, TINY, "spp=2", 2, warm_up=True, **size) as (real, _):
        group = real.worker
        few = first_shapes(group.plan.shapes)
        assert group.uncompiled == set(group.plan.shapes) - set(few) != set()
        compiled = group.compiles
        shapes = shapes_of(real)
        early = said(real, prompts)
        assert shapes and set(shapes) <= set(few)
        group.compile_others()
        while group.uncompiled:
            assert said(real, prompts) == early
        assert said(real, prompts) == early
        assert group.compiles > compiled
        assert group.recompiles == 0


def said(real: Engine, prompts: list[list[int]]) -> list[list[int]]:
    runner = Runner(real)
    ids = [runner.submit(prompt, max_tokens=4) for prompt in prompts]
    runner.run()
    return [runner.ids(id) for id in ids]
