"""Rates at which the lanes of a group attend and send, and what that takes per layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, Self

from jaxserve.lanes.work import Heads, require


@dataclasses.dataclass(frozen=True)
class Link:
    """A message of n bytes takes `seconds + n / bytes_per_s`."""

    seconds: float
    bytes_per_s: float

    def __call__(self, size: float) -> float:
        return self.seconds + size / self.bytes_per_s

    def in_layers(self, share: float) -> Link:
        """Returns the link as it seems per layer, where that share of the layers sends messages."""
        return Link(share * self.seconds, self.bytes_per_s / share)


LINKS = ("hop", "all_gather", "all_to_all")  # the fields of `LaneLinks`


@dataclasses.dataclass(frozen=True, slots=True)
class LaneLinks:
    """Links between the lanes of a group."""

    hop: Link  # to the next lane of the ring
    all_gather: Link  # by the bytes that a lane receives
    all_to_all: Link  # by the bytes that a lane sends

    @classmethod
    def alike(cls, link: Link) -> LaneLinks:
        """Returns one link for all that is sent."""
        return cls(link, link, link)

    def in_layers(self, share: float) -> LaneLinks:
        """Returns the links as they seem per layer, where that share of the layers sends."""
        return LaneLinks(**{name: link.in_layers(share) for name, link in self.by_name().items()})

    def by_name(self) -> dict[str, Link]:
        """Returns the links by what they are for."""
        return {name: getattr(self, name) for name in LINKS}


# by the size of the group: a small one may lie in a node, a large one in several
GroupLinks = Mapping[int, LaneLinks]


def links_of(links: GroupLinks, size: int) -> LaneLinks:
    """Returns the links in groups of `size` lanes: where no such group was measured, those of the
    next larger one, or of the largest."""
    return links[min((known for known in links if known >= size), default=max(links))]


def links_to_json(links: GroupLinks) -> dict[str, Any]:
    """Returns links as JSON has them: by size and name, the seconds of a message and its bytes per
    second."""
    return {
        str(size): {name: dataclasses.astuple(link) for name, link in each.by_name().items()}
        for size, each in links.items()
    }


def links_from_json(fields: dict[str, Any], lanes: int) -> dict[int, LaneLinks]:
    """Reads links that `links_to_json` gave, or, as earlier profiles have them, one set without a
    size: of `lanes` lanes, and so of groups of every size. Errors: KeyError, TypeError and
    ValueError for anything else."""
    by_size = {str(lanes): fields} if "hop" in fields else fields
    return {
        int(size): LaneLinks(**{name: Link(*map(float, link)) for name, link in each.items()})
        for size, each in by_size.items()
    }


def seconds_beside(one: float, other: float, hidden: float) -> float:
    """Returns the seconds of two things that run side by side. hidden: share of the shorter one
    that runs while the longer one does."""
    return max(one, other) + (1 - hidden) * min(one, other)


@dataclasses.dataclass(frozen=True, slots=True)
class ExchangeRates:
    """Rates at which one rank attends and sends: measured, not off a data sheet (section 3.4).
    hidden: share of the shorter of a hop and the attention beside it that runs while the longer one
    does. Errors: ConfigError for a rate that is not positive, or a share beyond 1."""

    flops_per_s: float  # attention of many queries
    read_bytes_per_s: float  # KV, by attention of few
    launch: float  # seconds that every call of attention takes besides
    hop: Link  # as `LaneLinks` has these three
    all_gather: Link
    all_to_all: Link
    hidden: float = 1.0

    def __post_init__(self) -> None:
        for field in ("flops_per_s", "read_bytes_per_s"):
            require(getattr(self, field) > 0, field, getattr(self, field), "above 0")
        for field in LINKS:
            link = getattr(self, field)
            require(link.bytes_per_s > 0, field, link, "above 0 bytes per second")
        require(self.launch >= 0, "launch", self.launch, "0 or more")
        require(0 <= self.hidden <= 1, "hidden", self.hidden, "a share from 0 to 1")

    def beside(self, hop: float, attention: float) -> float:
        """Seconds of a hop and the attention that runs beside it."""
        return seconds_beside(hop, attention, self.hidden)

    @property
    def links(self) -> LaneLinks:
        """The links of these rates."""
        return LaneLinks(self.hop, self.all_gather, self.all_to_all)

    def with_links(self, links: LaneLinks) -> ExchangeRates:
        """Returns the rates with other links."""
        return dataclasses.replace(
            self, hop=links.hop, all_gather=links.all_gather, all_to_all=links.all_to_all
        )


class AttentionCosts(Protocol):
    """Seconds of attention per layer, as a profile has them: see `costs.coefficients.Costs`."""

    @property
    def decode(self) -> float: ...
    def attend(self, pairs: float, read: float, queries: float) -> float: ...
    def attend_decodes(self, count: int, context: float) -> float: ...


@dataclasses.dataclass(frozen=True)
class ExchangeTimes:
    """Seconds per layer of attention and messages in groups of `lanes` lanes. piece: tokens of KV
    that a lane sends on at once round a ring, 0: its shard. costs: of attention, where a profile
    has them; None: as the rates say. Errors: ConfigError that names the field."""

    lanes: int
    heads: Heads
    rates: ExchangeRates
    piece: int = 0
    costs: AttentionCosts | None = None

    def __post_init__(self) -> None:
        require(self.lanes >= 1, "lanes", self.lanes, "1 or more")
        require(self.piece >= 0, "piece", self.piece, "0 or more")

    def attention(self, pairs: float, read: float, queries: float = 0.0) -> float:
        """Seconds of `pairs` pairs of query and key, of `queries` queries, over `read` tokens of
        KV: computing or reading, whichever takes longer."""
        if self.costs is not None:
            return self.costs.attend(pairs, read, queries)
        heads = self.heads
        rates = self.rates
        computed = heads.pair_flops * pairs / rates.flops_per_s
        return rates.launch + max(computed, heads.kv_bytes * read / rates.read_bytes_per_s)

    def attention_of_decodes(self, count: int, kv: float) -> float:
        """Seconds of a call of attention of `count` decodes over `kv` tokens together."""
        if self.costs is None:
            return self.attention(kv, kv, count)
        return self.costs.attend_decodes(count, kv)

    def joined(self, links: Iterable[str]) -> Self:
        """Returns the times of what goes with other messages over links of these names, and costs
        its bytes only."""
        known = self.rates.links
        joined = {name: Link(0.0, getattr(known, name).bytes_per_s) for name in links}
        rates = self.rates.with_links(dataclasses.replace(known, **joined))
        return dataclasses.replace(self, rates=rates)

    @property
    def decode_call(self) -> float:
        """Seconds of a call of attention of decodes that attend to nothing."""
        return self.rates.launch if self.costs is None else self.costs.decode
