"""Chunkwise dynamic sequence parallelism (Tetris): which prefill instances compute which part of a
prompt.

Sequence parallelism runs all its instances in step, so a prompt on a large group waits for the
busiest of them, while the others idle. CDSP fills that gap: the first chunk begins on the instances
that are free now and is just long enough to end when more of them are; the next chunk runs on these
as well. A group never loses an instance, so KV only ever moves to those that join. Seconds of such
moves that no linear layers hide are part of the chunk on the grown group.

    Latency    seconds of a chunk after a history, on a group of one size (Eq. 1), and its inverse
               (Alg. 3)
    Growth     seconds in which history moves to instances that join a group, and nothing else runs
    Instances  what there is to plan with: a latency for each group size, what growth takes, how
               many instances share a node, the length of a block
    cdsp       a plan in several chunks (Alg. 1); `single` in one (Alg. 2); `fixed` on groups of one
               size that never change

Planning is a function of the instances' queue times: seconds from now until each has done what it
was given. Instances are numbered node by node. Instead of lowering all queue times after each chunk
(Eq. 2) time runs on: a group can begin when its longest queue has ended or the chunk before it has,
whichever is later, which comes to the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxserve.api.errors import ConfigError

Queues = Sequence[float] | np.ndarray


# --- how long a chunk takes


@dataclass(frozen=True)
class Latency:
    """Seconds of `tokens` after `history` tokens: base + token L + history C L + pair L^2 (Tetris,
    Eq. 1)."""

    base: float
    token: float
    history: float
    pair: float

    def __call__(self, history: float, tokens: float) -> float:
        return self.base + tokens * (self.token + self.history * history + self.pair * tokens)

    def tokens(self, history: float, seconds: float) -> float:
        """Number of tokens that take `seconds`; not above 0 where one takes longer (Tetris, Alg. 3,
        in closed form)."""
        slope = self.token + self.history * history
        left = seconds - self.base
        if left <= 0:
            return 0.0
        root = math.sqrt(max(slope * slope + 4 * self.pair * left, 0.0))
        return 2 * left / (slope + root) if slope + root > 0 else math.inf


# group size, tokens of history, tokens of the chunk, seconds
LatencyPoint = tuple[int, float, float, float]


def fit(points: Iterable[LatencyPoint]) -> dict[int, Latency]:
    """The latency of each group size, by least squares of relative errors, with no coefficient
    below 0.

    A size without points that have a history gets what causal attention implies: a token sees half
    of its own chunk on average and all of the history, so that a pair with history costs twice
    `pair`. Errors: ConfigError for a size with fewer lengths than coefficients, or times that are
    not above 0.
    """
    by_size: dict[int, list[tuple[float, float, float]]] = {}
    for size, history, tokens, seconds in points:
        if not (seconds > 0 and tokens > 0 and history >= 0):
            raise ConfigError(
                "points",
                f"{(size, history, tokens, seconds)}: tokens and seconds must be above 0, "
                "and history not below",
            )
        by_size.setdefault(size, []).append((history, tokens, seconds))
    return {size: _fit(size, np.array(by_size[size], float)) for size in sorted(by_size)}


def _fit(size: int, points: np.ndarray) -> Latency:
    from scipy.optimize import nnls  # slow to import, and most servers fit nothing

    history, tokens, seconds = points.T
    columns = np.stack([np.ones_like(tokens), tokens, history * tokens, tokens * tokens])
    used = columns.max(axis=1) > 0
    if len(np.unique(points[:, :2], axis=0)) < used.sum():
        raise ConfigError(
            "points",
            f"group size {size} has fewer lengths than the {used.sum()} coefficients to find",
        )
    # seconds and their products with squares of tokens: comparable
    scale = columns.max(axis=1, keepdims=True) + ~used[:, None]
    values = np.zeros(4)
    values[used] = (
        nnls((columns / scale / seconds)[used].T, np.ones(len(seconds)))[0] / scale[used, 0]
    )
    if not used[2]:
        values[2] = 2 * values[3]
    return Latency(*values.tolist())


# --- what growth takes

# Seconds that are exposed, behind no linear layer, as history is dealt out evenly over a group that
# grows (Tetris, section 4.1): sizes of the group before and after, tokens of history, tokens of the
# chunk that then runs.
Growth = Callable[[int, int, float, float], float]


def free_growth(before: int, after: int, history: float, tokens: float) -> float:
    """Returns 0: a `Growth` where linear layers hide all moves."""
    return 0.0


# --- what plans are made of


@dataclass(frozen=True)
class Instances:
    """Prefill instances. latencies: by group size, powers of two where not aligned; per_node:
    instances in a node; block: every chunk but the last ends on a multiple of that many tokens;
    aligned: groups are those of `lanes.groups`, as the lanes of a replica meet; else any instances;
    growth: what a chunk takes besides where its group has grown since the one before."""

    latencies: Mapping[int, Latency]
    per_node: int
    block: int = 1
    aligned: bool = False
    growth: Growth = field(kw_only=True)

    def __post_init__(self) -> None:
        """Checks the fields. Errors: ConfigError."""
        powers = all(size > 0 and not size & (size - 1) for size in self.latencies)
        if not self.latencies or not (powers or self.aligned):
            raise ConfigError(
                "latencies", f"group sizes must be powers of two, not {list(self.latencies)}"
            )
        for name in ("per_node", "block"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True)
class CdspChunk:
    """`tokens` tokens of a prompt after `history` ones, on a group of instances, from `start` to
    `end` in seconds from now. exposed: seconds of these in which history moves to instances that
    joined, and nothing else runs."""

    history: int
    tokens: int
    group: tuple[int, ...]  # numbers of instances, ascending
    start: float
    end: float
    exposed: float = 0.0


@dataclass(frozen=True)
class CdspPlan:
    chunks: tuple[CdspChunk, ...]

    @property
    def ttft(self) -> float:
        """Seconds from now until the last chunk ends."""
        return self.chunks[-1].end


Planning = Callable[..., CdspPlan]  # instances, queues, tokens, rate, history


# --- groups

# how many instances of each node a group has: always those that are free first; of aligned groups
# their numbers
Counts = tuple[int, ...]


class Group(NamedTuple):
    """Instances that compute together, how many, and the seconds until the last is free."""

    counts: Counts
    size: int
    free: float


class _Groups:
    """Groups of the instances that are free first, node by node, and how they grow (Tetris, 5.1).

    Within a node a group has the instances with the shortest queues, so that its count in each
    node says which these are. Ties go to the lower number, and to the queue that was shorter at
    first.
    """

    def __init__(self, queues: Queues, per_node: int):
        times = np.asarray(queues, float).reshape(-1, per_node)
        order = np.argsort(times, axis=1, kind="stable")
        self._members = order + np.arange(len(times))[:, None] * per_node
        # by node: when one, two, ... are free
        self._free: list[list[float]] = np.take_along_axis(times, order, 1).tolist()
        self._by_full = sorted(range(len(times)), key=lambda node: self._free[node][-1])
        self._per_node = per_node
        self._known: dict[tuple[Counts, int], Group] = {}
        self.none = Group((0,) * len(times), 0, 0.0)

    def extended(self, group: Group, size: int) -> Group:
        """The group grown to `size` instances: within its nodes first."""
        key = group.counts, size
        if key not in self._known:
            self._known[key] = self._extended(group, size)
        return self._known[key]

    def _extended(self, before: Group, size: int) -> Group:
        counts = list(before.counts)
        need = size - before.size
        used = [node for node, count in enumerate(counts) if count]
        room = len(used) * self._per_node - before.size
        if need >= room:
            for node in used:
                counts[node] = self._per_node
            self._open(counts, need - room)
        elif len(used) == 1:
            counts[used[0]] += need
        else:
            waits = sorted(
                (self._free[node][place], node)
                for node in used
                for place in range(counts[node], self._per_node)
            )
            for _, node in waits[:need]:
                counts[node] += 1
        waits_of_nodes = (free[count - 1] for free, count in zip(self._free, counts) if count)
        return Group(tuple(counts), size, max(waits_of_nodes))

    def _open(self, counts: list[int], need: int) -> None:
        """Adds whole unused nodes, those that are free first; for the others that are needed, the
        node that has that many free first."""
        unused = [node for node in self._by_full if not counts[node]]
        whole, rest = divmod(need, self._per_node)
        for node in unused[:whole]:
            counts[node] = self._per_node
        if rest:
            counts[min(sorted(unused[whole:]), key=lambda node: self._free[node][rest - 1])] = rest

    def members(self, group: Group) -> tuple[int, ...]:
        return tuple(
            sorted(
                number
                for node, count in enumerate(group.counts)
                for number in self._members[node, :count].tolist()
            )
        )


class _AlignedGroups:
    """Groups of neighbours, as buddies are: the group of each size that is free first, and what
    grows out of it."""

    def __init__(self, queues: Queues):
        self._times = np.asarray(queues, float)
        self._known: dict[tuple[Counts, int], Group] = {}
        self.none = Group((), 0, 0.0)

    def extended(self, group: Group, size: int) -> Group:
        """The group grown to `size` instances."""
        key = group.counts, size
        if key not in self._known:
            waits = self._times.reshape(-1, size).max(1)
            index = group.counts[0] // size if group.counts else int(waits.argmin())
            members = tuple(range(index * size, (index + 1) * size))
            self._known[key] = Group(members, size, float(waits[index]))
        return self._known[key]

    def members(self, group: Group) -> tuple[int, ...]:
        return group.counts


# --- planners


def cdsp(
    instances: Instances, queues: Queues, tokens: int, rate: float, history: int = 0
) -> CdspPlan:
    """The plan with the earliest end of all that chunks of growing groups make (Tetris, Alg. 1).

    queues: [instances] seconds. rate: the improvement rate; a larger group is taken only if it
    shortens what is left by more than this share. history: tokens before these that are computed
    already; that they move to the first group is not counted. Errors: ConfigError for what makes no
    sense.
    """
    return _planned(instances, queues, tokens, rate, history, chunked=True)


def single(
    instances: Instances, queues: Queues, tokens: int, rate: float, history: int = 0
) -> CdspPlan:
    """The whole prompt as one chunk (Tetris, Alg. 2): group sizes in ascending order, each taken
    instead of the one before only if it saves more than `rate` of the time. With a rate of 0 this
    is what LoongServe does for one request at a time."""
    return _planned(instances, queues, tokens, rate, history, chunked=False)


def fixed(
    instances: Instances, queues: Queues, tokens: int, rate: float, history: int = 0, *, size: int
) -> CdspPlan:
    """One chunk on the group that is free first of those that the instances are divided into,
    neighbours together. The rate is not used."""
    _check(instances, queues, tokens, rate)
    if size not in instances.latencies or len(queues) % size:
        raise ConfigError(
            "size",
            f"{size} is no group size of {list(instances.latencies)} "
            f"that divides {len(queues)} instances",
        )
    groups = _AlignedGroups(queues)
    group = groups.extended(groups.none, size)
    end = group.free + instances.latencies[size](history, tokens)
    return CdspPlan((CdspChunk(history, tokens, groups.members(group), group.free, end),))


PLANNERS: Mapping[str, Planning] = {
    "single": single,
    "cdsp": cdsp,
    **{f"fixed-{size}": functools.partial(fixed, size=size) for size in (1, 2, 4, 8, 16)},
}


def _check(instances: Instances, queues: Queues, tokens: int, rate: float) -> None:
    times = np.asarray(queues, float)
    if times.ndim != 1 or not len(times) or len(times) % instances.per_node:
        raise ConfigError(
            "queues",
            f"{times.shape} queue times do not make nodes of {instances.per_node} instances",
        )
    if not (np.isfinite(times).all() and times.min() >= 0):
        raise ConfigError("queues", "queue times must be finite and not below 0")
    if len(times) < min(instances.latencies):
        raise ConfigError(
            "queues",
            f"{len(times)} instances are fewer than the smallest group, {min(instances.latencies)}",
        )
    if tokens < 1:
        raise ConfigError("tokens", f"must be at least 1, not {tokens}")
    if not 0 <= rate < 1:
        raise ConfigError("rate", f"must be at least 0 and below 1, not {rate}")


# --- the search


class FoundChunk(NamedTuple):
    """A chunk while plans are searched for; see `CdspChunk`."""

    history: int
    tokens: int
    group: Group
    start: float
    end: float
    exposed: float


def _planned(
    instances: Instances, queues: Queues, tokens: int, rate: float, history: int, chunked: bool
) -> CdspPlan:
    _check(instances, queues, tokens, rate)
    search = _Search(instances, queues, history + tokens, rate)
    none = search.groups.none
    last = len(search.sizes) - 1
    if chunked:
        chunks = search.chunked(history, none, 0, last, 0.0, math.inf)
    else:
        chunks = search.whole(history, none, 0, last, 0.0)[1]
    members = search.groups.members
    return CdspPlan(
        tuple(CdspChunk(**each._asdict() | {"group": members(each.group)}) for each in chunks)
    )


class _Search:
    """The search for one prompt, at one moment. Group sizes go by their index, ascending."""

    def __init__(self, instances: Instances, queues: Queues, tokens: int, rate: float):
        whole = lambda size: size <= len(queues) and not (instances.aligned and len(queues) % size)
        self.sizes = sorted(filter(whole, instances.latencies))
        self.latencies = [instances.latencies[size] for size in self.sizes]
        self.groups = (
            _AlignedGroups(queues) if instances.aligned else _Groups(queues, instances.per_node)
        )
        self.total = tokens
        self.block = instances.block
        self.growth = instances.growth
        self.keep = 1 - rate
        self.least = [_least(self.latencies[index:]) for index in range(len(self.sizes))]

    def whole(
        self, history: int, before: Group, first: int, last: int, now: float
    ) -> tuple[int, list[FoundChunk]]:
        """Plans what is left as one chunk (Alg. 2), on a group of the sizes with index `first` to
        `last`. Returns its size's index, and it."""
        left = self.total - history
        best = math.inf
        chosen = None
        place = first
        for index in range(first, last + 1):
            group = self.groups.extended(before, self.sizes[index])
            start = max(now, group.free)
            exposed = self._exposed(before, index, history, left)
            seconds = start - now + exposed + self.latencies[index](history, left)
            if chosen is None or seconds < self.keep * best:
                best = seconds
                place = index
                chosen = FoundChunk(history, left, group, start, now + seconds, exposed)
        assert chosen is not None
        return place, [chosen]

    def chunked(
        self, history: int, before: Group, first: int, last: int, now: float, limit: float
    ) -> list[FoundChunk]:
        """Plans the chunks of what is left (Alg. 1). None is on a larger group than Alg. 2 gives to
        all of it, which is where the load comes in. Gives up the search, not the answer, for what
        cannot end before `limit`."""
        last, best = self.whole(history, before, first, last, now)
        for current in range(first, last):
            group = self.groups.extended(before, self.sizes[current])
            start = max(now, group.free)
            for following in range(current + 1, last + 1):
                free = self.groups.extended(group, self.sizes[following]).free
                count = self._filling(history, before, current, free - start)
                if not count:
                    continue
                done = history + count
                exposed = self._exposed(before, current, history, count)
                end = start + exposed + self.latencies[current](history, count)
                if end + self.least[following](done, self.total - done) >= min(best[-1].end, limit):
                    continue
                others = self.chunked(done, group, following, last, end, min(best[-1].end, limit))
                if others[-1].end < best[-1].end:
                    best = [FoundChunk(history, count, group, start, end, exposed), *others]
        return best

    def _exposed(self, before: Group, index: int, history: int, tokens: int) -> float:
        """Seconds by which a chunk takes longer as its group has grown out of `before`."""
        size = self.sizes[index]
        if not 0 < before.size < size:
            return 0.0
        return self.growth(before.size, size, history, tokens)

    def _filling(self, history: int, before: Group, index: int, seconds: float) -> int:
        """Tokens of a chunk that takes `seconds`, in whole blocks; 0 where it would be empty, all
        that is left, or so short that the next smaller group is as fast. Of `seconds`, exposed
        moves take as many as beside a chunk that fills all of them."""
        latency = self.latencies[index]
        left = self.total - history
        tokens = min(latency.tokens(history, seconds), left)
        if before.size and tokens >= 1:
            exposed = self._exposed(before, index, history, int(tokens))
            tokens = latency.tokens(history, seconds - exposed)
        if not tokens < left:
            return 0
        ends = (history + int(tokens)) // self.block * self.block
        count = ends - history
        if count <= 0 or (
            index
            and self._seconds(history, before, index, count)
            >= self._seconds(history, before, index - 1, count)
        ):
            return 0
        return count

    def _seconds(self, history: int, before: Group, index: int, tokens: int) -> float:
        """Seconds of a chunk on a group grown out of `before`."""
        exposed = self._exposed(before, index, history, tokens)
        return exposed + self.latencies[index](history, tokens)


def _least(latencies: Sequence[Latency]) -> Latency:
    """A lower bound of what chunks take that any of these compute, however they are cut: of each
    coefficient the least, and no more for a pair within a chunk than when a cut makes it one with
    history."""
    history = min(latency.history for latency in latencies)
    return Latency(
        min(latency.base for latency in latencies),
        min(latency.token for latency in latencies),
        history,
        min(history / 2, *(latency.pair for latency in latencies)),
    )
