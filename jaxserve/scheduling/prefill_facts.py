"""Facts of which a replica's predictions of prefills are made, as plain data that can be sent
elsewhere, and the predictor that is made of them there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.costs.coefficients import NOMINAL
from jaxserve.costs.fit import from_json, to_json
from jaxserve.costs.predictor import Predictor
from jaxserve.lanes.choice import Correction, ExchangeChooser
from jaxserve.lanes.cost import lane_costs
from jaxserve.lanes.dealing import PromptLanes
from jaxserve.lanes.placement import PLACEMENTS
from jaxserve.lanes.rates import (
    LINKS,
    ExchangeRates,
    Link,
    links_from_json,
    links_to_json,
)
from jaxserve.lanes.work import Heads
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.settings.schema import ConfigError, MeshConfig


def prefill_facts(scheduler: Scheduler) -> dict[str, Any]:
    """Describes how a scheduler's predictor computes the seconds of a prefill; {} where it is not
    known what steps cost. All values are those that JSON has."""
    costs = scheduler.predictor.costs
    if costs == NOMINAL:
        return {}
    placement = scheduler.cache.placement
    names = {kind: name for name, kind in PLACEMENTS.items()}
    facts: dict[str, Any] = {
        "costs": to_json(costs),
        "placement": {
            "name": names[type(placement)],
            "limit": placement.limit,
            "stripe": placement.stripe,
            "pool": placement.pool,
        },
        "block_size": scheduler.cache.block_size,
        "pages": scheduler.cache.pages.per_lane,
        "exchange": None,
    }
    chooser = scheduler.predictor.lane_costs.chooser
    if chooser is not None and isinstance(chooser.chooser, str):
        facts["exchange"] = _exchange_facts(chooser)
    return facts


def _exchange_facts(chooser: ExchangeChooser) -> dict[str, Any]:
    rates = {
        field.name: getattr(chooser.rates, field.name)
        for field in dataclasses.fields(ExchangeRates)
    }
    for name in LINKS:
        rates[name] = list(dataclasses.astuple(rates[name]))
    return {
        "heads": dataclasses.asdict(chooser.heads),
        "rates": rates,
        "piece": chooser.piece,
        "chooser": chooser.chooser,
        "decode_chooser": chooser.decode_chooser,
        "block": chooser.block,
        "moves": chooser.moves,
        "seen": list(chooser.seen),
        "corrections": {
            name: list(dataclasses.astuple(one)) for name, one in chooser.corrections.items()
        },
        "links": links_to_json(chooser.links),
    }


def predictor_of(facts: Mapping[str, Any], mesh: MeshConfig) -> Predictor:
    """Makes the predictor that `prefill_facts` describes, of a replica with this mesh; that of
    NOMINAL costs where they are {}. Errors: ConfigError for facts of another version."""
    if not facts:
        return Predictor(NOMINAL, mesh)
    try:
        costs = from_json(facts["costs"])
        given = facts["placement"]
        kind = PLACEMENTS[given["name"]]
        placement = kind(mesh.kvp, given["limit"], given["stripe"], given["pool"])
        prompts = PromptLanes(placement, facts["block_size"], facts["pages"])
        chooser = None
        if facts["exchange"] is not None:
            chooser = _chooser_of(facts["exchange"], mesh.kvp)
            chooser = dataclasses.replace(chooser, costs=costs)
        return Predictor(costs, mesh, lane_costs(costs, mesh.kvp, chooser, prompts))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError("replicas", f"costs of another version: {error!r}") from None


def _chooser_of(facts: Mapping[str, Any], lanes: int) -> ExchangeChooser:
    rates = dict(facts["rates"])
    for name in LINKS:
        rates[name] = Link(*rates[name])
    corrections = {name: Correction(*one) for name, one in facts["corrections"].items()}
    return ExchangeChooser(
        lanes,
        Heads(**facts["heads"]),
        ExchangeRates(**rates),
        facts["piece"],
        chooser=facts["chooser"],
        decode_chooser=facts["decode_chooser"],
        block=facts["block"],
        moves=facts["moves"],
        seen=tuple(facts["seen"]),
        corrections=corrections,
        links=links_from_json(facts["links"], lanes),
    )
