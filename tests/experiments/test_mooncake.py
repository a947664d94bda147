"""Mooncake's figures in miniature: each one's rows, claims and panels; the cache and the equations
behind them; what is wrong, in one line."""

import gzip
import json
import math
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from experiments.mooncake import __main__ as every
from experiments.mooncake import clusters, fig19, fig22, fig23
from experiments.mooncake.cache_replay import (
    NODE_TOKENS,
    BlockCache,
    block_hashes,
    hit_ratio,
    prompts_of,
    unbounded,
)
from experiments.mooncake.figure import WORKLOADS, MooncakeSettings
from experiments.mooncake.node import A800, H800, KV_BYTES
from jaxserve.lab.simulate.arrival import BLOCK, Arrival
from tests.experiments.figure_checks import made_small

FIGURES = {made.name: made for made in every.PAPER.figures()}
SMALL = MooncakeSettings(requests=120)  # generated traces only
TINY = MooncakeSettings(requests=12)  # for figures that simulate clusters
CLUSTERS = (
    "table4",
    "fig1",
    "fig5",
    "fig6",
    "fig13",
    "fig14",
    "fig15",
    "fig18",
    "fig21",
    "fig23",
)
HALF = MooncakeSettings(requests=2500)


@pytest.fixture(autouse=True)
def few_ratios(monkeypatch):
    """Ratios of prefill to decode enough for a miniature."""
    monkeypatch.setattr(fig23, "PREFILL", (5, 8, 11))


def in_suite(name: str):
    """A figure's parameter; those that are other workloads of fig1, or slow, are in the matrix."""
    marks = pytest.mark.matrix if name in ("fig13", "fig14", "fig15", "fig17", "fig23") else ()
    return pytest.param(FIGURES[name], id=name, marks=marks)


@pytest.mark.parametrize("made", map(in_suite, FIGURES))
def test_a_figure_in_miniature_gives_csv_and_table(made, tmp_path, monkeypatch):
    settings = TINY if made.name in CLUSTERS else SMALL
    rows = made_small(made, settings, tmp_path, monkeypatch)
    finite = [math.isfinite(claim.ours(rows)) for claim in made.claims]
    if made.name == "fig6":
        assert not any(finite), "a dozen requests are no overload: nothing is to be said of it"
    else:
        assert all(finite)


# --- the cache


class IndependentCache:
    """An LRU cache of hash ids that shares no code with the product: a prompt hits up to its first
    id that is missing, its first blocks are the last to go."""

    def __init__(self, blocks: int):
        self.blocks = blocks
        self.ids: OrderedDict[int, None] = OrderedDict()

    def serve(self, ids: list[int]) -> int:
        missing = (place for place, value in enumerate(ids) if value not in self.ids)
        hits = next(missing, len(ids))
        for value in reversed(ids):
            self.ids[value] = None
            self.ids.move_to_end(value)
        while len(self.ids) > self.blocks:
            self.ids.popitem(last=False)
        return hits


def independent_ratio(arrivals: list[Arrival], capacity: int) -> float:
    cache = IndependentCache(capacity // BLOCK)
    hits = sum(cache.serve(arrival.blocks.tolist()) for arrival in arrivals)
    return hits / sum(len(arrival.blocks) for arrival in arrivals)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("capacity", [300_000, NODE_TOKENS])
def test_the_engines_cache_hits_as_an_independent_lru_does(workload, capacity):
    ours = hit_ratio(prompts_of(workload, HALF), capacity)
    other = independent_ratio(HALF.arrivals(workload), capacity)
    assert 0 < ours < hit_ratio(prompts_of(workload, HALF), 10**9)
    assert ours == pytest.approx(other, rel=0.01)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "workload, highest, share", [("conversation", 0.366, 0.371), ("synthetic", 0.640, 0.484)]
)
def test_recorded_traces_are_hit_as_an_independent_simulator_says(workload, highest, share):
    """The figures of data/README 1.2."""
    settings = MooncakeSettings.of(dict(data=None, requests=None, seed=0))
    if settings.file(workload) is None:
        pytest.skip(f"no {workload} trace; name its folder with JAXSERVE_DATA")
    prompts = prompts_of(workload, settings)
    assert hit_ratio(prompts, unbounded(prompts)) == pytest.approx(highest, rel=0.01)
    assert hit_ratio(prompts, NODE_TOKENS) == pytest.approx(highest * share, rel=0.01)


@pytest.mark.matrix
def test_the_generated_tool_trace_is_hit_as_the_papers_is():
    """Table 3 and Figure 16: 59 % of the blocks at most, 75 % of these in one node's memory."""
    shares = []
    for seed in range(2):
        prompts = prompts_of("toolagent", MooncakeSettings(seed=seed))
        highest = hit_ratio(prompts, unbounded(prompts))
        assert highest == pytest.approx(0.59, abs=0.02)
        shares.append(hit_ratio(prompts, NODE_TOKENS) / highest)
    assert np.mean(shares) == pytest.approx(0.75, abs=0.02)


def test_a_prompt_longer_than_the_cache_keeps_its_first_blocks():
    cache = BlockCache(3)
    prompt = block_hashes(Arrival(0.0, 5 * BLOCK, 1, blocks=(1, 2, 3, 4, 5)), "")
    assert [cache.serve(prompt), cache.serve(prompt)] == [0, 3]
    cache.pages.check([])


def test_ephemeral_requests_are_not_kept_and_context_cache_is():
    search = ("ephemeral", block_hashes(Arrival(0.0, BLOCK, 1, blocks=(1,)), ""))
    context = ("context", block_hashes(Arrival(0.0, BLOCK, 1, blocks=(2,)), ""))
    other = ("normal", block_hashes(Arrival(0.0, BLOCK, 1, blocks=(3,)), ""))
    hits = lambda strategy, *prompts: strategy(prompts, BlockCache(1), BlockCache(9))
    assert hits(fig19.lru, search, search) == 1 and hits(fig19.filtered, search, search) == 0
    assert hits(fig19.filtered, context, search, context) == 1
    assert hits(fig19.filtered, context, other, context) == 0
    assert hits(fig19.tiered, context, other, context) == 1
    assert hits(fig19.tiered, other, context, other) == 0


# --- the equations


def test_equations_1_and_2_give_the_papers_numbers():
    assert A800.bandwidth(8192) == pytest.approx(5.86e9, rel=0.01)
    assert H800.bandwidth(8192) == pytest.approx(18.6e9, rel=0.01)
    saved = A800.flops(0.95 * 128_000) / A800.flops(128_000)
    assert saved == pytest.approx(0.915, abs=0.002)
    assert KV_BYTES == 320 * 1024


def test_a_cached_prompt_takes_at_least_as_long_as_its_loading():
    parts = fig22.request_parts(1_000_000, 999_999)
    assert parts["prefill_s"] >= 999_999 * KV_BYTES / 128e9
    assert fig22.request_parts(8192, 0)["prefill_s"] > fig22.request_parts(8192, 7000)["prefill_s"]


# --- workloads and the command


def recorded(folder: Path, workload: str, *lengths: int) -> Path:
    file = folder / "mooncake" / f"{workload}_trace.jsonl.gz"
    file.parent.mkdir(parents=True)
    lines = (
        json.dumps(
            dict(
                timestamp=1000 * number,
                input_length=length,
                output_length=5,
                hash_ids=list(range(-(-length // BLOCK))),
            )
        )
        for number, length in enumerate(lengths)
    )
    file.write_bytes(gzip.compress("\n".join(lines).encode()))
    return folder


def test_a_trace_is_read_where_it_is_and_replayed_faster(tmp_path):
    settings = MooncakeSettings(recorded(tmp_path, "toolagent", 600, 700, 800, 900), 3)
    assert [(a.time, a.prompt) for a in settings.arrivals("toolagent", speed=2.0)] == [
        (0.0, 600),
        (0.5, 700),
        (1.0, 800),
    ]
    assert settings.source("toolagent") == "toolagent recorded, at most 3 requests"
    assert MooncakeSettings().source("conversation") == "conversation generated"


def test_generated_traces_come_at_the_recorded_rate():
    arrivals = MooncakeSettings().arrivals("synthetic", speed=2.0)
    assert len(arrivals) == 3993
    assert arrivals[-1].time == pytest.approx(1022 / 2, rel=0.1)


# --- the clusters


def test_systems_have_the_nodes_of_the_paper():
    assert all(len(spec.roles) == clusters.NODES for spec in clusters.SYSTEMS.values())
    mooncake = clusters.SYSTEMS["mooncake"]
    assert mooncake.cache_tokens == NODE_TOKENS and mooncake.cache.prefix_caching
    assert not clusters.SYSTEMS["vllm"].cache.prefix_caching


def test_equal_runs_are_simulated_once():
    spec = clusters.prefill_only(2)
    first = clusters.simulated(spec, "conversation", TINY)
    assert clusters.simulated(clusters.prefill_only(2), "conversation", TINY) is first
    assert clusters.gpu_seconds(first) > 0


def test_routing_by_cache_and_load_is_ahead_of_chance():
    """The order of Figure 5, on the first minutes of a generated trace."""
    settings = MooncakeSettings(requests=300)
    runs = {
        routing: clusters.simulated(
            clusters.prefill_only(6, routing=routing), "conversation", settings
        )
        for routing in ("cache_aware", "load_balanced", "random")
    }
    means = [float(report.ttft().mean()) for report in runs.values()]
    assert means == sorted(means)
    assert runs["cache_aware"].hit_rate() > runs["random"].hit_rate()
