"""Puts the host's side of a replica together, cache and scheduler, for engines and for simulations
of them: from settings, from the sizes of the devices, and from what steps cost there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from jaxserve.cache import CacheManager, LaneRules
from jaxserve.cache.hashes import CacheIdentity
from jaxserve.cache.manager import ANONYMOUS
from jaxserve.cache.tiers import LowerTiers
from jaxserve.checkpoint.page_groups import ONE_GROUP, Windows, window_blocks
from jaxserve.costs.coefficients import NOMINAL, Costs
from jaxserve.costs.predictor import Predictor
from jaxserve.lanes.cdsp import PLANNERS, Instances
from jaxserve.lanes.choice import Correction, ExchangeChooser, MoveTimes
from jaxserve.lanes.cost import lane_costs, moves_per_pair
from jaxserve.lanes.dealing import PromptLanes
from jaxserve.lanes.exchange import PIECE_TOKENS
from jaxserve.lanes.groups import group_sizes
from jaxserve.lanes.placement import PLACEMENTS, Striped
from jaxserve.lanes.planner import ELASTIC, LanePlanner, instances_of
from jaxserve.lanes.rates import GroupLinks, links_of
from jaxserve.lanes.segments import least_segment
from jaxserve.lanes.work import Heads
from jaxserve.scheduling.improvement_file import improvement_rates
from jaxserve.scheduling.pool.elastic import BatchTimes
from jaxserve.scheduling.pool.elastic_scheduler import ElasticScheduler
from jaxserve.scheduling.pool.interface import PoolScheduler
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig


@dataclasses.dataclass(frozen=True)
class ReplicaProfile:
    """Costs of a replica's steps. links: between lanes, by the size of their group; empty with one
    lane, or where `costs` say what messages take. improvement: the best improvement rate by
    requests per second, for each planner that was searched. corrections, decode_corrections: by
    exchange, from measured steps: see `ExchangeChooser`. move_times: of pages that change lanes;
    None where no such steps were measured, or links say as much. doubt: why its times may be wrong,
    for people; "" where they are right as far as is known."""

    costs: Costs
    links: GroupLinks
    improvement: Mapping[str, Mapping[float, float]] = dataclasses.field(default_factory=dict)
    corrections: Mapping[str, Correction] = dataclasses.field(default_factory=dict)
    decode_corrections: Mapping[str, Correction] = dataclasses.field(default_factory=dict)
    move_times: MoveTimes | None = None
    doubt: str = ""


@dataclasses.dataclass(frozen=True)
class ReplicaSizes:
    """Settings and sizes of a replica. cache: with its pages per lane. heads: of one rank. max_len:
    tokens of a sequence. planned_len: tokens of the longest prompt that plans are fitted to.
    layer_groups: programs that run one after the other in each step. windows: of the page groups
    behind the first."""

    mesh: MeshConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    heads: Heads
    max_len: int
    planned_len: int
    layer_groups: int = 1
    windows: Windows = ONE_GROUP

    @property
    def planned(self) -> bool:
        """True if plans say which lanes compute which part of a prompt."""
        return self.mesh.kvp > 1 and self.scheduler.planner in PLANNERS

    @property
    def moves(self) -> int:
        """Most pages that a step moves from each lane to each; 0 if none ever moves."""
        chunk, block, lanes = self.scheduler.chunk_tokens, self.cache.block_size, self.mesh.kvp
        moves = self.planned or (lanes > 1 and self.cache.copies)
        return moves_per_pair(chunk, block, lanes, 1 + len(self.windows)) if moves else 0

    def stripe(self, profile: ReplicaProfile | None) -> int:
        """Returns the consecutive blocks on a lane of a prompt that is dealt out: those of a row of
        a step; with states, which pass to the next lane behind each stripe, those of all rows; of a
        segment, where prompts are dealt out by these. profile: None if it is not known what steps
        cost."""
        cache = self.cache
        row = self.scheduler.stripe(cache.block_size)
        if self.heads.attending < 1:
            row = max(row, self.scheduler.chunk_tokens // cache.block_size)
        if not PLACEMENTS[cache.placement].pools:
            return row
        tokens = cache.segment_tokens
        if tokens is None and profile is not None:
            rates = profile.costs.exchange_rates(self.heads)
            if profile.links:
                links = self._links(profile)
                rates = rates.with_links(links_of(links, cache.pool(self.mesh.kvp)))
            tokens = max(least_segment(self.heads, rates), row * cache.block_size)
        if tokens is None:
            return row
        return -(-tokens // cache.block_size)

    def chooser(self, profile: ReplicaProfile) -> ExchangeChooser | None:
        """Returns what chooses how lanes exchange KV and queries; None for one lane."""
        if self.mesh.kvp == 1:
            return None
        chooser = ExchangeChooser(
            self.mesh.kvp,
            self.heads,
            profile.costs.exchange_rates(self.heads),
            piece=PIECE_TOKENS,
            costs=profile.costs,
            chooser=self.scheduler.exchange,
            decode_chooser=self.scheduler.decode_exchange,
            block=self.cache.block_size,
            moves=self.moves,
            seen=tuple(window_blocks(window, self.cache.block_size) for window in self.windows),
            corrections=profile.corrections,
            decode_corrections=profile.decode_corrections,
            move_times=profile.move_times,
            links=self._links(profile),
        )
        return chooser.for_groups(self.mesh.kvp)

    def _links(self, profile: ReplicaProfile) -> GroupLinks:
        """Returns the links of a profile per layer: only some may attend."""
        share = self.heads.attending
        return {size: links.in_layers(share) for size, links in profile.links.items()}

    def instances(self, profile: ReplicaProfile) -> Instances:
        """Returns the lanes as prefill instances to plan with."""
        kvp = self.mesh.kvp
        everywhere = PromptLanes(Striped(kvp, limit=0), self.cache.block_size)
        lanes = lane_costs(profile.costs, kvp, self.chooser(profile), everywhere)
        predictor = Predictor(profile.costs, self.mesh, lanes)
        step = self.scheduler.chunk_tokens
        return instances_of(predictor, kvp, step, self.planned_len, self.cache.block_size)

    def planner(self, profile: ReplicaProfile) -> LanePlanner | PoolScheduler | None:
        """Returns the planner that the settings ask for, if any."""
        if self.scheduler.planner == ELASTIC:
            latencies = self.instances(profile).latencies
            degrees = group_sizes(self.cache.pool(self.mesh.kvp))
            return ElasticScheduler(BatchTimes.of({size: latencies[size] for size in degrees}))
        if not self.planned:
            return None
        policy = self.scheduler.planner
        instances = self.instances(profile)
        rates = profile.improvement.get(policy)
        if self.scheduler.improvement is not None:
            rates = {0.0: self.scheduler.improvement}
        if not rates:
            rates = improvement_rates(policy, instances, self.mesh.kvp, self.planned_len)
        return LanePlanner(policy, instances, rates)


@dataclasses.dataclass(frozen=True)
class CachedModel:
    """A model as its cache and scheduler know it. ascending: rows of blocks must ascend, as for
    sliding windows. states: layers keep states, so that blocks alone do not bring a prefix back.
    state_pages: of a checkpoint of these; 0: none can be kept."""

    identity: CacheIdentity = ANONYMOUS
    ascending: bool = False
    eos_ids: Iterable[int] = ()
    states: bool = False
    state_pages: int = 0


def assemble(
    sizes: ReplicaSizes,
    profile: ReplicaProfile | None,
    model: CachedModel = CachedModel(),
    lower: LowerTiers | None = None,
) -> Scheduler:
    """Makes a scheduler and its cache, both empty. profile: None if it is not known what steps
    cost. lower: tiers below the devices."""
    costs = NOMINAL
    if profile is not None:
        costs = dataclasses.replace(profile.costs, layer_groups=sizes.layer_groups)
    cache = CacheManager(
        sizes.cache,
        sizes.mesh.kvp,
        sizes.scheduler.max_seqs,
        model.identity,
        lower,
        LaneRules(
            sizes.stripe(profile),
            sizes.moves,
            model.ascending,
            model.states,
            sizes.windows,
            model.state_pages,
        ),
    )
    return Scheduler(
        sizes.scheduler,
        cache,
        sizes.mesh,
        sizes.max_len,
        model.eos_ids,
        costs=costs,
        planner=sizes.planner(profile) if profile else None,
        chooser=sizes.chooser(profile) if profile else None,
    )
