"""Layers with sliding windows keep the pages of what they see: tokens are those of a cache that
keeps all pages, whatever is freed, evicted, preempted and found again, on any lanes."""

from __future__ import annotations

import itertools
import random

import jax
import numpy as np
import pytest

from jaxserve.cache.page_needs import PageNeeds
from jaxserve.checkpoint.model_config import from_hf
from jaxserve.checkpoint.page_groups import ONE_GROUP
from jaxserve.engine import sizing
from jaxserve.engine.memory import sizes
from jaxserve.engine.sizing import make_plan
from jaxserve.settings.options import make
from jaxserve.settings.schema import ConfigError, EngineConfig
from tests.engine.harness import Runner, assert_empty, engine, fresh, watch_batches
from tests.lanes.plans import Plans
from tests.models.test_families import CASES, write_model

BLOCK = 4
WINDOW = 20
ON_LANES = [
    ("gemma3", ""),
    ("gpt_oss", ""),
    *(
        pytest.param(*case, marks=pytest.mark.matrix)
        for case in (
            ("gemma3", "kvp=2"),
            ("gpt_oss", "kvp=2"),
            *itertools.product(("gemma3", "gpt_oss"), ("kvp=4", "kvp=8")),
        )
    ),
]
ASKED = dict(max_tokens=40, ignore_eos=True)


def prompts(count: int) -> list[list[int]]:
    """Prompts of up to six windows, some of which begin alike."""
    rng = random.Random(count)
    common = [rng.randrange(120) for _ in range(60)]
    return [
        common[: rng.choice((0, 30, 60))] + [rng.randrange(120) for _ in range(rng.randint(1, 60))]
        for _ in range(count)
    ]


def tiny(folder, name: str, mesh: str = "", **settings):
    return engine(
        write_model(folder / name, name),
        mesh,
        chunk=24,
        seqs=4,
        block=BLOCK,
        max_len=160,
        **settings,
    )


@pytest.mark.parametrize("name, mesh", ON_LANES)
def test_tokens_are_those_of_one_table_for_all_layers(name, mesh, tmp_path):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sizing, "page_windows", lambda _: ONE_GROUP)
        whole = tiny(tmp_path / "whole", name, pages=800)
    assert whole.worker.plan.windows == ONE_GROUP
    runner = Runner(whole)
    some = prompts(8)
    right = []
    for prompt in some:
        right.append(runner.submit(prompt, **ASKED))
        runner.run()
    groups = tiny(tmp_path / "groups", name, mesh, pages=800)
    assert groups.worker.plan.windows
    lanes = groups.worker.plan.mesh.kvp
    windows = groups.worker.plan.windows
    longest = int(PageNeeds(BLOCK, windows).of(160))
    for seed, placement in enumerate(("grow", "random") if lanes > 1 else ("grow",)):
        # little more than the longest sequence takes: others are preempted and evicted
        pages = int(1.2 * longest) // lanes + len(windows)
        tight = fresh(groups, placement, pages=pages, decode_reserve=0.0)
        found = Runner(tight)
        for chunks in ((1, 2, 3), (5, 24)):
            ids = [found.submit(prompt, **ASKED) for prompt in some]
            found.run(chunks=chunks, seed=seed)
            for id, one in zip(ids, right):
                assert found.ids(id) == runner.ids(one)
        assert tight.scheduler.slots.preemptions or lanes > 1, "pages were not short"
        assert_empty(tight)


@pytest.mark.parametrize(
    "name, mesh, exchange",
    [
        ("gemma3", "kvp=2", "gather"),
        *(
            pytest.param(*case, marks=pytest.mark.matrix)
            for case in (
                ("gpt_oss", "kvp=2", "gather"),
                ("gemma3", "kvp=2", "pass_kv"),
                ("gpt_oss", "kvp=4", "pass_q"),
                ("gemma3", "kvp=4", "visit"),
                ("gemma3", "kvp=8", "pass_kv"),
                ("gpt_oss", "kvp=2,tp=2", "gather"),
                ("gemma3", "kvp=4,spp=2", "pass_kv"),
            )
        ),
    ],
)
def test_tokens_stay_while_blocks_move_and_are_copied(name, mesh, exchange, tmp_path):
    """By random plans, while pages are short, and to where several read a prefix."""
    crowd = [[*range(48), number, 7, 7] for number in range(8)]
    some = prompts(5) + crowd
    asked = {**ASKED, "max_tokens": WINDOW + BLOCK}
    quiet = Runner(tiny(tmp_path / "quiet", name, pages=800))
    right = []
    for prompt in some:
        right.append(quiet.submit(prompt, **asked))
        quiet.run()
    real = tiny(
        tmp_path / "lanes",
        name,
        mesh,
        pages=400,
        planned=True,
        exchange=exchange,
        prefix_copies=True,
    )
    plan = real.worker.plan
    lanes = plan.mesh.kvp
    assert plan.windows and plan.moves
    short = int(1.5 * PageNeeds(BLOCK, plan.windows).of(160)) // lanes + 2 * plan.page_groups
    moved = []
    whole, parts = (), (5, 24)
    for placement, planner, pages, rounds in (
        ("striped", Plans(1, lanes, longest=40), short, (whole, parts)),
        ("zigzag", Plans(2, lanes, longest=40), short, (parts,)),
        ("grow", None, 400, (whole,)),
    ):
        tight = fresh(real, placement, pages, planner, decode_reserve=0.0)
        moved.append(0)
        watch_batches(tight, lambda batch: moved.append(moved.pop() + len(batch.moves)))
        runner = Runner(tight)
        for chunks in rounds:
            ids = [runner.submit(prompt, **asked) for prompt in some]
            runner.run(chunks=chunks, seed=lanes)
            for id, one in zip(ids, right):
                assert runner.ids(id) == quiet.ids(one)
        assert_empty(tight)
    assert all(moved), f"{moved} pages moved by each plan, and were copied"


def test_a_prefix_is_found_where_windows_see_published_pages_alone(tmp_path):
    """At the end of a prompt and, for the pages of passed windows stay cached, in its middle."""
    real = tiny(tmp_path, "gemma3", pages=800)
    runner = Runner(real)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 120, 100).tolist()
    runner.submit(prompt, **ASKED)
    runner.run()
    for kept in (100, 60, 21):
        other = prompt[:kept] + [(prompt[kept % 100] + 1) % 120] * 30
        hit = runner.submit(other, max_tokens=8, ignore_eos=True)
        runner.run()
        anew = runner.submit(
            other, max_tokens=8, ignore_eos=True, rest=dict(bypass_prefix_cache=True)
        )
        runner.run()
        assert runner.completion(hit).finished.usage.cached == kept // BLOCK * BLOCK
        assert runner.ids(hit) == runner.ids(anew)


def test_a_sequence_holds_what_its_windows_see(tmp_path):
    real = tiny(tmp_path, "gemma3", pages=400)
    cache = real.scheduler.cache
    runner = Runner(real)
    runner.submit([5] * 100, max_tokens=50, ignore_eos=True)
    groups = len(cache.windows)
    assert groups == 3
    most = 0
    while real.step():
        layout = max(cache.layouts, key=lambda layout: len(layout.pages))
        blocks = len(layout.pages)
        chunk = 24 // BLOCK
        held = len(layout.held()) - blocks
        assert held <= groups * ((WINDOW - 1) // BLOCK + 2 + chunk)
        most = max(most, blocks)
    assert most == -(-149 // BLOCK) or most == 150 // BLOCK + 1


@pytest.mark.parametrize("mesh, parts", [("", 1), ("", 3), ("spp=2", 2)])
def test_pools_take_the_memory_that_was_counted(mesh, parts, tmp_path):
    """Also of layers in several groups, each of which has pools of its own."""
    real = tiny(tmp_path, "gemma3", mesh, pages=40, layer_groups=parts)
    plan = real.worker.plan
    stages = real.worker.stages.stages
    assert plan.windows and len(stages) == plan.mesh.spp * parts
    held = [
        sum(
            array.nbytes for array in jax.tree.leaves([part.caches for part in stages[at:][:parts]])
        )
        for at in range(0, len(stages), parts)
    ]
    assert sizes(plan).kv == max(held)


@pytest.mark.parametrize("name, given", [("pages", 7), ("kv_memory_gib", 0.001)])
def test_room_for_less_than_two_blocks_is_refused_at_the_start(name, given):
    """A block takes a page in each of the four groups."""
    config = make(EngineConfig, {"block_size": 1024, "dtype": "float32", name: given})
    with pytest.raises(ConfigError, match=rf"{name}: .*at least 8 are needed"):
        make_plan(config, from_hf(CASES["gemma3"].config).with_tp(1))
