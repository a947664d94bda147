"""Figure 19: hit rates of ways to keep KV: LRU alone, without ephemeral requests, with a disk tier
that keeps what is marked as context cache, and without bounds.

The sessions of the paper are not public. Ours have its shares of ephemeral requests (62 %) and of
context cache (8 %); lengths and pauses are our own, and the size of the cache is the one at which
LRU alone has about the paper's hit rate. What the other ways add to that is what can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from experiments.figures import Claim, Figure, Panel, Row, Rows, cell
from experiments.mooncake.cache_replay import BlockCache, PromptBlocks, block_hashes
from experiments.mooncake.figure import MooncakeSettings
from experiments.papers import main
from jaxserve.lab.simulate.arrival import BLOCK
from jaxserve.lab.simulate.workload import parse

REQUESTS = 20_000
MEMORY = 13_000_000  # tokens
EPHEMERAL = "ephemeral"
CONTEXT = "context"

Prompt = tuple[str, PromptBlocks]  # kind and blocks


def lru(prompts: Sequence[Prompt], memory: BlockCache, disk: BlockCache) -> int:
    """Keeps every prompt in memory; returns how many blocks were hit."""
    return sum(memory.serve(prompt) for _, prompt in prompts)


def filtered(prompts: Sequence[Prompt], memory: BlockCache, disk: BlockCache) -> int:
    """Keeps in memory what is not ephemeral."""
    return sum(
        memory.match(prompt) if kind == EPHEMERAL else memory.serve(prompt)
        for kind, prompt in prompts
    )


def tiered(prompts: Sequence[Prompt], memory: BlockCache, disk: BlockCache) -> int:
    """Keeps in memory what is not ephemeral, and context cache on disk too."""
    hits = 0
    for kind, prompt in prompts:
        if kind == EPHEMERAL:
            hits += memory.match(prompt)
        elif kind == CONTEXT:
            hits += max(memory.serve(prompt), disk.serve(prompt))
        else:
            hits += memory.serve(prompt)
    return hits


def unbounded(prompts: Sequence[Prompt], memory: BlockCache, disk: BlockCache) -> int:
    """Keeps every prompt on a disk that has room for all."""
    return sum(disk.serve(prompt) for _, prompt in prompts)


STRATEGIES: dict[str, Callable[[Sequence[Prompt], BlockCache, BlockCache], int]] = {
    "LRU": lru,
    "no ephemeral": filtered,
    "tiers and context cache": tiered,
    "unbounded": unbounded,
}


def sweep(settings: MooncakeSettings) -> Iterator[Row]:
    count = min(settings.requests or REQUESTS, REQUESTS)
    arrivals = parse("poisson:mix=mooncake-sessions", qps=1, requests=count, seed=settings.seed)
    prompts = [(arrival.kind, block_hashes(arrival, "")) for arrival in arrivals]
    total = sum(blocks for _, (_, blocks) in prompts)
    for place, (name, strategy) in enumerate(STRATEGIES.items()):
        hits = strategy(prompts, BlockCache(MEMORY // BLOCK), BlockCache(total))
        yield {
            "lengths": "sessions generated",
            "step": place,
            "strategy": name,
            "hit": hits / total,
        }


def _hit(rows: Rows, strategy: str) -> float:
    return cell(rows, "hit", strategy=strategy)


def _gain(rows: Rows, strategy: str) -> float:
    base = _hit(rows, "LRU")
    return _hit(rows, strategy) / base if base else 1.0


FIGURE = Figure(
    "fig19",
    "Hit rates by storage strategy",
    "simulated",
    sweep,
    claims=(
        Claim(
            "LRU",
            0.27,
            lambda rows: _hit(rows, "LRU"),
            "7.3.4",
            "%",
            "higher",
            remark="by the size of the cache, 13M tokens",
        ),
        Claim(
            "without ephemeral requests / LRU",
            1.0,
            lambda rows: _gain(rows, "no ephemeral"),
            "7.3.4: 'a minor improvement'",
            better="higher",
            limit=True,
        ),
        Claim(
            "tiers and context cache",
            0.52,
            lambda rows: _hit(rows, "tiers and context cache"),
            "7.3.4",
            "%",
            "higher",
        ),
        Claim(
            "tiers and context cache / LRU",
            1.93,
            lambda rows: _gain(rows, "tiers and context cache"),
            "7.3.4",
            better="higher",
        ),
    ),
    panels=(Panel("hit rate", "step", "hit", "strategy"),),
    runs="real cache",
)

if __name__ == "__main__":
    main(FIGURE, "mooncake")
