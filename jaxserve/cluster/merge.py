"""Merges facts, load and views of members into those of their conductor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxserve.cluster.member import Member
from jaxserve.replica.info import ReplicaInfo
from jaxserve.replica.weights import UPDATED
from jaxserve.scheduling import Load
from jaxserve.settings.schema import ConfigError

# in all members
SAME = (
    "served_name",
    "model",
    "vocab",
    "eos_ids",
    "sampling_defaults",
    "cache_fingerprint",
    "cache_dtype",
)
SHOWN_REQUESTS = 256  # of all members together, in a view


def merged_info(infos: Sequence[ReplicaInfo]) -> ReplicaInfo:
    """The facts of a cluster: what all members have together, and the least length that each takes.
    Errors: ConfigError where they do not serve the same model, or there are none."""
    if not infos:
        raise ConfigError("replicas", "there are none that answer")
    first = infos[0]
    for info in infos:
        for name in SAME:
            ours, theirs = (_first(getattr(one, name)) for one in (first, info))
            if ours != theirs:
                said = f"{ours!r:.80} and {theirs!r:.80}"
                raise ConfigError("replicas", f"differ in {name}: {said}")
    pages = sum(info.pages_per_lane * info.mesh.kvp for info in infos)
    return dataclasses.replace(
        first,
        max_model_len=min(info.max_model_len for info in infos),
        pages_per_lane=pages // first.mesh.kvp,
        max_seqs=sum(info.max_seqs for info in infos),
        max_queue=sum(info.max_queue for info in infos),
    )


def _first(fact: Any) -> Any:
    """Returns a fact; of a cache's fingerprint, that of the weights that a replica began with."""
    return fact.partition(UPDATED)[0] if isinstance(fact, str) else fact


def merged_load(loads: Iterable[Load]) -> Load:
    """The sums of loads; the queue's seconds as if members shared them."""
    loads = list(loads)
    totals = [sum(values) for values in zip(*map(dataclasses.astuple, loads))]
    if not loads:
        return Load(0, 0, 0, 0.0, 0, 0, 0)
    load = Load(*totals)
    return dataclasses.replace(
        load, queued_prefill_seconds=load.queued_prefill_seconds / len(loads)
    )


def member_view(member: Member, blocks: int, view: Mapping[str, Any] | None) -> dict[str, Any]:
    """A row of the view's table of members. role: "" before it has said what it is. load: None if
    it has reported none. prefills, decodes: requests of this conductor that it prefills, and that
    decode there. prompt_tokens, cached_tokens: of prompts that it has ended, and of these those
    that it did not compute. blocks: of KV that it has, as the conductor knows. view: its own; None
    where it gives none. kv: what this says of its tiers, see `observe.kv_view`."""
    load = member.load() if member.alive else None
    return {
        "name": member.name,
        "role": member.role.value if member.joined else "",
        "alive": member.alive,
        "usable": member.usable,
        "leaving": member.leaving,
        "fault": member.fault,
        "prefills": member.work.prefills,
        "decodes": member.work.decodes,
        "prompt_tokens": member.prompt_tokens,
        "cached_tokens": member.cached_tokens,
        "blocks": blocks,
        "kv": (view or {}).get("kv"),
        "load": None if load is None else dataclasses.asdict(load),
    }


def merged_view(
    info: ReplicaInfo, rows: Sequence[dict[str, Any]], views: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """A view of a cluster: the rows of its members, and the requests of all of them with the same
    columns. It has no steps, which are those of one replica."""
    shown: dict[str, Any] = {
        "model": info.model,
        "mesh": str(info.mesh),
        "alive": True,
        "members": list(rows),
    }
    full = [view for view in views if "columns" in view]
    for name in ("requests", "ended"):
        shown[name] = [row for view in full for row in view[name]][:SHOWN_REQUESTS]
    shown.update({"steps": [], "flying": [], "names": {}, "next": 0, "more": False})
    if not full:
        return shown
    for name in ("columns", "end_columns", "now", "born"):
        shown[name] = full[0][name]
    for name in ("running", "waiting"):
        shown[name] = sum(view[name] for view in full)
    for name in ("pages", "copied", "reads"):
        shown[name] = [lane for view in full for lane in view[name]]
    shown["segment"] = full[0]["segment"]
    left_out = {name: sum(view["left_out"][name] for view in full) for name in full[0]["left_out"]}
    return {**shown, "left_out": left_out}
