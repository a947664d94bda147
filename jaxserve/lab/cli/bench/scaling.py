"""`jaxserve bench scaling`: one prompt on ever more devices along an axis of the mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.lab.cli.bench.engine import counts
from jaxserve.lab.cli.bench.sweep import OUTPUT, SWEEP, run_points
from jaxserve.lab.research.points import Point, parsed_base
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import MeshConfig

ABOUT = """\
Strong scaling: the same prompt on more devices; weak: a prompt as many times longer as there are
devices. A sweep (`jaxserve bench sweep`) with these points: requests one after the other, so that
TTFT is that of a prompt alone.

  jaxserve bench scaling --axis=kvp --devices=1,2,4,8 --prompt=4096 --html=scaling.html
  jaxserve bench scaling --run=simulated --gpu=h100 --base=model=llama3-8b --axis=tp --prompt=128000
"""
AXES = tuple(field.name for field in dataclasses.fields(MeshConfig))
SCALING = [
    Option("kind", str, "strong", "what grows with the devices", choices=("strong", "weak")),
    Option("axis", str, AXES[-1], "axis of the mesh", choices=AXES),
    Option("devices", str, "1,2,4,8", "degrees of the axis, as N,N"),
    Option("prompt", int, 2048, "tokens of the prompt on one device", 1),
    Option("output", int, 16, "tokens of the output", 1),
    Option("requests", int, 3, "prompts for each point", 1),
    Option("base", str, "", "settings of all points, as NAME=VALUE;NAME=VALUE"),
]
SHARED = [option for option in SWEEP if option.name not in ("grid", "base", "axes")]


def run(values: dict[str, Any]) -> int:
    base = parsed_base(values["base"])
    load = {"concurrency": 1, "output": str(values["output"]), "requests": values["requests"]}
    points = []
    for count in counts("devices", values["devices"]):
        prompt = values["prompt"] * (count if values["kind"] == "weak" else 1)
        mesh = f"{values['axis']}={count}"
        points.append(Point.of({**load, **base, "mesh": mesh, "prompt": str(prompt)}))
    return run_points(points, ["mesh", "prompt"], values)


COMMAND = Command({"scaling": SCALING, "sweep": SHARED, "output": OUTPUT}, run, ABOUT)
