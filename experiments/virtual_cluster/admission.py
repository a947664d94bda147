"""Admission in two stages (Mooncake, section 4.3): on arrival, as `jaxserve.cluster.admission` has
it, and when a request's prefill has ended and its decode would begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.cluster.admission import ADMISSION, AdmissionView, Check, check_tbt_now, check_ttft
from jaxserve.cluster.assignments import Assignments
from jaxserve.costs.predictor import Predictor
from jaxserve.lanes.load import LaneLoad


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


POLICIES: dict[str, AdmissionPolicy] = {
    "none": AdmissionPolicy(),
    "baseline": AdmissionPolicy((check_ttft,), (check_tbt_now,)),
    "early": AdmissionPolicy(ADMISSION["early"], (check_tbt_now,)),
    "predicted": AdmissionPolicy(ADMISSION["predicted"], (check_tbt_now,)),
    # the paper's words for the last two: what is accepted is decoded
    "early, once": AdmissionPolicy(ADMISSION["early"]),
    "predicted, once": AdmissionPolicy(ADMISSION["predicted"]),
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
