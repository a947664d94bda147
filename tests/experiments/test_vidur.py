"""The comparison with vidur without vidur: what its driver is told, and the arithmetic."""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import pytest

from experiments.benchmarks.install import InstallError
from experiments.vidur import comparison
from experiments.vidur.__main__ import OPTIONS, chosen, environment, figures, row
from experiments.vidur.comparison import (
    PEERS,
    SHIPPED,
    SYSTEM,
    Comparison,
    Load,
    Peer,
    VidurError,
    job_of,
    run_vidur,
    simulated,
)
from jaxserve.costs.coefficients import Costs
from jaxserve.settings.schema import ConfigError

LOAD = Load("medha-0", 4.0)


def test_the_driver_is_told_the_requests_costs_and_settings_of_our_run():
    arrivals = LOAD.arrivals(12, seed=3)
    (peer,) = [peer for peer in PEERS if peer.policy == "edf" and not peer.one_queue]
    records = simulated(peer.baseline, arrivals)
    job = json.loads(json.dumps(job_of(peer, arrivals, records)))
    assert [(told["arrival"], told["prompt"], told["output"]) for told in job["requests"]] == [
        (arrival.time, arrival.prompt, arrival.output) for arrival in arrivals
    ]
    assert all(told["due"] == told["arrival"] + 2.0 for told in job["requests"])
    assert Costs(**job["costs"] | {"shapes": (), "spread_shapes": ()}) == SYSTEM.costs
    assert job["blocks"] * job["block_size"] <= SYSTEM.kv_tokens()
    assert (job["scheduler"], job["step_time"], job["one_queue"]) == ("edf", 0.05, False)


def test_each_policy_is_compared_as_shipped_and_under_the_name_that_it_has_here():
    shipped = {peer.baseline for peer in PEERS if peer.difference == SHIPPED}
    assert shipped == {"sarathi-512", "fcfs-unshared", "edf-unshared", "slack-unshared"}
    assert chosen("edf, slack") == [peer for peer in PEERS if peer.scheduler in ("edf", "slack")]
    changed = Peer("edf", "edf-unshared", "edf", one_queue=True, order="slack")
    assert changed.difference == "one queue, late ones behind"


def test_percentiles_ratios_and_correlation_by_hand():
    vidur = np.arange(101.0)
    found = Comparison(ours=1.1 * vidur, vidur=vidur)
    assert found.percentiles["vidur"] == [50, 90, 99]
    assert found.percentiles["ratio"] == pytest.approx([1.1] * 3)
    assert found.correlation == pytest.approx(1)
    assert Comparison(100 - vidur, vidur).correlation == pytest.approx(-1)
    assert math.isnan(Comparison(vidur, np.ones(101)).correlation)
    cells = row(LOAD, PEERS[0], found)
    assert cells[:5] == ["medha-0 at 4/s", "fcfs, chunks of 512", SHIPPED, "55.00/50.00", "1.100"]
    kept = json.loads(json.dumps(figures(LOAD, PEERS[0], found)))
    assert kept["at"] == [50, 90, 99] and kept["ttft"]["vidur"] == vidur.tolist()


@pytest.mark.parametrize("text", ["medha-5", "medha-5@", "medha-5@fast", "nothing@1"])
def test_a_load_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="loads"):
        Load.parse(text)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match=r"llf: known are fcfs-512, fcfs, edf, slack"):
        chosen("edf,llf")


def test_without_its_environment_the_command_says_how_to_make_it(tmp_path):
    values = {option.name: option.default for group in OPTIONS.values() for option in group}
    with pytest.raises(InstallError, match=r"vidur==0.0.26 is not in .* \(--install\)"):
        environment(values | {"folder": str(tmp_path / "none")})
    (tmp_path / "installed").touch()
    assert environment(values | {"folder": str(tmp_path)}) == str(tmp_path / "bin" / "python")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            "raise ValueError('no such scheduler')",
            "ended with code 1: ValueError: no such scheduler",
        ),
        ("import time; time.sleep(60)", "timed out after 0.2 seconds"),
    ],
)
def test_a_run_of_vidur_that_fails_says_why(tmp_path, monkeypatch, program, said):
    (tmp_path / "driver.py").write_text(program)
    monkeypatch.setattr(comparison, "DRIVER", tmp_path / "driver.py")
    patience = 0.2 if "sleep" in program else 60.0
    with pytest.raises(VidurError, match=said):
        run_vidur(sys.executable, {}, patience)


def test_what_the_driver_writes_is_read(tmp_path, monkeypatch):
    driver = "import json, sys\njob = json.load(sys.stdin)\nopen(sys.argv[1], 'w').write(job['a'])"
    (tmp_path / "driver.py").write_text(driver)
    monkeypatch.setattr(comparison, "DRIVER", tmp_path / "driver.py")
    assert run_vidur(sys.executable, {"a": "[1.5, 2]"}, 60.0) == [1.5, 2]
