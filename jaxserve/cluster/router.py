"""Chooses among the members of a live cluster: which of them serves a request, and which computes
its prompt, from what they have cached and what was routed to them.

Mixed members compute prompts and decode. Where there are members that only prefill, Algorithm 1
chooses among these and the mixed ones who computes a prompt, and its KV goes to a member that
decodes, chosen by predicted seconds per token and freeness. Roles are no promise of service: where
no member prefills, those that decode compute prompts too, and where no member decodes, those that
prefill serve whole requests.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from jaxserve.api.request import KvSource, Request
from jaxserve.cluster.member import Member
from jaxserve.cluster.member_table import MemberTable
from jaxserve.cluster.prefixes import CachedPrefixes
from jaxserve.cluster.roles import Role
from jaxserve.cluster.routing import (
    KV_BANDWIDTH,
    ROUTING,
    DecodeView,
    Fetch,
    PrefillChoice,
    PrefillView,
    RoutingQuery,
    choose_decode,
    freeness,
)
from jaxserve.settings.schema import ConfigError

GOLDEN_RATIO = 0.6180339887498949  # its multiples, without their whole parts, are evenly spread
MIN_PREFILL_BLOCKS = 4  # missing blocks, below which a prompt is computed where it is decoded


class Placement(NamedTuple):
    """The members that serve a request.

    member: that decodes it. prefill_on: that computes its prompt's KV for it; None: `member` does
    itself. fetch: KV that the member which computes the prompt gets from another. prefill, ttft:
    predicted seconds of computing, and to the first token.
    """

    member: Member
    prefill_on: Member | None = None
    fetch: KvSource | None = None
    prefill: float = 0.0
    ttft: float = 0.0


class Router:
    """Routes requests to members. policy: a row of ROUTING. bandwidth: GB/s at which KV goes from
    one member to another, until it was measured between the two. Its caller keeps the members'
    work from changing meanwhile.

    Errors: ConfigError for a policy that there is not.
    """

    def __init__(self, table: MemberTable, policy: str, bandwidth: float = KV_BANDWIDTH):
        if policy not in ROUTING:
            raise ConfigError("routing", f"must be one of {', '.join(ROUTING)}, not {policy!r}")
        self.table = table
        self.cached = CachedPrefixes()
        self._policy = ROUTING[policy]
        self._bytes_per_s = bandwidth * 1e9
        self._draws = 0

    def prefixes(self, request: Request) -> list[int]:
        """Tokens at a prompt's beginning that each member has cached, by number."""
        return self.cached.tokens(request, self.table.all, self.table.numbers)

    @property
    def _least_tokens(self) -> int:
        """Missing tokens, below which a prompt is computed where it is decoded."""
        return MIN_PREFILL_BLOCKS * self.table.info.block_size

    # --- placing a request

    def place(
        self,
        request: Request,
        prefixes: Sequence[int],
        now: float,
        tried: Collection[Member] = (),
        spared: Collection[Member] = (),
    ) -> Placement | None:
        """Places a request; None if no member is left. prefixes: see `prefixes`. tried: that
        are not to serve it. spared: that are not to compute its prompt for others."""
        serving = self._serving(request, tried)
        if not serving:
            return None
        mixed = [member for member in serving if member.role is Role.MIXED]
        if not _computes_all(request) and any(member.role.decodes for member in serving):
            prefilling = [one for one in self._prefilling(request) if one not in spared]
            if prefilling:
                return self._shared(request, prefixes, prefilling, serving, now)
        return self._local(request, prefixes, mixed or serving, now)

    def place_decode(
        self, request: Request, prefixes: Sequence[int], tried: Collection[Member] = ()
    ) -> Member | None:
        """The member that decodes a request whose prompt another one computes; None where none is
        left."""
        serving = self._serving(request, tried)
        if not serving:
            return None
        return self._decode(request, prefixes, serving)

    def _serving(self, request: Request, tried: Collection[Member]) -> list[Member]:
        """The members that may serve a request: where none that decodes is usable, as the last
        resort, those that should only prefill."""
        usable = [member for member in self._having(request.adapter) if member.usable]
        decoding = [member for member in usable if member.role.decodes]
        return [member for member in decoding or usable if member not in tried]

    def _having(self, adapter: str) -> list[Member]:
        """The members that have an adapter; "": all."""
        return [member for member in self.table.all if not adapter or member.has_adapter(adapter)]

    def _prefilling(self, request: Request) -> list[Member]:
        """The members that compute the prompt of a request for others."""
        having = self._having(request.adapter)
        members = [member for member in having if member.moves_kv and member.usable]
        return [member for member in members if member.role is Role.PREFILL]

    def _shared(
        self,
        request: Request,
        prefixes: Sequence[int],
        prefilling: Sequence[Member],
        serving: Sequence[Member],
        now: float,
    ) -> Placement:
        """Places a request that one member may prefill and another decode."""
        decode = self._decode(request, prefixes, serving)
        short = self._missing(request, prefixes, decode) < self._least_tokens
        prefilling = list(filter(decode.takes_kv_of, prefilling))
        if short or not prefilling:
            return self._local(request, prefixes, [decode], now)
        mixed = [member for member in serving if member.role is Role.MIXED]
        choice, member = self._choose(request, prefixes, [*prefilling, *mixed], now)
        fetch = self._source(choice.fetch)
        if member in mixed:
            return Placement(member, None, fetch, choice.prefill, choice.ttft)
        return Placement(decode, member, fetch, choice.prefill, choice.ttft)

    def _local(
        self, request: Request, prefixes: Sequence[int], members: Sequence[Member], now: float
    ) -> Placement:
        """A member that computes the prompt and decodes."""
        choice, member = self._choose(request, prefixes, members, now)
        fetch = None if _computes_all(request) else self._source(choice.fetch)
        return Placement(member, None, fetch, choice.prefill, choice.ttft)

    # --- who computes the prompt

    def _choose(
        self, request: Request, prefixes: Sequence[int], members: Sequence[Member], now: float
    ) -> tuple[PrefillChoice, Member]:
        """The member that computes a prompt."""
        total = len(request.prompt)
        # of equal ones the policies take the first
        requests = {member: member.requests for member in members}
        members = sorted(members, key=requests.__getitem__)
        views = []
        for member in members:
            prefix = _of(prefixes, member)
            queue = member.queue(now) + member.delay(total - prefix)
            views.append(PrefillView(member.number, prefix, queue, requests[member]))
        self._draws += 1
        draw = (self._draws * GOLDEN_RATIO) % 1.0
        costs = _Costs({member.number: member for member in members}, self)
        choice = self._policy(RoutingQuery(views, total, costs, draw=draw))
        return choice, next(member for member in members if member.number == choice.member)

    def _source(self, fetch: Fetch | None) -> KvSource | None:
        if fetch is None:
            return None
        source = next((m for m in self.table.all if m.number == fetch.source), None)
        if source is None or source.kv_address is None:
            return None
        size = source.replica.info.block_size
        return KvSource(source.kv_address, fetch.stop // size, block_size=size)

    def transfer_seconds(self, tokens: int, source: Member, target: Member) -> float:
        """Predicted seconds to move the KV of `tokens` tokens from one member to another: as
        measured between these two, if anything was."""
        rate = target.kv_rate(source) or self._bytes_per_s
        return self.table.info.moved_bytes(tokens) / rate

    # --- who decodes

    def _decode(
        self, request: Request, prefixes: Sequence[int], members: Sequence[Member]
    ) -> Member:
        """The member that decodes a request: one that has its prompt already, if it would be in
        time there; else by `routing.choose_decode`, if none has room the freest."""
        dedicated = [member for member in members if member.role is Role.DECODE]
        members = dedicated or members
        objective = self.table.objectives.of(request.slo.class_name).tpot_of(request)
        tokens = len(request.prompt) + request.sampling.max_tokens
        views = [self._decode_view(member) for member in members]
        holding = [
            view
            for member, view in zip(members, views)
            if self._missing(request, prefixes, member) < self._least_tokens
            and view.tbt <= objective
        ]
        chosen = choose_decode(holding, tokens, objective)
        chosen = chosen or choose_decode(views, tokens, objective) or max(views, key=freeness)
        return next(member for member in members if member.number == chosen.member)

    def _decode_view(self, member: Member) -> DecodeView:
        """A member with one sequence more."""
        load = member.load()
        size = member.replica.info.block_size
        free = member.replica.info.capacity_tokens
        if load is not None:
            free = (load.pages_free + load.pages_cached) * size
        active = member.decodes
        seconds = member.decode_rate.seconds(active + 1)
        return DecodeView(member.number, free, member.promised, active, seconds)

    @staticmethod
    def _missing(request: Request, prefixes: Sequence[int], member: Member) -> int:
        """Tokens of a prompt whose KV a member lacks."""
        return len(request.prompt) - _of(prefixes, member)


class _Costs(NamedTuple):
    """Predictions for a choice among members; see `RoutingCosts`."""

    members: dict[int, Member]
    router: Router

    def prefill(self, member: int, cached: int, total: int) -> float:
        return self.members[member].prefill(cached, total)

    def transfer(self, source: int, target: int, tokens: int) -> float:
        """Infinite where one takes no KV of the other."""
        sender, receiver = self.members[source], self.members[target]
        if not receiver.takes_kv_of(sender):
            return math.inf
        return self.router.transfer_seconds(tokens, sender, receiver)


def _of(prefixes: Sequence[int], member: Member) -> int:
    """A member's entry; 0 for one that came after the prefixes were looked up."""
    return prefixes[member.number] if member.number < len(prefixes) else 0


def _computes_all(request: Request) -> bool:
    """Returns whether the prompt is computed where its request is served, whatever is cached
    elsewhere."""
    wants_logprobs = request.sampling.prompt_logprobs is not None
    return request.bypass_prefix_cache or wants_logprobs or request.embed
