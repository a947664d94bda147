"""A cluster of virtual replicas under one clock, with the conductor's own decisions: who prefills,
what is fetched from where, who decodes, who is refused (`jaxserve.cluster`).

A request is prefilled on one replica, which puts out its first token; its KV goes to another as it
is made, layer by layer, and is decoded there. MIXED replicas do both. Where no replica decodes,
requests end with their first token. The network is a `Network`: transfers queue on their links.

Replicas that only prefill are run event by event, for what they end sets off transfers; the others
are run up to the moment at which they are asked something.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from experiments.virtual_cluster.admission import POLICIES, tbt_at
from experiments.virtual_cluster.copies import Copies
from experiments.virtual_cluster.network import Network
from experiments.virtual_cluster.node import ClusterSpec, Node
from experiments.virtual_cluster.report import (
    ClusterRecord,
    ClusterReport,
    LoadSample,
    RoleChange,
    slowest_mean,
)
from experiments.virtual_cluster.routers import ROUTERS, RouterQuery
from jaxserve.api.errors import RequestError
from jaxserve.api.events import Event, Finished, Token
from jaxserve.api.request import Request, Slo
from jaxserve.cache.hashes import BlockHashes
from jaxserve.cluster.admission import AdmissionView
from jaxserve.cluster.roles import RatioController, Role
from jaxserve.cluster.routing import (
    ROUTING,
    PrefillChoice,
    PrefillView,
    RoutingQuery,
    choose_decode,
    freeness,
)
from jaxserve.lab.quotients import quotient
from jaxserve.lab.simulate.arrival import Arrival, to_request
from jaxserve.replica.protocol import Sink

__all__ = ["ClusterRecord", "ClusterReport", "ClusterSpec", "LoadSample", "VirtualCluster", "run"]

NEVER = float("inf")
MAX_LEN = 2**31 - 1
BALANCE_SECONDS = 1.0  # between looks at the loads of both sides


def run(spec: ClusterSpec, arrivals: Iterable[Arrival], until: float = NEVER) -> ClusterReport:
    """Runs arrivals, in the order of their times, through a cluster, to their end or to clock
    second `until`. Errors: ConfigError for a spec that cannot be simulated."""
    return VirtualCluster(spec).run(arrivals, until)


@dataclasses.dataclass(slots=True)
class Passage:
    """A request on its way through the cluster. split: where it is prefilled only its first token
    is put out. times: clock seconds of its tokens."""

    request: Request
    record: ClusterRecord
    chain: BlockHashes
    prefill_on: Node
    decode_on: Node | None
    split: bool
    times: list[float] = dataclasses.field(default_factory=list)


class VirtualCluster:
    """Runs requests through the nodes of a cluster; see the module."""

    def __init__(self, spec: ClusterSpec):
        self.spec = spec
        self.nodes = [Node(number, role, spec) for number, role in enumerate(spec.roles)]
        self._controller = None if spec.ratio is None else RatioController(spec.ratio)
        self.role_changes: list[RoleChange] = []
        self.network = Network(len(self.nodes), spec.bytes_per_s)
        self.records: list[ClusterRecord] = []
        self.samples: list[LoadSample] = []
        self.copies = Copies(spec.settles)
        self.bytes_fetched = 0.0
        # run event by event
        may_prefill = (Role.PREFILL,) if spec.ratio is None else (Role.PREFILL, Role.DECODE)
        self._stepped = [node for node in self.nodes if node.role in may_prefill]
        self._coming = True  # whether requests are still to arrive
        self._live = 0  # requests that were not refused and have not ended
        self._now = 0.0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._random = random.Random(spec.seed)
        self._slo = spec.slo or (lambda prompt: Slo(spec.ttft, spec.tbt))

    @property
    def prefilling(self) -> list[Node]:
        """The replicas that prefill now."""
        return [node for node in self.nodes if node.role.prefills]

    @property
    def decoding(self) -> list[Node]:
        """The replicas that only decode now."""
        return [node for node in self.nodes if node.role is Role.DECODE]

    # --- time

    def run(self, arrivals: Iterable[Arrival], until: float = NEVER) -> ClusterReport:
        """Runs all arrivals to their end, or to clock second `until`."""
        if self.spec.sample_every is not None:
            self._at(0.0, self._sample)
        if self.spec.count_every is not None:
            self._at(0.0, functools.partial(self._count_every, self.spec.count_every))
        if self._controller is not None:
            self._at(0.0, functools.partial(self._balance, self._controller))
        for number, arrival in enumerate(arrivals):
            if arrival.time > until:
                break
            self._advance(arrival.time)
            self._arrive(to_request(arrival, number, MAX_LEN, self._slo(arrival.prompt)))
        self._coming = False
        self._advance(until)
        for node in self.nodes:
            node.replica.advance(until)
        return self._report()

    def _at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time, next(self._order), action))

    def _advance(self, to: float) -> None:
        """Runs what is due by clock second `to`."""
        while True:
            timer = next((due for due, *_ in self._timers), NEVER)
            step = min((node.replica.next_event() for node in self._stepped), default=NEVER)
            time = min(timer, step)
            if time > to or time == NEVER:
                break
            self._now = time
            if step <= timer:
                self._step(time)
            else:
                heapq.heappop(self._timers)[2]()
        if to < NEVER:
            self._now = to

    def _step(self, time: float) -> None:
        for node in self._stepped:
            if node.replica.next_event() <= time:
                node.replica.advance(time)

    # --- a request comes

    def _arrive(self, request: Request) -> None:
        total = len(request.prompt)
        for node in self.nodes:
            node.replica.advance(self._now)
        chain = self.prefilling[0].cache.block_hashes(
            request.key_salt, lambda first, last: request.prompt[first:last]
        )
        choice = self._route(chain, total, request.slo)
        output = request.sampling.max_tokens
        decode = self._choose_decode(total + output) if self.decoding else None
        record = ClusterRecord(request.id, request.arrival, total, output)
        record.predicted_ttft = choice.ttft
        record.prefill_seconds = choice.prefill
        self.records.append(record)
        try:
            POLICIES[self.spec.admission].check_arrival(
                self._admission_view(choice, decode, total + output)
            )
        except RequestError as error:
            record.reason = "refused"
            record.refusal = error.reason
            return
        self._live += 1
        node = self.nodes[choice.member]
        split = node.role is Role.PREFILL
        self._begin(Passage(request, record, chain, node, decode, split), choice)

    def _route(self, chain: BlockHashes, total: int, slo: Slo) -> PrefillChoice:
        """Chooses where a prompt of `total` tokens is prefilled; its last token is always
        computed."""
        spec = self.spec
        size = spec.cache.block_size
        blocks = (total - 1) // size if spec.cache.prefix_caching else 0
        nodes = self._looked_at()
        views = [
            PrefillView(
                node.number,
                node.prefix(chain, blocks) * size,
                node.work.queue(self._now),
                node.work.prefills,
            )
            for node in nodes
        ]
        draw = self._random.random()
        query = RoutingQuery(views, total, self, spec.threshold, draw)
        if spec.routing in ROUTING:
            return ROUTING[spec.routing](query)
        active = [node.active for node in nodes]
        kept = [node.kept for node in nodes]
        name = chain[max(min(total, spec.name_tokens) // size, 1) - 1]
        return ROUTERS[spec.routing](RouterQuery(query, active, kept, name, slo.ttft or spec.ttft))

    def _looked_at(self) -> list[Node]:
        """The replicas that routing sees for one request, in the order of their numbers."""
        nodes = self.prefilling
        if self.spec.seen is None or self.spec.seen >= len(nodes):
            return nodes
        chosen = self._random.sample(range(len(nodes)), self.spec.seen)
        return [nodes[place] for place in sorted(chosen)]

    def prefill(self, member: int, cached: int, total: int) -> float:
        """Seconds to compute a part of a prompt; see `RoutingCosts`."""
        return self.nodes[member].prefill_seconds(cached, total)

    def transfer(self, source: int, target: int, tokens: int) -> float:
        """Seconds until the KV of `tokens` tokens is there; see `RoutingCosts`."""
        return self.network.seconds(source, target, self._bytes(tokens), self._now)

    def _bytes(self, tokens: int) -> float:
        """Bytes of KV that go to a replica which lacks a prompt's first tokens."""
        return self.nodes[0].replica.info.moved_bytes(tokens)

    def _choose_decode(self, tokens: int) -> Node:
        """Chooses where a request that ends with `tokens` tokens is decoded: if no replica has
        room for it, it waits on the freest one."""
        views = [node.decode_view(tokens) for node in self.decoding]
        chosen = choose_decode(views, tokens, self.spec.tbt) or max(views, key=freeness)
        return self.nodes[chosen.member]

    def _admission_view(
        self, choice: PrefillChoice, decode: Node | None, tokens: int
    ) -> AdmissionView:
        spec = self.spec
        now = later = 0.0
        if decode is not None:
            now = self._tbt_now(decode, tokens)
            later = tbt_at(
                decode.predictor,
                [node.work for node in self.decoding],
                self._now + choice.ttft,
                spec.completion,
                tokens,
            )
        return AdmissionView(choice.ttft, now, later, spec.ttft, spec.tbt, spec.completion)

    @staticmethod
    def _tbt_now(node: Node, tokens: int) -> float:
        """Seconds per token with `tokens` tokens more on a node; infinite if it has no room."""
        view = node.decode_view(tokens)
        return view.tbt if view.free >= tokens else NEVER

    # --- prefill

    def _begin(self, passage: Passage, choice: PrefillChoice) -> None:
        """Sends a request to where it is prefilled, after what it is to fetch."""
        record = passage.record
        node = passage.prefill_on
        record.prefill_on = node.number
        now = self._now
        # what is not computed but waited for delays those behind it too
        node.work.begin_prefill(record.id, choice.prefill, now)
        if passage.decode_on is not None:
            record.decode_on = passage.decode_on.number
            tokens = record.prompt + record.output
            passage.decode_on.work.expect_decode(record.id, tokens, now + choice.ttft)
        if choice.fetch is None:
            self._submit(passage)
            return
        fetch = choice.fetch
        record.fetched = fetch.tokens
        size = self._bytes(fetch.tokens)
        self.bytes_fetched += size
        arrival = self.network.send(fetch.source, node.number, size, now)
        self._at(arrival, lambda: self._fetched(passage, fetch.stop // self.spec.cache.block_size))

    def _fetched(self, passage: Passage, blocks: int) -> None:
        passage.prefill_on.replica.advance(self._now)
        passage.prefill_on.receive(passage.chain, blocks)
        self._submit(passage)

    def _submit(self, passage: Passage) -> None:
        request = passage.request
        if passage.split:
            sampling = dataclasses.replace(request.sampling, max_tokens=1)
            request = dataclasses.replace(request, sampling=sampling)
        passage.prefill_on.replica.submit(request, self._prefill_sink(passage))

    def _prefill_sink(self, passage: Passage) -> Sink:
        node = passage.prefill_on
        record = passage.record
        times = passage.times

        def hear(events: Sequence[Event]) -> None:
            for event in events:
                if isinstance(event, Token):
                    if not times:
                        record.first = node.replica.now()
                        node.work.end_prefill(record.id, record.first)
                    times.append(node.replica.now())
                elif isinstance(event, Finished):
                    record.cached = event.usage.cached
                    self._prefilled(passage, event)

        return hear

    def _prefilled(self, passage: Passage, end: Finished) -> None:
        """The replica that prefilled a request has ended it: it goes on where it is decoded."""
        record = passage.record
        node = passage.decode_on
        if node is None or record.output == 1:
            self._end(passage, passage.prefill_on.replica.now())
            return
        begun = record.arrival + end.timing.queued
        blocks = record.prompt // self.spec.cache.block_size if self.spec.decode_caching else 0
        missing = record.prompt - node.prefix(passage.chain, blocks) * self.spec.cache.block_size
        size = self._bytes(missing)
        chunk = min(missing, self.spec.scheduler.chunk_tokens)
        last = self._bytes(chunk) / self.spec.layer_groups
        record.transferred = self.network.stream(
            passage.prefill_on.number, node.number, size, begun, record.first, last
        )
        self._at(record.transferred, lambda: self._decode(passage))

    # --- decode

    def _decode(self, passage: Passage) -> None:
        """A request's KV is where it is decoded: it joins the others there, or is refused."""
        node = passage.decode_on
        assert node is not None
        record = passage.record
        node.replica.advance(self._now)
        node.work.begin_decode(record.id, self._now)
        now = self._tbt_now(node, record.prompt + record.output)
        view = AdmissionView(0.0, now, now, self.spec.ttft, self.spec.tbt, self.spec.completion)
        try:
            POLICIES[self.spec.admission].check_decode(view)
        except RequestError as error:
            record.reason = "refused_late"
            record.refusal = error.reason
            self._forget(passage)
            return
        if self.spec.decode_caching:
            node.receive(passage.chain, record.prompt // self.spec.cache.block_size)
        request = passage.request
        sampling = dataclasses.replace(request.sampling, max_tokens=record.output - 1)
        prompt = np.append(request.prompt, np.int32(0))  # with its first token
        request = dataclasses.replace(request, prompt=prompt, sampling=sampling)
        node.replica.submit_prefilled(request, self._decode_sink(passage, node), record.prompt)

    def _decode_sink(self, passage: Passage, node: Node) -> Sink:
        times = passage.times

        def hear(events: Sequence[Event]) -> None:
            for event in events:
                if isinstance(event, Token):
                    times.append(node.replica.now())
                elif isinstance(event, Finished):
                    self._end(passage, node.replica.now())

        return hear

    # --- the end

    def _end(self, passage: Passage, time: float) -> None:
        record = passage.record
        record.end = time
        record.tbt = slowest_mean(passage.times)
        record.longest_gap = float(np.diff(passage.times).max(initial=0.0))
        record.reason = "length"
        self._forget(passage)

    def _forget(self, passage: Passage) -> None:
        self._live -= 1
        passage.prefill_on.work.end_prefill(passage.record.id, self._now)
        if passage.decode_on is not None:
            passage.decode_on.work.end_decode(passage.record.id)

    def _balance(self, controller: RatioController) -> None:
        """Has the least loaded replicas of one side change to the other where that is called for,
        as a conductor does; what they have goes on."""
        for node in self.nodes:
            node.replica.advance(self._now)
        prefill = {node: node.load(self._now) for node in self.prefilling}
        decode = {node: node.load(self._now) for node in self.decoding}
        count = controller.change(list(prefill.values()), list(decode.values()), self._now)
        givers, role = (prefill, Role.DECODE) if count > 0 else (decode, Role.PREFILL)
        for node in sorted(givers, key=givers.__getitem__)[: abs(count)]:
            node.role = role
            change = RoleChange(self._now, node.number, len(self.prefilling))
            self.role_changes.append(change)
        if self._coming or self._live:
            self._at(self._now + BALANCE_SECONDS, functools.partial(self._balance, controller))

    def _sample(self) -> None:
        """Notes the loads of the pools, as long as anything is to come."""
        spec = self.spec
        for node in self.nodes:
            node.replica.advance(self._now)
        queues = [node.work.queue(self._now) / spec.ttft for node in self.prefilling]
        pool = self.decoding or [node for node in self.nodes if node.role is Role.MIXED]
        rates = [node.decode_view(0).tbt / spec.tbt for node in pool]
        decode = quotient(sum(rates), len(rates))
        self.samples.append(LoadSample(self._now, sum(queues) / len(queues), decode))
        if spec.sample_every is not None and (self._coming or self._live):
            self._at(self._now + spec.sample_every, self._sample)

    def _count_every(self, seconds: float) -> None:
        """Counts the copies of blocks, as long as anything is to come."""
        for node in self.nodes:
            node.replica.advance(self._now)
        if self._coming or self._live:
            self._count_copies()
            self._at(self._now + seconds, functools.partial(self._count_every, seconds))

    def _count_copies(self) -> None:
        self.copies.add(self._now, (node.cache.pages.with_key for node in self.prefilling))

    def _report(self) -> ClusterReport:
        self._count_copies()
        return ClusterReport(
            self.records,
            [node.busy for node in self.nodes],
            self.network.bytes_sent,
            self.bytes_fetched,
            self.copies,
            self.samples,
            self.role_changes,
        )
