"""LoongServe (Wu et al., SOSP 2024) as a baseline: elastic sequence parallelism over instances,
prefill and decode apart, no preemption.

A prompt is computed at once, by as many instances as a dynamic program over the head of the queue
gives it, each holding a part of the sequence; attention goes round in a ring. Its KV then moves to
the decode pool, as few instances as hold the KV of all that decode.

By default, what is not known is modelled in its favour: moving KV, scaling and borrowing instances
cost nothing, instances that do not decode are all free for prefill, and decodes that need another
instance get it at once, even while that finishes a prefill. What is not: it cannot interrupt a
prefill that has begun (Medha, sections 2 and 5). `Elasticity` is what these take; `PUBLISHED` is
what LoongServe's paper and its public code say of that, part by part.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxserve.costs.coefficients import Costs
from jaxserve.lab.simulate.arrival import Arrival, class_of
from jaxserve.lab.simulate.noise import NO_NOISE, Noise
from jaxserve.lab.simulate.recorder import Recorder, RequestRecord
from jaxserve.lanes.rates import Link

MAX_CONSIDERED = 16  # waiting prompts that the dynamic program looks at, which takes their cube
# seconds of a step for the manager's calls to its instances: the guide to LoongServe's public code
# (docs/artifact-eval) shows 12.4 ms for a decode step of LWM-7B on 4 instances of 2 A800, where our
# costs of that model on A100 and SCALE_UP say 7.4
STEP = 5.0e-3
# seconds of a prefill for each instance of its group after the first: the same run shows 32.8 ms
# for a prompt of a few tokens on 4 instances, where our costs and STEP say 11.6. Table 1 of Tetris
# has more: 24 ms an instance, over what our costs say of 8 and 16 A100
HOP = 7.1e-3
SCALE_DOWN = 0.02  # of a prefill's time on several instances (LoongServe, 7.4: less than 2 %)
SCALE_UP = 0.10  # of a decode step's time on several instances (LoongServe, 7.4: less than 10 %)
# seconds of prefills that begin together, unless it is one; and how many times in a row others may
# pass a prompt that is longer (LoongServe, 5.1; --max_prefill_time in test/longserve of the public
# code and the default of its --max_num_ooe)
LONGEST = 5.0
PASSED = 10
WAIT = 10  # decode steps between prefills (--max_wait_tokens of the public code)


@dataclass(frozen=True)
class Elasticity:
    """Costs of elasticity, in seconds, and in shares of what a step takes without it.

    step: of each step. hop: of a prefill, for each instance of its group after the first.
    scale_down: share of a prefill on several instances, whose KV fewer of them keep. scale_up:
    share of a decode step on several. moves: times that KV must move over the link before
    prefills begin, so that decodes hold as few instances as they need; 0: it is there at once.
    own: decodes get no instance before its prefill ends. together: seconds within which
    prefills that begin together end, unless it is one; while they run, only those that end before
    them begin. 0: prefills begin whenever an instance is free. wait: decode steps, where something
    decodes, before the next prefills begin together.
    """

    step: float = 0.0
    hop: float = 0.0
    scale_down: float = 0.0
    scale_up: float = 0.0
    moves: float = 0.0
    own: bool = False
    together: float = 0.0
    wait: int = 0

    def times(self, factor: float) -> Elasticity:
        """Returns the same with all times and shares multiplied."""
        return replace(
            self,
            step=self.step * factor,
            hop=self.hop * factor,
            scale_down=self.scale_down * factor,
            scale_up=self.scale_up * factor,
            moves=self.moves * factor,
        )


FREE = Elasticity()
# KV moves and prefills begin together as in LoongServe's public code: `_migrate_batch` and
# `_dispatch_independ_batch_list` of longserve_server/router/manager.py
PUBLISHED = Elasticity(
    STEP, HOP, SCALE_DOWN, SCALE_UP, moves=1.0, own=True, together=LONGEST, wait=WAIT
)


@dataclass(frozen=True)
class LoongPool:
    """Instances: how many, what one costs, the tokens of KV it holds, bytes of KV per token and
    layer of one rank, and the link between two instances. `reserved` of them take only prompts
    below `short` tokens (Medha 5.3). most: instances of a prefill; 0: any number. node: instances
    of a node, and `between` nodes another link; 0: all are joined by the same one."""

    count: int
    costs: Costs
    capacity: int
    kv_bytes: float
    link: Link
    reserved: int = 0
    short: int = 8192
    most: int = 0
    node: int = 0
    between: Link | None = None
    elasticity: Elasticity = FREE

    def joined(self, degree: int) -> Link:
        """The slowest link in a group of `degree` instances."""
        if self.between is None or degree <= self.node:
            return self.link
        return self.between

    def move(self, tokens: int) -> float:
        """Seconds to move the KV of `tokens` tokens to another instance, each as likely."""
        if not self.elasticity.moves or not tokens:
            return 0.0
        sent = self.kv_bytes * self.costs.layers * tokens
        near = (self.node or self.count) - 1
        far = self.count - 1 - near
        seconds = near * self.link(sent) + far * self.joined(self.count)(sent)
        return self.elasticity.moves * seconds / max(1, near + far)

    def prefill(self, prompts: Sequence[int], degree: int) -> float:
        """Seconds to prefill these prompts together on `degree` instances: linear parts and
        attention are split evenly, and in every layer `degree - 1` hops of KV are hidden behind
        attention as far as it lasts."""
        costs = self.costs
        tokens = sum(prompts)
        pairs = sum(n * n / 2 for n in prompts) / degree
        attention = (
            len(prompts) * costs.chunk
            + costs.chunk_token * tokens / degree
            + costs.attended(pairs, tokens, tokens / degree)
        )
        ring = 0.0
        if degree > 1:
            ring = (degree - 1) * self.joined(degree)(self.kv_bytes * tokens / degree)
        layer = costs.linear(-(-tokens // degree)) + max(attention, ring)
        whole = costs.launch + costs.layers * layer + costs.head + costs.head_token * len(prompts)
        elastic = self.elasticity
        if degree > 1:
            whole = whole * (1 + elastic.scale_down) + elastic.hop * (degree - 1)
        return whole + elastic.step

    def decode(self, count: int, context: int, degree: int) -> float:
        """Seconds of a decode step over `degree` instances, each of which is master for its part of
        the sequences."""
        costs = self.costs
        own = -(-count // degree)
        layer = costs.linear(own) + costs.attend_decodes(own, context / degree)
        exchange = 0.0
        if degree > 1:
            sent = costs.kvp_token * self.link.bytes_per_s * own
            exchange = 2 * self.joined(degree)(sent)
        whole = (
            costs.launch + costs.layers * (layer + exchange) + costs.head + costs.head_token * own
        )
        elastic = self.elasticity
        if degree > 1:
            whole *= 1 + elastic.scale_up
        return whole + elastic.step


@dataclass(slots=True)
class DecodingRequest:
    """A request that decodes: when its first and its last token came, and how many there are.
    apart: its KV is where it was computed, not with that of the others."""

    number: int
    arrival: Arrival
    first: float
    last: float
    done: int = 1
    apart: bool = True

    @property
    def context(self) -> int:
        return self.arrival.prompt + self.done


@dataclass
class LoongServe:
    """A server of LoongServe, which runs arrivals. `objective` gives the seconds to the first token
    that a prompt of a length is promised, `tpot` those per output token, for the records. noise:
    spread of the times of prefills
    and decode steps around their prediction, by which prompts are grouped."""

    pool: LoongPool
    objective: Callable[[int], float]
    max_seqs: int = 256
    recorder: Recorder = field(default_factory=Recorder)  # `busy` is the mean of the instances
    noise: Noise = NO_NOISE
    tpot: float = float("inf")

    def __post_init__(self) -> None:
        self._factor = self.noise.draws()
        self._queue: deque[tuple[int, Arrival]] = deque()
        # end, tie, degree, requests
        self._prefills: list[tuple[float, int, int, list[tuple[int, Arrival]]]] = []
        self._running: list[DecodingRequest] = []
        self._step: float | None = None  # when the decode step in progress ends
        self._joining: list[DecodingRequest] = []
        self._serial = 0
        self.in_use = {True: 0, False: 0}  # instances that prefill: reserved ones and others
        # clock seconds at which the prefills that began together end, as predicted
        self._border = {True: 0.0, False: 0.0}
        self._waited = 0  # decode steps since prefills began
        self._passed = 0  # times in a row that prompts began before one that had come earlier

    def run(self, arrivals: Iterable[Arrival], until: float = float("inf")) -> None:
        """Runs arrivals to the end, or to clock second `until`."""
        coming = deque(enumerate(arrivals))
        while True:
            times = [
                next((arrival.time for _, arrival in coming), np.inf),
                next((end for end, *_ in self._prefills), np.inf),
                np.inf if self._step is None else self._step,
            ]
            now = min(times)
            if now == np.inf or now > until:
                return
            if now == times[0]:
                self._arrive(*coming.popleft())
            elif now == times[1]:
                self._prefilled(now)
            else:
                self._decoded(now)
            self._dispatch(now)
            self._decode(now)

    def _arrive(self, number: int, arrival: Arrival) -> None:
        if arrival.prompt + arrival.output > self.pool.capacity * (
            self.pool.count - self.pool.reserved
        ):
            self.recorder.records.append(
                self._record(number, arrival, 0, arrival.time, arrival.time, "refused")
            )
        else:
            self._queue.append((number, arrival))

    # --- prefill

    def _dispatch(self, now: float) -> None:
        """Gives free instances to the head of the queue."""
        if self.pool.reserved:
            self._dispatch_on(now, True, self.pool.reserved)
        self._dispatch_on(now, False, self.pool.count - self.pool.reserved - self._decoders())

    def _dispatch_on(self, now: float, reserved: bool, instances: int) -> None:
        free = instances - self.in_use[reserved]
        wanted = [
            entry for entry in self._queue if not reserved or entry[1].prompt < self.pool.short
        ]
        seats = (
            self.max_seqs
            - len(self._running)
            - len(self._joining)
            - sum(len(chosen) for *_, chosen in self._prefills)
        )
        if free <= 0 or not wanted or seats <= 0:
            return
        together = self.pool.elasticity.together
        late = together > 0 and self.in_use[reserved] > 0
        decoding = self._running or self._joining
        if decoding and not late and self._waited < self.pool.elasticity.wait:
            return
        if together:
            ends = self._border[reserved] - now if late else together
            wanted = self._ending(wanted[: min(MAX_CONSIDERED, seats)], free, ends, late)
        batch = self._fitting(wanted[: min(MAX_CONSIDERED, seats)])
        began = now if late or not batch else now + self._gather()
        border = now
        for group, degree in group_prompts(
            [arrival.prompt for _, arrival in batch], free, self.pool
        ):
            chosen = [batch[index] for index in group]
            predicted = self.pool.prefill([arrival.prompt for _, arrival in chosen], degree)
            if late and now + predicted > self._border[reserved]:
                continue
            for entry in chosen:
                self._queue.remove(entry)
            self._waited = 0
            seconds = predicted * self._factor()
            border = max(border, began + predicted)
            self._serial += 1
            self.in_use[reserved] += degree
            self.recorder.busy += seconds * degree / self.pool.count
            heapq.heappush(
                self._prefills,
                (began + seconds, self._serial, degree if not reserved else -degree, chosen),
            )
        if not late:
            self._border[reserved] = border

    def _ending(
        self, wanted: list[tuple[int, Arrival]], free: int, seconds: float, late: bool
    ) -> list[tuple[int, Arrival]]:
        """Returns those that end within `seconds` if all instances that are free prefill them, in
        their order; the first always, and alone then, unless others run and it is late."""
        out: list[tuple[int, Arrival]] = []
        passed = False
        for entry in wanted:
            prompts = [arrival.prompt for _, arrival in (*out, entry)]
            fits = self.pool.prefill(prompts, free) <= seconds
            if not out and not late and not fits and not passed:
                return [entry]
            if fits:
                out.append(entry)
            elif late or self._passed < PASSED:
                passed = True
            else:
                break
        if not late:
            self._passed = self._passed + 1 if passed else 0
        return out

    def _gather(self) -> float:
        """Seconds in which the KV of all that decode is moved to as few instances as it needs."""
        if not self.pool.elasticity.moves:
            return 0.0
        apart = [running for running in (*self._running, *self._joining) if running.apart]
        if len(apart) == len(self._running) + len(self._joining):
            apart = apart[1:]  # the others come to the first
        for running in (*self._running, *self._joining):
            running.apart = False
        return self.pool.move(sum(running.context for running in apart))

    def _fitting(self, wanted: list[tuple[int, Arrival]]) -> list[tuple[int, Arrival]]:
        """The first of these, in order, whose KV fits beside what is held and what is on its
        way."""
        room = self.pool.count * self.pool.capacity - self._held()
        out = []
        for entry in wanted:
            room -= entry[1].prompt + entry[1].output
            if room < 0:
                break
            out.append(entry)
        return out

    def _held(self) -> int:
        """Tokens of KV that are held or promised."""
        arrivals = [running.arrival for running in (*self._running, *self._joining)]
        arrivals += [arrival for *_, chosen in self._prefills for _, arrival in chosen]
        return sum(arrival.prompt + arrival.output for arrival in arrivals)

    def _prefilled(self, now: float) -> None:
        _, _, degree, chosen = heapq.heappop(self._prefills)
        self.in_use[degree < 0] -= abs(degree)
        for number, arrival in chosen:
            running = DecodingRequest(number, arrival, now, now)
            self._joining.append(running) if arrival.output > 1 else self._end(running)

    # --- decode

    def _decoders(self) -> int:
        """Instances that the KV of all that decode takes."""
        running = (*self._running, *self._joining)
        context = sum(r.context for r in running)
        return max(1, -(-context // self.pool.capacity)) if running else 0

    def _decode(self, now: float) -> None:
        """Begins the next decode step if none is in progress."""
        if self._step is not None:
            return
        self._running += self._joining
        self._joining = []
        if self._running:
            degree = min(self._decoders(), self.pool.count)
            if self.pool.elasticity.own and degree + sum(self.in_use.values()) > self.pool.count:
                return
            context = sum(running.context for running in self._running)
            predicted = self.pool.decode(len(self._running), context, degree)
            seconds = predicted * self._factor()
            # those borrowed are busy with a prefill
            own = min(degree, self.pool.count - sum(self.in_use.values()))
            self.recorder.busy += seconds * max(own, 0) / self.pool.count
            self._step = now + seconds

    def _decoded(self, now: float) -> None:
        self._step = None
        self._waited += 1
        self.recorder.gaps.append(np.array([now - running.last for running in self._running]))
        for running in self._running:
            running.done = running.done + 1
            running.last = now
        for running in [r for r in self._running if r.done >= r.arrival.output]:
            self._end(running)
        self._running = [r for r in self._running if r.done < r.arrival.output]

    def _end(self, running: DecodingRequest) -> None:
        self.recorder.records.append(
            self._record(
                running.number, running.arrival, running.done, running.first, running.last, "length"
            )
        )

    def give_up(self, now: float) -> None:
        """Notes those that have not ended by then: 'unfinished', with what they had put out."""
        waiting = [*self._queue, *(entry for *_, chosen in self._prefills for entry in chosen)]
        self.recorder.records += [
            self._record(number, arrival, 0, now, now, "unfinished") for number, arrival in waiting
        ]
        for running in (*self._running, *self._joining):
            self.recorder.records.append(
                self._record(
                    running.number,
                    running.arrival,
                    running.done,
                    running.first,
                    running.last,
                    "unfinished",
                )
            )

    def _record(
        self, number: int, arrival: Arrival, output: int, first: float, end: float, reason: str
    ) -> RequestRecord:
        due = arrival.time + self.objective(arrival.prompt)
        kind = arrival.kind or class_of(arrival.prompt)
        return RequestRecord(
            str(number),
            kind,
            arrival.prompt,
            output,
            0,
            arrival.time,
            due,
            first,
            end,
            reason,
            self.tpot,
        )


def group_prompts(
    prompts: Sequence[int], instances: int, pool: LoongPool
) -> list[tuple[list[int], int]]:
    """Groups prompts, each group with a number of instances, so that the sum of all prompts'
    latencies is least: LoongServe's dynamic program over prompts in the order of their length.
    Returns (indices of the prompts, instances)."""
    order = sorted(range(len(prompts)), key=lambda index: -prompts[index])
    degrees = range(1, instances + 1)
    most = pool.most or instances
    # [prompts][instances at most]: sum, groups
    best: list[list[tuple[float, tuple]]] = [[(0.0, ())] * (instances + 1)]
    for end in range(1, len(order) + 1):
        groups = [[prompts[index] for index in order[begin:end]] for begin in range(end)]
        sums = [
            [pool.prefill(group, degree) * len(group) for degree in degrees[:most]]
            for group in groups
        ]
        row: list[tuple[float, tuple]] = [(float("inf"), ())]
        for used in degrees:
            total, begin, degree = min(
                (best[begin][used - degree][0] + sums[begin][degree - 1], begin, degree)
                for begin in range(end)
                for degree in range(1, min(used, most) + 1)
            )
            row.append((total, (*best[begin][used - degree][1], (begin, end, degree))))
        best.append(row)
    return [
        ([order[index] for index in range(begin, end)], degree)
        for begin, end, degree in best[-1][instances][1]
    ]
