"""Makes pandas frames of what the predictor and the planners say of prompts and workloads before
anything runs: how lanes exchange, how many of them compute a chunk, which mesh serves a
workload."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from jaxserve.lab.research.frames import TIMELINE
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.plan import CHUNKS, PlanQuestion, PlanRunner, meshes, plans, search
from jaxserve.lab.simulate.run import System
from jaxserve.lab.simulate.tetris import PrefillInstances, constant
from jaxserve.lanes.cdsp import PLANNERS, Instances
from jaxserve.lanes.choice import ExchangeChooser, Pick
from jaxserve.lanes.work import ExchangeWork, pairs_of
from jaxserve.scheduling.assembly import ReplicaSizes
from jaxserve.settings.schema import CacheConfig, ConfigError, SchedulerConfig

BLOCK = 16  # tokens of a page
STEP = 8192  # prefill tokens of a step for each lane
QUEUED = "queued"  # kind of a lane's work that is there already


def exchange_chooser(system: System, chooser: str | Pick = "auto") -> ExchangeChooser:
    """Returns the chooser of how the lanes of a system exchange, by the costs of its devices.
    Errors: ConfigError."""
    known = _sizes(system).chooser(system.profile)
    if known is None:
        raise ConfigError("mesh", f"{system.mesh} has one lane, which exchanges nothing")
    return dataclasses.replace(known, chooser=chooser)


def exchanges(
    chooser: ExchangeChooser, prompts: Iterable[int], new: Iterable[float]
) -> pd.DataFrame:
    """Tabulates the choice for prompts of these lengths, of which a share is `new` and the rest is
    cached: a row for each pair, with `prompt`, `new` (share), the `strategy`, and the seconds per
    layer of each strategy."""
    rows = []
    for prompt, share in itertools.product(prompts, new):
        tokens = max(1, round(prompt * share))
        decision = chooser.decide(_evenly(prompt - tokens, tokens, chooser.lanes))
        rows.append(
            {"prompt": prompt, "new": share, "strategy": decision.strategy, **decision.seconds}
        )
    return pd.DataFrame(rows)


def _evenly(cached: int, new: int, lanes: int) -> ExchangeWork:
    """A chunk alone in its step, of which all lanes hold and compute as much."""
    share = -(-new // lanes)
    shard = -(-cached // lanes) + share
    return ExchangeWork(lanes, new, cached + new, pairs_of(cached, new), share, shard, shard)


def lanes(system: System, longest: int, block: int = BLOCK, step: int = STEP) -> Instances:
    """The lanes of a system to plan with, for contexts up to `longest` tokens, in steps of `step`
    tokens for each lane. Errors: ConfigError."""
    return _sizes(system, longest, block, step).instances(system.profile)


def _sizes(system: System, longest: int = 0, block: int = BLOCK, step: int = STEP) -> ReplicaSizes:
    cache = CacheConfig(block_size=block)
    scheduler = SchedulerConfig(exchange="auto", planner="cdsp", chunk_tokens=step)
    return system.sizes(scheduler, cache, longest)


def planned(
    instances: Instances, queues: Sequence[float], tokens: int, rate: float, policy: str = "cdsp"
) -> pd.DataFrame:
    """A prompt's plan as a timeline, with the `degree` of each chunk (lanes); before it what the
    lanes have to do first, `queues` in seconds, as chunks of kind QUEUED. rate: share of the time
    that more lanes must save. Errors: ConfigError."""
    plan = PLANNERS[policy](instances, queues, tokens, rate)
    queued = [
        (0.0, seconds, 0, (lane,), "others", QUEUED, 0, 1)
        for lane, seconds in enumerate(queues)
        if seconds > 0
    ]
    chunks = [
        (chunk.start, chunk.end, 0, chunk.group, "prompt", "prefill", chunk.history, chunk.tokens)
        for chunk in plan.chunks
    ]
    table = pd.DataFrame([*queued, *chunks], columns=TIMELINE)
    return table.assign(degree=table["lanes"].map(len))


def degrees(
    instances: Instances,
    count: int,
    prompts: Sequence[int],
    loads: Sequence[float],
    rate: float,
    draws: int = 20,
) -> pd.DataFrame:
    """The mean plan of prompts on `count` lanes, each of which has work for a random time: uniform
    from 0 to `load` seconds, the same draws for all. A row per prompt and load, with the mean
    `degree` (lanes that compute a token), `chunks` of a plan, and `ttft` in seconds of cdsp and of
    one chunk (`ttft_single`)."""
    shares = np.random.default_rng(0).random((draws, count))
    rows = []
    for prompt, load in itertools.product(prompts, loads):
        found = [_of_plan(instances, load * each, prompt, rate) for each in shares]
        rows.append({"prompt": prompt, "load": load, **pd.DataFrame(found).mean().to_dict()})
    return pd.DataFrame(rows)


def _of_plan(
    instances: Instances, queues: np.ndarray, prompt: int, rate: float
) -> dict[str, float]:
    plan = PLANNERS["cdsp"](instances, queues, prompt, rate)
    return {
        "degree": sum(chunk.tokens * len(chunk.group) for chunk in plan.chunks) / prompt,
        "chunks": len(plan.chunks),
        "ttft": plan.ttft,
        "ttft_single": PLANNERS["single"](instances, queues, prompt, rate).ttft,
    }


def streams(
    instances: Instances, count: int, arrivals: Sequence[Arrival], rates: Sequence[float]
) -> pd.DataFrame:
    """Simulates a stream of prompts on `count` lanes that `cdsp` plans for with each improvement
    rate, and on groups of one size: a row each, with `policy`, `rate` and `ttft`, the mean in
    seconds."""
    fixed = [(f"fixed-{size}", 0.0) for size in instances.latencies]
    rows = []
    for policy, rate in [*(("cdsp", rate) for rate in rates), *fixed]:
        served = PrefillInstances(instances, count, PLANNERS[policy], constant(rate)).run(arrivals)
        rows.append({"policy": policy, "rate": rate, "ttft": float(served.ttft.mean())})
    return pd.DataFrame(rows)


def deployments(
    question: PlanQuestion,
    counts: Sequence[int],
    best: int = 2,
    chunks: Sequence[tuple[str, int]] = CHUNKS,
) -> pd.DataFrame:
    """Simulates the question's workload on the meshes of each count of GPUs, all by the same
    objectives: a row per plan, the best of a count first, with the fields of `PlanAnswer.row` and
    its percentiles `ttft_p90` and `tpot_p90` in seconds.

    For the `best` plans of a count `capacity` is known, in requests per second, and with it
    `replicas`, how many of them bear the question's rate if requests are spread evenly, and
    `total_gpus`. Errors: ConfigError.
    """
    by_count = [plans(meshes(count, question)[0], chunks) for count in counts]
    runner = PlanRunner(question, [plan for found in by_count for plan in found])
    answers = [answer for found in by_count for answer in search(runner, found, best)]
    table = pd.DataFrame([_flat(answer.row) for answer in answers])
    replicas = np.ceil(runner.rate / table["capacity"].astype(float).replace(0, np.nan))
    return table.assign(replicas=replicas, total_gpus=replicas * table["gpus"])


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    figures = row.pop("figures")
    return {
        **row,
        **{f"{name}_p90": figures[name].get("p90", np.nan) for name in ("ttft", "tpot")},
    }
