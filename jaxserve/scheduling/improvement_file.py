"""Improvement rates of planners, found by a short simulation and kept in the cache folder."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping
from pathlib import Path

from jaxserve.files import write_whole
from jaxserve.folders import cache_folder, private_folder
from jaxserve.lanes.cdsp import PLANNERS, Instances
from jaxserve.lanes.improvement_search import quick_rates
from jaxserve.settings.schema import ConfigError

SEARCHED = ("single", "cdsp")  # planners with an improvement rate
FORMAT = 2  # of the file; another one where the search changes


def improvement_rates(
    policy: str, instances: Instances, lanes: int, longest: int
) -> Mapping[float, float]:
    """Returns improvement rates by prompts per second, for a planner of `PLANNERS`: those kept for
    these latencies, or else found now and kept where that is possible. longest: tokens of a
    prompt."""
    if policy not in SEARCHED:
        return {0.0: 0.0}
    file = _file(policy, instances, lanes, longest)
    try:
        return {float(load): float(rate) for load, rate in json.loads(file.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        pass  # not there, or cut off: it is found again
    rates = quick_rates(instances, lanes, PLANNERS[policy], longest)
    _keep(file, rates)
    return rates


def _file(policy: str, instances: Instances, lanes: int, longest: int) -> Path:
    """The file for all that the rates depend on."""
    latencies = {
        size: dataclasses.astuple(latency) for size, latency in instances.latencies.items()
    }
    growth = [
        instances.growth(before, after, history, longest)
        for before, after in itertools.combinations(sorted(latencies), 2)
        for history in (instances.block, longest)
    ]
    depends = [FORMAT, policy, lanes, longest, instances.per_node, instances.block]
    text = json.dumps([*depends, instances.aligned, sorted(latencies.items()), growth])
    name = f"{policy}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    return cache_folder() / "improvement" / name


def _keep(file: Path, rates: Mapping[float, float]) -> None:
    """Writes rates, whole or not at all; a folder that cannot be written to costs the next start a
    second."""
    try:
        private_folder(file.parent, "improvement")
        write_whole(file, json.dumps({str(load): rate for load, rate in rates.items()}))
    except (OSError, ConfigError):
        pass
