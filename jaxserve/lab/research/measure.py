"""Measures one point live, and predicts it with the costs that were measured there.

`python -m jaxserve.lab.research.measure` reads a point as JSON and writes its figures as JSON on
the last line. Each point has a process, so that none starts with the memory, threads or programs of
another.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.lab.research.drive import LiveRun, figures, virtual
from jaxserve.lab.research.points import Point
from jaxserve.lab.simulate.replica import VirtualReplica
from jaxserve.settings.schema import ConfigError, EngineConfig

WARM_UP_REQUESTS = 3  # of the load's own, run before it: what runs first runs slower
COMPILE_SECONDS = 600.0  # for the programs that are compiled beside traffic


def measure(point: Point, simulated: bool) -> dict[str, Any]:
    """Returns the figures of a point: `live`, and `simulated` with the same costs. Errors:
    ConfigError, RequestError, TimeoutError."""
    from jaxserve.engine import build

    arrivals = point.load.schedule()
    concurrency = point.load.concurrency
    config = build.for_this_machine(point.config())
    worker, model = build.open_executor(config, progress=False)
    profile = _profile(config, worker)
    engine = build.make_engine(config, worker, model, profile)
    worker.compile_others()
    try:
        _wait_for_programs(worker)
        engine.start()
        LiveRun(engine, "warm").at_once(arrivals[:WARM_UP_REQUESTS], 1)
        engine.post(engine.flush_cache)
        compiled = worker.compiles
        live = LiveRun(engine, "r", point.load.seed)
        if concurrency is None:
            outcome = live.at_their_times(arrivals)
        else:
            outcome = live.at_once(arrivals, concurrency)
        compiled = worker.compiles - compiled
    finally:
        engine.close()
    answer = {
        "live": figures(outcome, config.scheduler),
        "compiled": compiled,
        "platform": worker.platform,
        "device": worker.device_kind,
    }
    if simulated:
        scheduler = build.make_scheduler(config, worker.plan, model, profile)
        replica = VirtualReplica(scheduler, config.cache, config.mesh, config.lookahead)
        answer["simulated"] = figures(virtual(replica, arrivals, concurrency), config.scheduler)
    return answer


def _profile(config: EngineConfig, worker: Any) -> Any:
    """Measures what steps cost here, even if the point's scheduler decides nothing by it."""
    from jaxserve.engine.profiling.profile_file import profile_for
    from jaxserve.engine.sizing import max_length

    asks = dataclasses.replace(config.scheduler, policy="slack")
    longest = max_length(config, worker.plan.model)
    return profile_for(dataclasses.replace(config, scheduler=asks), worker, longest, progress=False)


def _wait_for_programs(worker: Any) -> None:
    until = time.monotonic() + COMPILE_SECONDS
    while worker.uncompiled:
        if time.monotonic() > until:
            raise TimeoutError(f"programs were not compiled in {COMPILE_SECONDS:g} s")
        time.sleep(0.05)


def main() -> None:
    """Answers the point on standard input."""
    asked = json.load(sys.stdin)
    try:
        answer = measure(Point.of(asked["point"]), asked["simulated"])
    except (ConfigError, RequestError, TimeoutError) as error:
        answer = {"reason": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
