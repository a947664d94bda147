"""Predicts what lanes say to each other for a step of decodes, by exchange.

python -m experiments.context_parallel.decodes --lanes=8

Microseconds of one layer besides attention, behind which the ring hides its hops, and visits their
way home: all lanes hold all sequences here, so that visits send as much as is gathered. The
attention of a lane is in a column of its own. Steps whose KV does not fit are left out. All is
computed, from the profile of the GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from experiments.markdown import table
from experiments.script import command_line
from jaxserve.lab.simulate.run import System, shape_of
from jaxserve.lanes.exchange import decode_exchanges
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import CacheConfig, ConfigError, MeshConfig, SchedulerConfig

OPTIONS = {
    "decodes": [
        Option("model", str, "llama3-8b", "model whose layer it is"),
        Option("gpu", str, "h200", "GPU whose profile says what attention and links take"),
        Option(
            "lanes", int, 8, "lanes of a group; with more than 8 GPUs the link is one of nodes", 2
        ),
        Option("tp", int, 1, "ranks of a lane", 1),
        Option("contexts", str, "2000,16000,128000,1000000", "tokens of each sequence"),
        Option("batches", str, "1,16,256,2048", "sequences of the step, evenly over lanes"),
    ]
}
NAMES = tuple(decode_exchanges())
HEAD = ("context", "sequences", "attention, us", *(f"{name}, us" for name in NAMES), "auto")
BLOCK = 64  # tokens of a page


def rows(
    system: System, contexts: list[int], batches: list[int]
) -> Iterator[tuple[int, int, list[float], str]]:
    """Per context and number of sequences: seconds of attention and of what each exchange takes
    besides it, and which one is chosen; only of steps whose KV fits the GPUs. Errors: ConfigError
    for a mesh that cannot be."""
    system.check()
    settings = SchedulerConfig(exchange="auto", decode_exchange="auto")
    chooser = system.sizes(settings, CacheConfig(block_size=BLOCK)).chooser(system.profile)
    if chooser is None:
        raise ConfigError("lanes", "one lane exchanges nothing")
    for context in contexts:
        for batch in batches:
            if context * batch > system.kv_tokens() * chooser.lanes:
                continue
            share = -(-batch // chooser.lanes)
            kv = context * batch / chooser.lanes
            decision = chooser.decodes(share, kv)
            seconds = [decision.seconds[name] for name in NAMES]
            attention = system.costs.attend_decodes(share, kv)
            yield context, batch, [attention, *seconds], decision.strategy


def run(values: dict[str, Any]) -> int:
    mesh = MeshConfig(kvp=values["lanes"], tp=values["tp"])
    system = System(shape_of(values["model"]), values["gpu"], mesh)
    found = rows(system, _numbers(values, "contexts"), _numbers(values, "batches"))
    print(table(HEAD, map(_cells, found)))
    return 0


def _cells(row: tuple[int, int, list[float], str]) -> list[str]:
    context, batch, seconds, strategy = row
    return [
        f"{context:,}",
        f"{batch:,}",
        *(f"{second * 1e6:,.0f}" for second in seconds),
        f"`{strategy}`",
    ]


def _numbers(values: dict[str, Any], name: str) -> list[int]:
    """Parses a list. Errors: ConfigError for what is no list of positive numbers."""
    parts = values[name].split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(name, f"{values[name]!r} is not a list of numbers above 0")
    return [int(part) for part in parts]


COMMAND = Command(OPTIONS, run, __doc__.partition("\n\n")[2])

if __name__ == "__main__":
    sys.exit(command_line("decodes", "exchanges of decodes", COMMAND, sys.argv[1:]))
