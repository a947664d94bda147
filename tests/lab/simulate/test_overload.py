"""Ten times too many requests for a minute, and one who sends far too long ones, on the virtual
replica."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.checkpoint.zoo import MODELS
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.recorder import RequestRecord
from jaxserve.lab.simulate.replica import VirtualReplica
from jaxserve.lab.simulate.run import System, execute
from jaxserve.lab.simulate.workload import parse
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig

TPOT = 0.05
WARM = 20.0
OVER = 60.0
AFTER = 30.0
RECOVERY = 10.0  # seconds after which nothing is to be seen of the overload
CHATS = "poisson:prompt=lognormal:1000:0.8:32:8000,output=lognormal:60:0.7:4:400"
ANSWERS = "poisson:prompt=lognormal:200:0.5:32:1000,output=lognormal:200:0.5:50:600"
MIXED = "poisson:prompt=lognormal:1500:1.5:32:60000,output=lognormal:60:0.7:4:400"


def replica(admission: str, **settings) -> VirtualReplica:
    """Llama-3 8B on an A100."""
    config = SchedulerConfig(
        **{
            "policy": "slack",
            "chunking": "adaptive",
            "max_seqs": 64,
            "chunk_tokens": 8192,
            "step_time": 0.1,
            "ttft": 2.0,
            "tpot": TPOT,
            "max_queue": 10**6,
            "admission": admission,
            **settings,
        }
    )
    return System(MODELS["llama3-8b"], "a100", MeshConfig()).replica(
        config, CacheConfig(block_size=256, prefix_caching=False)
    )


def arrivals(mix: str, rate: float, seconds: float, seed: int, at: float = 0.0) -> list[Arrival]:
    found = parse(mix, qps=rate, requests=int(rate * seconds), seed=seed)
    return [Arrival(at + arrival.time, arrival.prompt, arrival.output) for arrival in found]


def good(record: RequestRecord) -> bool:
    return record.output > 0 and record.first <= record.due and record.tpot <= TPOT * (1 + 1e-9)


def accepted(records: list[RequestRecord]) -> list[RequestRecord]:
    return [record for record in records if record.reason != "refused"]


def between(records: list[RequestRecord], first: float, last: float) -> list[RequestRecord]:
    return [record for record in records if first <= record.arrival < last]


@pytest.mark.parametrize("seed", [0, pytest.param(10, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    "mix, capacity, settings, again",
    [
        (CHATS, 7, {}, 1.0),
        pytest.param(CHATS, 7, dict(policy="edf"), 1.0, marks=pytest.mark.matrix),
        pytest.param(
            CHATS,
            7,
            dict(policy="fcfs", chunking="static", chunk_tokens=512),
            1.0,
            marks=pytest.mark.matrix,
        ),
        pytest.param(CHATS, 5, dict(max_seqs=8), 1.0, marks=pytest.mark.matrix),
        pytest.param(ANSWERS, 3, dict(max_seqs=8), 1.0, marks=pytest.mark.matrix),
        (MIXED, 2, {}, 0.6),
    ],
    ids=[
        "chats",
        "edf",
        "fcfs",
        "few slots",
        "long answers in few slots",
        "prompts of all lengths",
    ],
)
def test_at_ten_times_the_capacity_what_is_accepted_keeps_its_objectives_and_all_is_well_soon_after(
    mix, capacity, settings, again, seed
):
    """capacity: requests per second of which nine in ten keep their objectives where all are
    accepted. again: least share of those after the overload that are accepted; a few very long
    prompts fill half of the capacity."""
    calm = execute(replica("queue", **settings), arrivals(mix, capacity, OVER, 0)).records
    peak = sum(map(good, calm)) / OVER
    assert peak >= 0.9 * len(calm) / OVER
    records, depth = stormed(mix, capacity, seed, settings)
    storm = between(records, WARM, WARM + OVER)
    after = between(records, WARM + OVER + RECOVERY, np.inf)
    served = accepted(storm)
    assert len(served) < 0.6 * len(storm)
    assert sum(map(good, served)) >= 0.9 * len(served), f"{sum(map(good, served))} of {len(served)}"
    assert sum(map(good, served)) / OVER >= 0.9 * peak
    assert len(accepted(after)) >= again * len(after), (
        f"{len(accepted(after))} of {len(after)} accepted"
    )
    assert sum(map(good, accepted(after))) >= 0.9 * len(accepted(after))
    assert depth < 100


def stormed(
    mix: str, capacity: float, seed: int, settings: dict
) -> tuple[list[RequestRecord], int]:
    """Half the capacity, ten times, and half of it again; the most that waited."""
    virtual = replica("predict", **settings)
    depths = []
    add = virtual.scheduler.add

    def watched(request, *rest):
        depths.append(virtual.scheduler.slots.waiting)
        return add(request, *rest)

    virtual.scheduler.add = watched
    coming = [(0.5, WARM, 0.0), (10.0, OVER, WARM), (0.5, AFTER, WARM + OVER)]
    found = [
        arrival
        for number, (factor, seconds, at) in enumerate(coming)
        for arrival in arrivals(mix, factor * capacity, seconds, seed + number, at)
    ]
    return execute(virtual, sorted(found, key=lambda arrival: arrival.time)).records, max(depths)


@pytest.mark.parametrize("long", [pytest.param(20_000, marks=pytest.mark.matrix), 100_000])
def test_one_who_sends_far_too_long_prompts_takes_nothing_from_others(long):
    """64 prompts at once that would take minutes to hours; beside them four short ones a second."""
    chats = arrivals("poisson:prompt=1000,output=30", 4.0, 60.0, 0)
    flood = [Arrival(20.0 + number / 100, long, 10) for number in range(64)]
    records = execute(
        replica("predict"), sorted(chats + flood, key=lambda arrival: arrival.time)
    ).records
    short = [record for record in records if record.prompt < long]
    assert (
        len(accepted(short)) == len(short)
        and np.percentile([record.ttft for record in short], 99) < 1.0
    )
    heavy = accepted([record for record in records if record.prompt == long])
    assert 1 <= len(heavy) < 8 and all(map(good, heavy))
