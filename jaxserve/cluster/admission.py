"""Refuses requests that would miss their objectives, at overload (Mooncake, section 4.3).

A policy is a tuple of checks, made before anything is computed: a request that is refused when its
decode would begin has been prefilled in vain. That is why decoding is checked early, and why with
the load that decoding will have at the end of the prefill, which today's load does not tell
(section 4.3.3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxserve.api.errors import RequestError

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


# raises RequestError of status RESOURCE_EXHAUSTED, with `retry_after`
Check = Callable[[AdmissionView], None]


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


# what a policy checks on arrival
ADMISSION: dict[str, tuple[Check, ...]] = {
    "none": (),
    "early": (check_ttft, check_tbt_now),
    "predicted": (check_ttft, check_tbt_later),
}


def _refused(message: str, reason: str, after: float) -> RequestError:
    after = max(after, MIN_RETRY_AFTER)
    return RequestError(
        "", f"{message}; try again in {after:.3g} s", "RESOURCE_EXHAUSTED", after, reason
    )
