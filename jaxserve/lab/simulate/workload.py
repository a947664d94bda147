"""Reads or generates the arrivals of a simulated workload: recorded traces, files of lengths, and
mixes of lengths calibrated to them.

`parse` takes one of

    FILE.jsonl[.gz]   Mooncake: timestamp, input_length, output_length, hash_ids. Options after a
                      colon: `unit=ms|s` of the timestamps (default ms, as in Mooncake's and
                      veeksha's traces) and `block=N` tokens per hash id (default 512).
    FILE.csv[.gz]     By its header: Azure (TIMESTAMP, ContextTokens, GeneratedTokens); lengths
                      (num_prefill_tokens, num_decode_tokens, and arrived_at in seconds); L-Eval
                      (words, n_questions, ...). Where there are no times, rows are drawn without
                      replacement, and again once all are used, and arrive as a Poisson process of
                      rate qps. All but L-Eval, and .jsonl, may have `class`, the request's.
    poisson:OPTIONS   Exponential gaps of mean 1 / qps.
    gamma:OPTIONS     Gaps of a gamma distribution of mean 1 / qps and shape `burstiness` (1): a
                      Poisson process at 1, burstier below, evener above.
    constant:OPTIONS  Gaps of 1 / qps.
    burst:OPTIONS     A Poisson process whose rate is a square wave of mean qps: `period` (60 s), of
                      which the last `duty` (0.25) is at `factor` (4) times the rate of the rest.
    NAME[:OPTIONS]    A row of shared_prefixes.WORKLOADS, whose prompts begin alike and which has
                      times of its own at a mean rate of qps, such as `loogle:zipf=0.9`.

OPTIONS name the lengths in tokens: `mix=NAME`, a row of MIXES, or `prompt=LENGTHS,output=LENGTHS`
(with or without `mix=fixed`). LENGTHS is N, LOW:HIGH or uniform:LOW:HIGH, exponential:MEAN or
lognormal:MEDIAN:SIGMA[:LOW:HIGH], the last cut off at LOW and HIGH. Before such a prompt stands
with `prefix=N` one of `groups=N` (1) prefixes of that many tokens.

The first arrival of a file with times is at 0. The first `requests` arrivals are taken (default:
all of a file, 1000 of a generator); then, where qps is given, recorded times are stretched so that
what was taken comes at qps on average. Lengths depend on the seed alone, so that one seed at
several rates is the same work. Whatever is malformed raises ConfigError("workload", ...) with file,
line and field.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxserve.lab.simulate import mixes, traces
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.shared_prefixes import WORKLOADS, named
from jaxserve.lab.simulate.spec import did_you_mean, fault, to_number, to_options
from jaxserve.settings.schema import ConfigError

GENERATED_REQUESTS = 1000  # where the caller names no number


def parse(
    spec: str, *, qps: float | None = None, requests: int | None = None, seed: int = 0
) -> list[Arrival]:
    """The arrivals that `spec` describes, by time. Errors: ConfigError."""
    if qps is not None and not (0 < qps < math.inf):
        raise ConfigError("qps", f"must be above 0, not {qps:g}")
    if requests is not None and requests < 1:
        raise ConfigError("requests", f"must be at least 1, not {requests}")
    if seed < 0:
        raise ConfigError("seed", f"must not be below 0, not {seed}")
    name, _, text = spec.partition(":")
    if name in TIMES:
        options = to_options(text, (*mixes.OPTIONS, *TIMES[name][1]))
        count = requests or GENERATED_REQUESTS
        return _timed(
            mixes.drawn(options, count, seed),
            TIMES[name][0](_rate(qps, name), count, seed, options),
        )
    if name in WORKLOADS:
        count = requests or GENERATED_REQUESTS
        return named(name, text).arrivals(_rate(qps, name), count, seed)
    names = (*TIMES, *WORKLOADS)
    if not (file := re.fullmatch(r"(.+?\.(?:jsonl|csv)(?:\.gz)?)(?::(.*))?", spec, re.DOTALL)):
        fault(
            f"{spec!r} is neither a generator ({', '.join(names)}) nor a file named .jsonl, .csv "
            "or one of these and .gz" + did_you_mean(name, names)
        )
    path = Path(file[1])
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        return _recorded(
            traces.mooncake(path, to_options(file[2], ("unit", "block"))), qps, requests
        )
    to_options(file[2], ())
    arrivals = traces.table(path)
    if not math.isnan(arrivals[0].time):
        return _recorded(arrivals, qps, requests)
    return _timed(
        _drawn(arrivals, requests or len(arrivals), seed),
        _poisson(_rate(qps, path.name), requests or len(arrivals), seed, {}),
    )


# --- times


def _rate(qps: float | None, name: str) -> float:
    if qps is None:
        raise ConfigError("qps", f"is missing: {name} has no times of its own")
    return qps


def _poisson(qps: float, count: int, seed: int, options: dict[str, str]) -> np.ndarray:
    return np.cumsum(np.random.default_rng((seed, 1)).exponential(1.0, count)) / qps


def _gamma(qps: float, count: int, seed: int, options: dict[str, str]) -> np.ndarray:
    shape = to_number("burstiness", options.get("burstiness", "1"), 1e-3)
    return np.cumsum(np.random.default_rng((seed, 1)).gamma(shape, 1 / shape, count)) / qps


def _constant(qps: float, count: int, seed: int, options: dict[str, str]) -> np.ndarray:
    return np.arange(count) / qps


def _burst(qps: float, count: int, seed: int, options: dict[str, str]) -> np.ndarray:
    """Arrival times of a Poisson process whose rate is a square wave: a process of unit rate,
    mapped by the inverse of the expected number of arrivals up to a time."""
    period = to_number("period", options.get("period", "60"), 1e-6)
    factor = to_number("factor", options.get("factor", "4"), 1)
    duty = to_number("duty", options.get("duty", "0.25"), 0, 1)
    # share of the arrivals that come at the low rate
    quiet = (1 - duty) / (1 - duty + duty * factor)
    periods, phase = np.divmod(_poisson(qps, count, seed, {}) / period, 1)
    return (periods + np.interp(phase, (0, quiet, 1), (0, 1 - duty, 1))) * period


TIMES: dict[
    str, tuple[Callable[[float, int, int, dict[str, str]], np.ndarray], tuple[str, ...]]
] = {
    "poisson": (_poisson, ()),
    "gamma": (_gamma, ("burstiness",)),
    "constant": (_constant, ()),
    "burst": (_burst, ("period", "factor", "duty")),
}


def retimed(
    arrivals: list[Arrival], process: str, qps: float, seed: int, options: dict[str, str]
) -> list[Arrival]:
    """The arrivals in their order, at the times of a process of TIMES, which has such options.
    Errors: ConfigError."""
    return _timed(arrivals, TIMES[process][0](qps, len(arrivals), seed, options))


def _timed(arrivals: list[Arrival], times: np.ndarray) -> list[Arrival]:
    return [replace(arrival, time=time) for arrival, time in zip(arrivals, times.tolist())]


def _recorded(arrivals: list[Arrival], qps: float | None, requests: int | None) -> list[Arrival]:
    """Arrivals of a trace in order of time, from 0, cut to `requests` and stretched to the mean
    rate qps."""
    ordered = sorted(arrivals, key=lambda arrival: arrival.time)[:requests]
    times = np.array([arrival.time for arrival in ordered]) - ordered[0].time
    if qps is not None and len(ordered) > 1:
        if times[-1] == 0:
            fault(
                f"its first {len(ordered)} arrivals come at one moment, which no qps can stretch; "
                "take more requests"
            )
        times *= (len(ordered) - 1) / qps / times[-1]
    return _timed(ordered, times)


def _drawn(arrivals: list[Arrival], count: int, seed: int) -> list[Arrival]:
    """Draws `count` arrivals in random order, each as often as any other, give or take one."""
    rng = np.random.default_rng((seed, 0))
    orders = [rng.permutation(len(arrivals)) for _ in range(-(-count // len(arrivals)))]
    return [arrivals[index] for index in np.concatenate(orders)[:count]]
