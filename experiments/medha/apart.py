"""A pipeline as the paper's Sarathi has it (TP-8, PP-2): a prompt's next chunk begins when the one
before has left the last stage, so that a prompt is in one stage at a time, and the others work for
other requests. vLLM's pipeline has a scheduler for each batch in flight, and deals requests out to
them by how many each has.

Two batches that take turns in two stages take as long as each would on all layers of devices of its
own: it is simulated as one replica for each stage, on the ranks of one stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxserve.api.request import Slo
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.baselines import SCHEDULERS
from jaxserve.lab.simulate.recorder import Outcome, Recorder
from jaxserve.lab.simulate.replica import VirtualReplica
from jaxserve.lab.simulate.run import System, requests, submit
from jaxserve.settings.schema import CacheConfig, SchedulerConfig


@dataclass
class Stream:
    """One of the batches in flight: what schedules it, and what becomes of its requests."""

    replica: VirtualReplica
    recorder: Recorder


def execute(
    name: str,
    system: System,
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    arrivals: Iterable[Arrival],
    until: float,
) -> Outcome:
    """Runs the arrivals on as many streams as the system has stages. name: a row of SCHEDULERS.
    First tokens are due as with our pipeline."""
    config = dataclasses.replace(scheduler, **SCHEDULERS[name])
    deadline = system.replica(config, cache).scheduler.times.deadline
    streams = [_stream(number, system, config, cache) for number in range(system.mesh.spp)]
    info = streams[0].replica.info
    for request, kind in requests(arrivals, info.max_model_len, Slo()):
        if request.arrival > until:
            break
        for stream in streams:
            stream.replica.advance(request.arrival, through=False)
        least = min(streams, key=lambda stream: len(stream.recorder.pending))
        submit(least.replica, least.recorder, request, kind, deadline)
    for stream in streams:
        stream.replica.advance(until)
        for request_id in list(stream.recorder.pending):
            stream.replica.cancel(request_id, "unfinished")
    return _together([stream.recorder.outcome() for stream in streams])


def _stream(number: int, system: System, config: SchedulerConfig, cache: CacheConfig) -> Stream:
    alone = dataclasses.replace(
        system,
        mesh=dataclasses.replace(system.mesh, spp=1),
        noise=system.noise.of(number),
    )
    replica = alone.replica(config, cache, observed=False)
    recorder = Recorder()
    replica.listeners.append(recorder)
    replica.start()
    return Stream(replica, recorder)


def _together(outcomes: list[Outcome]) -> Outcome:
    """What came of all streams, as of one system."""
    records = [record for outcome in outcomes for record in outcome.records]
    gaps = np.concatenate([outcome.gaps for outcome in outcomes])
    busy = float(np.mean([outcome.busy for outcome in outcomes]))
    return Outcome(records, gaps, [], busy)
