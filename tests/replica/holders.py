"""The replicas that the suite runs over, each with its way of waiting: a live one on a thread goes
on by itself, a virtual one when its clock is moved."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxserve.api.events import Accepted, Event, Finished, Token
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.cache import CacheManager
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.cluster.conductor import Conductor, ConductorSettings
from jaxserve.cluster.member import Member
from jaxserve.costs.coefficients import Costs
from jaxserve.lab.simulate.replica import VirtualReplica
from jaxserve.replica.protocol import Replica
from jaxserve.scheduling import Scheduler
from jaxserve.server.remote_replica import RemoteReplica
from jaxserve.server.replica_service import ReplicaService
from jaxserve.settings.schema import (
    CacheConfig,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)
from tests.server.fakes import FakeReplica
from tests.waiting import SOON, eventually

SECONDS = 120.0  # most that a test waits for a live replica, which may have to compile
MAX_LEN = 512
SECRET = b"of the tests of replicas"
LONG = 400  # tokens of an output that is still running when a test looks
CACHE = CacheConfig(block_size=16, pages=60)
SCHEDULER = SchedulerConfig(max_seqs=4, max_queue=6, chunk_tokens=32)


class Heard:
    """A sink that keeps what it hears."""

    def __init__(self) -> None:
        self.calls: list[Sequence[Event]] = []
        self.events: list[Event] = []

    def __call__(self, events: Sequence[Event]) -> None:
        self.calls.append(events)
        self.events += events

    def of(self, index: int) -> list[Event]:
        """Returns the events of one completion."""
        return [event for event in self.events if getattr(event, "index", None) == index]

    @property
    def accepted(self) -> list[Accepted]:
        return [event for event in self.events if isinstance(event, Accepted)]

    @property
    def tokens(self) -> list[Token]:
        return [event for event in self.events if isinstance(event, Token)]

    @property
    def ends(self) -> list[Finished]:
        return [event for event in self.events if isinstance(event, Finished)]

    @property
    def end(self) -> Finished:
        """Returns the end of a request with one completion."""
        (found,) = self.ends
        return found


class Holder:
    """Holds a replica that runs by itself and waits for it."""

    def __init__(self, replica: Replica):
        self.replica = replica

    def wait(self, condition: Callable[[], bool]) -> None:
        eventually(condition, SECONDS)

    def wait_ended(self, *heard: Heard, completions: int = 1) -> None:
        self.wait(lambda: all(len(one.ends) == completions for one in heard))

    def request(
        self, id: str = "r", prompt: int = 20, tokens: int = 5, n: int = 1, **rest
    ) -> Request:
        """A request of so many tokens that no end token ends."""
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, n=n)
        ids = np.arange(3, 3 + prompt, dtype=np.int32) % self.replica.info.vocab
        return Request(id, ids, sampling, arrival=self.replica.now(), **rest)

    def submit(self, id: str = "r", prompt: int = 20, tokens: int = 5, n: int = 1, **rest) -> Heard:
        heard = Heard()
        self.replica.submit(self.request(id, prompt, tokens, n, **rest), heard)
        return heard


class VirtualHolder(Holder):
    """Moves the clock from event to event while it waits."""

    replica: VirtualReplica

    def wait(self, condition: Callable[[], bool]) -> None:
        while not condition():
            at = self.replica.next_event()
            assert at < math.inf, "it did not happen, and nothing is left to happen"
            self.replica.advance(at)


@functools.cache
def _engine():
    """A live engine of the smallest model, whose programs the ones made from it share."""
    from jaxserve.engine.build import build

    source = ModelSource(model="random:tiny", max_model_len=MAX_LEN)
    config = EngineConfig(source, MeshConfig(), CACHE, SCHEDULER)
    return build(config, progress=False, warm_up=False)


def live(**settings: Any) -> Holder:
    """settings: of the scheduler, where they are others than SCHEDULER's."""
    from tests.engine.harness import fresh

    return Holder(fresh(_engine(), "grow", **settings))


def virtual(**settings: Any) -> Holder:
    """settings: of the scheduler, where they are others than SCHEDULER's."""
    mesh = MeshConfig()
    config = dataclasses.replace(SCHEDULER, **settings)
    cache = CacheManager(CACHE, mesh.kvp, SCHEDULER.max_seqs)
    costs = Costs(layers=1, launch=0.01, linear_token=1e-5)
    scheduler = Scheduler(config, cache, mesh, MAX_LEN, costs=costs)
    return VirtualHolder(VirtualReplica(scheduler, CACHE, mesh, shape=MODELS["tiny"]))


def fake() -> Holder:
    """Holds the fake of the server's tests, which has neither a scheduler nor a journal."""
    return Holder(FakeReplica(step_seconds=0.005, max_queue=12))


class RemoteHolder(Holder):
    """Holds a replica that a service offers on a port of this machine."""

    def __init__(self, behind: Replica):
        self.service = ReplicaService(SECRET)
        port = self.service.start("127.0.0.1:0")
        self.service.open(behind)
        super().__init__(_ReachedReplica(behind, self.service, f"127.0.0.1:{port}"))


class _ReachedReplica(RemoteReplica):
    """Starts and closes what it reaches as well, which other processes do by themselves."""

    def __init__(self, behind: Replica, service: ReplicaService, target: str):
        super().__init__(target, SECRET)
        assert self.wait_connected(SOON)
        self._behind = behind
        self._service = service

    def start(self) -> None:
        self._behind.start()

    def close(self) -> None:
        super().close()
        self._service.stop()
        self._behind.close()


def remote() -> Holder:
    return RemoteHolder(live().replica)


def conductor_of_fakes() -> Holder:
    """Holds a conductor with a thread of its own, over fakes with theirs."""
    fakes = [FakeReplica(step_seconds=0.005, max_queue=6) for _ in range(2)]
    members = [Member(f"fake {number}", one) for number, one in enumerate(fakes)]
    return Holder(Conductor(members, owns_members=True))


class VirtualConductorHolder(Holder):
    """Moves the clocks of a conductor's virtual members together while it waits."""

    def __init__(self, members: list[VirtualReplica], routing: str = "local_cache_aware"):
        self.members = members
        named = [Member(f"virtual {number}", one) for number, one in enumerate(members)]
        clock = members[0].clock
        settings = ConductorSettings(routing=routing)
        super().__init__(Conductor(named, settings, clock=clock, threaded=False, owns_members=True))

    def wait(self, condition: Callable[[], bool]) -> None:
        while not condition():
            at = min(member.next_event() for member in self.members)
            assert at < math.inf, "it did not happen, and nothing is left to happen"
            for member in self.members:
                member.advance(at)


def conductor_of_virtuals() -> Holder:
    return VirtualConductorHolder([virtual().replica for _ in range(2)])


SCHEDULED = {"live": live, "remote": remote, "virtual": virtual}
HOLDERS = {
    **SCHEDULED,
    "fake": fake,
    "conductor of fakes": conductor_of_fakes,
    "conductor of virtuals": conductor_of_virtuals,
}
