"""Results of a run of a simulated cluster: a record of each request, loads, bytes moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from experiments.virtual_cluster.copies import Copies
from jaxserve.lab.quotients import quotient

SLOWEST_SHARE = (
    0.1  # of the gaps between a request's tokens, of which TBT is the mean (Mooncake 7.1)
)


def slowest_mean(times: Sequence[float]) -> float:
    """Mean of the longest tenth of the gaps between clock seconds, of at least one; 0 of none."""
    gaps = np.sort(np.diff(times))
    if not len(gaps):
        return 0.0
    return float(gaps[-max(round(SLOWEST_SHARE * len(gaps)), 1) :].mean())


@dataclass(slots=True)
class ClusterRecord:
    """Fate of a request, in clock seconds and tokens.

    prefill_on, decode_on: replicas, None where it did not get there. cached: tokens of its prompt
    that were not computed, of which `fetched` came from another replica. transferred: clock second
    at which its KV was where it is decoded. reason: 'length'; 'unfinished'; 'refused' on arrival or
    'refused_late' after its prefill, in vain, for `refusal` (a reason of metrics). first, end: 0
    where that did not happen. tbt: mean of the slowest tenth of the gaps between its tokens, of
    which the longest is longest_gap.
    """

    id: str
    arrival: float
    prompt: int
    output: int
    prefill_on: int | None = None
    decode_on: int | None = None
    predicted_ttft: float = 0.0
    prefill_seconds: float = 0.0  # predicted seconds of computing what was not cached
    cached: int = 0
    fetched: int = 0
    first: float = 0.0
    transferred: float = 0.0
    end: float = 0.0
    tbt: float = 0.0
    longest_gap: float = 0.0
    reason: str = "unfinished"
    refusal: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first token; NaN where none came."""
        return self.first - self.arrival if self.first else float("nan")

    @property
    def computed(self) -> int:
        """Tokens of its prompt that were computed."""
        return self.prompt - self.cached if self.first else 0


@dataclass(frozen=True, slots=True)
class LoadSample:
    """Loads of the pools at one moment, as shares of the objectives: mean seconds of queued prefill
    over that for the first token, mean seconds per token over that."""

    at: float
    prefill: float
    decode: float


class RoleChange(NamedTuple):
    """A change of sides. at: clock second; member: that changed; prefilling: replicas that prefill
    from then on."""

    at: float
    member: int
    prefilling: int


@dataclass(frozen=True)
class ClusterReport:
    """Results of a run. busy: seconds of steps on each replica. bytes_sent: over the network, and
    `bytes_fetched` of these for prefixes. copies: of blocks over the caches. samples: of the
    loads. role_changes: in their order."""

    records: list[ClusterRecord]
    busy: list[float]
    bytes_sent: float
    bytes_fetched: float
    copies: Copies
    samples: list[LoadSample]
    role_changes: list[RoleChange] = field(default_factory=list)

    @property
    def served(self) -> list[ClusterRecord]:
        """Requests that were served to their end."""
        return [record for record in self.records if record.reason == "length"]

    @property
    def refused(self) -> dict[str, int]:
        """Requests that were refused on arrival, and after their prefill."""
        reasons = [record.reason for record in self.records]
        return {name: reasons.count(name) for name in ("refused", "refused_late")}

    def ttft(self) -> np.ndarray:
        """Seconds to the first token of those that had one [n]."""
        return np.array([record.ttft for record in self.records if record.first])

    def tbt(self) -> np.ndarray:
        """Seconds between tokens, see ClusterRecord, of those that were served [n]."""
        return np.array([record.tbt for record in self.served])

    def hit_rate(self) -> float:
        """Share of the tokens of prompts that were prefilled which were not computed."""
        begun = [record for record in self.records if record.first]
        total = sum(record.prompt for record in begun)
        return quotient(sum(record.cached for record in begun), total)

    def effective(self, ttft: float, tbt: float) -> float:
        """Share of all requests that were served within both objectives, in seconds."""
        good = sum(record.ttft <= ttft and record.tbt <= tbt for record in self.served)
        return good / max(len(self.records), 1)
