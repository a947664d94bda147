"""Arrivals of simulated requests: their times and lengths, the requests made of them, and a summary
of many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.api.request import Request, Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.lab.quotients import quotient

BLOCK = 512  # tokens per hash id in the public Mooncake traces
LONG = 100_000  # tokens; the shortest long prompt of medha_mixed has 100,628
MOST_TOKENS = 2**31 - 1  # of a prompt or an output: the largest int32

# kinds of requests and their most prompt tokens, where arrivals name no kind
CLASSES = (("short", 8192), ("medium", LONG - 1), ("long", MOST_TOKENS))


@dataclass(frozen=True, slots=True)
class Arrival:
    """An arrival: `time` in seconds, lengths in tokens. Equal `blocks` (hash ids of `block`
    tokens each) are equal tokens; tokens beyond the last of them, all of them where there are none,
    are the request's own. tenant: whose share of the time the request uses."""

    time: float
    prompt: int
    output: int
    kind: str = ""
    blocks: tuple[int, ...] | np.ndarray | None = None
    block: int = BLOCK
    tenant: str = ""


def to_request(
    arrival: Arrival,
    number: int,
    max_len: int,
    slo: Slo = Slo(),  # noqa: B008 (frozen)
) -> Request:
    """Makes a greedy request of exactly `output` tokens, as far as `max_len` tokens a sequence
    leave room.

    Its prompt is made here: a token is the hash id of its block; a request's own tokens are all -1
    - number, which no other has, and where it has no other tokens they are a view of that one.
    Errors: RequestError where the prompt leaves no room.
    """
    if arrival.prompt >= max_len:
        raise RequestError(
            "prompt",
            f"has {arrival.prompt} tokens; with one token to generate the limit is {max_len - 1}",
        )
    prompt = np.broadcast_to(np.int32(-1 - number), arrival.prompt)
    if arrival.blocks is not None and len(arrival.blocks):
        shared = np.repeat(np.asarray(arrival.blocks, np.int32), arrival.block)[: arrival.prompt]
        prompt = np.concatenate([shared, prompt[len(shared) :]])
    sampling = SamplingParams(
        temperature=0.0, max_tokens=min(arrival.output, max_len - arrival.prompt), ignore_eos=True
    )
    tenant = arrival.tenant
    return Request(str(number), prompt, sampling, arrival=arrival.time, slo=slo, tenant=tenant)


def scaled(arrival: Arrival, time: float, length: float) -> Arrival:
    """Multiplies an arrival's time and lengths; a length stays at least 1.

    Hash ids stay what they are, each of fewer tokens, so that prompts have as many blocks as
    before: a full block becomes one of `length` times its tokens, and what stands in a last block
    that is not full is scaled likewise and rounded up. So two prompts share exactly the blocks that
    they shared.
    """
    output = max(1, round(arrival.output * length))
    if arrival.blocks is None:
        prompt = max(1, round(arrival.prompt * length))
        return replace(arrival, time=arrival.time * time, prompt=prompt, output=output)
    block = max(1, round(arrival.block * length))
    full, partial = divmod(arrival.prompt, arrival.block)
    prompt = full * block + -(-partial * block // arrival.block)
    return replace(arrival, time=arrival.time * time, prompt=prompt, output=output, block=block)


def class_of(prompt: int) -> str:
    """The kind of a request whose arrival names none."""
    return next(name for name, limit in CLASSES if prompt <= limit)


def kind_of(arrival: Arrival) -> str:
    """Returns the kind of an arrival: its own, else by the length of its prompt."""
    return arrival.kind or class_of(arrival.prompt)


def workload_summary(arrivals: Sequence[Arrival]) -> dict[str, Any]:
    """Figures of a workload. `span` from first to last in seconds; `rate` the inverse of the mean
    gap, 0 without one; `long` the share of prompts of at least `long_limit` tokens;
    `prompt` and `output` in tokens."""
    if not arrivals:
        return dict(count=0, span=0.0, rate=0.0, prompt={}, output={}, long=0.0, long_limit=LONG)
    prompts, outputs = (
        np.array([getattr(arrival, name) for arrival in arrivals]) for name in ("prompt", "output")
    )
    span = arrivals[-1].time - arrivals[0].time
    rate = quotient(len(arrivals) - 1, span)
    return dict(
        count=len(arrivals),
        span=span,
        rate=rate,
        prompt=_figures(prompts),
        output=_figures(outputs),
        long=float((prompts >= LONG).mean()),
        long_limit=LONG,
    )


def _figures(values: np.ndarray) -> dict[str, float]:
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return dict(mean=float(values.mean()), p50=p50, p90=p90, p99=p99, max=int(values.max()))
