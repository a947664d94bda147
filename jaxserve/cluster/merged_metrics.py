"""The metrics of a conductor's members: their sums, and some of each replica.

Sums of what only grows never fall: what a replica has counted stays in them when it is lost, begins
again or leaves. Counts between the last scrape and the loss of a replica are lost with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.cluster.member import Member
from jaxserve.observe.metric_rows import OF_TRANSFERS, PREFIX
from jaxserve.replica.protocol import Replica

ALIVE = "replica_alive"
# ends of the names of gauges that are means, not sums
AVERAGED = ("_perc", "_scale", "_per_second")
GROWING = ("counter", "histogram", "summary")  # types of families whose samples never fall
CREATED = "_created"  # the end of the names of samples that are moments
OF_EACH = (  # metrics that are also shown of each replica
    "num_requests_running",
    "num_requests_waiting",
    "queued_prefill_seconds",
    "kv_cache_usage_perc",
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_hits",
    "kv_blocks_from_peers",
    *OF_TRANSFERS,
    "num_preemptions",
)


class Place(NamedTuple):
    """A sample's place: its family's name, its own, and its labels."""

    family: str
    sample: str
    labels: tuple[tuple[str, str], ...]


Values = dict[Place, float]


class GrowingTotals:
    """Sums over all members of samples that only grow, of lost members too."""

    def __init__(self) -> None:
        self._of_members: dict[Member, Values] = {}  # newest of each
        self._before: Values = {}  # of members that have left, and of those before they restarted

    def take(self, member: Member, values: Values) -> None:
        """Takes the newest values of a member. If one is smaller than before, the member has
        begun again."""
        known = self._of_members.get(member, {})
        if any(values.get(place, 0.0) < value for place, value in known.items()):
            _add(self._before, known)
        self._of_members[member] = values

    def keep(self, members: Iterable[Member]) -> None:
        """Forgets all other members, which have left, and keeps their values."""
        for member in self._of_members.keys() - set(members):
            _add(self._before, self._of_members.pop(member))

    def sums(self) -> Values:
        totals = dict(self._before)
        for values in self._of_members.values():
            _add(totals, values)
        return totals


class MergedMetrics(Collector):
    """The metrics of all members: sums of counters, histograms and gauges, means of shares. Beside
    them which members are alive, and the metrics OF_EACH by replica, as `replica_` and their
    name."""

    def __init__(self, members: Callable[[], Sequence[Member]]):
        self._members = members
        self._totals = GrowingTotals()
        self._known: dict[str, Metric] = {}  # families that were seen, without samples
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        members = self._members()
        found = [(one, one.ask(_families)) for one in members if one.alive]
        scraped = [(member, families) for member, families in found if families is not None]
        yield self._alive(members)
        yield from _of_each(scraped)
        with self._lock:
            yield from self._merged(members, scraped)

    def _merged(
        self, members: Sequence[Member], scraped: Sequence[tuple[Member, list[Metric]]]
    ) -> list[Metric]:
        now: dict[Place, list[float]] = {}  # of what may fall
        for member, families in scraped:
            growing: Values = {}
            for family in families:
                self._known.setdefault(family.name, _without_samples(family, family.name))
                for sample in family.samples:
                    place = Place(family.name, sample.name, tuple(sorted(sample.labels.items())))
                    if family.type in GROWING and not sample.name.endswith(CREATED):
                        growing[place] = sample.value
                    else:
                        now.setdefault(place, []).append(sample.value)
            self._totals.take(member, growing)
        self._totals.keep(members)
        merged = {name: _without_samples(family, name) for name, family in self._known.items()}
        for place, total in self._totals.sums().items():
            merged[place.family].add_sample(place.sample, dict(place.labels), total)
        for place, values in now.items():
            value = _together(merged[place.family], place.sample, values)
            merged[place.family].add_sample(place.sample, dict(place.labels), value)
        return [family for family in merged.values() if family.samples]

    def _alive(self, members: Sequence[Member]) -> Metric:
        labels = ["replica", "role"]
        alive = GaugeMetricFamily(PREFIX + ALIVE, "1: it can be sent requests", labels=labels)
        for member in members:
            role = member.role.value if member.joined else ""
            alive.add_metric([member.name, role], float(member.usable))
        return alive


def _of_each(scraped: Sequence[tuple[Member, list[Metric]]]) -> list[Metric]:
    """The metrics OF_EACH with a label for the replica."""
    shown: dict[str, Metric] = {}
    names = {PREFIX + name for name in OF_EACH}
    for member, families in scraped:
        for family in families:
            if family.name not in names:
                continue
            name = PREFIX + "replica_" + family.name.removeprefix(PREFIX)
            one = shown.setdefault(name, _without_samples(family, name))
            for sample in family.samples:
                if not sample.name.endswith(CREATED):
                    suffix = sample.name.removeprefix(family.name)
                    labels = {**sample.labels, "replica": member.name}
                    one.add_sample(name + suffix, labels, sample.value)
    return list(shown.values())


def _without_samples(family: Metric, name: str) -> Metric:
    return Metric(name, family.documentation, family.type)


def _add(totals: Values, values: Values) -> None:
    for place, value in values.items():
        totals[place] = totals.get(place, 0.0) + value


def _together(family: Metric, sample: str, values: list[float]) -> float:
    """Merges the values of samples that may fall, of the members that are alive."""
    if family.type == "info" or sample.endswith(CREATED):
        return values[0]
    total = sum(values)
    if family.type == "gauge" and family.name.endswith(AVERAGED):
        return total / len(values)
    return total


def _families(replica: Replica) -> list[Metric]:
    return list(replica.metrics_registry.collect())
