"""Groups of layers with page tables of their own, by the tokens that their sliding windows let them
see: a layer with a window needs the pages of its newest tokens only, which others keep.

Groups share pools: with as many pools as a group has layers, pool j serves layer j of every group,
and a page is one page of all pools, which one group at a time has. So memory is not split between
groups beforehand.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from jaxserve.checkpoint.model import ModelConfig, split
from jaxserve.settings.schema import ConfigError

Windows = tuple[int, ...]  # of the groups behind the first, whose layers see all tokens
ONE_GROUP: Windows = ()


class PageShape(NamedTuple):
    """Shape of a page, for each of its tokens: kv heads, vectors of each, numbers of a vector."""

    heads: int
    vectors: int
    numbers: int

    @property
    def size(self) -> int:
        """Numbers of a token."""
        return self.heads * self.vectors * self.numbers


class PagePlace(NamedTuple):
    """Numbers of a layer's page group, and of the pool that its pages are in. Of `parts` equal
    parts of a page in the pool the layer has one, `part`: where layers differ in the size of their
    heads, those with less have several in a page."""

    group: int
    pool: int
    part: int = 0
    parts: int = 1


def layer_page(model: ModelConfig, layer: int) -> PageShape:
    """Returns the shape of a layer's pages."""
    sizes = model.at(layer)
    return PageShape(sizes.kv_heads, *sizes.page)


@functools.cache
def pool_page(model: ModelConfig) -> PageShape:
    """Returns the shape of a page in the pools: that of the layers that need most, or several of
    these, so that those of all layers fit a number of times."""
    stored = {layer_page(model, layer) for layer in _storing(model)}
    largest = max(stored, key=lambda page: page.size)
    whole = math.lcm(*(page.size for page in stored))
    return largest._replace(heads=largest.heads * (whole // largest.size))


def page_parts(model: ModelConfig, layer: int) -> int:
    """Counts the layers like this one that share a page of a pool."""
    return _page_parts(model)[layer]


@functools.cache
def _page_parts(model: ModelConfig) -> dict[int, int]:
    whole = pool_page(model).size
    return {layer: whole // layer_page(model, layer).size for layer in _storing(model)}


def _storing(model: ModelConfig) -> list[int]:
    return [layer for layer in range(model.layers) if model.mixer(layer).stores]


def source(model: ModelConfig, layer: int) -> int:
    """Returns the layer that writes the pages which this one reads: the last one before it that
    stores keys and values and has the same window. Errors: ConfigError without one."""
    window = model.window(layer)
    before = [i for i in _storing(model) if i < layer and model.window(i) == window]
    if not before:
        fault = f"no layer before {layer} of {model.name} stores keys for its window {window}"
        raise ConfigError("model", fault)
    return before[-1]


def share_pages(model: ModelConfig) -> bool:
    """Returns whether layers share pages, as those with smaller heads than others do."""
    return any(parts > 1 for parts in _page_parts(model).values())


def page_windows(model: ModelConfig) -> Windows:
    """Returns the windows of a model's page groups behind the first. The first one is of the layers
    that see all tokens; for each window there are as many, of at most its size, as hold all layers
    with that window. ONE_GROUP where no layer sees all, or more than half of them do, so that
    little would be saved."""
    pages = {
        window: len(_sharing(model, range(model.layers), {window}))
        for window in dict.fromkeys(map(model.window, range(model.layers)))
    }
    whole = pages.pop(None, 0)
    if not 0 < whole <= sum(pages.values()):
        return ONE_GROUP
    counts = {window: -(-count // whole) for window, count in pages.items() if window is not None}
    return tuple(window for window in sorted(counts) for _ in range(counts[window]))


def page_places(model: ModelConfig, windows: Windows, layers: range) -> dict[int, PagePlace]:
    """Returns the places of those of these layers that have pages. windows: of the page groups, all
    of the model's or ONE_GROUP. Errors: ConfigError where a layer reads the pages of one that is
    not among them."""
    found: dict[int, PagePlace] = {}
    used = dict.fromkeys(map(model.window, layers))
    for window in used if windows else [None]:
        groups = [number for number, each in enumerate((None, *windows)) if each == window]
        pages = _sharing(model, layers, {window} if windows else set(used))
        size = -(-len(pages) // len(groups))
        for number, sharing in enumerate(pages):
            group, pool = groups[number // size], number % size
            for part, layer in enumerate(sharing):
                found[layer] = PagePlace(group, pool, part, page_parts(model, layer))
    for layer in layers:
        if model.mixer(layer).has_pages and layer not in found:
            found[layer] = _place_of_source(model, layer, found)
    return found


def _place_of_source(model: ModelConfig, layer: int, found: Mapping[int, PagePlace]) -> PagePlace:
    written = source(model, layer)
    if written not in found:
        fault = (
            f"layer {layer} of {model.name} reads the keys and values of layer {written}, so both "
            "must be in one stage and run together: spp=1 and layer_groups=1"
        )
        raise ConfigError("mesh", fault)
    return found[written]


def pool_count(model: ModelConfig, windows: Windows, layers: range, parts: int = 1) -> int:
    """Counts the pools of pages of these layers. parts: in which they run (`layer_groups`), each
    with pools of its own."""
    places = [page_places(model, windows, part).values() for part in split(layers, parts)]
    return sum(max((place.pool + 1 for place in part), default=0) for part in places)


def page_layout(windows: Windows, parts: Sequence[range], states: int = 0, sharing: int = 0) -> str:
    """Names the layers whose KV a page of each group has, in the order of the pools; "" for one
    group, whose pages have all layers in their order. parts: the layers that run one after the
    other, each with pools of its own. states: tensor-parallel ranks among which the states are
    split of which pages have copies; 0 where layers have none. sharing: ranks among which pages are
    split that several layers share; 0 where each has its own."""
    facts: list[str] = []
    if windows != ONE_GROUP:
        facts.append(f"windows {' '.join(map(str, windows))}")
    if states:
        facts.append(f"states of {states} ranks")
    if sharing:
        facts.append(f"shared by layers on {sharing} ranks")
    if facts:
        facts.append("layers " + " ".join(f"{part.start}-{part.stop - 1}" for part in parts))
    return "; ".join(facts)


def window_blocks(window: int, size: int) -> int:
    """Returns the most blocks of `size` tokens that a token sees through a window, its own one
    included."""
    return -(-(window - 1) // size) + 1


def _sharing(model: ModelConfig, layers: range, windows: Set[int | None]) -> list[list[int]]:
    """Splits those of these layers that store keys and values, and have one of these windows, into
    those that share a page of a pool."""
    alike: dict[int, list[int]] = {}
    for layer in layers:
        if model.mixer(layer).stores and model.window(layer) in windows:
            alike.setdefault(page_parts(model, layer), []).append(layer)
    return [
        some[at : at + parts] for parts, some in alike.items() for at in range(0, len(some), parts)
    ]
