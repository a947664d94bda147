"""Chooses the lane on which a sequence's next block goes: one function per placement policy.

A placement sees a PlacementView and returns a lane that has a page available; the caller makes sure
that there is one. Attention gives the same answer wherever a block lies, so a placement decides
speed and room, never tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from jaxserve.lanes.groups import lanes_of, size_around


class PlacementView(NamedTuple):
    """What a placement may look at."""

    available: list[int]  # pages that can be had on each lane
    held: list[int]  # blocks of this sequence on each lane
    lane: int  # of the block before, or the home lane
    limit: int  # blocks of a sequence on a lane before the next lane joins
    block: int  # number of the block to place
    slot: int
    home: int  # lane that computes and samples the sequence's tokens
    # of the whole prompt, after which decoded blocks come; 0: not known, none counts as decoded
    prompt_blocks: int
    # lanes over which the prompt is dealt out evenly; none: one lane may hold it
    group: tuple[int, ...]
    stripe: int  # consecutive blocks on a lane, where a prompt is dealt out

    @property
    def decoded(self) -> bool:
        """Whether the block comes after all blocks of the prompt."""
        return 0 < self.prompt_blocks <= self.block


def grow(view: PlacementView) -> int:
    """Stays on a lane until the sequence's limit there is reached, then goes to a lane of the
    smallest group with which some lane can join, of these to that with the most pages available
    (Medha's dynamic growth, M5).

    Decoded blocks of a spread sequence go round the lanes of its group that are below the limit.
    Once every lane with room holds as many blocks as the limit says, they go round all lanes of the
    group, and others to where most pages are available: the limit says when lanes join, not what
    fits.
    """
    lane = next_of_round(view, view.limit)
    if lane is not None:
        return lane
    if view.available[view.lane] and view.held[view.lane] < view.limit:
        return view.lane
    lanes = [lane for lane, pages in enumerate(view.available) if pages]
    joining = [lane for lane in lanes if view.held[lane] < view.limit]
    if not joining:
        lane = next_of_round(view)
        return max(lanes, key=view.available.__getitem__) if lane is None else lane
    members = [lane for lane, blocks in enumerate(view.held) if blocks or lane == view.home]
    size = lambda lane: size_around((*members, lane), len(view.held))
    return min(joining, key=lambda lane: (size(lane), -view.available[lane], lane))


def next_of_round(view: PlacementView, limit: int | None = None) -> int | None:
    """The lane for a decoded block of a spread sequence: block by block round the lanes of its
    group that have a page and hold fewer than `limit` of its blocks (None: any number). None for
    other blocks, and where there is no such lane.

    So KV grows evenly over a group, and the group stays as it is (context parallel paper, Alg. 4,
    which goes round token by token; here KV lies in pages, so a block is the unit). A round begins
    where most pages are available: at another lane for each sequence of a batch, so that lanes fill
    evenly over the batch too.
    """
    if not view.decoded:
        return None
    group = lanes_of(view.home, view.held)
    if len(group) == 1:
        return None
    lanes = [
        lane
        for lane in group
        if view.available[lane] and (limit is None or view.held[lane] < limit)
    ]
    if view.block == view.prompt_blocks:
        return max(lanes, key=view.available.__getitem__, default=None)
    return min(lanes, key=lambda lane: (lane - view.lane - 1) % len(group), default=None)


def round_robin(view: PlacementView) -> int:
    """Block by block over the lanes, skipping full ones."""
    lanes = len(view.available)
    return next(
        lane % lanes
        for lane in range(view.block, view.block + lanes)
        if view.available[lane % lanes]
    )


def striped(view: PlacementView) -> int:
    """Stripe by stripe over the lanes of the group, for prompts that are dealt out; others as
    `grow`."""
    return _dealt_out(view, view.group)


def zigzag(view: PlacementView) -> int:
    """Stripe by stripe over the lanes of the group and back again, for prompts that are dealt out;
    others as `grow`.

    So each lane has as many early tokens as late ones, which see all before them: causal attention
    takes every lane equally long (context parallel paper, 3.5.1).
    """
    return _dealt_out(view, view.group + view.group[::-1])


def _dealt_out(view: PlacementView, order: tuple[int, ...]) -> int:
    """Stripe by stripe over the lanes of `order`. The prompt's last block is at home, where the
    token after it is sampled; decoded blocks go round the group, whatever its lanes hold."""
    if not order:
        return grow(view)
    if view.decoded:
        next_lane = next_of_round(view)
        return grow(view) if next_lane is None else next_lane
    lane = order[view.block // view.stripe % len(order)]
    if view.block == view.prompt_blocks - 1:
        lane = view.home
    return lane if view.available[lane] else grow(view)


def scatter(view: PlacementView) -> int:
    """Any lane at random, but the same one in every run."""
    lanes = [lane for lane, pages in enumerate(view.available) if pages]
    return random.Random(view.slot * 1_000_003 + view.block).choice(lanes)


Placement = Callable[[PlacementView], int]
DEALING = (striped, zigzag)  # long prompts over their group
SCATTERING = (round_robin, scatter)  # all prompts over all lanes
PLACEMENTS: dict[str, Placement] = {
    "grow": grow,
    "striped": striped,
    "zigzag": zigzag,
    "round_robin": round_robin,
    "random": scatter,
}
