"""A replica as a conductor knows it: its role, what was routed to it, how fast it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Finished
from jaxserve.api.request import Request
from jaxserve.cluster.assignments import Assignments
from jaxserve.cluster.decode_rate import DecodeRate
from jaxserve.cluster.other_work import NO_OTHER_WORK, OtherWork, other_work
from jaxserve.cluster.prefill_costs import PrefillCosts
from jaxserve.cluster.recent_refusal import RecentRefusal
from jaxserve.cluster.roles import Role
from jaxserve.replica.protocol import Replica, Sink
from jaxserve.scheduling import Load

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
FIRST_COMPLETION = 1.0  # seconds that a sequence decodes, before anything was seen
SMOOTHING = 0.2  # weight of a new observation
RETRY_SECONDS = 1.0  # that callers wait where no replica can be reached


class KvPeer(NamedTuple):
    """Facts of a replica about KV that comes and goes. addresses: at which others ask it for KV.
    rates: bytes per second at which KV came from others, by their first address."""

    addresses: tuple[str, ...] = ()
    rates: Mapping[str, float] = {}


@dataclass(eq=False)
class Member:
    """A replica of a cluster, by a name that operators see.

    address: HOST:PORT at which other replicas ask it for KV, where it does not say it itself
    (`kv_peer`); None: it cannot be asked. kv_peer: tells, without waiting, what it said of KV;
    None: it says nothing. recent_load: gives its load without waiting; None: it is asked.
    other_requests: gives how many requests others have there, without waiting; None: it has no
    other users. number: among the members that there are. joined: it has said what it is, and
    serves the same model as the others. assigned: role that it has in place of its own. leaving: it
    is sent no new requests. suspect: it failed a call, and is not asked again before it was seen
    alive by the next check. lost: its requests were taken from it, as it was not alive.
    """

    name: str
    replica: Replica
    address: str | None = None
    recent_load: Callable[[], Load | None] | None = None
    other_requests: Callable[[], int] | None = None
    kv_peer: Callable[[], KvPeer] | None = None
    number: int = -1
    joined: bool = False
    assigned: Role | None = None
    leaving: bool = False
    suspect: bool = False
    lost: bool = False
    fault: str = ""  # why it has not joined
    work: Assignments = field(default_factory=Assignments)
    decode_rate: DecodeRate = field(default_factory=DecodeRate)
    completion: float = FIRST_COMPLETION  # learnt seconds that a sequence decodes
    prompt_tokens: int = 0  # of prompts that it has ended
    refusal: RecentRefusal | None = None  # its last one, which may stand for others
    cached_tokens: int = 0  # of these, tokens that it did not compute
    _prefill_costs: PrefillCosts | None = None  # of the facts that it reported last

    @property
    def role(self) -> Role:
        """Its own, or what it was changed to. Errors: RequestError before it has joined."""
        return self.assigned or Role(self.replica.info.role)

    @property
    def kv_address(self) -> str | None:
        """Addresses at which other replicas ask it for KV, apart by commas."""
        said = () if self.kv_peer is None else self.kv_peer().addresses
        return ",".join(said) or self.address

    def kv_rate(self, source: Member) -> float | None:
        """Bytes per second at which KV came here from another member; None where nothing was
        measured."""
        address = source.kv_address
        if self.kv_peer is None or address is None:
            return None
        return self.kv_peer().rates.get(address.partition(",")[0])

    @property
    def moves_kv(self) -> bool:
        """True if it can fetch KV from others and they from it, which is by way of host memory."""
        if self.address is None or not self.joined:
            return False
        return bool(self.replica.info.settings.get("cache", {}).get("host_cache_gib"))

    def takes_kv_of(self, source: Member) -> bool:
        """Returns whether it can fetch another member's KV: both move some, and their pages have
        the same layers; where windows see some of them, also as many tokens."""
        if not (self.moves_kv and source.moves_kv):
            return False
        here, there = self.replica.info, source.replica.info
        if here.cache_layout != there.cache_layout:
            return False
        return not here.cache_layout or here.block_size == there.block_size

    def has_adapter(self, identity: str) -> bool:
        """Returns whether it has an adapter, as it said last."""
        adapters = self.replica.adapters.by_name.values()
        return any(adapter.identity == identity for adapter in adapters)

    @property
    def alive(self) -> bool:
        return self.replica.alive and not self.suspect

    @property
    def usable(self) -> bool:
        """True if requests may be sent to it."""
        if self.leaving or not self.joined or not self.alive:
            return False
        return bool(self.ask(lambda replica: replica.available and replica.overdue() is None))

    def ask(self, question: Callable[[Replica], Answer]) -> Answer | None:
        """Returns the replica's answer; None if it cannot be reached."""
        try:
            return question(self.replica)
        except Exception as error:
            log.warning("replica %s did not answer: %s", self.name, error)
            return None

    def submit(self, request: Request, sink: Sink) -> RequestError | None:
        """Has it take a request. Returns why it does not; UNAVAILABLE where it cannot be
        reached."""
        try:
            self.replica.submit(request, sink)
        except RequestError as error:
            return error
        except Exception as error:
            log.warning("replica %s cannot be reached: %s", self.name, error)
            self.suspect = True
            said = f"the replica {self.name} cannot be reached"
            return RequestError("", said, "UNAVAILABLE", retry_after=RETRY_SECONDS)
        return None

    def known_refusal(self, request: Request, prefill: float, now: float) -> RequestError | None:
        """Returns why it would refuse a request, by what it has refused a moment ago. prefill:
        predicted seconds of the prompt."""
        known = self.refusal
        return known.error if known is not None and known.covers(request, prefill, now) else None

    def note_refusal(
        self, request: Request, prefill: float, error: RequestError, now: float
    ) -> None:
        """Notes that it has refused a request."""
        newer = RecentRefusal.of(request, prefill, error, now)
        if newer is not None:
            self.refusal = newer if self.refusal is None else self.refusal.or_newer(newer, now)

    def load(self) -> Load | None:
        """Returns its load as reported last; None before the first report."""
        if self.recent_load is not None:
            return self.recent_load()
        return self.ask(lambda replica: replica.load())

    # --- what it has to do

    @property
    def other_work(self) -> OtherWork:
        """Work of other conductors and clients on the replica."""
        if self.other_requests is None:
            return NO_OTHER_WORK
        requests = self.other_requests()
        return other_work(requests, self.load()) if requests else NO_OTHER_WORK

    @property
    def requests(self) -> int:
        """Requests on the replica that have not ended, of all senders."""
        return self.work.requests + self.other_work.requests

    @property
    def decodes(self) -> int:
        """Sequences that decode on the replica, of all senders."""
        return self.work.decodes + self.other_work.decodes

    @property
    def promised(self) -> int:
        """Tokens of KV of sequences that are expected on the replica, of all senders."""
        return self.work.promised + round(self.other_work.queued_tokens)

    def queue(self, now: float) -> float:
        """Predicts seconds until the prompts on the replica are computed, those of all senders."""
        others = self.other_work.queued_seconds
        return self.work.queue(now) + (self.prefill_costs.queued(others) if others else 0.0)

    # --- how fast it is

    @property
    def prefill_costs(self) -> PrefillCosts:
        """Predictions of prefills, from what it reports; what was learnt stays when it reports
        others. Errors: RequestError before it has joined; ConfigError for costs of another
        version."""
        info = self.replica.info
        known = self._prefill_costs
        if known is None or known.facts != info.prefill:
            known = PrefillCosts(info, 1.0 if known is None else known.scale)
            self._prefill_costs = known
        return known

    def prefill(self, cached: int, total: int) -> float:
        """Predicted seconds in which it computes tokens `cached` to before `total`."""
        return self.prefill_costs.seconds(cached, total)

    def delay(self, missing: int) -> float:
        """Predicted seconds by which what decodes here delays a prompt with `missing` tokens to
        compute: each of its steps is theirs too, and where all slots are taken it waits."""
        if not self.role.decodes:
            return 0.0
        info = self.replica.info
        others = self.other_work
        decodes = self.work.decodes + others.decodes
        steps = -(-missing // info.chunk_tokens)
        shared = steps * self.decode_rate.seconds(decodes) if decodes else 0.0
        return shared + self.slot_wait

    @property
    def slot_wait(self) -> float:
        """Predicted seconds until one more request has a slot; 0 where it does not decode."""
        if not self.role.decodes:
            return 0.0
        slots = self.replica.info.max_seqs
        return max(self.requests + 1 - slots, 0) * self.completion / slots

    def learn(self, end: Finished) -> None:
        """Learns from a request that has ended how fast prompts are computed, and tokens come."""
        usage = end.usage
        timing = end.timing
        if not usage.completion:
            return
        self.prompt_tokens += usage.prompt
        self.cached_tokens += usage.cached
        seconds = timing.first_token - timing.queued
        self.prefill_costs.learn(usage.cached, usage.prompt, seconds)
        if usage.completion > 1:
            decoded = timing.total - timing.first_token
            self.completion += SMOOTHING * (decoded - self.completion)
            self.decode_rate.learn(max(self.decodes, 1), decoded / (usage.completion - 1))
