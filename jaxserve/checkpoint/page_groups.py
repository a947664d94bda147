"""Groups of layers with page tables of their own, by the tokens that their sliding windows let them
see: a layer with a window needs the pages of its newest tokens only, which others keep.

Groups share pools: with as many pools as a group has layers, pool j serves layer j of every group,
and a page is one page of all pools, which one group at a time has. So memory is not split between
groups beforehand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.checkpoint.model import ModelConfig, split

Windows = tuple[int, ...]  # of the groups behind the first, whose layers see all tokens
ONE_GROUP: Windows = ()


class PagePlace(NamedTuple):
    """Numbers of a layer's page group, and of the pool that its pages are in."""

    group: int
    pool: int


def page_windows(model: ModelConfig) -> Windows:
    """Returns the windows of a model's page groups behind the first. The first one is of the layers
    that see all tokens; for each window there are as many, of at most its size, as hold all layers
    with that window. ONE_GROUP where no layer sees all, or more than half of them do, so that
    little would be saved."""
    counts = _by_window(model, range(model.layers))
    whole = counts[None]
    layers = {window: count for window, count in counts.items() if window is not None}
    if not 0 < whole <= sum(layers.values()):
        return ONE_GROUP
    return tuple(window for window in sorted(layers) for _ in range(-(-layers[window] // whole)))


def page_places(model: ModelConfig, windows: Windows, layers: range) -> dict[int, PagePlace]:
    """Returns the places of those of these layers that have pages. windows: of the page groups, all
    of the model's or ONE_GROUP."""
    if windows == ONE_GROUP:
        paged = [layer for layer in layers if model.mixer(layer).has_pages]
        return {layer: PagePlace(0, pool) for pool, layer in enumerate(paged)}
    found = {}
    counts = _by_window(model, layers)
    for window, count in counts.items():
        groups = [number for number, each in enumerate((None, *windows)) if each == window]
        size = -(-count // len(groups))
        alike = [layer for layer in layers if _is(model, layer, window)]
        for number, layer in enumerate(alike):
            found[layer] = PagePlace(groups[number // size], number % size)
    return found


def pool_count(model: ModelConfig, windows: Windows, layers: range, parts: int = 1) -> int:
    """Counts the pools of pages of these layers. parts: in which they run (`layer_groups`), each
    with pools of its own."""
    places = [page_places(model, windows, part).values() for part in split(layers, parts)]
    return sum(max((place.pool + 1 for place in part), default=0) for part in places)


def page_layout(windows: Windows, parts: Sequence[range], states: int = 0) -> str:
    """Names the layers whose KV a page of each group has, in the order of the pools; "" for one
    group, whose pages have all layers in their order. parts: the layers that run one after the
    other, each with pools of its own. states: tensor-parallel ranks among which the states are
    split of which pages have copies; 0 where layers have none."""
    facts: list[str] = []
    if windows != ONE_GROUP:
        facts.append(f"windows {' '.join(map(str, windows))}")
    if states:
        facts.append(f"states of {states} ranks")
    if facts:
        facts.append("layers " + " ".join(f"{part.start}-{part.stop - 1}" for part in parts))
    return "; ".join(facts)


def window_blocks(window: int, size: int) -> int:
    """Returns the most blocks of `size` tokens that a token sees through a window, its own one
    included."""
    return -(-(window - 1) // size) + 1


def _by_window(model: ModelConfig, layers: range) -> Counter[int | None]:
    """Counts the layers with pages by their window."""
    return Counter(model.window(layer) for layer in layers if model.mixer(layer).has_pages)


def _is(model: ModelConfig, layer: int, window: int | None) -> bool:
    return model.mixer(layer).has_pages and model.window(layer) == window
