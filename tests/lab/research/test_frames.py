"""Frames of sweeps, of what no point beats, and of a replica's journal."""

from __future__ import annotations

import pandas as pd
import pytest

from jaxserve.lab.cli.bench.sweep import shown
from jaxserve.lab.research.drive import virtual
from jaxserve.lab.research.frames import compared, frame, pareto, timeline
from jaxserve.lab.research.points import Point, grid
from jaxserve.lab.research.runner import Runner
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.run import System, shape_of
from jaxserve.settings.schema import MeshConfig


def test_what_nothing_beats():
    points = pd.DataFrame(
        {"x": [3, 1, 2, 2, 4, 1], "y": [5, 2, 4, 3, 5, 1], "name": list("abcdef")}
    )
    assert list(pareto(points, "x", "y")["name"]) == ["b", "c", "a"]


def test_a_frame_has_a_row_per_point_and_source():
    base = {"model": "llama3-8b", "prompt": "512", "qps": 1.0, "requests": 3}
    run = Runner("simulated", "h100")
    rows = [run(point) for point in grid(base, {"mesh": ["tp=8", "tp=4", "tp=99"]})]
    rows[0]["live"] = rows[0]["simulated"]
    found = frame(rows)
    assert list(found["source"]) == ["live", "simulated", "simulated", ""]
    assert list(found["devices"]) == [8, 8, 4, 99] and found["reason"].iloc[-1]
    both = compared(found)
    assert len(both) == 1 and both["ttft_mean_ratio"].iloc[0] == 1.0
    assert (found["in_time"].iloc[:3] == 1).all()
    assert (found["goodput_per_s"].iloc[:3] > 0).all()
    tokens = found["goodput_tokens_per_s"] / found["goodput_per_s"]
    assert tokens.iloc[:3].tolist() == pytest.approx([16] * 3), "of each output"


def test_lines_of_older_sweeps_say_nothing_of_what_was_in_time():
    base = {"model": "llama3-8b", "prompt": "512", "qps": 1.0, "requests": 3}
    row = Runner("simulated", "h100")(grid(base, {"mesh": ["tp=8"]})[0])
    for name in ("goodput_per_s", "goodput_tokens_per_s"):
        del row["simulated"][name]
    del row["simulated"]["all"]["in_time"]
    assert frame([row])["in_time"].isna().all() and "in time" in shown([row], [])


def test_a_timeline_has_every_chunk_of_every_stage():
    system = System(shape_of("llama3-8b"), "h100", MeshConfig(spp=2, tp=4))
    config = Point.of({"chunking": "static", "chunk_tokens": 512, "policy": "fcfs"}).config()
    replica = system.replica(config.scheduler, config.cache)
    virtual(replica, [Arrival(0.0, 1300, 200), Arrival(0.0, 512, 3)], None)
    found = timeline(replica)
    prefill = found[found["kind"] == "prefill"]
    by_stage = prefill.groupby(["stage", "request"])["tokens"].sum()
    assert by_stage.to_dict() == {(0, "0"): 1300, (0, "1"): 512, (1, "0"): 1300, (1, "1"): 512}
    assert (found["end"] > found["begin"]).all() and found["begin"].min() == 0
    decodes = found[(found["kind"] == "decode") & (found["stage"] == 0)]
    assert decodes.groupby("request")["tokens"].sum().to_dict() == {"0": 199, "1": 2}
