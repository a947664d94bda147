"""Share of prompt tokens that a model with recurrent states reuses of earlier prompts, by the
distance between checkpoints of its states, beside the share that it would reuse if blocks of KV
brought a prefix back alone, as in models without states.

    python -m experiments.benchmarks.state_reuse FILE.jsonl.gz

Simulated: one replica of the model that serves a trace in Mooncake's form (`jaxserve simulate`).
What a request puts out is in no later prompt of such a trace, so that only prompts are reused, in
both. The verdict: states were restored, and no request was lost."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, NamedTuple

import numpy as np

from experiments.script import command_line, exit_code, keep
from jaxserve.api.request import Slo
from jaxserve.cache.hashes import is_block
from jaxserve.checkpoint.page_groups import page_windows
from jaxserve.cli.display import table
from jaxserve.lab.simulate.replica import VirtualReplica
from jaxserve.lab.simulate.run import System, drive, requests, shape_of
from jaxserve.lab.simulate.workload import parse
from jaxserve.scheduling.assembly import CachedModel, assemble
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig

OPTIONS = {
    "state_reuse": [
        Option("model", str, "qwen3-next-80b-a3b", "shape of the model"),
        Option("device", str, "h200", "kind of device"),
        Option("mesh", str, "tp=2", "mesh of devices"),
        Option("kv_gib", float, 60.0, "memory for pages and states of a device (GiB)", 1.0),
        Option("block", int, 64, "tokens of a block", 1),
        Option("chunk", int, 4096, "tokens of a step", 1),
        Option("spacing", str, "0,3200,12800", "tokens between checkpoints, as N,N; 0: default"),
        Option("requests", int, 1500, "requests of the trace, from the first on", 1),
        Option("json", str, None, "file for all figures"),
    ]
}
BLOCKS_ALONE = "blocks alone"


class Reuse(NamedTuple):
    """Figures of a replica that served the trace. share: prompt tokens that it reused, of all of
    them. checkpoints: that it has at the end; gib: memory of a device that these take. restored:
    sequences that went on from one. ttft: mean, in seconds. lost: requests that it did not
    complete."""

    share: float
    checkpoints: int
    gib: float
    restored: int
    ttft: float
    lost: int


def _without_states(
    system: System, scheduler: SchedulerConfig, cache: CacheConfig
) -> VirtualReplica:
    """Returns a replica of the same model, if its blocks brought a prefix back alone. cache: with
    its pages."""
    windows = page_windows(system.shape)
    sizes = system.sizes(scheduler, cache, windows=windows)
    return VirtualReplica(
        assemble(sizes, system.profile, CachedModel()),
        cache,
        system.mesh,
        shape=system.shape,
        platform=system.device,
    )


def reuse(replica: VirtualReplica, trace: str, count: int, page_gib: float) -> Reuse:
    """Serves the first `count` requests of a trace."""
    restored = 0
    checkpoints = replica.scheduler.checkpoints
    if checkpoints is not None:
        take = checkpoints.copies

        def copies(*work: Any) -> Any:
            nonlocal restored
            made = take(*work)
            restored += len(made.restores)
            return made

        checkpoints.copies = copies  # type: ignore[method-assign]
    arrivals = parse(trace, requests=count)
    records = drive(replica, requests(arrivals, replica.info.max_model_len, Slo())).records
    cache = replica.scheduler.cache
    pages = sum(not is_block(key) for key in cache.pages.with_key)
    parts = 1 if cache.states is None else cache.states.parts
    return Reuse(
        sum(record.cached for record in records) / sum(record.prompt for record in records),
        pages // parts,
        pages * page_gib,
        restored,
        float(np.mean([record.ttft for record in records])),
        sum(record.reason != "length" for record in records),
    )


def run(values: dict[str, Any]) -> int:
    mesh = MeshConfig.parse(values["mesh"])
    system = System(shape_of(values["model"]), values["device"], mesh, kv_gib=values["kv_gib"])
    cache = CacheConfig(block_size=values["block"], kv_memory_gib=values["kv_gib"])
    scheduler = SchedulerConfig(
        max_seqs=64, chunk_tokens=values["chunk"], admission="queue", max_queue=10**6
    )
    spacings = [int(tokens) or None for tokens in values["spacing"].split(",")]
    made = {
        spacing: system.replica(scheduler, dataclasses.replace(cache, checkpoint_tokens=spacing))
        for spacing in spacings
    }
    total = made[spacings[0]].scheduler.cache.total
    alike = dataclasses.replace(cache, pages=total // mesh.kvp)
    replicas = {BLOCKS_ALONE: _without_states(system, scheduler, alike)}
    for replica in made.values():
        states = replica.scheduler.cache.states
        assert states is not None, f"{values['model']} has no states"
        replicas[f"{states.spacing}"] = replica
    page_gib = values["kv_gib"] / total
    found = {
        name: reuse(replica, values["trace"], values["requests"], page_gib)
        for name, replica in replicas.items()
    }
    head = ("every (tokens)", "reused (%)", "of blocks alone", "checkpoints", "GiB", "TTFT (s)")
    alone = found[BLOCKS_ALONE].share
    rows = [
        (
            name,
            f"{100 * each.share:.1f}",
            f"{each.share / alone:.2f}",
            str(each.checkpoints),
            f"{each.gib:.1f}",
            f"{each.ttft:.2f}",
        )
        for name, each in found.items()
    ]
    print(table(head, rows))
    keep(values, rows=[dict(zip(head, row)) for row in rows])
    faults = [
        f"{name}: {each.lost} requests were lost" for name, each in found.items() if each.lost
    ]
    faults += [
        f"{name}: no state was restored"
        for name, each in found.items()
        if name != BLOCKS_ALONE and not each.restored
    ]
    return exit_code(faults)


if __name__ == "__main__":
    sys.exit(
        command_line(
            "python -m experiments.benchmarks.state_reuse",
            "share of prompt tokens that a model with states reuses, by its checkpoints",
            Command(OPTIONS, run, argument="TRACE"),
            sys.argv[1:],
        )
    )
