"""Compares rules for prompts that can no longer have their first token in time, and for the share
of a long prompt's steps that shorter ones get.

python -m experiments.benchmarks.late_prompts --json=late_prompts.json

Llama-3 8B on 16 simulated A100s (tp=8,spp=2), mixes of short prompts, due in 2 s, and of long ones.
Runs of the seeds are put together. All figures are simulated.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import multiprocessing
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.script import command_line, keep
from jaxserve.cli.display import table
from jaxserve.lab.cli.simulate import configs, scheduling_options
from jaxserve.lab.simulate.recorder import RequestRecord
from jaxserve.lab.simulate.run import System, execute, shape_of
from jaxserve.lab.simulate.workload import parse
from jaxserve.policies import LAST, POLICIES, Policy, PromptView
from jaxserve.progress import progress_bar
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError, MeshConfig

SYSTEM = System(shape_of("llama3-8b"), "a100", MeshConfig(tp=8, spp=2))
POLICY = POLICIES["slack"]
# multiple of its TTFT budget after which a late prompt goes first, under the rules of this file
PATIENCE = 8.0
LOG_PATIENCE = 5.66
SPARED_SHARE = 0.1
# settings of the scheduler by the name of a way of sharing; ramped: over the whole TTFT budget
SHARING: Mapping[str, Mapping[str, float]] = {
    "unshared": {"sharing": 0.0},
    "shared": {},
    "ramped": {"sharing_ramp": 1.0},
}


def behind(view: PromptView) -> np.ndarray:
    """Late ones behind those in time, by their slack against twice the budget, then four times, and
    so on; first once they need PATIENCE times their budget."""
    relative = view.relative_slack
    need = np.maximum(1 - relative, 1.0)
    against, _ = np.frexp(need)
    return np.where(relative >= 0, relative, np.where(need < PATIENCE, 2 - against, -need))


def behind_in_the_end(view: PromptView) -> np.ndarray:
    """By deadline, and the late ones behind all others."""
    left = view.deadline - view.now
    return np.where(left < view.work, left + LAST, left)


def spared(view: PromptView) -> np.ndarray:
    """Late ones first where those in time can spare it: the shortest, as many as take at most
    SPARED_SHARE of the seconds by which each of those in time could wait longer and not be late, if
    the first that is due went first. The others as under the policy."""
    keys = behind(view)
    due = view.deadline
    work = view.work
    relative = view.relative_slack
    late = relative < 0
    in_time = np.flatnonzero(~late)
    in_time = in_time[np.argsort(due[in_time])]
    spare = due[in_time] - view.now - np.cumsum(work[in_time])
    room = SPARED_SHARE * spare[spare >= 0].min(initial=np.inf)  # below 0: late in any case
    short = np.flatnonzero(late)
    short = short[np.argsort(work[short], kind="stable")]
    first = short[np.cumsum(work[short]) <= room]
    keys[first] = relative[first] - 1
    return keys


def in_turns(view: PromptView) -> np.ndarray:
    """Late ones among those in time, as if due at twice their budget, then at four times."""
    relative = view.relative_slack
    need = np.maximum(1 - relative, 1.0)
    against, _ = np.frexp(need)
    return np.where(relative >= 0, relative, np.where(need < PATIENCE, 2 - 2 * against, -need))


def logarithmic(view: PromptView) -> np.ndarray:
    """Late ones among those in time, the more urgent the more of LOG_PATIENCE is used up."""
    relative = view.relative_slack
    need = np.maximum(1 - relative, 1.0)
    late = np.where(need < LOG_PATIENCE, 1 - np.log(need) / math.log(LOG_PATIENCE), -need)
    return np.where(relative >= 0, relative, late)


RULES: Mapping[str, Policy] = {
    "patient": POLICY,
    "behind": Policy(POLICY.help, behind, behind_in_the_end),
    "logarithmic": Policy(POLICY.help, logarithmic, behind_in_the_end),
    "in-turns": Policy(POLICY.help, in_turns, behind_in_the_end),
    "spared": Policy(POLICY.help, spared, behind_in_the_end),
    "first": POLICIES["relative-slack"],
}

OPTIONS = {
    "what is simulated": [
        Option("rules", str, ",".join(RULES), f"as NAME,NAME: {', '.join(RULES)}"),
        Option("mixes", str, "medha-5,medha-10", "mixes of lengths, as NAME,NAME"),
        Option("rates", str, "0.5,0.75,1.25", "requests per second, as N,N"),
        Option(
            "sharing", str, "unshared,shared", f"whether prompts share steps: {', '.join(SHARING)}"
        ),
        Option("requests", int, 300, "requests of a run", 1),
        Option("until", float, None, "seconds after which a run is cut off; default: never", 0.0),
        Option("seeds", str, "11,12", "of arrivals and lengths, as N,N"),
    ],
    "running": [
        Option("jobs", int, os.cpu_count() or 1, "runs at once", 1),
        Option("json", str, None, "file for all figures"),
    ],
}


@dataclass(frozen=True)
class Case:
    """Runs that make one line of the table."""

    mix: str
    rate: float
    sharing: str
    rule: str


def run(values: dict[str, Any]) -> int:
    cases = [
        Case(mix, float(rate), sharing, rule)
        for mix, rate, sharing, rule in itertools.product(
            *(words(values[name]) for name in ("mixes", "rates", "sharing", "rules"))
        )
    ]
    check(cases)
    seeds = [int(seed) for seed in words(values["seeds"])]
    until = math.inf if values["until"] is None else values["until"]
    runs = [(case, seed, values["requests"], until) for seed in seeds for case in cases]
    found: dict[Case, list[RequestRecord]] = {case: [] for case in cases}
    with (
        ProcessPoolExecutor(values["jobs"], multiprocessing.get_context("spawn")) as pool,
        progress_bar("simulating", len(runs), sys.stderr.isatty()) as step,
    ):
        for (case, *_), records in zip(runs, pool.map(records_of, *zip(*runs))):
            found[case] += records
            step("")
    summaries = {case: summary(records) for case, records in found.items()}
    print(f"simulated: seeds {values['seeds']}, {values['requests']} requests each; seconds")
    print(shown(summaries))
    keep(
        values,
        cases=[dataclasses.asdict(case) | figures for case, figures in summaries.items()],
    )
    return 0


def words(text: str) -> list[str]:
    return [word for word in text.replace(" ", "").split(",") if word]


def check(cases: list[Case]) -> None:
    """Checks the cases. Errors: ConfigError for an unknown rule or way of sharing."""
    for name, known in (("rule", RULES), ("sharing", SHARING)):
        if unknown := {getattr(case, name) for case in cases} - set(known):
            said = f"{', '.join(sorted(unknown))}: known are {', '.join(known)}"
            raise ConfigError("rules" if name == "rule" else name, said)


def records_of(
    case: Case, seed: int, requests: int, until: float = math.inf
) -> list[RequestRecord]:
    """One run, in a process of its own: the rule takes the place of the policy."""
    POLICIES["slack"] = RULES[case.rule]
    scheduler, cache = configs({option.name: option.default for option in scheduling_options()})
    scheduler = dataclasses.replace(scheduler, **SHARING[case.sharing])
    arrivals = parse(f"poisson:mix={case.mix}", qps=case.rate, requests=requests, seed=seed)
    return execute(SYSTEM.replica(scheduler, cache), arrivals, until=until).records


def summary(records: list[RequestRecord]) -> dict[str, float]:
    """Seconds to first tokens of short and long prompts, completions that ended, shares that were
    in time, and the most times its budget that one of them took. A request that has no first token
    when its run is cut off counts as having waited until then, and as late."""
    figures: dict[str, float] = {}
    for kind in ("short", "long"):
        mine = [record for record in records if record.kind == kind]
        ttft = np.array([record.ttft for record in mine])
        need = ttft / np.array([record.due - record.arrival for record in mine])
        if not len(need):
            continue
        for percent in (50, 90, 99):
            figures[f"{kind}_p{percent}"] = float(np.percentile(ttft, percent))
        figures[f"{kind}_max"] = float(ttft.max())
        figures[f"{kind}_ended"] = sum(record.reason == "length" for record in mine)
        figures[f"{kind}_in_time"] = float(np.mean([in_time(record) for record in mine]))
        figures[f"{kind}_most_budgets"] = float(need.max())
    figures["in_time"] = sum(map(in_time, records)) / len(records)
    return figures


def in_time(record: RequestRecord) -> bool:
    return bool(record.output) and record.first <= record.due


# column, figure, how it is written
COLUMNS = (
    ("short P50", "short_p50", "{:.2f}"),
    ("P99", "short_p99", "{:.2f}"),
    ("most", "short_max", "{:.1f}"),
    ("in time", "short_in_time", "{:.1%}"),
    ("long P50", "long_p50", "{:.0f}"),
    ("P90", "long_p90", "{:.0f}"),
    ("ended", "long_ended", "{:.0f}"),
    ("budgets", "long_most_budgets", "{:.1f}"),
    ("in time", "long_in_time", "{:.1%}"),
    ("all in time", "in_time", "{:.1%}"),
)


def shown(summaries: Mapping[Case, dict[str, float]]) -> str:
    """Formats the figures as a table."""
    rows = [
        [
            f"{case.mix} {case.rate:g}/s {case.sharing}",
            case.rule,
            *(form.format(figures.get(name, math.nan)) for _, name, form in COLUMNS),
        ]
        for case, figures in summaries.items()
    ]
    return table(["load", "late ones", *(title for title, _, _ in COLUMNS)], rows)


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])


if __name__ == "__main__":
    sys.exit(
        command_line(
            "late_prompts", "where late prompts go, and who shares steps", COMMAND, sys.argv[1:]
        )
    )
