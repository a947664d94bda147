"""Fair shares of the replica's time between tenants: who has used how much of its share, and in
which turn tenants go.

A tenant has a credit in predicted seconds. While it has requests, it gets its share of every second
in proportion to weights, and a step takes from each tenant what its rows add to the step. Tenants
with credit left are within their shares: they have the first turn together, in which the policy
orders their prompts. The others come behind them, the least indebted for its weight first, so that
tenants that all want more than there is get it in proportion to their weights. A new one begins
with none, and nothing is saved up without requests, but debts are paid.

Credit ends at a few seconds, so that no tenant can flood after some quiet. Debt ends at more: by so
much a tenant that came in bursts, and used less than its share on the whole, is served before one
that floods, as if it were alone; and so long at most one in debt waits for others. A tenant that is
alone uses what no other wants: its debt for that ends at a few steps, by which others that come are
before it at first, and it is not behind them for long.

That is start-time fair queueing over predicted seconds, as VTC is over tokens (Sheng et al., OSDI
2024), with bounded credit and debt in place of virtual times that never part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.costs.coefficients import Costs

MOST_CREDIT = 2.0  # seconds
MOST_DEBT = 30.0  # seconds
MOST_IDLE = 64  # tenants without requests that are remembered, for MOST_DEBT seconds
# share of the step time that others would have which steps take whose prompts are all of tenants in
# debt: prompts of others that come meanwhile wait for the step's end
DEBTORS_STEP = 1 / 3
MIN_STEPS = 4  # of the largest step, that both are at least: with costs that are no seconds too
ALONE_STEPS = 2  # of the largest step, by which a tenant that is alone may come to be in debt


class TenantShares:
    """The credit of each tenant that has requests or debts, and of some that have neither. A
    tenant's `number` stays while it is known, then another tenant may get it.

    weights: of tenants that have not 1. most_credit, most_debt: seconds. Those in `joined` are
    called with the number of a tenant that was not known. `used`: seconds by tenant, also of those
    that are not known any more."""

    def __init__(
        self,
        weights: Mapping[str, float],
        most_credit: float = MOST_CREDIT,
        most_debt: float = MOST_DEBT,
    ):
        self.most_credit = most_credit
        self.most_debt = most_debt
        self.joined: list[Callable[[int], None]] = []
        self.used: dict[str, float] = {}
        self._weights = weights
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []  # by number
        self._free: list[int] = []
        # by number; of numbers that no tenant has, weight 0
        self._weight = np.zeros(0)
        self._credit = np.zeros(0)
        self._requests = np.zeros(0, np.int64)  # live ones
        self._seen = np.zeros(0)  # clock second at which each had requests last
        self._turns: np.ndarray | None = None
        self._busy_until = 0.0  # clock second at which all packed steps are done, as predicted
        self._alone_debt = 0.0  # seconds
        self._idle = 0.0  # seconds without any request since the last step was packed

    def __len__(self) -> int:
        """Number of known tenants."""
        return len(self._numbers)

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    # --- tenants come and go

    def number(self, name: str) -> int:
        """Returns a tenant's number; one that was not known begins without credit."""
        number = self._numbers.get(name)
        if number is not None:
            return number
        if not self._free:
            self._free.append(len(self._weight))
            self._weight = np.append(self._weight, 0.0)
            self._credit = np.append(self._credit, 0.0)
            self._requests = np.append(self._requests, 0)
            self._seen = np.append(self._seen, -np.inf)
            self._names.append("")
        number = self._numbers[name] = self._free.pop()
        self._names[number] = name
        self._weight[number] = self._weights.get(name, 1.0)
        self._credit[number] = 0.0
        self._turns = None
        for hear in self.joined:
            hear(number)
        return number

    def begin(self, name: str, now: float) -> None:
        """Notes that a request of this tenant was accepted at clock second `now`."""
        number = self.number(name)
        if not self._requests.any():
            self._idle += max(0.0, now - self._busy_until)
            self._busy_until = max(self._busy_until, now)
        self._requests[number] += 1
        self._seen[number] = now

    def end(self, name: str) -> None:
        """Notes that a request of this tenant has ended."""
        self._requests[self._numbers[name]] -= 1

    # --- what they use

    def charge_all(self, seconds: float, now: float) -> None:
        """Does what `charge` does for a step of `seconds` of the only known tenant."""
        self._widen(seconds)
        ((name, number),) = self._numbers.items()
        self.used[name] = self.used.get(name, 0.0) + seconds
        weight = float(self._weight[number])
        share = weight / (1 + weight)
        before = float(self._credit[number])
        credit = before + share * (seconds + self._idle) - seconds
        credit = max(credit, min(before, -self._alone_debt))
        self._credit[number] = min(max(credit, -self.most_debt), self.most_credit)
        self._turns = None
        self._idle = 0.0
        self._busy_until = now + seconds

    def charge(self, numbers: np.ndarray, seconds: np.ndarray, now: float) -> None:
        """Takes the seconds [n] of a step that was packed at clock second `now` from the tenants of
        these numbers [n], and gives all known ones their shares of its time."""
        total = float(seconds.sum())
        self._widen(total)
        known = self._weight > 0
        active = known & ((self._requests > 0) | (self._credit < 0))
        weight = np.where(active, self._weight, 0.0)
        # one that is alone is in debt where it uses more than if another had the same right
        alone = np.count_nonzero(active) < 2
        whole = 1 + weight if alone else weight.sum()
        credit = self._credit + weight / whole * (total + self._idle)
        taken = np.bincount(numbers, seconds, len(weight))
        credit -= taken
        for number in np.flatnonzero(taken).tolist():
            name = self._names[number]
            self.used[name] = self.used.get(name, 0.0) + float(taken[number])
        if alone:
            credit = np.maximum(credit, np.minimum(self._credit, -self._alone_debt))
        self._credit = np.clip(credit, -self.most_debt, self.most_credit)
        self._turns = None
        self._idle = 0.0
        self._busy_until = now + total
        self._seen[self._requests > 0] = now
        idle = known & (self._requests == 0) & (self._credit >= 0)
        gone = idle & (self._seen < now - self.most_debt)  # one that is alone then has all
        if np.count_nonzero(idle) > MOST_IDLE:
            gone = idle
        if gone.any():
            self._forget(gone)

    def _widen(self, seconds: float) -> None:
        self.most_credit = max(self.most_credit, MIN_STEPS * seconds)
        self.most_debt = max(self.most_debt, MIN_STEPS * seconds)
        self._alone_debt = max(self._alone_debt, ALONE_STEPS * seconds)

    def _forget(self, which: np.ndarray) -> None:
        for name, number in list(self._numbers.items()):
            if which[number]:
                del self._numbers[name]
                self._weight[number] = 0.0
                self._free.append(number)

    # --- who goes first

    @property
    def turns(self) -> np.ndarray:
        """The turn of each tenant, by number: 0 within its share, else 1, 2, ... by debt."""
        if self._turns is None:
            turns = np.zeros(len(self._weight), np.int64)
            debtors = np.flatnonzero((self._credit <= 0) & (self._weight > 0))
            debt = self._credit[debtors] / self._weight[debtors]
            turns[debtors[np.argsort(-debt, kind="stable")]] = np.arange(1, len(debtors) + 1)
            self._turns = turns
        return self._turns

    @property
    def parts(self) -> np.ndarray:
        """Share of slots and pages of each tenant that has requests, by number; 0 of others."""
        weight = np.where(self._requests > 0, self._weight, 0.0)
        return weight / max(weight.sum(), 1e-9)

    def part_beside(self, number: int) -> float:
        """Returns the share of a tenant beside all others that have requests."""
        others = self._requests > 0
        others[number] = False
        weight = float(self._weight[number])
        return weight / (weight + float(self._weight[others].sum()))

    def credits(self) -> dict[str, float]:
        """Returns the seconds that each known tenant may use beyond its share; below 0 that it has
        used."""
        return {name: float(self._credit[number]) for name, number in self._numbers.items()}

    def check(self, live: Mapping[str, int]) -> None:
        """Compares with the number of live requests of each tenant. Errors: AssertionError with
        what differs."""
        counts = {name: int(self._requests[n]) for name, n in self._numbers.items()}
        assert {name: count for name, count in counts.items() if count} == live, (
            f"requests by tenant {counts}, counted {live}"
        )
        within = (-self.most_debt <= self._credit) & (self._credit <= self.most_credit)
        assert within.all(), f"credits {self._credit}"


def seconds_by_row(batch: Batch, costs: Costs) -> np.ndarray:
    """Returns the share of a batch's predicted seconds of each row [n], in proportion to what it
    adds to linear parts and attention."""
    length = batch.length.astype(float)
    start = batch.start.astype(float)
    decode = batch.is_decode
    attention = (costs.pair * (start + length / 2) + costs.chunk_token) * length
    attention[decode] = costs.decode_seq + costs.decode_kv * start[decode]
    added = costs.linear_token * length + attention
    whole = added.sum()
    if whole <= 0:
        added = length
        whole = length.sum()
    return added * (batch.seconds / whole)
