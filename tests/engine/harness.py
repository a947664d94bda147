"""Runs requests on an engine step by step, in the test's own thread, with the invariants checked
after every step."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from jaxserve.api.events import Event, Finished, Token
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.cache import CacheManager, LaneRules
from jaxserve.costs.coefficients import NOMINAL, Costs
from jaxserve.engine.build import build
from jaxserve.engine.engine import Engine
from jaxserve.engine.stages import HiddenStates
from jaxserve.engine.step_shapes import StepShape
from jaxserve.lanes.choice import ExchangeChooser
from jaxserve.lanes.planner import LanePlanner, PlanPart
from jaxserve.scheduling import Batch, Scheduler
from jaxserve.scheduling.events import StepIssued
from jaxserve.scheduling.pool.interface import PoolScheduler
from jaxserve.settings.schema import (
    AdapterConfig,
    CacheConfig,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)
from tests.lanes.plans import Plans as Plans


def engine(
    model: str = "random:tiny",
    mesh: str = "",
    *,
    chunk: int = 64,
    seqs: int = 8,
    pages: int = 256,
    block: int = 16,
    max_len: int = 2048,
    exchange: str = "gather",
    decode_exchange: str = "auto",
    dtype: str = "float32",
    quantization: str = "auto",
    planned: bool = False,
    profiled: bool = True,
    expert_parallel: bool = False,
    ffn_over_lanes: bool = False,
    layer_groups: int = 1,
    drafts: str = "none",
    draft_tokens: int = 5,
    loras: int = 0,
    lora_rank: int = 8,
    **cache,
) -> Engine:
    """An engine whose programs are compiled when first used. planned: those that move pages are
    among them; who plans is said to `fresh`. profiled: measured where settings ask for it."""
    planner = "cdsp" if planned else "none"
    if planned:
        cache.setdefault("placement", "striped")
    config = EngineConfig(
        ModelSource(
            model=str(model),
            max_model_len=max_len,
            dtype=dtype,
            quantization=quantization,
            enable_expert_parallel=expert_parallel,
            ffn_over_lanes=ffn_over_lanes,
        ),
        MeshConfig.parse(mesh),
        CacheConfig(block_size=block, pages=pages, **cache),
        SchedulerConfig(
            max_seqs=seqs,
            chunk_tokens=chunk,
            exchange=exchange,
            decode_exchange=decode_exchange,
            planner=planner,
            drafts=drafts,
            draft_tokens=draft_tokens,
            max_loras=loras,
        ),
        AdapterConfig(max_lora_rank=lora_rank, lora_root="/" if loras else None),
        layer_groups=layer_groups,
    )
    return build(
        config,
        progress=False,
        warm_up=False,
        profiled=profiled and not planned and drafts == "none",
    )


def fresh(
    old: Engine,
    placement: str,
    pages: int | None = None,
    planner: LanePlanner | PoolScheduler | None = None,
    costs: Costs = NOMINAL,
    chooser: ExchangeChooser | None = None,
    **settings,
) -> Engine:
    """An engine on the same devices and tiers below them with an empty cache, another placement, so
    many of the pages, costs of steps and exchanges, and other settings of the scheduler. It
    overwrites those of the old one: use that no more."""
    plan = old.worker.plan
    cache = dataclasses.replace(old.config.cache, pages=pages or plan.pages, placement=placement)
    config = dataclasses.replace(
        old.config, scheduler=dataclasses.replace(old.config.scheduler, **settings)
    )
    scheduler = Scheduler(
        config.scheduler,
        CacheManager(
            cache,
            plan.mesh.kvp,
            plan.slots,
            lower=old.worker.lower_tiers,
            rules=LaneRules(
                most_moves=plan.moves,
                ascending=plan.model.has_windows,
                has_states=plan.model.has_states,
                windows=plan.windows,
                state_pages=plan.state_pages,
            ),
        ),
        plan.mesh,
        old.info.max_model_len,
        plan.model.eos_ids,
        dataclasses.replace(costs, layer_groups=plan.layer_groups),
        planner,
        chooser=chooser,
    )
    return Engine(config, old.worker, scheduler)


# sizes of `shared` engines; others of these sizes have the same programs, which are compiled once
SHARED = dict(chunk=32, seqs=4, pages=400, max_len=512)


@functools.cache
def _tiny(mesh: str) -> Engine:
    return engine(mesh=mesh, **SHARED)


def shared(mesh: str = "", placement: str = "grow", pages: int | None = None) -> Engine:
    """Returns a new engine of the smallest model on devices and compiled programs that all tests of
    this process share. pages: of its empty cache, per lane. It overwrites the pages of the engine
    returned before on this mesh: use that no more."""
    base = _tiny(mesh)
    stages = base.worker.stages
    own = [name for name in vars(stages) if callable(getattr(type(stages), name, None))]
    assert not own, f"a test before this one left its own {own} behind"
    return fresh(base, placement, pages)


def watch_batches(real: Engine, see: Callable[[Batch], object]) -> None:
    """Shows each batch from now on, once it is issued."""
    real.bus.subscribe(StepIssued, lambda step: see(step.batch))


def shapes_of(real: Engine) -> list[StepShape]:
    """The shapes of the steps from now on."""
    shapes: list[StepShape] = []
    compiled = real.worker.plan.shapes
    real.bus.subscribe(StepIssued, lambda step: shapes.append(compiled[step.command.shape]))
    return shapes


def hidden_states_of(real: Engine) -> list[HiddenStates]:
    """Collects what the last stage returns for each step from now on."""
    hidden: list[HiddenStates] = []
    stages = real.worker.stages
    step = stages.step

    def kept(*work: Any) -> HiddenStates:
        hidden.append(step(*work))
        return hidden[-1]

    stages.step = kept  # type: ignore[method-assign]
    return hidden


@dataclasses.dataclass
class Completion:
    ids: list[int]
    logprobs: list
    finished: Finished


class Runner:
    """Submits requests and collects what comes back, by request and completion."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.events: dict[str, list[Event]] = {}

    def submit(
        self, prompt: Sequence[int], id: str | None = None, rest: dict | None = None, **fields
    ) -> str:
        id = id or f"r{len(self.events)}"
        params = SamplingParams.make(**{"temperature": 0, **fields})
        request = Request.make(
            id,
            np.asarray(prompt),
            params,
            vocab=self.engine.info.vocab,
            max_len=self.engine.info.max_model_len,
            arrival=self.engine.now(),
            **(rest or {}),
        )
        self.events[id] = []
        self.engine.submit(request, self.events[id].extend)
        return id

    def run(self, chunks: Sequence[int] = (), seed: int = 0) -> None:
        """Turns until nothing is left. chunks: budgets to choose from at random before each turn;
        none: the engine's own."""
        rng = random.Random(seed)
        scheduler = self.engine.scheduler
        own = scheduler.packer.config
        while True:
            if chunks:
                scheduler.packer.config = dataclasses.replace(own, chunk_tokens=rng.choice(chunks))
            if not self.engine.step():
                coming = any(sequence.ticket is not None for sequence in scheduler.slots.prefilling)
                if not coming and not any(each.lookup for each in scheduler.slots.queue):
                    break
                time.sleep(0.001)  # blocks are on their way from lower tiers
            scheduler.check()
        scheduler.packer.config = own

    def completion(self, id: str, index: int = 0) -> Completion:
        mine = [event for event in self.events[id] if getattr(event, "index", None) == index]
        tokens = [event for event in mine if isinstance(event, Token)]
        ends = [event for event in mine if isinstance(event, Finished)]
        assert len(ends) == 1, f"{id} ended {len(ends)} times"
        return Completion(
            [token.id for token in tokens], [token.logprobs for token in tokens], ends[0]
        )

    def ids(self, id: str, index: int = 0) -> list[int]:
        return self.completion(id, index).ids


class InGroups:
    """Plans of one part: each prompt of more than `least` tokens on the next group of `size`
    lanes."""

    def __init__(self, size: int, lanes: int = 8, least: int = 64):
        self.groups = itertools.cycle(
            tuple(range(first, first + size)) for first in range(0, lanes, size)
        )
        self.least = least

    def arrived(self, now: float) -> None:
        pass

    def __call__(self, pending: list[float], start: int, target: int) -> tuple[PlanPart, ...]:
        group = next(self.groups)
        return (PlanPart(target, group if target > self.least else group[:1]),)


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], chunks: Sequence[int] = (), **fields
) -> list[list[int]]:
    """Greedy tokens of all prompts, run together."""
    runner = Runner(engine)
    ids = [runner.submit(prompt, **fields) for prompt in prompts]
    runner.run(chunks)
    return [runner.ids(id) for id in ids]


def on_its_thread(engine: Engine, call: Callable[[], object]) -> None:
    """Calls something between two steps of a running engine. Errors: those of the call."""
    done: Future[object] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    engine.post(run)
    done.result(60)


def threads_of_engines() -> list[threading.Thread]:
    """Threads of the engines that run in this process."""
    return [thread for thread in threading.enumerate() if thread.name == "engine"]


def assert_empty(engine: Engine) -> None:
    """Nothing is left of any request."""
    load = engine.load()
    assert load.running == load.waiting == 0
    assert load.pages_free + load.pages_cached == load.pages_total
    assert not len(engine.registry) and not len(engine.steps.in_flight)
