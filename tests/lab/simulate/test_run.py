"""A simulated system: what fits in its memory, and the figures of a run."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from jaxserve.api.events import Finished, Token
from jaxserve.api.request import Request, Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.costs.profiles import devices
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.noise import Noise
from jaxserve.lab.simulate.recorder import Recorder, RequestRecord
from jaxserve.lab.simulate.run import (
    MEMORY_SHARE,
    Outcome,
    System,
    execute,
    outcome_summary,
    requests,
)
from jaxserve.lab.simulate.workload import parse
from jaxserve.scheduling.events import CompletionEnded
from jaxserve.settings.schema import CacheConfig, ConfigError, MeshConfig, SchedulerConfig

# 16 layers of 8 * (2 * 4 + 2 * 2) * 2 + 3 * 8 * 16 = 576 weights and two norms of 8 in f32; twice 8
# * 112 for the vocabulary, which is padded to tiles of 16, and a norm
SHAPE = ModelConfig(
    name="small",
    layers=16,
    d_model=8,
    heads=4,
    kv_heads=2,
    head_dim=2,
    d_ff=16,
    vocab=100,
    max_len=2**24,
)
LARGE = MODELS["llama3-70b"]


def record(
    first: float, end: float, output: int, reason: str = "length", kind: str = "a"
) -> RequestRecord:
    """It came at second 1 and was due at 3, with 0.2 s per token."""
    return RequestRecord("0", kind, 100, output, 0, 1.0, 3.0, first, end, reason, 0.2)


# --- memory


@pytest.mark.parametrize("received", [4000, 4007])
def test_a_prompt_that_comes_computed_has_the_pages_that_windows_see(received):
    """Of all of its blocks in the first page group alone: there are pages for no more."""
    system = System(MODELS["gpt-oss-120b"], "h100", MeshConfig(tp=4))
    cache = CacheConfig(block_size=16, pages=4128 // 16 + 9 + 4)
    replica = system.replica(SchedulerConfig(decode_reserve=0.0), cache)
    assert replica.scheduler.cache.windows == (128,)
    replica.start()
    events = []
    request = Request("a", np.arange(4100, dtype=np.int32), SamplingParams(max_tokens=20))
    replica.submit_prefilled(request, events.extend, received)
    replica.scheduler.cache.check()
    (layout,) = [layout for layout in replica.scheduler.cache.layouts if layout.pages]
    assert layout.first_seen == [(received - 127) // 16]
    replica.advance(float("inf"))
    assert events[-1].reason == "length"


def test_weights_of_a_shape_by_hand():
    layer = 2 * 576 + 2 * 4 * 8
    assert SHAPE.weight_bytes() == 16 * layer + 2 * 2 * 8 * 112 + 4 * 8 == 23_072


@pytest.mark.parametrize(
    ("mesh", "weights", "token"),
    [
        (MeshConfig(), 23_072, 16 * 16),
        (MeshConfig(tp=2), 12_320, 16 * 8),  # norms are on both; 50 ids of each are padded to 64
        (MeshConfig(spp=4), 6_688, 4 * 16),  # the last stage, with the head and its norm
        (MeshConfig(spp=3), 9_120, 6 * 16),
        (MeshConfig(tp=4), 7_200, 16 * 8),  # two ranks have a copy of each kv head
        (MeshConfig(kvp=4), 23_072, 16 * 16),
    ],
)
def test_tokens_that_fit_on_a_lane_by_hand(mesh, weights, token):
    """A token's KV is 16 bytes per layer: 2 heads of 2 elements of 2 bytes, for keys and values.
    The largest stage counts; a rank holds at least one kv head; every lane holds all weights."""
    free = 0.9 * devices()["a100"].memory_bytes - weights
    assert System(SHAPE, "a100", mesh).kv_tokens() == int(free / token)


def test_a_large_model_by_hand():
    """70.6 GB x 2 of weights on 4 devices, and 80 layers x 2 heads x 128 x 4 bytes a token."""
    free = MEMORY_SHARE * devices()["h100"].memory_bytes - LARGE.weight_bytes(tp=4)
    assert System(LARGE, "h100", MeshConfig(tp=4)).kv_tokens() == int(free / (80 * 2 * 128 * 4))
    assert 2 * 70e9 < LARGE.weight_bytes() < 2 * 71e9


def test_where_the_weights_do_not_fit_the_error_says_how_much_they_are():
    system = System(LARGE, "a100", MeshConfig(kvp=8))
    with pytest.raises(
        ConfigError,
        match=r"mesh: 13\d GiB of weights per device leave no room for KV on a100 with "
        r"spp=1,kvp=8,tp=1",
    ):
        system.kv_tokens()
    with pytest.raises(ConfigError, match="GiB of weights"):
        system.replica(SchedulerConfig(), CacheConfig())


def test_a_replica_has_the_pages_that_fit_or_those_that_are_given():
    system = System(LARGE, "a100", MeshConfig(kvp=2, tp=8))
    fitting = system.replica(SchedulerConfig(), CacheConfig(block_size=256)).scheduler.cache
    assert fitting.total == 2 * (system.kv_tokens() // 256)
    assert (
        system.replica(
            SchedulerConfig(), CacheConfig(block_size=256, pages=10)
        ).scheduler.cache.total
        == 20
    )


def test_a_replica_keeps_the_settings_of_its_cache_and_steps_where_asked():
    system = System(LARGE, "a100", MeshConfig(tp=8))
    replica = system.replica(
        SchedulerConfig(),
        CacheConfig(block_size=64, lane_tokens=640, prefix_caching=False),
        2,
    )
    outcome = execute(
        replica,
        [Arrival(0.0, 640, 1, blocks=(1, 2)), Arrival(60.0, 640, 1, blocks=(1, 2))],
        keep_steps=True,
    )
    assert (
        [r.cached for r in outcome.records] == [0, 0]
        and replica.info.settings["lookahead"] == 2
        and len(outcome.steps) == 4
    )
    assert not execute(
        system.replica(SchedulerConfig(), CacheConfig()), [Arrival(0.0, 10, 1)]
    ).steps


@pytest.mark.parametrize(
    ("device", "mesh", "said"),
    [
        ("b200", MeshConfig(), "device: 'b200' is not one of"),
        ("a100", MeshConfig(tp=16), "mesh: tp=16"),
    ],
)
def test_costs_that_do_not_exist_are_named(device, mesh, said):
    with pytest.raises(ConfigError, match=said):
        _ = System(LARGE, device, mesh).costs


# --- runs


def test_a_run_uses_the_objective_that_it_is_given_and_names_kinds_by_length():
    system = System(LARGE, "a100", MeshConfig(tp=8))
    found = execute(
        system.replica(SchedulerConfig(), CacheConfig(block_size=256)),
        [
            Arrival(1.0, 100, 2),
            Arrival(2.0, 8192, 2),
            Arrival(3.0, 8193, 2),
            Arrival(4.0, 100, 2, "mine"),
        ],
        Slo(ttft=5.0),
    )
    assert sorted((record.arrival, record.due, record.kind) for record in found.records) == [
        (1.0, 6.0, "short"),
        (2.0, 7.0, "short"),
        (3.0, 8.0, "medium"),
        (4.0, 9.0, "mine"),
    ]


def test_busy_is_the_share_of_the_time_in_which_a_stage_worked():
    system = System(LARGE, "a100", MeshConfig(tp=8))
    one = execute(
        system.replica(SchedulerConfig(), CacheConfig(block_size=256)), [Arrival(0.0, 5000, 20)]
    )
    assert one.busy == pytest.approx(1)
    late = execute(
        system.replica(SchedulerConfig(), CacheConfig(block_size=256)),
        [Arrival(one.records[0].end, 5000, 20)],
    )
    assert late.busy == pytest.approx(0.5)


def test_records_have_the_objectives_of_their_class_and_say_what_the_ends_say():
    system = System(LARGE, "a100", MeshConfig(tp=8))
    scheduler = SchedulerConfig(classes="strict:tpot=0.001;lax:tpot=60", ttft=100.0)
    replica = system.replica(scheduler, CacheConfig(block_size=256))
    ends: list[Finished] = []
    replica.bus.subscribe(CompletionEnded, lambda event: ends.append(event.event))
    arrivals = [Arrival(0.0, 100, 9, kind) for kind in ("strict", "lax", "other")]
    records = execute(replica, arrivals).records
    given = {record.kind: record.tpot_given for record in records}
    assert given == {"strict": 0.001, "lax": 60.0, "other": 0.1}
    assert {record.kind: record.in_time for record in records}["strict"] is False
    assert {record.kind: record.in_time for record in records}["lax"] is True
    assert [record.in_time for record in records] == [end.in_time for end in ends]
    assert all(0 < record.longest_gap < 1 for record in records)


def test_two_runs_of_one_seed_are_equal_and_of_another_are_not():
    def run(seed: int) -> Outcome:
        system = System(MODELS["llama3-8b"], "a100", MeshConfig(spp=2, tp=4))
        config = SchedulerConfig(
            policy="slack", chunking="adaptive", chunk_tokens=8192, max_seqs=64, max_queue=1000
        )
        return execute(
            system.replica(config, CacheConfig(block_size=256)),
            parse("poisson:mix=medha-5", qps=1.0, requests=15, seed=seed),
        )

    one = run(1)
    same = run(1)
    other = run(2)
    assert (
        one.records == same.records
        and (one.gaps == same.gaps).all()
        and one.records != other.records
    )


# --- figures

RECORDS = [
    record(first=2.0, end=4.0, output=5),  # TTFT 1, TPOT 0.5
    record(first=4.0, end=4.2, output=3, kind="b"),  # late; TPOT 0.1
    record(first=2.5, end=2.5, output=1, reason="stop"),  # no second token: no TPOT, and it met it
    record(first=2.0, end=9.0, output=2, reason="unfinished"),  # in time, but never ended
    record(first=1.0, end=1.0, output=0, reason="refused"),
    record(first=8.0, end=8.0, output=0, reason="unfinished"),
]


def test_figures_by_hand():
    said = outcome_summary(Outcome(RECORDS, np.array([0.1, 0.3]), [], 0.25), tpot=0.2)
    everything = said["all"]
    assert (everything["requests"], everything["finished"]) == (6, 3)
    assert everything["ttft"] == dict(
        mean=pytest.approx(6.5 / 4),
        p50=1.25,
        p90=pytest.approx(2.55),
        p99=pytest.approx(2.955),
        max=3.0,
    )
    assert everything["tpot"] == dict(
        mean=pytest.approx(0.3),
        p50=pytest.approx(0.3),
        p90=pytest.approx(0.46),
        p99=pytest.approx(0.496),
        max=0.5,
    )
    # of all that came: refused ones missed it
    assert everything["ttft_met"] == pytest.approx(3 / 6)
    assert everything["tpot_met"] == pytest.approx(2 / 6)
    assert everything["in_time"] == pytest.approx(1 / 6), "the third kept both"
    assert said["goodput_per_s"] == said["goodput_tokens_per_s"] == pytest.approx(1 / 9)
    assert (said["span"], said["busy"]) == (9.0, 0.25)
    assert said["tokens_per_s"] == pytest.approx((105 + 103 + 101 + 102 + 100) / 9)
    assert said["token_gap"]["p50"] == pytest.approx(0.2)


def test_figures_by_kind():
    said = outcome_summary(Outcome(RECORDS, np.empty(0), [], 0.0), tpot=0.2)
    assert {kind: (said[kind]["requests"], said[kind]["finished"]) for kind in ("a", "b")} == {
        "a": (5, 2),
        "b": (1, 1),
    }
    assert said["b"]["ttft_met"] == 0 and said["b"]["tpot_met"] == 1 and said["token_gap"] == {}
    assert json.loads(json.dumps(said)) == said


def test_figures_of_nothing():
    said = outcome_summary(Outcome([], np.empty(0), [], 0.0), tpot=0.2)
    assert (
        said["all"]
        == dict(
            requests=0, begun=0, finished=0, ttft={}, tpot={}, ttft_met=0, tpot_met=0, in_time=0
        )
        and said["tokens_per_s"] == 0
    )


# --- what nobody asks for


def watched(system: System, arrivals: list[Arrival], *settings) -> Outcome:
    """Runs the arrivals with all metrics and views, and with callers that hear every token: each
    request gets as many as are recorded of it."""
    replica = system.replica(*settings)
    recorder = Recorder(keep_steps=True)
    replica.listeners.append(recorder)
    heard: dict[str, list[Token]] = {}
    replica.start()
    for request, kind in requests(arrivals, replica.info.max_model_len, Slo()):
        replica.advance(request.arrival, through=False)
        times = replica.scheduler.times
        record = recorder.sink(request, kind, times.deadline(request), times.promise(request))
        tokens = heard[request.id] = []

        def hear(events, record=record, tokens=tokens):
            tokens += [event for event in events if isinstance(event, Token)]
            record(events)

        replica.submit(request, hear)
    replica.advance(float("inf"))
    outcome = recorder.outcome()
    assert {r.id: r.output for r in outcome.records} == {id: len(all) for id, all in heard.items()}
    return outcome


@pytest.mark.parametrize("seed", range(12))
def test_a_run_is_the_same_to_the_last_digit_whether_or_not_anybody_looks_on(seed):
    """Metrics, journal and events of tokens are left out of a run of which only the ends are asked
    for; over random settings."""
    dice = random.Random(seed)
    drafts = dice.random() < 0.3
    scheduler = SchedulerConfig(
        policy=dice.choice(["fcfs", "edf", "relative-slack", "slack"]),
        chunking=dice.choice(["adaptive", "adaptive", "static"]),
        chunk_tokens=dice.choice([512, 2048]),
        max_seqs=dice.choice([4, 32]),
        decode_reserve=dice.choice([0.0, 0.5]),
        drafts="ngram" if drafts else "none",
        admission=dice.choice(["queue", "predict"]),
    )
    cache = CacheConfig(block_size=64, pages=dice.choice([None, 2500]))
    mesh = MeshConfig(tp=4, spp=dice.choice([1, 2, 4]), kvp=dice.choice([1, 1, 2]))
    groups = dice.choice([1, 4])
    system = System(MODELS["llama3-8b"], "a100", mesh, noise=Noise(0.2, seed), layer_groups=groups)
    arrivals = parse(
        "burst:prompt=lognormal:1500:1.2:50:40000,output=exponential:20,prefix=300,groups=3",
        qps=dice.choice([2.0, 8.0]),
        requests=40,
        seed=seed,
    )
    alone = execute(system.replica(scheduler, cache, observed=False), arrivals, keep_steps=True)
    beside = watched(system, arrivals, scheduler, cache)
    assert alone.records == beside.records
    assert alone.steps == beside.steps
    assert alone.gaps.tolist() == beside.gaps.tolist()
