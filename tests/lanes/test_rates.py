"""Links by the size of a group: lookup, JSON, and what a group beyond a node takes."""

from __future__ import annotations

import json

import pytest

from jaxserve.lanes.choice import ExchangeChooser
from jaxserve.lanes.rates import (
    ExchangeRates,
    LaneLinks,
    Link,
    links_from_json,
    links_of,
    links_to_json,
)
from jaxserve.lanes.work import Heads

NODE = LaneLinks.alike(Link(1e-6, 400e9))
NETWORK = LaneLinks(Link(1e-5, 50e9), Link(2e-5, 40e9), Link(3e-5, 30e9))
RATES = ExchangeRates(1e15, 1e12, 1e-6, **NETWORK.by_name())


def test_a_size_that_was_not_measured_has_the_links_of_the_next_larger_one():
    links = {2: NODE, 8: NETWORK}
    assert [links_of(links, size) for size in (2, 4, 8, 16)] == [NODE, NETWORK, NETWORK, NETWORK]


def test_links_pass_through_json_and_one_set_is_for_all_sizes():
    links = {2: NODE, 4: NETWORK}
    assert links_from_json(json.loads(json.dumps(links_to_json(links))), 4) == links
    one = links_from_json(json.loads(json.dumps(links_to_json(links)))["4"], 8)
    assert {size: links_of(one, size) for size in (2, 4, 8)} == dict.fromkeys((2, 4, 8), NETWORK)
    assert links_from_json({}, 1) == {}
    with pytest.raises(TypeError):
        links_from_json({"2": {"hop": [1e-5, 50e9]}}, 2)


def test_a_chooser_for_groups_of_a_size_has_their_links():
    chooser = ExchangeChooser(8, Heads(8, 2, 64), RATES, links={4: NODE, 8: NETWORK})
    inside, beyond = (chooser.for_groups(lanes) for lanes in (4, 8))
    assert inside.lanes == 4 and inside.rates == RATES.with_links(NODE)
    assert beyond.rates == RATES == chooser.for_groups(16).rates
    assert ExchangeChooser(8, Heads(8, 2, 64), RATES).for_groups(2).rates == RATES
