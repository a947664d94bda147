"""The clusters of Tetris' evaluation, simulated: what a system makes of a trace at a load. Equal
runs are simulated once.

Four nodes of eight A100 for 8B and eight for 70B; half of them prefill where prefill and decode are
apart (7.1). Systems:

    tetris             chunks of growing groups; the improvement rate follows the load single-chunk
    the same without chunks (7.3), with improvement rates profiled for it fixed-8, fixed-16  groups
    that never change; the paper leaves out fixed-4 and fixed-1, slow when idle, which waste less
    under load loongserve-disagg  each request alone on the group that ends first, whatever that
    does to others loongserve         the same on all instances, one of which each request keeps
    while it decodes, for its batch takes no others (2.4)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from experiments.bounds import load_of_time
from experiments.figures import Mechanism, Row, Rows, matching
from experiments.tetris.figure import TetrisSettings
from experiments.tetris.model import NODE, TP, costs_of, instances
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.tetris import PrefillInstances, PrefillOutcome, constant
from jaxserve.lanes.cdsp import PLANNERS, Planning
from jaxserve.lanes.improvement import ImprovementRate
from jaxserve.lanes.improvement_search import IMPROVEMENT_RATES, best_rates

MODELS = ("llama3-8b", "llama3-70b")
NODES = {"llama3-8b": 4, "llama3-70b": 8}
MOST = {  # requests per second: about where no system keeps up
    ("llama3-8b", "short"): 8.0,
    ("llama3-8b", "medium"): 5.5,
    ("llama3-8b", "long"): 3.0,
    ("llama3-8b", "recorded"): 8.0,
    ("llama3-70b", "short"): 2.0,
    ("llama3-70b", "medium"): 1.5,
    ("llama3-70b", "long"): 1.0,
    ("llama3-70b", "recorded"): 2.0,
}
LOADS = 16  # that a sweep goes through up to MOST
# requests per second between rows of a table of improvement rates
STEP = {"llama3-8b": 0.5, "llama3-70b": 0.125}
PROFILED = 300  # requests of a sample, as the table is made
OTHER = 1000  # between the seed of what is served and that of the sample
PATIENCE = 25  # mean TTFT over light-load latency up to which a load counts as served (7.2)
LOW = 5  # the same, for what 7.3 calls low latency without a number
PERCENTS = (5, 10, 25, 50, 75, 90, 95, 99)  # at which distributions are noted
# the paper's, on as many prefill instances as Tetris
BASELINES = ("fixed-8", "fixed-16", "loongserve-disagg")
SYSTEMS = ("tetris", *BASELINES, "loongserve", "fixed-4", "fixed-1")


def possible(names: Iterable[str], model: str) -> tuple[str, ...]:
    """Returns the systems that the model's cluster can form: 70B has eight prefill instances."""
    return tuple(
        name for name in names if not (name == "fixed-16" and prefill_instances(model) < 16)
    )


def prefill_instances(model: str) -> int:
    return NODES[model] * NODE // TP[model] // 2


def loads(model: str, trace: str) -> list[float]:
    return [round(MOST[model, trace] * n / LOADS, 5) for n in range(1, LOADS + 1)]


# --- a run


def run(
    name: str,
    model: str,
    trace: str,
    load: float,
    settings: TetrisSettings,
    rate: float | None = None,
) -> PrefillOutcome:
    """rate: the improvement rate; None for one that follows the load, of systems that have one."""
    return _run(name, model, trace, load, settings, rate)


@functools.cache
def _run(
    name: str, model: str, trace: str, load: float, settings: TetrisSettings, rate: float | None
) -> PrefillOutcome:
    return server(name, model, trace, load, settings, rate).run(settings.arrivals(trace, load))


POLICY: dict[str, Planning] = (
    dict(PLANNERS)
    | {"tetris": PLANNERS["cdsp"], "single-chunk": PLANNERS["single"]}
    | dict.fromkeys(("loongserve", "loongserve-disagg"), PLANNERS["single"])
)


def server(
    name: str,
    model: str,
    trace: str,
    load: float,
    settings: TetrisSettings,
    rate: float | None = None,
) -> PrefillInstances:
    """A run begins as if the load had been the same before."""
    count = prefill_instances(model)
    if name == "loongserve":
        return PrefillInstances(
            instances(model),
            2 * count,
            POLICY[name],
            constant(0.0),
            functools.partial(decode_seconds, model),
            settings.step_noise,
        )
    made = functools.partial(
        PrefillInstances, instances(model), count, POLICY[name], noise=settings.step_noise
    )
    if name not in ("tetris", "single-chunk"):
        return made(constant(0.0))
    exact = replace(settings, noise=0.0)
    follows = (
        constant(rate)
        if rate is not None
        else ImprovementRate(rates(name, model, trace, exact), load).arrived
    )
    return made(follows)


@functools.cache
def rates(name: str, model: str, trace: str, settings: TetrisSettings) -> dict[float, float]:
    """The improvement rate that was best at each load, for another sample than the one that is
    served. It is found without noise, as predicted."""
    requests = min(PROFILED, settings.requests)
    sample = replace(settings, seed=settings.seed + OTHER, requests=requests)
    grid = np.arange(STEP[model], MOST[model, trace] + STEP[model] / 2, STEP[model]).tolist()
    return best_rates(
        instances(model),
        prefill_instances(model),
        POLICY[name],
        lambda load: sample.arrivals(trace, load),
        grid,
        IMPROVEMENT_RATES,
    )


def decode_seconds(model: str, arrival: Arrival) -> float:
    """Seconds that a request decodes alone on the instance that it prefilled on."""
    one = costs_of(model)
    step = (
        one.launch
        + one.layers * (one.linear(1) + one.attend_decodes(1, arrival.prompt))
        + one.head
        + one.head_token
    )
    return (arrival.output - 1) * step


# --- what is read off runs


def light(model: str, trace: str, settings: TetrisSettings) -> float:
    """Mean seconds of a trace's requests, each alone on the group size that is best for it."""
    found = [
        min(
            latency(0, arrival.prompt)
            for size, latency in instances(model).latencies.items()
            if size <= prefill_instances(model)
        )
        for arrival in settings.arrivals(trace, 1.0)
    ]
    return float(np.mean(found))


def bound(model: str, trace: str, settings: TetrisSettings, size: int = 8) -> float:
    """Over groups of one size, the most that any plans can bear: the instances' time that requests
    take on groups of this size, over that on those where each takes least of it. Whole prompts: cut
    ones take more."""
    found = instances(model).latencies
    work = lambda prompt, sizes: min(s * found[s](0, prompt) for s in sizes)
    prompts = [arrival.prompt for arrival in settings.arrivals(trace, 1.0)]
    return sum(work(prompt, (size,)) for prompt in prompts) / sum(
        work(prompt, found) for prompt in prompts
    )


def row_of(
    name: str,
    model: str,
    trace: str,
    load: float,
    settings: TetrisSettings,
    rate: float | None = None,
) -> Row:
    served = run(name, model, trace, load, settings, rate)
    p50, p99 = np.percentile(served.ttft, (50, 99)).tolist()
    return {
        "lengths": settings.lengths,
        "system": name,
        "model": model,
        "trace": trace,
        "load": load,
        "light_s": light(model, trace, settings),
        "mean_s": float(served.ttft.mean()),
        "p50_s": p50,
        "p99_s": p99,
        "busy": served.busy,
        "exposed": served.exposed,
        "idle": served.idle,
        "tokens_per_s": served.tokens_per_s,
        "several": served.several,
    }


def _several(rows: Rows) -> float:
    """The fewest plans of several chunks, of any model and trace, over all loads."""
    found: dict[tuple[object, object], float] = {}
    for row in matching(rows, system="tetris"):
        key = row["model"], row["trace"]
        found[key] = found.get(key, 0.0) + float(row["several"])
    return min(found.values(), default=0.0)


SEVERAL = Mechanism("plans of several chunks", _several)


def swept(name: str, model: str, trace: str, settings: TetrisSettings) -> Iterator[Row]:
    """A system at all loads."""
    yield from (row_of(name, model, trace, load, settings) for load in loads(model, trace))


def capacity(rows: Rows, system: str, model: str, trace: str, limit: float = PATIENCE) -> float:
    """The load at which the mean TTFT reaches `limit` times the light-load latency; NaN where the
    system is not in the rows."""
    chosen = matching(rows, system=system, model=model, trace=trace)
    points = [(float(row["load"]), float(row["mean_s"]) / float(row["light_s"])) for row in chosen]
    return load_of_time(points, limit) if points else math.nan


def critical(
    name: str, model: str, trace: str, settings: TetrisSettings, limit: float = LOW
) -> float:
    """The highest load at which a system keeps its mean TTFT within `limit` times the light-load
    latency (7.3)."""
    return capacity(list(swept(name, model, trace, settings)), name, model, trace, limit)
