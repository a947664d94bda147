"""Finds improvement rates by simulation: prompts come to prefill instances, each is planned for
against the queues that the plans before it left, and the rate with the least mean TTFT counts
(Tetris, 5.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jaxserve.lanes.cdsp import Instances, Planning
from jaxserve.lanes.instance_queues import PlannedQueues

# improvement rates that are tried (Tetris, 7.1)
IMPROVEMENT_RATES = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75)
QUICK_LOADS = (0.25, 0.5, 0.75, 1.0)  # of the load at which all instances are busy
QUICK_PROMPTS = 120  # at each load: about a second for all, on 16 lanes
# Prompts at a start are those of the short trace of Tetris, which `jaxserve profile` takes by
# default: tokens, log-normal between two ends.
MEDIAN = 18_260
SIGMA = 0.8
SHORTEST = 4_000
LONGEST = 95_000
SEED = 0


class Prompt(Protocol):
    """A prompt of `prompt` tokens that comes at clock second `time`."""

    @property
    def time(self) -> float: ...
    @property
    def prompt(self) -> int: ...


class DrawnPrompt(NamedTuple):
    """A prompt that was drawn: see `Prompt`."""

    time: float
    prompt: int


Sample = Callable[[float], Sequence[Prompt]]  # by prompts per second


def mean_ttft(
    instances: Instances,
    count: int,
    policy: Planning,
    prompts: Iterable[Prompt],
    rate: float,
) -> float:
    """Returns the mean seconds to the first token of prompts on `count` instances, whose chunks
    take what is planned. Errors: ConfigError, of the policy."""
    queues = PlannedQueues(count)
    found = []
    for prompt in prompts:
        plan = policy(instances, queues.seconds(prompt.time), prompt.prompt, rate)
        found.append(queues.give(plan, prompt.time).ttft)
    return float(np.mean(found))


def best_rates(
    instances: Instances,
    count: int,
    policy: Planning,
    sample: Sample,
    loads: Iterable[float],
    rates: Sequence[float] = IMPROVEMENT_RATES,
) -> dict[float, float]:
    """Finds the improvement rate with the least mean TTFT at each load, in prompts per second. The
    smallest counts where several are as good."""

    def best(prompts: Sequence[Prompt]) -> float:
        return min(rates, key=lambda rate: mean_ttft(instances, count, policy, prompts, rate))

    return {load: best(sample(load)) for load in loads}


def quick_rates(
    instances: Instances, count: int, policy: Planning, longest: int
) -> dict[float, float]:
    """Finds improvement rates with few prompts, as a replica does when it starts. longest: tokens
    that a prompt has at most."""
    rng = np.random.default_rng(SEED)
    lengths = rng.lognormal(math.log(MEDIAN), SIGMA, QUICK_PROMPTS).clip(SHORTEST, LONGEST)
    tokens = np.minimum(lengths, longest).astype(int).tolist()
    gaps = np.cumsum(rng.exponential(1.0, QUICK_PROMPTS)).tolist()
    alone = instances.latencies[min(instances.latencies)]
    busy = count / float(np.mean([alone(0, each) for each in tokens]))
    sample = lambda load: [DrawnPrompt(gap / load, each) for gap, each in zip(gaps, tokens)]
    loads = [busy * share for share in QUICK_LOADS]
    return best_rates(instances, count, policy, sample, loads)
