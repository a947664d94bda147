"""Refuses requests that would miss their objectives, at overload (Mooncake, section 4.3).

A policy is two lists of checks: those on arrival, before anything is computed, and those made when
a request's prefill has ended and its decode would begin. What is refused only then has been
prefilled in vain: that is why decoding is checked early, and why with the load that decoding will
have at the end of the prefill, which today's load does not tell (section 4.3.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxserve.api.errors import RequestError
from jaxserve.cluster.assignments import Assignments
from jaxserve.costs.predictor import Predictor
from jaxserve.lanes.load import LaneLoad

MIN_RETRY_AFTER = 0.05  # seconds


class AdmissionView(NamedTuple):
    """Predicted seconds of a request, with its objectives.

    ttft: to its first token. tbt_now: per token on the replica that would decode it, as that is
    loaded now. tbt_later: per token on the average replica at the end of the prefill. completion:
    that a sequence decodes, of which a refused caller waits a part.
    """

    ttft: float
    tbt_now: float
    tbt_later: float
    ttft_objective: float
    tbt_objective: float
    completion: float = 1.0


Check = Callable[[AdmissionView], None]


class AdmissionPolicy(NamedTuple):
    """Checks that raise RequestError of status RESOURCE_EXHAUSTED, with `retry_after`."""

    on_arrival: tuple[Check, ...] = ()
    before_decode: tuple[Check, ...] = ()

    def check_arrival(self, view: AdmissionView) -> None:
        """Checks a request that comes now. Errors: RequestError if it is refused."""
        for check in self.on_arrival:
            check(view)

    def check_decode(self, view: AdmissionView) -> None:
        """Checks a request whose prefill has ended. Errors: RequestError if it is refused."""
        for check in self.before_decode:
            check(view)


def check_ttft(view: AdmissionView) -> None:
    """Refuses a request whose first token would be late."""
    late = view.ttft - view.ttft_objective
    if late > 0:
        raise _refused(
            f"its first token is due in {view.ttft_objective:.3g} s and would come "
            f"{late:.3g} s too late",
            "ttft",
            late,
        )


def check_tbt_now(view: AdmissionView) -> None:
    """Refuses a request where the load of decoding is too high now."""
    _check_tbt(view, view.tbt_now, "now")


def check_tbt_later(view: AdmissionView) -> None:
    """Refuses a request where the load of decoding will be too high when its prefill has ended."""
    _check_tbt(view, view.tbt_later, "by the end of its prefill")


def _check_tbt(view: AdmissionView, tbt: float, when: str) -> None:
    if tbt > view.tbt_objective:
        share = 1 - view.tbt_objective / tbt
        raise _refused(
            f"tokens are due every {view.tbt_objective:.3g} s and {when} would come every "
            f"{tbt:.3g} s",
            "tpot",
            share * view.completion,
        )


ADMISSION: dict[str, AdmissionPolicy] = {
    "none": AdmissionPolicy(),
    "baseline": AdmissionPolicy((check_ttft,), (check_tbt_now,)),
    "early": AdmissionPolicy((check_ttft, check_tbt_now), (check_tbt_now,)),
    "predicted": AdmissionPolicy((check_ttft, check_tbt_later), (check_tbt_now,)),
}


def tbt(predictor: Predictor, sequences: float, tokens: float) -> float:
    """Predicts seconds per token of decoding sequences with `tokens` tokens of context
    together."""
    lanes = predictor.mesh.kvp
    longest = tokens / sequences if sequences else 0.0
    count = round(sequences / lanes)
    load = LaneLoad(count, tokens / lanes, longest, samples=count)
    stage = predictor.lane(load)
    return predictor.latency(stage, count, count)


def tbt_at(
    predictor: Predictor, pool: Sequence[Assignments], at: float, completion: float, tokens: int
) -> float:
    """Predicted seconds per token on the average replica of a pool at clock second `at`, with one
    more sequence of `tokens` tokens: by then some of those that are prefilled now have come, and
    those that have decoded for `completion` seconds have left (Mooncake, section 4.3.4)."""
    counts = [member.decodes_at(at, completion) for member in pool]
    size = max(len(pool), 1)
    sequences = sum(count for count, _ in counts) / size + 1
    context = sum(held for _, held in counts) / size + tokens
    return tbt(predictor, sequences, context)


def _refused(message: str, reason: str, after: float) -> RequestError:
    after = max(after, MIN_RETRY_AFTER)
    return RequestError(
        "", f"{message}; try again in {after:.3g} s", "RESOURCE_EXHAUSTED", after, reason
    )
