"""Planners start with improvement rates by load: chosen, profiled, or found and kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.lab.simulate.run import System, shape_of
from jaxserve.lanes.cdsp import PLANNERS, Instances, Latency, free_growth
from jaxserve.lanes.improvement_search import quick_rates
from jaxserve.lanes.planner import LanePlanner
from jaxserve.scheduling.assembly import ReplicaProfile
from jaxserve.scheduling.improvement_file import improvement_rates
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig

SYSTEM = System(shape_of("llama3-8b"), "a100", MeshConfig(kvp=8))
SCHEDULER = SchedulerConfig(planner="cdsp", exchange="pass_q", chunk_tokens=8192)
CACHE = CacheConfig(pages=4000, placement="striped")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    return tmp_path / "improvement"


def rates(scheduler: SchedulerConfig = SCHEDULER, profile: ReplicaProfile | None = None) -> dict:
    planner = SYSTEM.sizes(scheduler, CACHE).planner(profile or SYSTEM.profile)
    assert isinstance(planner, LanePlanner)
    return planner.rates


def test_a_simulated_replica_finds_rates_by_load_and_keeps_them(folder):
    replica = SYSTEM.replica(SCHEDULER, CACHE)
    found = replica.scheduler.packer.prefill.chunks.planner.rates
    assert len(found) == 4 and found[max(found)] > found[min(found)], (
        "more must be saved where others wait"
    )
    (file,) = folder.iterdir()
    file.write_text(json.dumps({"1.0": 0.5}))
    assert rates() == {1.0: 0.5}, "what was kept is not found again"
    file.write_text("{")
    assert rates() == found, "a file that was cut off is"
    rates(replace(SCHEDULER, planner="single"))
    assert len(list(folder.iterdir())) == 2, "another planner has rates of its own"


def test_chosen_and_profiled_rates_are_taken_as_they_are(folder):
    profile = replace(SYSTEM.profile, improvement={"cdsp": {2.0: 0.3}})
    assert rates(profile=profile) == {2.0: 0.3}
    assert rates(replace(SCHEDULER, improvement=0.2), profile) == {0.0: 0.2}
    assert not folder.exists()


def test_a_cache_folder_that_cannot_be_written_to_stops_no_start(folder):
    folder.write_text("a file is in the way")
    assert len(rates()) == 4


def test_rates_are_kept_for_what_growth_takes(folder):
    sizes = {1: Latency(0, 1e-4, 0, 0), 2: Latency(0, 5e-5, 0, 0)}
    for seconds in (0.0, 0.1):
        growth = lambda *grown, seconds=seconds: seconds
        instances = Instances(sizes, 2, aligned=True, growth=growth)
        improvement_rates("cdsp", instances, 2, 10**5)
    assert len(list(folder.iterdir())) == 2


def test_rates_are_least_where_more_lanes_cost_nothing():
    """Two lanes take half of the time of one: all are used, whatever the load."""
    free = Instances(
        {1: Latency(0, 1e-4, 0, 0), 2: Latency(0, 5e-5, 0, 0)}, 2, aligned=True, growth=free_growth
    )
    assert set(quick_rates(free, 2, PLANNERS["cdsp"], 10**6).values()) == {0.05}
