"""Settings of a replica: all that one engine needs to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxserve.api.errors import ConfigError
from jaxserve.drafts.drafter import DRAFTERS
from jaxserve.lanes.choice import CHOOSERS
from jaxserve.lanes.groups import group_sizes
from jaxserve.lanes.placement import PLACEMENTS, Placement
from jaxserve.lanes.planner import ELASTIC
from jaxserve.settings.fields import Settings, option
from jaxserve.settings.schema.adapters import AdapterConfig, AdapterRoom
from jaxserve.settings.schema.cache import CacheConfig
from jaxserve.settings.schema.drafts import DraftConfig
from jaxserve.settings.schema.mesh import MeshConfig
from jaxserve.settings.schema.model import ModelSource
from jaxserve.settings.schema.scheduler import SchedulerConfig

AUTOMATIC = frozenset({"mesh", "block_size", "chunk_tokens", "max_seqs"})
MORE_LANES = "give --mesh a kvp of 2 or more"
# defaults of servers, where they differ from those of the config
SERVED: Mapping[str, str] = {"policy": "slack", "chunking": "adaptive", "admission": "stated"}


@dataclass(frozen=True)
class EngineConfig(Settings):
    """A replica: its model, mesh, cache, scheduler, adapters and draft model, and how its engine
    runs.

    automatic: settings that were not given, which are chosen by the machine where it has GPUs
    (`jaxserve.engine.machine`); no setting itself.
    """

    source: ModelSource = field(default=ModelSource())
    mesh: MeshConfig = field(default=MeshConfig())
    cache: CacheConfig = field(default=CacheConfig())
    scheduler: SchedulerConfig = field(default=SchedulerConfig())
    adapters: AdapterConfig = field(default=AdapterConfig())
    draft: DraftConfig = field(default=DraftConfig())
    profile: str = option(
        "auto",
        "what steps cost: a file that `jaxserve profile` wrote; auto: measured at the first start "
        "and kept; none: no predictions",
    )
    lookahead: int = option(
        1, "steps that are issued before the tokens of the last one are read", low=0, high=8
    )
    layer_groups: int = option(
        1,
        "groups into which the layers of a stage are cut, at the cost of a launch a group in each "
        "step: KV of a group goes to other replicas while the layers behind it compute, and with a "
        "policy by deadlines a prompt that would be late interrupts a long step between two groups",
        low=1,
        high=64,
    )
    attention: str = option(
        "auto",
        "kernels of attention over pages: those for Hopper GPUs (mosaic), NVIDIA GPUs since Ampere "
        "(triton) or CPUs (cpu), XLA's form of any device (xla), or one that is slow and plain "
        "(reference); auto: the fastest that supports the shapes, which GPUs compute a few tokens "
        "with at the start, and replace if these are not those of the reference",
        choices=("auto", "mosaic", "triton", "cpu", "xla", "reference"),
    )
    hang_timeout: float = option(
        60.0,
        "seconds after which a step counts as hung, if it has also taken ten times as long as "
        "predicted",
        low=0.01,
    )
    replay: str = option(
        "none",
        "which requests begin again when workers are lost, and do not end with UNAVAILABLE: "
        "unsent: those that no token was sent of; all: also the others, which go on where they "
        "were",
        choices=("none", "unsent", "all"),
    )
    role: str = option(
        "mixed",
        "what a conductor has this replica do with requests",
        choices=("mixed", "prefill", "decode"),
    )
    compile_cache: str | None = option(
        None, "folder of compiled programs; default: under the user's cache folder; '' for none"
    )
    compile_all: bool = option(
        True,
        "compile beside traffic the programs of steps of all sizes; off: only the few that hold "
        "every batch, for replicas that do not live long",
    )

    automatic: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lanes(self.mesh, self.cache, self.scheduler)
        if self.source.ffn_over_lanes and self.mesh.kvp == 1:
            raise ConfigError("ffn_over_lanes", f"has no effect on one lane; {MORE_LANES}")
        scheduler = self.scheduler
        for name, value in (
            ("lora_modules", self.adapters.lora_modules),
            ("lora_root", self.adapters.lora_root),
        ):
            if value and not scheduler.max_loras:
                raise ConfigError(name, "needs places for adapters: give --max_loras=N too")
        self._check_draft()
        for name, value, needs_costs in (
            ("exchange", scheduler.exchange, scheduler.exchange in CHOOSERS),
            ("planner", scheduler.planner, scheduler.planner != "none"),
        ):
            if self.profile == "none" and needs_costs:
                raise ConfigError(
                    name, f"{value} needs to know what steps cost, which --profile=none rules out"
                )

    def _check_draft(self) -> None:
        """Refuses a draft model without use, and drafts without one. Errors: ConfigError."""
        drafts = self.scheduler.drafts
        kinds = [name for name, kind in DRAFTERS.items() if kind.weights]
        if drafts in kinds and self.draft.draft_model is None:
            raise ConfigError("drafts", f"{drafts} needs weights: give --draft_model=NAME too")
        if drafts not in kinds and self.draft.draft_model is not None:
            names = " or ".join(f"--drafts={name}" for name in kinds)
            raise ConfigError("draft_model", f"has no effect without {names}")
        if drafts == "eagle3" and self.draft.draft_quantization not in ("auto", "none"):
            raise ConfigError("draft_quantization", "draft heads are not quantised")

    @property
    def adapter_room(self) -> AdapterRoom | None:
        """Room for adapters on the devices; None for none."""
        places = self.scheduler.max_loras
        return AdapterRoom(places, self.adapters.max_lora_rank) if places else None

    @property
    def timed(self) -> bool:
        """True if it is known what steps cost: a profile is given, or measured at the start since
        something is decided by it. `decode_exchange=auto` has none measured for itself."""
        scheduler = self.scheduler
        if self.profile != "auto":
            return self.profile != "none"
        if scheduler.policy != "fcfs" or scheduler.chunking != "static":
            return True
        if scheduler.drafts != "none":
            return True
        by_cost = scheduler.exchange in CHOOSERS or scheduler.planner != "none"
        return by_cost and self.mesh.kvp > 1


def check_lanes(mesh: MeshConfig, cache: CacheConfig, scheduler: SchedulerConfig) -> None:
    """Refuses settings about lanes that would have no effect on this mesh or beside the others;
    what is the default anyway is never refused. Errors: ConfigError."""
    planner = scheduler.planner
    for name, value, default in (
        ("placement", cache.placement, CacheConfig.placement),
        ("exchange", scheduler.exchange, SchedulerConfig.exchange),
        ("decode_exchange", scheduler.decode_exchange, SchedulerConfig.decode_exchange),
        ("planner", planner, SchedulerConfig.planner),
        ("matched_homes", scheduler.matched_homes, SchedulerConfig.matched_homes),
        ("prefix_copies", cache.prefix_copies, CacheConfig.prefix_copies),
    ):
        if mesh.kvp == 1 and value != default:
            raise ConfigError(name, f"{value} has no effect on one lane; {MORE_LANES}")
    if scheduler.matched_homes and not PLACEMENTS[cache.placement].pools:
        raise ConfigError("matched_homes", f"has no effect with --placement={cache.placement}")
    if scheduler.improvement is not None and planner not in ("single", "cdsp"):
        raise ConfigError("improvement", f"has no effect with --planner={planner}")
    _check_pool(mesh, cache)
    placement = PLACEMENTS[cache.placement]
    if planner == "none":
        if placement.planned and cache.lane_tokens is None:
            raise ConfigError(
                "placement",
                f"{cache.placement} deals out prompts of more than --lane_tokens, which is not "
                "given",
            )
        return
    if not _follows(placement, planner):
        names = " or ".join(name for name, kind in PLACEMENTS.items() if _follows(kind, planner))
        raise ConfigError(
            "placement", f"{cache.placement} cannot follow --planner={planner}; that needs {names}"
        )
    size = int(planner.removeprefix("fixed-")) if planner.startswith("fixed-") else 1
    if mesh.kvp % size:
        raise ConfigError(
            "planner", f"{planner} needs a kvp that {size} divides; --mesh has kvp={mesh.kvp}"
        )


def _follows(placement: type[Placement], planner: str) -> bool:
    return placement.scatters if planner == ELASTIC else placement.planned


def _check_pool(mesh: MeshConfig, cache: CacheConfig) -> None:
    """Refuses sizes of a pool and its segments that no placement asks for, and groups that lanes do
    not divide into. Errors: ConfigError."""
    for name in ("pool_lanes", "segment_tokens"):
        if getattr(cache, name) is not None and not PLACEMENTS[cache.placement].pools:
            raise ConfigError(name, f"has no effect with --placement={cache.placement}")
    sizes = group_sizes(mesh.kvp)[1:]
    if cache.pool_lanes is not None and cache.pool_lanes not in sizes:
        names = ", ".join(map(str, sizes))
        raise ConfigError("pool_lanes", f"{cache.pool_lanes} is not one of {names}")
    if cache.prefix_copies and not cache.prefix_caching:
        raise ConfigError("prefix_copies", "has no effect without prefix_caching")
