"""A draft model changes how many steps a completion takes, and nothing of what it says: one that
is of the model's mind, one that seldom is, and one that fails."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.costs.coefficients import Costs
from jaxserve.costs.predictor import Predictor
from jaxserve.engine.build import build
from jaxserve.engine.command import DeviceError
from jaxserve.engine.draft_loading import check_tokenizers
from jaxserve.engine.draft_sizing import draft_replica
from jaxserve.engine.engine import Engine
from jaxserve.scheduling.events import StepRead
from jaxserve.settings.schema import (
    CacheConfig,
    ConfigError,
    DraftConfig,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)
from tests.engine.harness import Runner
from tests.engine.test_drafts import SAMPLING, assert_same, checked, prompts, run
from tests.engine.weights import live_bytes
from tests.text.vocabulary import tokenizer

EVERY_MESH = ["tp=2", "kvp=2", "spp=2", "spp=2,kvp=2,tp=2"]
SAME, OTHER = "random:tiny", "random:tiny-window"


def drafting(
    draft: str = SAME,
    mesh: str = "",
    model: str = SAME,
    chunk: int = 32,
    profiled: bool = False,
    **draft_settings,
) -> Engine:
    return build(
        EngineConfig(
            ModelSource(model=model, max_model_len=512),
            MeshConfig.parse(mesh),
            CacheConfig(block_size=16, pages=400),
            SchedulerConfig(max_seqs=4, chunk_tokens=chunk, drafts="model", draft_tokens=5),
            draft=DraftConfig(draft_model=draft, **draft_settings),
        ),
        progress=False,
        warm_up=False,
        profiled=profiled,
    )


def plainly(drafted: Engine, every: list[list[int]], fields: dict) -> list[list]:
    """Completions of the same settings without a draft model."""
    config = drafted.config
    plain = dataclasses.replace(
        config,
        scheduler=dataclasses.replace(config.scheduler, drafts="none"),
        draft=DraftConfig(),
    )
    return run(build(plain, progress=False, warm_up=False, profiled=False), every, fields)


@pytest.mark.parametrize("kind", SAMPLING)
def test_completions_are_those_without_a_draft_model(kind):
    every = prompts()
    drafted = drafting()
    right = checked(drafted)
    plain = plainly(drafted, every, SAMPLING[kind])
    assert_same(run(drafted, every, SAMPLING[kind], (7, 32)), plain)
    assert sum(right) > 40
    if kind in ("greedy", "drawn", "several"):  # else it is not of one mind with the model
        assert sum(right) > 0.95 * len(right)


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=pytest.mark.matrix) for m in EVERY_MESH])
def test_completions_on_a_mesh_are_those_without_a_draft_model(mesh):
    every = prompts()
    fields = dict(temperature=1.1, seed=3)
    drafted = drafting(mesh=mesh)
    right = checked(drafted)
    assert_same(run(drafted, every, fields), plainly(drafted, every, fields))
    assert sum(right) > 40


def test_a_draft_model_of_another_mind_changes_nothing():
    every = prompts()
    drafted = drafting(OTHER)
    right = checked(drafted)
    assert_same(run(drafted, every, {}), plainly(drafted, every, {}))
    assert any(right) and not all(right)


def test_a_draft_model_with_windows_proposes():
    every = prompts()
    fields = dict(temperature=0.9, seed=1)
    drafted = drafting(OTHER, model=OTHER)
    right = checked(drafted)
    assert_same(run(drafted, every, fields), plainly(drafted, every, fields))
    assert sum(right) > 0.95 * len(right) > 40


@pytest.mark.parametrize("fields", [{}, dict(temperature=1.2, seed=5)])
def test_long_texts_are_seen_in_part(fields):
    """300 tokens come, of which the draft model has room for 128: it begins again several times."""
    random = np.random.default_rng(0)
    every = [random.integers(3, 500, 150).tolist(), random.integers(3, 500, 20).tolist()]
    fields = dict(max_tokens=300, ignore_eos=True, **fields)
    drafted = drafting(draft_context=128)
    right = checked(drafted)
    assert_same(run(drafted, every, fields), plainly(drafted, every, fields))
    assert sum(right) > 100


def test_a_completion_takes_fewer_steps():
    drafted = drafting()
    seen: list = []
    drafted.bus.subscribe(StepRead, seen.append)
    run(drafted, prompts(1), dict(max_tokens=60, ignore_eos=True))
    assert len(seen) < 60 / 3


def test_those_that_began_first_have_the_places():
    """A text is computed once, however many sequences have no place."""
    every = prompts()
    drafted = drafting(draft_seqs=2)
    right = checked(drafted)
    long: list[int] = []
    steps = drafted.draft_model._steps
    issue = steps.issue

    def seen(rows):
        long.extend(rows.length[rows.length > 1].tolist())
        issue(rows)

    steps.issue = seen
    assert_same(run(drafted, every, {}), plainly(drafted, every, {}))
    assert sum(right) > 40
    assert sum(long) < sum(map(len, every)) + 40 * len(every)


def test_short_steps_of_the_model_are_none_of_the_draft_models():
    every = prompts(3)
    drafted = drafting(chunk=1)
    right = checked(drafted)
    fields = dict(max_tokens=12, ignore_eos=True)
    assert_same(run(drafted, every, fields), plainly(drafted, every, fields))
    assert any(right)


def test_the_steps_of_a_draft_model_are_measured():
    every = prompts()
    drafted = drafting(profiled=True)
    model = drafted.draft_model
    assert model.seconds(1, 4) > model.seconds(1, 1) > 0
    assert_same(run(drafted, every, {}), plainly(drafted, every, {}))
    assert not model.broken


def test_texts_are_computed_as_time_leaves():
    """With a model that takes as long as a step may, a text comes in pieces."""
    drafted = drafting()
    model = drafted.draft_model
    model._predictor = Predictor(Costs(layers=1, launch=0.001, linear_token=0.001), MeshConfig())
    sizes: list[int] = []
    issue = model._steps.issue

    def seen(rows):
        sizes.extend(rows.length.tolist())
        issue(rows)

    model._steps.issue = seen
    random = np.random.default_rng(0)
    every = [random.integers(3, 500, 300).tolist()]
    fields = dict(max_tokens=40, ignore_eos=True)
    assert_same(run(drafted, every, fields), plainly(drafted, every, fields))
    assert 64 in sizes and max(sizes) < 300


def test_it_sleeps_and_wakes_with_the_model():
    every = prompts()
    held_before = live_bytes()
    drafted = drafting()
    right = checked(drafted)
    before = run(drafted, every, {})
    held = live_bytes() - held_before
    for _ in range(2):
        drafted.weights.sleep(1)
        assert live_bytes() - held_before < 0.01 * held
        drafted.weights.wake_up()
        del right[:]
        assert_same(run(drafted, every, {}), before)
        assert sum(right) > 0.95 * len(right) > 40


@pytest.mark.parametrize(
    ("fault", "after"),
    [(DeviceError("out of memory"), 20), (AssertionError("a slip"), 20), (DeviceError("lost"), 0)],
)
def test_a_fault_of_the_draft_model_ends_its_proposals_alone(fault, after, caplog):
    every = prompts()
    drafted = drafting()
    model = drafted.draft_model
    execute = model.worker.execute
    count = 0

    def fails(command):
        nonlocal count
        count += 1
        if count > after:
            raise fault
        execute(command)

    model.worker.execute = fails
    right = checked(drafted)
    assert_same(run(drafted, every, {}), plainly(drafted, every, {}))
    assert model.broken and bool(right) == (after > 0)
    assert "proposes nothing" in caplog.text


@pytest.mark.parametrize("when", ["sleep", "wake"])
def test_a_draft_model_that_is_lost_in_sleep_is_done_without(when, monkeypatch):
    every = prompts()
    drafted = drafting()
    plain = run(drafted, every, {})
    lost = RequestError("", "the devices failed", "RESOURCE_EXHAUSTED")

    def fails(*_):
        raise lost

    monkeypatch.setattr(drafted.draft_model.worker.weights, when, fails)
    drafted.weights.sleep(1)
    drafted.weights.wake_up()
    right = checked(drafted)
    assert_same(run(drafted, every, {}), plain)
    assert drafted.draft_model.broken and not right


def test_a_draft_model_that_hangs_is_seen():
    drafted = drafting()
    runner = Runner(drafted)
    runner.submit(prompts(1)[0], max_tokens=40, ignore_eos=True)
    seen: list[float | None] = []

    def hangs(wanted, seconds):
        now = drafted.clock.now()
        seen.append(drafted.steps.watchdog.overdue(now + 1000))
        return [np.empty(0, np.int32)] * len(wanted)

    drafted.draft_model.make = hangs
    runner.run()
    assert seen and all(seen)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (dict(draft=None), "drafts: model needs weights: give --draft_model"),
        (dict(draft="random:nothing"), "is not one of"),
    ],
)
def test_what_cannot_propose_is_refused(settings, fault):
    with pytest.raises((ConfigError, CheckpointError), match=fault):
        drafting(**settings)


def test_a_draft_model_with_states_is_refused():
    config = drafting().config
    with pytest.raises(ConfigError, match=r"draft_model: .* keeps states"):
        draft_replica(config, MODELS["qwen3-next-80b-a3b"])


def test_tokenizers_must_agree_on_ids():
    """One may have more special tokens than the other, and ids without a text."""
    ours = tokenizer(("<a>", "<b>"))
    check_tokenizers(ours, tokenizer(("<a>",)))
    check_tokenizers(tokenizer(("<a>",)), ours)
    with pytest.raises(
        ConfigError, match=r"draft_model: its tokenizer is another one: .* '<b>' th"
    ):
        check_tokenizers(ours, tokenizer(("<b>", "<a>")))


def test_a_draft_model_without_use_is_refused():
    with pytest.raises(ConfigError, match="no effect without --drafts=model"):
        EngineConfig(draft=DraftConfig(draft_model=SAME))
