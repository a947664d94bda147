"""A replica without devices that keeps a journal, as the engine does."""

from __future__ import annotations

import json

import numpy as np

from jaxserve.api.request import Request, Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.cache import CacheManager
from jaxserve.observe.journal import Journal
from jaxserve.observe.view import Snapshot
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.batch_reader import StepResults
from jaxserve.scheduling.events import StepIssued, StepRead
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig


class Recorded:
    """A scheduler whose steps take a tenth of a second each and always sample the token 7."""

    def __init__(
        self,
        seqs: int = 4,
        chunk: int = 64,
        pages: int = 4096,
        lanes: int = 1,
        stages: int = 1,
        **cache,
    ):
        mesh = MeshConfig(kvp=lanes, spp=stages)
        manager = CacheManager(CacheConfig(block_size=16, pages=pages, **cache), lanes, seqs)
        self.scheduler = Scheduler(
            SchedulerConfig(max_seqs=seqs, chunk_tokens=chunk, policy="slack"),
            manager,
            mesh,
            max_len=100_000,
        )
        self.journal = Journal(stages, 0.0)
        self.journal.listen(self.scheduler.bus)
        self.now = 0.0
        self.flights = []
        self.requests = {}

    def submit(self, id: str, prompt: int, tokens: int = 4, **slo) -> None:
        sampling = SamplingParams.make(max_tokens=tokens, ignore_eos=True)
        ids = np.random.default_rng(len(self.requests)).integers(0, 99, prompt)
        self.requests[id] = Request.make(
            id, ids, sampling, vocab=100, max_len=100_000, arrival=self.now, slo=Slo(**slo)
        )
        self.scheduler.add(self.requests[id])

    def issue(self) -> bool:
        batch = self.scheduler.start(self.now)
        if batch is not None:
            self.scheduler.bus.publish(StepIssued(batch, None, self.now))
            self.flights.append(batch)
        return batch is not None

    def read(self, seconds: float = 0.1) -> None:
        self.now, batch = self.now + seconds, self.flights.pop(0)
        self.scheduler.bus.publish(StepRead(batch, self.now, seconds, comparable=True))
        self.scheduler.finish(batch, StepResults(np.full(batch.seq.size, 7)), self.now)

    def run(self, steps: int = 10**6) -> None:
        while steps and self.issue():
            self.read()
            steps -= 1

    def view(self, since: int = 0) -> dict:
        return json.loads(
            json.dumps(
                Snapshot.take(self.journal, self.scheduler, self.now, since).shown(),
                allow_nan=False,
            )
        )


def crowd() -> Recorded:
    """256 sequences that decode, 4096 that wait."""
    replica = Recorded(seqs=256, chunk=4096, pages=40_000)
    for place in range(256):
        replica.submit(f"runs-{place}", 16, tokens=1000)
    replica.run(100)
    for place in range(4096):
        replica.submit(f"waits-{place}", 100 + place, tokens=10, ttft=1 + place / 100)
    return replica
