"""Settings of the scheduler."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.api.batch import DEFAULT_EXCHANGE
from jaxserve.drafts.drafter import DRAFTERS
from jaxserve.lanes.cdsp import PLANNERS
from jaxserve.lanes.choice import DECODE_CHOICES, EXCHANGE_CHOICES
from jaxserve.lanes.planner import ELASTIC
from jaxserve.policies import POLICIES
from jaxserve.settings.fields import option
from jaxserve.settings.schema.objectives import Objectives, objectives_by_class
from jaxserve.settings.schema.tenants import shares_by_tenant


@dataclass(frozen=True)
class SchedulerConfig(Objectives):
    """Settings of the scheduler. Its own objectives are those of requests that name no class."""

    policy: str = option(
        "fcfs",
        "order of prefill: "
        + "; ".join(f"{policy.help} ({name})" for name, policy in POLICIES.items()),
        choices=POLICIES.keys(),
    )
    chunking: str = option(
        "static",
        "prefill tokens of a step: chunk_tokens (static), or fewer so that decodes meet their "
        "objective (adaptive)",
        choices=("static", "adaptive"),
    )
    max_seqs: int = option(16, "largest number of sequences that run at once", low=1, high=4096)
    chunk_tokens: int = option(
        512,
        "largest number of prefill tokens in a step, per lane; one prompt may have those of all "
        "lanes that compute it",
        low=1,
        high=65536,
    )
    min_chunk: int = option(
        64,
        "smallest prefill chunk in tokens, and the length of the rows of chunks that share a step",
        low=1,
    )
    sharing: float = option(
        0.95,
        "largest share of a step that shorter prompts may take from a long one (0 to 1; adaptive "
        "chunks)",
        low=0,
        high=1,
    )
    sharing_ramp: float = option(
        1 / 32,
        "share of its time to the first token that a shorter prompt has used up when it may take "
        "all of sharing from a long one; until then it may take less in proportion, with 1 over "
        "the whole of that time, as in Medha",
        low=0.0001,
        high=1,
    )
    classes: str = option(
        "",
        "objectives of requests that name a class, as "
        "chat:ttft=0.5,tpot=0.05;batch:ttft=600,stretch=20,tpot=1; what a class leaves out is as "
        "for requests without one",
    )
    tenant_shares: str = option(
        "",
        "shares of the replica's time by tenant of API keys, as team-a:2;team-b:1; tenants that "
        "are not named have 1. One that uses more than its share goes behind the others",
    )
    exchange: str = option(
        DEFAULT_EXCHANGE,
        "how attention reaches KV on other lanes: "
        + "; ".join(f"{row.summary} ({name})" for name, row in EXCHANGE_CHOICES.items()),
        choices=EXCHANGE_CHOICES.keys(),
    )
    decode_exchange: str = option(
        "auto",
        "how decodes of sequences on several lanes reach KV on other lanes: "
        + "; ".join(f"{row.summary} ({name})" for name, row in DECODE_CHOICES.items())
        + ", or gather where it is not known what steps cost",
        choices=DECODE_CHOICES.keys(),
    )
    planner: str = option(
        "none",
        "how many lanes compute a prompt: chosen for each of its chunks so that it ends soonest "
        "(cdsp), chosen once for all of it (single), always N (fixed-N), or by lane_tokens (none); "
        "needs a placement of striped or zigzag; or, over a placement of hashed, chosen in each "
        "step for all its prompts so that their summed latency is least (elastic)",
        # fixed-1 is what none does
        choices=("none", *(name for name in PLANNERS if name != "fixed-1"), ELASTIC),
    )
    matched_homes: bool = option(
        False,
        "choose the home lanes of all prompts that are admitted in a step together, such that the "
        "fewest queries of their decodes visit other lanes; needs a placement of hashed",
    )
    improvement: float | None = option(
        None,
        "share of a prompt's time that more lanes must save to be used (planner single or cdsp); "
        "default: by the load, as `jaxserve profile` or a short simulation at the start found",
        low=0,
        high=0.99,
    )
    admission: str = option(
        "queue",
        "what happens to a request that cannot have its first token in time, or would make others "
        "late: it waits (queue), is refused at once (predict; needs a profile), or is refused if "
        "it states an objective or a class itself, and else waits (stated)",
        choices=("queue", "predict", "stated"),
    )
    step_time: float = option(
        0.25,
        "upper bound on step time (s) when no decode sets one, and for steps of a long prompt, "
        "unless longer chunks take less time for each token (adaptive chunks)",
        low=0.0001,
    )
    decode_reserve: float = option(
        0.5,
        "largest share of all pages that is kept free for what running sequences will still put "
        "out, as long as completions are on average; with less, more run at once, and more decodes "
        "are preempted; 1: for all that they may put out, and none is ever preempted (0 to 1)",
        low=0,
        high=1,
    )
    drafts: str = option(
        "none",
        "what proposes tokens that are then checked, several in one step, where that gives more "
        "tokens a second (speculative decoding; the tokens stay the same): "
        + "; ".join(f"{kind.help} ({name})" for name, kind in DRAFTERS.items())
        + "; or nothing (none)",
        choices=("none", *DRAFTERS),
    )
    draft_tokens: int = option(
        7, "largest number of proposed tokens of a sequence in a step", low=1, high=64
    )
    max_loras: int = option(
        0,
        "adapters (LoRA) on the devices at once, so also those of one step; 0: none are served",
        low=0,
        high=256,
    )
    max_queue: int = option(
        4096, "largest number of waiting requests; further ones are refused", low=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # refuse mistakes in texts when the object is made
        _ = self.objectives
        _ = self.weights

    @functools.cached_property
    def objectives(self) -> Mapping[str | None, Objectives]:
        """Objectives by class of requests; None: of those that name none."""
        return objectives_by_class(self.classes, self)

    @functools.cached_property
    def weights(self) -> Mapping[str, float]:
        """Shares of tenants that have not 1, by name."""
        return shares_by_tenant(self.tenant_shares)

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(filter(None, self.objectives))

    @property
    def decode_rows(self) -> int:
        """Largest number of tokens that a step decodes on a lane, proposed ones included."""
        if self.drafts == "none":
            return self.max_seqs
        return max(self.max_seqs, 1 + self.draft_tokens)

    @property
    def tile(self) -> int:
        """Tokens of a row: prefill chunks that share a step are computed in whole rows."""
        return min(self.min_chunk, self.chunk_tokens)

    @property
    def tiles(self) -> int:
        """Rows of a step on one lane."""
        return -(-self.chunk_tokens // self.tile)

    def stripe(self, block_size: int) -> int:
        """Consecutive blocks on one lane of a prompt that is dealt out over lanes: those of a
        row."""
        return max(1, self.tile // block_size)
