"""Conductors over the server tests' fake replicas, which have roles, addresses and cached prefixes
here, and die, hang and refuse as real ones do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.api.events import Progress
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.cache.block_events import StoredBlocks
from jaxserve.cluster.conductor import Conductor, ConductorSettings
from jaxserve.cluster.member import Member
from jaxserve.cluster.prefill_job import SUFFIX
from jaxserve.replica.info import ReplicaInfo
from jaxserve.replica.protocol import Sink
from tests.replica.holders import Heard
from tests.server.fakes import FakeReplica, expected
from tests.waiting import eventually

BLOCK = 16
LONG = list(range(3, 103))  # a prompt of six full blocks and a part
SHORT = LONG[:20]


class RoleReplica(FakeReplica):
    """A fake with a role. seen: all requests that it took, jobs of prefill among them. busy: it has
    not begun with prefill jobs that it takes; else it has computed some of each, also while it is
    `paused`."""

    def __init__(self, role: str = "mixed", block_size: int = BLOCK, **rest):
        super().__init__(**rest)
        self.role = role
        self.block_size = block_size
        self.host_cache_gib = 1.0
        self.cache_layout = ""
        self.prefill: Mapping[str, Any] = {}
        self.seen: list[Request] = []
        self.closed = False
        self.busy = False

    @property
    def info(self) -> ReplicaInfo:
        settings = {"cache": {"host_cache_gib": self.host_cache_gib}}
        return dataclasses.replace(
            super().info,
            role=self.role,
            block_size=self.block_size,
            cache_layout=self.cache_layout,
            settings=settings,
            prefill=self.prefill,
        )

    def submit(self, request: Request, sink: Sink) -> None:
        super().submit(request, sink)
        self.seen.append(request)
        if request.id.endswith(SUFFIX) and not self.busy:
            sink([Progress(0, 1, len(request.prompt))])

    def close(self) -> None:
        self.closed = True
        super().close()

    def cache(self, prompt: Sequence[int], blocks: int) -> None:
        """Says that it has stored a prompt's first blocks."""
        chain = self.info.block_hashes(np.array(prompt, np.int32), "")
        self.block_events.stored(StoredBlocks([chain[block] for block in range(blocks)]))

    @property
    def jobs(self) -> list[Request]:
        """The prefill jobs that it took."""
        return [request for request in self.seen if request.id.endswith(SUFFIX)]

    @property
    def own(self) -> list[Request]:
        """The users' requests that it took."""
        return [request for request in self.seen if not request.id.endswith(SUFFIX)]


def make(role: str = "mixed", paused: bool = False, **rest) -> RoleReplica:
    fake = RoleReplica(role, **rest)
    fake.paused = paused
    return fake


class RoleCluster:
    """A conductor over fakes, which it owns if nothing else is said."""

    def __init__(self, *fakes: RoleReplica, owns_members: bool = True, **settings):
        self.fakes = list(fakes)
        self.members = [self.member(fake) for fake in fakes]
        self.conductor = Conductor(
            self.members, ConductorSettings(**settings), owns_members=owns_members
        )

    @staticmethod
    def member(fake: FakeReplica, name: str = "") -> Member:
        name = name or f"{getattr(fake, 'role', 'fake')}-{id(fake)}"
        return Member(name, fake, f"host-{id(fake)}:1")

    def address(self, fake: FakeReplica) -> str | None:
        return next(m.address for m in self.conductor.members if m.replica is fake)

    def request(
        self,
        id: str = "r",
        prompt: Sequence[int] = LONG,
        tokens: int = 5,
        prompt_logprobs: int | None = None,
        **rest,
    ) -> Request:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, prompt_logprobs=prompt_logprobs
        )
        ids = np.array(prompt, np.int32)
        return Request(id, ids, sampling, arrival=self.conductor.now(), **rest)

    def submit(self, id: str = "r", prompt: Sequence[int] = LONG, **rest) -> Heard:
        heard = Heard()
        self.conductor.submit(self.request(id, prompt, **rest), heard)
        return heard

    def serve(self, id: str = "r", prompt: Sequence[int] = LONG, **rest) -> Heard:
        """Submits a request and waits for its end."""
        heard = self.submit(id, prompt, **rest)
        eventually(lambda: heard.ends)
        return heard

    def idle(self) -> bool:
        """Returns True if nothing is left of any request."""
        books = not self.conductor.requests and not any(
            member.work.requests for member in self.conductor.members
        )
        return books and not any(fake.requests for fake in self.fakes if fake.alive)


def assert_right(heard: Heard, prompt: Sequence[int] = LONG, tokens: int = 5) -> None:
    """It has heard the right tokens, once, and one end."""
    assert [event.id for event in heard.tokens] == expected(prompt, tokens)
    assert heard.end.reason == "length" and len(heard.accepted) == 1
