"""Tables of the settings of a replica that go together: every pair is tried on the settings' own
checks."""

from __future__ import annotations

import dataclasses
import itertools
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from experiments.markdown import plain, table
from jaxserve.group.layout import check_processes
from jaxserve.settings.options import make
from jaxserve.settings.schema import ConfigError, EngineConfig, MeshConfig

LETTERS = string.ascii_letters
LANES = {"mesh": "kvp=2"}
DEALT = {**LANES, "placement": "striped", "exchange": "auto"}
POOLED = {**LANES, "placement": "hashed"}
TIER = {"host_cache_gib": 1.0}


@dataclass(frozen=True)
class Feature:
    """Settings that somebody may want. sets: those that are asked for. needs: what they do not work
    without, unless the other feature of a pair says otherwise. processes: of the replica."""

    sets: Mapping[str, Any] = field(default_factory=dict)
    needs: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1


FEATURES = {
    "launch --processes=2": Feature(needs={"mesh": "spp=2"}, processes=2),
    "--mesh=spp=2": Feature({"mesh": "spp=2"}),
    "--mesh=kvp=2": Feature({"mesh": "kvp=2"}),
    "--mesh=tp=2": Feature({"mesh": "tp=2"}),
    "--placement=striped": Feature({"placement": "striped"}, {**LANES, "lane_tokens": 64}),
    "--placement=zigzag": Feature({"placement": "zigzag"}, {**LANES, "lane_tokens": 64}),
    "--placement=round_robin": Feature({"placement": "round_robin"}, LANES),
    "--placement=random": Feature({"placement": "random"}, LANES),
    "--placement=hashed": Feature({"placement": "hashed"}, LANES),
    "--exchange=gather": Feature({"exchange": "gather"}),
    "--exchange=pass_q": Feature({"exchange": "pass_q"}, LANES),
    "--exchange=pass_kv": Feature({"exchange": "pass_kv"}, LANES),
    "--exchange=visit": Feature({"exchange": "visit"}, LANES),
    "--exchange=auto": Feature({"exchange": "auto"}, LANES),
    "--exchange=alg1": Feature({"exchange": "alg1"}, LANES),
    "--exchange=alg5": Feature({"exchange": "alg5"}, LANES),
    "--decode_exchange=gather": Feature({"decode_exchange": "gather"}, LANES),
    "--decode_exchange=pass_q": Feature({"decode_exchange": "pass_q"}, LANES),
    "--decode_exchange=visit": Feature({"decode_exchange": "visit"}, LANES),
    "--planner=fixed-2": Feature({"planner": "fixed-2"}, DEALT),
    "--planner=single": Feature({"planner": "single"}, DEALT),
    "--planner=cdsp": Feature({"planner": "cdsp"}, DEALT),
    "--planner=elastic": Feature({"planner": "elastic"}, POOLED),
    "--matched_homes": Feature({"matched_homes": True}, POOLED),
    "--improvement=0.2": Feature({"improvement": 0.2}, {**DEALT, "planner": "cdsp"}),
    "--kv_cache_dtype=fp8": Feature({"kv_cache_dtype": "fp8"}),
    "--noprefix_caching": Feature({"prefix_caching": False}),
    "--host_cache_gib": Feature(TIER),
    "--disk_cache": Feature({"disk_cache": "kv:1"}, TIER),
    "--kv_store": Feature({"kv_store": "mooncake://host:50051"}, TIER),
    "--chunking=adaptive": Feature({"chunking": "adaptive"}),
    "--policy=slack": Feature({"policy": "slack"}),
    "--admission=predict": Feature({"admission": "predict"}),
    "--profile=none": Feature({"profile": "none"}),
    "--lookahead=0": Feature({"lookahead": 0}),
    "--replay=all": Feature({"replay": "all"}),
    "--role=prefill": Feature({"role": "prefill"}),
    "--role=decode": Feature({"role": "decode"}),
}


def settings_of(*features: Feature) -> dict[str, Any] | None:
    """The settings that have all of these features; None where they say two things of one setting.
    Meshes are multiplied."""
    asked = [dict(feature.sets) for feature in features]
    found: dict[str, Any] = {}
    for each in asked:
        if any(found.get(name, value) != value for name, value in each.items() if name != "mesh"):
            return None
        found |= each
    for feature in features:
        found = {**feature.needs, **found}
    every = [{**feature.needs, **feature.sets}.get("mesh", "") for feature in features]
    return {**found, "mesh": str(_together(every))}


def _together(meshes: list[str]) -> MeshConfig:
    """A mesh with the largest degree of each axis."""
    parsed = [dataclasses.asdict(MeshConfig.parse(mesh)) for mesh in meshes]
    return MeshConfig(**{axis: max(mesh[axis] for mesh in parsed) for axis in parsed[0]})


def refusal(*features: Feature) -> str | None:
    """Returns why these features do not go together, '' if they do, None if the question has no
    sense."""
    settings = settings_of(*features)
    if settings is None:
        return None
    try:
        config = make(EngineConfig, settings)
        processes = max(feature.processes for feature in features)
        if processes > 1:
            check_processes(config, processes)
    except ConfigError as error:
        return f"--{error}" if error.field in settings else str(error)
    return ""


def refusals() -> Iterator[tuple[str, str, str]]:
    """Every pair that is refused, with the reason."""
    for (a, one), (b, other) in itertools.combinations(FEATURES.items(), 2):
        if reason := refusal(one, other):
            yield a, b, reason


def page() -> str:
    """All pairs as a triangle of letters, and the reasons of those that are refused."""
    names = list(FEATURES)
    reasons = list(dict.fromkeys(reason for _, _, reason in refusals()))
    width = max(map(len, names))
    numbers = range(1, len(names) + 1)
    digits = [" ".join(f"{number:2}"[place] for number in numbers[:-1]) for place in (0, 1)]
    lines = [" " * (width + 4) + line for line in digits]
    for row, name in enumerate(names):
        cells = (_cell(refusal(FEATURES[name], FEATURES[other]), reasons) for other in names[:row])
        lines.append(f"{row + 1:2} {name:{width}} {' '.join(cells)}".rstrip())
    return "\n\n".join(
        [
            "# Which settings go together",
            "Every pair of settings of one replica, tried on the checks that refuse settings at a "
            "start: `+` is taken, a letter is refused for the reason below, `.` is two values of "
            "one setting. Columns are numbered as rows. What a setting needs by itself is given "
            "with it: lanes (`kvp=2`), a placement that deals out for a planner, host memory for "
            "the tiers below it.",
            "That a pair is taken is tested further: `tests/experiments/test_combinations.py` has "
            "a small model generate with each of them that one process can run without a store "
            "(`-m matrix`), and the tokens are those of one device.",
            "\n".join(["```text", *lines, "```"]),
            "## Why not",
            table(("", "refused with"), zip(LETTERS, map(plain, reasons))),
            "Several processes ask for a mesh that can be dealt out to them: "
            "[multihost](../multihost.md).",
            "",
        ]
    )


def _cell(reason: str | None, reasons: list[str]) -> str:
    if reason is None:
        return "."
    return LETTERS[reasons.index(reason)] if reason else "+"
