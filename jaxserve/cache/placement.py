"""Chooses the lane on which a sequence's next block goes: one function per placement policy.

A placement sees a PlacementView and returns a lane that has a page available; the caller makes sure
that there is one. Attention gives the same answer wherever a block lies, so a placement decides
speed and room, never tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from jaxserve.api.lane_groups import size_around


class PlacementView(NamedTuple):
    """What a placement may look at."""

    available: list[int]  # pages that can be had on each lane
    held: list[int]  # blocks of this sequence on each lane
    lane: int  # of the block before, or the home lane
    limit: int  # blocks of a sequence on a lane before the next lane joins
    block: int  # number of the block to place
    slot: int
    home: int  # lane that computes and samples the sequence's tokens
    prompt_blocks: int  # of the whole prompt
    # lanes over which the prompt is dealt out evenly; none: one lane may hold it
    group: tuple[int, ...]
    stripe: int  # consecutive blocks on a lane, where a prompt is dealt out


def grow(view: PlacementView) -> int:
    """Stays on a lane until the sequence's limit there is reached, then goes to a lane of the
    smallest group with which some lane can join, of these to that with the most pages available
    (Medha's dynamic growth, M5).

    Once every lane with room holds as many blocks as the limit says, blocks go on to where most
    pages are available: the limit says when lanes join, not what fits.
    """
    if view.available[view.lane] and view.held[view.lane] < view.limit:
        return view.lane
    lanes = [lane for lane, pages in enumerate(view.available) if pages]
    joining = [lane for lane in lanes if view.held[lane] < view.limit]
    if not joining:
        return max(lanes, key=lambda lane: (view.available[lane], -lane))
    members = [lane for lane, blocks in enumerate(view.held) if blocks or lane == view.home]
    size = lambda lane: size_around((*members, lane), len(view.held))
    return min(joining, key=lambda lane: (size(lane), -view.available[lane], lane))


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
    token after it is sampled."""
    if not order:
        return grow(view)
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
