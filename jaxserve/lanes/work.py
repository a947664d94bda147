"""The attention that the spread chunks of a step need, summed up: tokens, pairs of query and key.

All is per layer and for one rank of tp: each rank's heads have lanes of their own (Context
Parallelism paper, figure 5).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jaxserve.api.errors import ConfigError

ITEM = 2  # bytes of a bf16 weight, activation or KV element
PARTIAL = 4  # bytes of an element of a lane's part of attention, and of its log-sum-exp
SCALE_ITEM = 2  # bytes of the bf16 scale of a key or value in FP8, as `kernels.kv_pages` stores it


def require(fits: bool, field: str, value: Any, rule: str) -> None:
    """Raises ConfigError, which names the field, where a value does not fit."""
    if not fits:
        raise ConfigError(field, f"{value} is not {rule}")


def stored_bytes(numbers: int, item: int, fp8: bool) -> int:
    """Bytes of a vector on pages, its scale included: of a key or a value of one head, or of a
    latent. item: bytes of an element where it is not FP8."""
    return numbers + SCALE_ITEM if fp8 else numbers * item


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of one rank. head_dim: numbers of a query, and of a vector on pages. item:
    bytes of an element of queries and vectors; partial: of partial outputs and their log-sum-exp, 4
    in our engine, `item` in the paper; stored: of one vector as it lies on pages, its scale
    included; 0: head_dim x item. vectors: of a token and kv head on pages: key and value, or the
    latent that is both. value_dim: numbers of a head's output; 0: head_dim. passed: bytes of
    what a chunk makes of states, which a lane sends to each other one in a layer that keeps these.
    attending: share of the model's layers that have these heads; others keep states. Errors:
    ConfigError for a field that cannot be."""

    heads: int
    kv_heads: int
    head_dim: int
    item: int = ITEM
    partial: int = PARTIAL
    stored: int = 0
    vectors: int = 2
    value_dim: int = 0
    passed: int = 0
    attending: float = 1.0

    def __post_init__(self) -> None:
        require(0 < self.attending <= 1, "attending", self.attending, "a share of the layers")
        for field in dataclasses.fields(self)[:-1]:
            value = getattr(self, field.name)
            low = int(field.name not in ("stored", "value_dim", "passed"))
            require(value >= low, field.name, value, f"{low} or more")

    @property
    def query_bytes(self) -> int:
        """Bytes of a token's queries."""
        return self.heads * self.head_dim * self.item

    @property
    def new_kv_bytes(self) -> int:
        """Bytes of a new token's vectors, before they lie on pages."""
        return self.vectors * self.kv_heads * self.head_dim * self.item

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's vectors on pages."""
        return self.vectors * self.kv_heads * (self.stored or self.head_dim * self.item)

    @property
    def partial_bytes(self) -> int:
        """Bytes of a token's partial output and log-sum-exp over one lane's KV."""
        return self.heads * (self._value_dim + 1) * self.partial

    @property
    def pair_flops(self) -> int:
        """FLOP of a token's queries and the vectors of one token: a product for the score, and one
        with the value."""
        return 2 * self.heads * (self.head_dim + self._value_dim)

    @property
    def _value_dim(self) -> int:
        return self.value_dim or self.head_dim


@dataclasses.dataclass(frozen=True, slots=True)
class ExchangeWork:
    """Sums over a step's spread chunks: over all lanes, and on the lane with the largest."""

    lanes: int
    tokens: int  # new ones, T
    context: int  # cached and new, P + T
    pairs: float  # of a query and a key that it attends to
    share: int  # new tokens of a lane, at most
    shard: int  # tokens of KV on a lane, at most; what goes round is padded to it
    touched: float  # of these, those of sequences that have queries in a step of the ring
    # what differs where chunks are on some of the lanes only; 0: they are on all
    even: int = 0  # new tokens of a lane where any lane may compute them: gathered ones
    holders: int = 0  # lanes that hold a sequence
    shard_pairs: float = 0.0  # pairs of all queries and the KV of the lane that attends most
    hop_pairs: float = 0.0  # pairs of one lane's queries and another's KV, at most
    visits: float = 1.0  # share of a lane's new tokens whose sequence one other lane holds, at most

    @property
    def cached(self) -> int:
        return self.context - self.tokens

    @property
    def gathered_pairs(self) -> float:
        """Pairs of all queries and one lane's KV, at most."""
        return self.shard_pairs or self.pairs * self.shard / self.context

    @property
    def step_pairs(self) -> float:
        """Pairs of one lane's queries and one lane's KV, at most: those of a step of the ring."""
        return self.hop_pairs or self.pairs * self.shard / self.context * self.share / self.tokens


def pairs_of(cached: int, new: int) -> float:
    """Pairs of a query and a key that it attends to, of `new` tokens after `cached` ones."""
    return new * (cached + (new + 1) / 2)


def most_visits(home: np.ndarray, blocks: np.ndarray) -> int:
    """Counts how many rows of a lane visit one other lane, at most. home [n]: lane that computes
    each row; blocks [n, lanes]: of its sequence on each lane."""
    computes = np.arange(blocks.shape[1])[:, None] == home
    visits = computes.astype(np.int32) @ (blocks > 0).astype(np.int32)
    np.fill_diagonal(visits, 0)
    return int(visits.max())


def work_of_decodes(lanes: int, share: int, kv: float, visits: float = 1.0) -> ExchangeWork:
    """Sums up decodes in a group of `lanes` lanes, each of which sends as many rows as the one that
    is home to most, `share`, and of whose KV a lane holds at most `kv` tokens. One lane's queries
    need an even share of them. visits: share of a lane's rows that visit one other lane."""
    return ExchangeWork(
        lanes=lanes,
        tokens=lanes * share,
        context=math.ceil(lanes * kv),
        pairs=kv * lanes,
        share=share,
        shard=math.ceil(kv),
        touched=kv / lanes,
        visits=visits,
    )
