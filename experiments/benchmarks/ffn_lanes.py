"""Seconds per token of long contexts on lanes, with feed-forward parts split over lanes and ranks,
and over ranks alone.

    python -m experiments.benchmarks.ffn_lanes

Computed, from the profile of the GPU: decodes of sequences that all lanes hold, around a ring or by
gathering, whichever is quicker. A lane reads all of its ranks' weights in each step, or its part of
those of MLPs and experts, and then sends tokens and sums over the links. Helix (arXiv 2507.07120)
reports up to 1.5x less time per token at a million tokens, or 32x the sequences within the same
time, on GB200 with more to it: no figure of it is made again. The verdict: weights on a device are
fewer, and the token of a lone sequence of a model without experts is sooner where all lanes are
within a node."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from experiments.script import command_line, exit_code, keep, numbers
from jaxserve.cli.display import table
from jaxserve.lab.simulate.run import NODE_DEVICES, System, shape_of
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig

OPTIONS = {
    "ffn_lanes": [
        Option("models", str, "llama3.1-8b,llama3-70b,qwen3-30b-a3b", "shapes of models"),
        Option("gpu", str, "h200", "GPU whose profile says what steps and links take"),
        Option("meshes", str, "kvp=8;kvp=4,tp=2;kvp=8,tp=8", "meshes, with ; between them"),
        Option("node", int, NODE_DEVICES, "GPUs within a node; 72 are the links of an NVL72", 1),
        Option("contexts", str, "131072,1048576,10485760", "tokens of each sequence"),
        Option("batches", str, "1,8,64", "sequences of a step, evenly over lanes"),
        Option("json", str, None, "file for all figures"),
    ]
}
HEAD = ("model", "mesh", "context", "sequences", "ranks, ms", "lanes too, ms", "ratio", "weights")
BLOCK = 64  # tokens of a page


@dataclasses.dataclass(frozen=True)
class Decoding:
    """A step of decodes. seconds: of a token, by whether lanes share out feed-forward parts;
    weights: bytes on a device, alike. sooner: whether lanes should make a token come sooner."""

    model: str
    mesh: str
    context: int
    batch: int
    seconds: dict[bool, float]
    weights: dict[bool, int]
    sooner: bool

    def fault(self) -> str | None:
        """Returns what the verdict says against it."""
        name = f"{self.model} on {self.mesh}, {self.batch} x {self.context}"
        if self.weights[True] >= self.weights[False]:
            return f"{name}: a device holds as many weights"
        if self.sooner and self.seconds[True] >= self.seconds[False]:
            return f"{name}: a token takes as long"
        return None


def step_seconds(system: System, context: int, batch: int) -> float | None:
    """Seconds of a step of decodes that all lanes hold; None where their KV does not fit."""
    settings = SchedulerConfig(exchange="auto", decode_exchange="auto")
    chooser = system.sizes(settings, CacheConfig(block_size=BLOCK)).chooser(system.profile)
    assert chooser is not None, "one lane exchanges nothing"
    lanes = chooser.lanes
    if context * batch > system.kv_tokens() * lanes:
        return None
    costs = system.costs
    share = -(-batch // lanes)
    kv = context * batch / lanes
    decision = chooser.decodes(share, kv)
    layer = costs.linear(share) + costs.attend_decodes(share, kv)
    layer += decision.seconds[decision.strategy]
    return costs.launch + costs.layers * layer + costs.head + costs.head_token * share


def rows(values: dict[str, Any]) -> Iterator[Decoding]:
    """Yields the steps whose KV fits. Errors: ConfigError for a mesh that cannot be."""
    for name in values["models"].split(","):
        for text in values["meshes"].split(";"):
            mesh = MeshConfig.parse(text)
            alone = System(shape_of(name), values["gpu"], mesh, node_devices=values["node"])
            systems = {
                over: dataclasses.replace(alone, ffn_over_lanes=over) for over in (False, True)
            }
            if any(system.obstacle() for system in systems.values()):
                continue
            for context in numbers(values["contexts"]):
                for batch in numbers(values["batches"]):
                    found = {o: step_seconds(s, context, batch) for o, s in systems.items()}
                    if found[True] is None or found[False] is None:
                        continue
                    weights = {over: system.weights for over, system in systems.items()}
                    sooner = mesh.devices <= values["node"] and not alone.shape.experts
                    sooner = sooner and batch == 1
                    yield Decoding(name, text, context, batch, found, weights, sooner)  # type: ignore[arg-type]


def run(values: dict[str, Any]) -> int:
    found = list(rows(values))
    cells = [
        [
            one.model,
            one.mesh,
            f"{one.context:,}",
            str(one.batch),
            *(f"{1e3 * one.seconds[over]:.2f}" for over in (False, True)),
            f"{one.seconds[False] / one.seconds[True]:.2f}",
            f"{one.weights[False] / 2**30:.1f} to {one.weights[True] / 2**30:.1f} GiB",
        ]
        for one in found
    ]
    print(table(HEAD, cells))
    keep(values, steps=[dataclasses.asdict(one) for one in found])
    faults = [fault for one in found if (fault := one.fault())]
    return exit_code(faults or ([] if found else ["no step's KV fits"]))


COMMAND = Command(OPTIONS, run, __doc__.partition("\n\n")[2])

if __name__ == "__main__":
    sys.exit(
        command_line("ffn_lanes", "feed-forward parts over lanes and ranks", COMMAND, sys.argv[1:])
    )
