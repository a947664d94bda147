"""Baselines that jaxserve's scheduling is compared with: rows of scheduler settings, and engines
that work in another way altogether.

A baseline runs on as many devices of the same kind as the system it is compared with, over the same
arrivals.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jaxserve.api.request import Slo
from jaxserve.costs.profiles import devices
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.loongserve import (
    FREE,
    PUBLISHED,
    Elasticity,
    LoongPool,
    LoongServe,
)
from jaxserve.lab.simulate.recorder import Outcome
from jaxserve.lab.simulate.run import System, execute
from jaxserve.policies import POLICIES
from jaxserve.settings.schema import CacheConfig, ConfigError, MeshConfig, SchedulerConfig

# Settings that make our scheduler another one. Unshared: no prompts share a step, as they do under
# `--policy=NAME`. Medha's LRS (5.4) is relative-slack-unshared; slack-unshared demotes late ones.
SCHEDULERS: Mapping[str, Mapping[str, Any]] = {
    "sarathi-512": dict(policy="fcfs", chunking="static", chunk_tokens=512),
    "sarathi-2048": dict(policy="fcfs", chunking="static", chunk_tokens=2048),
    **{
        f"{policy}-unshared": dict(policy=policy, chunking="adaptive", sharing=0.0)
        for policy in POLICIES
    },
}
# LoongServe: ranks of an instance, share of the instances kept for short prompts, what elasticity
# takes where it is not free
POOLS: Mapping[str, Mapping[str, Any]] = {
    "loongserve": dict(tp=2, reserved=0.0),
    "loongserve-reserved": dict(tp=2, reserved=0.25),
    "loongserve-costs": dict(tp=2, reserved=0.0, elasticity=PUBLISHED),
    "loongserve-costs-reserved": dict(tp=2, reserved=0.25, elasticity=PUBLISHED),
}
BASELINES = (*SCHEDULERS, *POOLS)
FORMER = {"fcfs": "fcfs-unshared", "edf": "edf-unshared", "lrs": "slack-unshared"}


def check_baseline(name: str) -> None:
    """Checks a name. Errors: ConfigError for an unknown one."""
    if name in FORMER:
        message = f"{name!r} is {FORMER[name]} now: with --policy, prompts share steps"
        raise ConfigError("baseline", message)
    if name not in BASELINES:
        raise ConfigError("baseline", f"{name!r} is not one of {', '.join(BASELINES)}")


def compare(
    name: str,
    system: System,
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    arrivals: Iterable[Arrival],
    slo: Slo = Slo(),  # noqa: B008
    until: float = float("inf"),
    lookahead: int = 1,
) -> Outcome:
    """Runs the arrivals on a baseline. `scheduler` gives what the baseline does not set:
    limits and objectives.

    Errors: ConfigError for an unknown name, or devices that do not make whole instances.
    """
    check_baseline(name)
    if name in SCHEDULERS:
        return execute(
            system.replica(
                dataclasses.replace(scheduler, **SCHEDULERS[name]), cache, lookahead, observed=False
            ),
            arrivals,
            slo,
            until,
        )
    made = pool(system.with_cache(cache), **POOLS[name])
    return serve_elastic(made, system, scheduler, cache, arrivals, slo, until)


def serve_elastic(
    made: LoongPool,
    system: System,
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    arrivals: Iterable[Arrival],
    slo: Slo = Slo(),  # noqa: B008
    until: float = float("inf"),
) -> Outcome:
    """Runs the arrivals on LoongServe's instances; promises are those of the system."""
    times = system.replica(scheduler, cache).scheduler.times

    def ttft(prompt: int) -> float:
        """Seconds that a prompt of `prompt` tokens is given: never less than it takes alone."""
        alone = times.seconds(0, prompt)
        return max(slo.ttft or scheduler.ttft_by_length(alone), alone)

    server = LoongServe(
        made,
        ttft,
        scheduler.max_seqs,
        noise=system.noise,
        tpot=slo.tpot or scheduler.tpot,
    )
    server.run(arrivals, until)
    server.give_up(until)
    return server.recorder.outcome()


def pool(system: System, tp: int, reserved: float, elasticity: Elasticity = FREE) -> LoongPool:
    """LoongServe's instances on the system's devices. Where elasticity is free they are joined as
    ranks are inside a node: in its favour, for a ring may have to leave it. Else what leaves a node
    takes the link between nodes."""
    count, spare = divmod(system.mesh.devices, tp)
    if spare or not count:
        raise ConfigError("mesh", f"{system.mesh.devices} devices do not make instances of {tp}")
    part = dataclasses.replace(system, mesh=MeshConfig(tp=tp))
    device = devices()[system.device]
    made = LoongPool(
        count,
        part.costs,
        part.kv_tokens(),
        part.heads.kv_bytes,
        device.ranks[min(device.ranks)],
        round(reserved * count),
    )
    if elasticity == FREE:
        return made
    node = min(count, max(1, system.node_devices // tp))
    return dataclasses.replace(made, node=node, between=device.node, elasticity=elasticity)
