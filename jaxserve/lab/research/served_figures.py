"""Figures of requests that a server answered, and their spread over repeats."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import stdtrit

from jaxserve.api.attainment import Promise
from jaxserve.lab.quotients import quotient
from jaxserve.lab.research.generator import OK, REFUSED, Sent
from jaxserve.lab.simulate.run import spread
from jaxserve.settings.schema import ConfigError

OBJECTIVES = ("ttft", "tpot", "tbt", "e2e")
CONFIDENCE = 0.95
GOODPUT = ("goodput_share", "goodput_per_s", "goodput_tokens_per_s")
SCALARS = (  # figures whose spread over repeats is given
    *(
        f"{name}.{point}"
        for name in ("ttft", "tpot", "itl", "e2e")
        for point in ("p50", "p90", "p99")
    ),
    *("output_tokens_per_s", "total_tokens_per_s", "requests_per_s"),
    *GOODPUT,
    "prefix_hit_rate",
)


def parsed_goodput(text: str) -> dict[str, float]:
    """Reads 'ttft:0.5,tpot:0.05', in seconds. Errors: ConfigError."""
    limits: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition(":")
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        if name not in OBJECTIVES or name in limits or not 0 < seconds < float("inf"):
            raise ConfigError(
                "goodput", f"{part!r} is not NAME:SECONDS with one of {', '.join(OBJECTIVES)}"
            )
        limits[name] = seconds
    return limits


def figures(sent: Sequence[Sent], objectives: Mapping[str, float]) -> dict[str, Any]:
    """Sums up a run: times in seconds, rates per second.

    Latencies are over the `done` requests; those of TPOT over the ones with at least two tokens,
    those of ITL over all gaps between events of a stream; `count` says how many each is over.
    `span` is from the first planned moment to the last token. goodput: requests in time, and their
    tokens: those that met all `objectives`, or, where there are none, of which the server says that
    they kept its own; None where neither is known. `goodput_share` is of all that were sent.
    prefix_hit_rate: tokens of prompts that
    the server had, by its own usage, of all tokens of prompts; None where it does not say.
    """
    ended = [each for each in sent if each.status == OK]
    span = 0.0
    if ended:
        span = max(each.last for each in ended) - min(each.planned for each in sent)
    tokens = sum(each.tokens for each in ended)
    prompts = sum(each.prompt for each in ended)
    per_s = lambda count: quotient(count, span)
    goodput: dict[str, float | None] = dict.fromkeys(GOODPUT)
    if objectives or any(each.in_time is not None for each in ended):
        good = [each for each in ended if _in_time(each, objectives)]
        in_time = len(good) / len(sent), per_s(len(good)), per_s(sum(each.tokens for each in good))
        goodput = dict(zip(GOODPUT, in_time))
    return {
        "requests": len(sent),
        "done": len(ended),
        "refused": _reasons(each for each in sent if each.status == REFUSED),
        "failed": _reasons(each for each in sent if each.status not in (OK, REFUSED)),
        "span": span,
        "ttft": _spread([each.ttft for each in ended]),
        "tpot": _spread([each.tpot for each in ended if each.tokens > 1]),
        "itl": _spread([gap for each in ended for gap in each.gaps]),
        "e2e": _spread([each.e2e for each in ended]),
        "lag": _spread([each.sent - each.planned for each in sent]),
        "output_tokens": tokens,
        "prompt_tokens": prompts,
        "output_tokens_per_s": per_s(tokens),
        "total_tokens_per_s": per_s(tokens + prompts),
        "requests_per_s": per_s(len(ended)),
        **goodput,
        "prefix_hit_rate": _hit_rate(ended),
    }


def _in_time(sent: Sent, objectives: Mapping[str, float]) -> bool:
    """Returns whether a request that is done met all objectives; where there are none, what the
    server says."""
    if not objectives:
        return bool(sent.in_time)
    limit = lambda name: objectives.get(name, math.inf)
    promise = Promise(limit("ttft"), limit("tpot"), objectives.get("tbt"))
    slow = sum(gap > limit("tbt") for gap in sent.gaps) / max(1, len(sent.gaps))
    return promise.kept(sent.ttft, sent.tpot, slow) and sent.e2e <= limit("e2e")


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"count": len(values), **spread(np.array(values))}


def _hit_rate(ended: Sequence[Sent]) -> float | None:
    counted = [each for each in ended if each.cached is not None]
    if not counted:
        return None
    return sum(each.cached or 0 for each in counted) / sum(each.prompt for each in counted)


def _reasons(sent: Any) -> dict[str, int]:
    """Counts requests by status and the error of the first of them."""
    errors: dict[str, str] = {}
    counted: Counter[str] = Counter()
    for each in sent:
        errors.setdefault(each.status, each.error)
        counted[each.status] += 1
    return {f"{status}: {errors[status]}": count for status, count in counted.items()}


def scalar(summary: Mapping[str, Any], path: str) -> float | None:
    """One of SCALARS in the figures of a run; None if it is missing."""
    value: Any = summary
    for name in path.split("."):
        value = value.get(name)
        if value is None:
            return None
    return float(value)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean of repeats, and half the width of Student's t-interval around it at CONFIDENCE;
    infinite for one value."""
    count = len(values)
    if count < 2:
        return float(np.mean(values)), float("inf")
    error = float(np.std(values, ddof=1)) / count**0.5
    return float(np.mean(values)), float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * error


def intervals(runs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """`interval` of each of SCALARS that all repeats have."""
    means = {}
    for path in SCALARS:
        values = [scalar(run, path) for run in runs]
        counted = [value for value in values if value is not None]
        if counted and len(counted) == len(runs):
            means[path] = interval(counted)
    return means
