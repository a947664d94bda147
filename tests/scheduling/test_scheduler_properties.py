"""Whatever is added, cancelled and expired, and whatever steps fail, on whatever cache and lanes:
invariants hold, answers are exact, and nothing is left."""

from __future__ import annotations

import dataclasses

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.api.errors import RequestError
from jaxserve.costs.coefficients import NOMINAL, Costs
from jaxserve.lanes.placement import PLACEMENTS
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig
from tests.examples import examples
from tests.lanes.plans import Plans
from tests.scheduling.fakes import ADAPTERS, VOCAB, Replica, Tier

CONFIG = st.builds(
    SchedulerConfig,
    max_seqs=st.integers(1, 5),
    chunk_tokens=st.sampled_from([*range(1, 10), 150]),
    max_queue=st.just(6),
    admission=st.sampled_from(["queue", "predict", "stated"]),
    policy=st.sampled_from(["fcfs", "slack"]),
    chunking=st.sampled_from(["static", "adaptive"]),
    drafts=st.sampled_from(["none", "ngram"]),
    draft_tokens=st.integers(1, 5),
    max_loras=st.sampled_from([0, 0, 1, 2]),
)
COSTS = Costs(layers=1, linear_token=0.02, decode_kv=0.001)
CACHE = st.builds(
    CacheConfig,
    block_size=st.integers(1, 4),
    pages=st.integers(2, 8),
    lane_tokens=st.none() | st.integers(1, 12),
    prefix_caching=st.booleans(),
    prefix_copies=st.booleans(),
)
PLANNED = sorted(name for name, placement in PLACEMENTS.items() if placement.planned)
WINDOWS = st.just([]) | st.lists(st.integers(1, 9), min_size=1, max_size=3)
MESH = st.builds(MeshConfig, spp=st.integers(1, 3), kvp=st.integers(1, 4))
TAIL = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)
SAMPLING = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 12),
        "min_tokens": st.integers(0, 1),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=1),
    }
)


class Traffic(RuleBasedStateMachine):
    @initialize(
        config=CONFIG,
        cache=CACHE,
        mesh=MESH,
        placement=st.sampled_from(sorted(PLACEMENTS)),
        windows=WINDOWS,
        plans=st.none() | st.integers(0, 99),
        state_pages=st.sampled_from([0, 0, 1, 2]),
    )
    def build(self, config, cache, mesh, placement, windows, plans, state_pages):
        costs = COSTS if config.admission != "queue" else NOMINAL
        cache = dataclasses.replace(cache, pages=cache.pages * (1 + len(windows)))
        planner = None
        if state_pages:  # as `check_states` does
            config = dataclasses.replace(config, drafts="none")
            cache = dataclasses.replace(
                cache, prefix_copies=False, checkpoint_tokens=cache.pages, pages=4 * cache.pages
            )
        if plans is not None and mesh.kvp > 1:
            placement = PLANNED[plans % len(PLANNED)]
            planner = Plans(plans, mesh.kvp, longest=4 * cache.block_size)
        self.replica = Replica(
            config,
            cache,
            mesh,
            placement,
            costs=costs,
            planner=planner,
            windows=tuple(sorted(windows)),
            state_pages=state_pages,
            tier=self.tier(),
        )
        self.ahead = mesh.spp + 1

    def tier(self) -> Tier | None:
        return None

    @rule(
        common=st.sampled_from([0, 4, 8, 12]) | st.integers(0, 12),
        tail=TAIL,
        sampling=SAMPLING,
        patience=st.none() | st.integers(0, 9),
        bypass=st.booleans(),
        adapter=st.sampled_from(["", *ADAPTERS]),
        session=st.sampled_from(["", "s", "t"]),
        tenant=st.sampled_from(["", "", "a", "b"]),
    )
    def add(self, common, tail, sampling, patience, bypass, adapter, session, tenant):
        replica = self.replica
        try:
            deadline = None if patience is None else replica.now + patience
            replica.add(
                [i % VOCAB for i in range(common)] + tail,
                deadline=deadline,
                bypass=bypass,
                adapter=adapter if replica.scheduler.config.max_loras else "",
                session=session,
                tenant=tenant,
                **sampling,
            )
        except RequestError as error:
            assert error.status in ("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED") or "pages" in str(
                error
            )

    @precondition(lambda self: len(self.replica.flight) < self.ahead)
    @rule(times=st.integers(1, 3))
    def start(self, times):
        for _ in range(min(times, self.ahead - len(self.replica.flight))):
            self.replica.start()

    @precondition(lambda self: self.replica.flight)
    @rule()
    def finish(self):
        self.replica.finish()

    @precondition(lambda self: self.replica.flight)
    @rule()
    def fail(self):
        self.replica.fail()
        assert not self.replica.cache.counts()[2]

    @rule(steps=st.integers(1, 12))
    def run(self, steps):
        for _ in range(steps):
            if len(self.replica.flight) < self.ahead:
                self.replica.start()
            if self.replica.flight:
                self.replica.finish()

    @precondition(lambda self: self.replica.scheduler.requests.entries)
    @rule(data=st.data(), index=st.none() | st.integers(0, 2))
    def cancel(self, data, index):
        id = data.draw(st.sampled_from(sorted(self.replica.scheduler.requests.entries)))
        self.replica.hear(self.replica.scheduler.cancel(id, self.replica.now, index=index))

    @rule(seconds=st.integers(1, 5))
    def expire(self, seconds):
        self.replica.now += seconds
        self.replica.hear(self.replica.scheduler.expire(self.replica.now))

    @invariant()
    def load_adds_up(self):
        load = self.replica.scheduler.load()
        assert (
            load.running + load.waiting == len(self.replica.scheduler.sequences)
            and load.queued_prefill_tokens >= 0
        )

    def teardown(self):
        if hasattr(self, "replica"):
            self.replica.drain(self.ahead)
            self.replica.check_answers()


class TieredTraffic(Traffic):
    """The same with host memory below the devices, of which pages come back in pieces, at any time,
    are lost and damaged. Lanes and windows as replicas have them."""

    def tier(self) -> Tier | None:
        return Tier()

    @precondition(lambda self: self.replica.fetches)
    @rule(data=st.data(), pages=st.integers(1, 6))
    def arrive(self, data, pages):
        number = data.draw(st.integers(0, len(self.replica.fetches) - 1))
        self.replica.arrive(number, pages)

    @precondition(lambda self: self.replica.tier.content)
    @rule(data=st.data(), damaged=st.booleans())
    def lose(self, data, damaged):
        tier = self.replica.tier
        keys = data.draw(st.sets(st.sampled_from(sorted(tier.content)), max_size=4))
        for key in keys:
            del tier.content[key]
            if damaged:
                tier.hidden.add(key)


def machine(traffic: type[Traffic]) -> type:
    """The test case of a machine."""
    traffic.TestCase.settings = settings(
        max_examples=examples(400),
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
        report_multiple_bugs=False,
    )
    return traffic.TestCase


TestTraffic = machine(Traffic)
TestTieredTraffic = machine(TieredTraffic)
