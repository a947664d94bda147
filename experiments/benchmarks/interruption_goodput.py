"""Goodput of prefill with steps in groups of layers, which prompts that would be late interrupt,
against whole steps and against smaller chunks.

    python -m experiments.benchmarks.interruption_goodput

Simulated: one replica that prefills (each request has one token), prompts of a public mix. Goodput
is the highest of the given rates up to which at least 90 % of the requests of all seeds have their
first token in time. FlowPrefill (arXiv 2602.16603) reports up to 5.6x; its traces and objectives
are not known here, so none of its figures is made again. The verdict: steps in groups were
interrupted, whole ones were not, and no request was lost."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

from experiments.script import command_line, exit_code, keep, numbers
from jaxserve.api.request import Slo
from jaxserve.cli.display import table
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.run import System, drive, requests, shape_of
from jaxserve.lab.simulate.workload import parse
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig

OPTIONS = {
    "interruption_goodput": [
        Option("model", str, "llama3-8b", "shape of the model"),
        Option("device", str, "h100", "kind of device"),
        Option("mix", str, "mooncake-conversation", "mix of lengths"),
        Option("rates", str, "0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8", "requests per second, as N,N"),
        Option("groups", str, "2,4,8,16,32", "groups of layers to compare with one, as N,N"),
        Option("chunks", str, "8192,2048,512", "tokens of a chunk, as N,N"),
        Option("requests", int, 200, "requests of a run", 1),
        Option("seeds", str, "1,2", "of arrivals and lengths, as N,N"),
        Option("policy", str, "edf", "order of prefill"),
        Option("ttft", float, 0.5, "objective (s) of prompts with little work", 0.001),
        Option(
            "stretch", float, 3.0, "objective of others, as a multiple of their work alone", 1.0
        ),
        Option("json", str, None, "file for all figures"),
    ]
}
IN_TIME = 0.9  # share of requests


@dataclass
class Counts:
    """Requests of some runs. interruptions: of their steps."""

    asked: int = 0
    ended: int = 0
    in_time: int = 0
    interruptions: int = 0


def counts_of(values: dict[str, Any], chunk: int, groups: int, rate: float) -> Counts:
    """Runs all seeds at a rate."""
    scheduler = SchedulerConfig(
        policy=values["policy"],
        chunk_tokens=chunk,
        max_seqs=64,
        ttft=values["ttft"],
        ttft_stretch=values["stretch"],
    )
    system = System(shape_of(values["model"]), values["device"], MeshConfig(), layer_groups=groups)
    found = Counts()
    for seed in numbers(values["seeds"]):
        replica = system.replica(scheduler, CacheConfig(prefix_caching=False))
        arrivals = parse(
            f"poisson:mix={values['mix']}", qps=rate, requests=values["requests"], seed=seed
        )
        prompts = [_prefilled(one) for one in arrivals]
        recorder = drive(replica, requests(prompts, replica.info.max_model_len, Slo()))
        records = recorder.records
        found.asked += len(prompts)
        found.ended += sum(record.reason == "length" for record in records)
        found.in_time += sum(record.output and record.first <= record.due for record in records)
        found.interruptions += replica.scheduler.interruptions
    return found


def _prefilled(arrival: Arrival) -> Arrival:
    """The arrival with one token to put out, and no block of others."""
    return dataclasses.replace(arrival, output=1, blocks=None)


def goodput(by_rate: dict[float, Counts]) -> float:
    """Highest rate up to which enough requests are in time; 0 where not even the first is."""
    found = 0.0
    for rate in sorted(by_rate):
        counts = by_rate[rate]
        if counts.in_time < IN_TIME * counts.asked:
            break
        found = rate
    return found


def run(values: dict[str, Any]) -> int:
    rates = [float(rate) for rate in values["rates"].split(",")]
    chunks = numbers(values["chunks"])
    cases = [(chunk, 1) for chunk in chunks]
    cases += [(chunks[0], groups) for groups in numbers(values["groups"])]
    found: dict[tuple[int, int], dict[float, Counts]] = {}
    rows = []
    for chunk, groups in cases:
        by_rate = {rate: counts_of(values, chunk, groups, rate) for rate in rates}
        found[chunk, groups] = by_rate
        shares = [f"{100 * each.in_time / each.asked:.0f}" for each in by_rate.values()]
        count = sum(each.interruptions for each in by_rate.values())
        rows.append((str(chunk), str(groups), f"{goodput(by_rate):g}", *shares, str(count)))
    head = (
        "chunk",
        "groups",
        "goodput (1/s)",
        *(f"{rate:g}/s (%)" for rate in rates),
        "interrupted",
    )
    print(table(head, rows))
    keep(values, rows=[dict(zip(head, row)) for row in rows])
    return _verdict(found)


def _verdict(found: dict[tuple[int, int], dict[float, Counts]]) -> int:
    """Returns 0 where the figures mean what they should; else 1, and says why not."""
    faults = []
    for (chunk, groups), by_rate in found.items():
        count = sum(each.interruptions for each in by_rate.values())
        if (count > 0) != (groups > 1):
            faults.append(f"{count} steps of {chunk} tokens in {groups} groups were interrupted")
        if any(each.ended < each.asked for each in by_rate.values()):
            faults.append(f"requests are missing with {chunk} tokens in {groups} groups")
    return exit_code(faults)


if __name__ == "__main__":
    sys.exit(
        command_line(
            "python -m experiments.benchmarks.interruption_goodput",
            "goodput of prefill with steps in groups of layers, against whole ones",
            Command(OPTIONS, run),
            sys.argv[1:],
        )
    )
