"""`jaxserve simulate`: runs a workload on simulated GPUs, with the scheduler that serves."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.cli.display import table
from jaxserve.cli.files import check_picture, check_writable, figure_class
from jaxserve.costs.profiles import devices
from jaxserve.drafts.drafter import DRAFTERS
from jaxserve.lab.quotients import cell
from jaxserve.lab.simulate.arrival import Arrival, workload_summary
from jaxserve.lab.simulate.baselines import BASELINES, POOLS, check_baseline, compare
from jaxserve.lab.simulate.guesses import Guesses
from jaxserve.lab.simulate.mixes import MIXES
from jaxserve.lab.simulate.noise import REPEATED, SERVED, Noise
from jaxserve.lab.simulate.recorder import Outcome, RequestRecord
from jaxserve.lab.simulate.replica import VirtualReplica
from jaxserve.lab.simulate.run import (
    System,
    check_classes,
    execute,
    outcome_summary,
    shape_of,
    tpot_by_kind,
)
from jaxserve.lab.simulate.shared_prefixes import WORKLOADS
from jaxserve.lab.simulate.workload import parse
from jaxserve.progress import terminal_bar
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option, make, options_of
from jaxserve.settings.schema import (
    CacheConfig,
    ConfigError,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)

ABOUT = f"""\
The scheduler and the cache are those that serve; a step takes as long as coefficients say that
were fitted to public measurements of the GPU, or with --noise as is drawn around that: scheduler
and planner know the predictions alone. All figures are simulated.

A workload is a generator or a file, which may end in .gz too:
poisson:mix=NAME or burst:mix=NAME, with mixes {", ".join(MIXES)};
a workload of shared prefixes, {", ".join(WORKLOADS)};
poisson:prompt=LENGTHS,output=LENGTHS, with N, LOW:HIGH, exponential:MEAN or
lognormal:MEDIAN:SIGMA[:LOW:HIGH], and prefix=N,groups=N for shared prefixes; likewise
gamma (with burstiness=X) and constant;
FILE.jsonl, Mooncake's: timestamp (ms), input_length, output_length, hash_ids of 512 tokens;
FILE.csv, Azure's: TIMESTAMP, ContextTokens, GeneratedTokens; or lengths: num_prefill_tokens,
num_decode_tokens, and arrived_at (seconds), without which they come as --qps says. Both may have
`class`: requests of a class of --classes; others are short, medium and long ones by their prompt.
Lanes (kvp) take --placement, --exchange, --decode_exchange and --planner as `jaxserve serve` does.
The exit code is 1 where no request was served.

  jaxserve simulate --model=llama3-8b --gpu=a100 --mesh=tp=8,spp=2 --qps=0.5 --requests=500
  jaxserve simulate --workload=burst:mix=medha-5 --qps=0.5 --baseline=sarathi-512,loongserve
"""
DEFAULTS: Mapping[str, Any] = {
    "policy": "slack",
    "chunk_tokens": 8192,
    "max_seqs": 256,
    "max_queue": 10**6,
    "block_size": 256,
    "step_time": 0.1,
}
SYSTEM = [
    Option("model", str, "llama3-8b", "model: a name in the table of models"),
    Option("gpu", str, "a100", "kind of GPU", choices=tuple(devices())),
    Option("mesh", MeshConfig, MeshConfig(tp=8), MeshConfig.HELP),
    Option(
        "lookahead",
        int,
        1,
        "steps that are issued before the tokens of the last one are read",
        0,
        8,
    ),
    options_of(ModelSource)["enable_expert_parallel"],
    options_of(ModelSource)["ffn_over_lanes"],
    Option(
        "noise",
        float,
        0.0,
        "spread of step times around their prediction: sigma of a lognormal factor of mean 1; "
        f"kernels that are repeated have {REPEATED:g}, measured servers {SERVED:g}",
        0,
        1,
    ),
    Option(
        "draft_acceptance",
        float,
        0.7,
        "probability that a proposed token is right if those before it are; with --drafts",
        0,
        1,
    ),
    Option(
        "draft_seconds",
        float,
        None,
        "seconds in which a draft model makes one token of each sequence; for --drafts=model",
        0,
    ),
]
WORKLOAD = [
    Option("workload", str, "poisson:mix=medha-5", "file or generator, see above"),
    Option(
        "qps",
        float,
        None,
        "requests per second; traces with times of their own are stretched to it",
    ),
    Option(
        "requests", int, None, "how many requests; default: all of a trace, 1000 of a generator", 1
    ),
    Option("seed", int, 0, "of arrivals, lengths and noise", 0),
    Option("duration", float, None, "seconds after which what still runs is given up", 0.001),
]
OUTPUT = [
    Option(
        "baseline",
        str,
        "",
        f"run these over the same requests too, as NAME,NAME: {', '.join(BASELINES)}",
    ),
    Option("json", str, None, "file for the summary"),
    Option("csv", str, None, "file for one row per request"),
    Option("plot", str, None, "picture of the requests over time, .png or .svg (needs matplotlib)"),
]


def scheduling_options() -> list[Option]:
    """Returns the settings of scheduler and cache, with the defaults of a simulation; chunking
    takes the size of chunks too, as static:N."""
    chunking = Option(
        "chunking",
        str,
        "adaptive",
        "adaptive (to the objectives of the decodes), or static:N tokens",
    )
    options = {**options_of(SchedulerConfig), **options_of(CacheConfig), "chunking": chunking}
    return [
        dataclasses.replace(option, default=DEFAULTS.get(name, option.default))
        for name, option in options.items()
    ]


GOODPUT = ("goodput/s", "goodput tok/s")  # headers


def run(values: dict[str, Any]) -> int:
    system = System(
        shape_of(values["model"]),
        values["gpu"],
        mesh_of(values["mesh"]),
        expert_parallel=values["enable_expert_parallel"],
        ffn_over_lanes=values["ffn_over_lanes"],
        noise=Noise(values["noise"], values["seed"]),
        guesses=guesses_of(values),
    )
    scheduler, cache = configs(values)
    arrivals = parse(
        values["workload"], qps=values["qps"], requests=values["requests"], seed=values["seed"]
    )
    names = [name for name in values["baseline"].replace(" ", "").split(",") if name]
    check(names, values)
    check_classes(scheduler, arrivals)
    until = values["duration"] or float("inf")
    replica = system.replica(scheduler, cache, values["lookahead"], observed=False)
    total = len(arrivals) * (1 + len(names))
    with terminal_bar("simulating", total) as step:
        outcomes = {"jaxserve": execute(replica, _reported(arrivals, step), until=until)}
        for name in names:
            coming = _reported(arrivals, step)
            outcomes[name] = compare(
                name, system, scheduler, cache, coming, until=until, lookahead=values["lookahead"]
            )
    report = report_of(values, replica, scheduler, arrivals, outcomes)
    print(shown(report))
    if values["json"]:
        Path(values["json"]).write_text(json.dumps(report, indent=1) + "\n")
    if values["csv"]:
        write_csv(values["csv"], outcomes)
    if values["plot"]:
        draw(values["plot"], outcomes)
    return int(report["results"]["jaxserve"]["all"]["begun"] == 0)


def _reported(arrivals: Sequence[Arrival], step: Callable[[str], object]) -> Iterator[Arrival]:
    """Yields the arrivals, and reports each."""
    for arrival in arrivals:
        yield arrival
        step("")


def check(baselines: Sequence[str], values: Mapping[str, Any]) -> None:
    """Refuses before the run what would fail after it. Errors: ConfigError."""
    for name in baselines:
        check_baseline(name)
        if values["classes"] and name in POOLS:
            raise ConfigError("baseline", f"{name} knows no --classes")
    if values["plot"]:
        check_picture("plot", values["plot"])
    for flag in filter(values.get, ("json", "csv", "plot")):
        check_writable(flag, values[flag])


def guesses_of(values: Mapping[str, Any]) -> Guesses:
    """Makes the proposed tokens. Errors: ConfigError for a draft model without its speed, or its
    speed without one."""
    kind = DRAFTERS.get(values["drafts"])
    modelled = kind is not None and kind.weights
    if modelled != (values["draft_seconds"] is not None):
        raise ConfigError("draft_seconds", "goes with --drafts=model or eagle3, which need it")
    return Guesses(values["draft_acceptance"], values["seed"], values["draft_seconds"] or 0.0)


def mesh_of(given: str | MeshConfig) -> MeshConfig:
    """Parses a mesh. Errors: ConfigError."""
    if given == "":
        raise ConfigError("mesh", "is empty; one device is tp=1")
    return MeshConfig.parse(given) if isinstance(given, str) else given


def configs(values: Mapping[str, Any]) -> tuple[SchedulerConfig, CacheConfig]:
    """Makes the configs of scheduler and cache. Errors: ConfigError."""
    kind, _, tokens = values["chunking"].partition(":")
    if tokens and not (kind == "static" and tokens.isdecimal()):
        raise ConfigError("chunking", f"{values['chunking']!r} is neither adaptive nor static:N")
    chosen = {**values, "chunking": kind, **({"chunk_tokens": int(tokens)} if tokens else {})}

    def of(config: type) -> dict[str, Any]:
        return {name: chosen[name] for name in options_of(config) if name in chosen}

    return make(SchedulerConfig, of(SchedulerConfig)), make(CacheConfig, of(CacheConfig))


def report_of(
    values: Mapping[str, Any],
    replica: VirtualReplica,
    scheduler: SchedulerConfig,
    arrivals: Sequence[Arrival],
    outcomes: Mapping[str, Outcome],
) -> dict[str, Any]:
    cache = replica.scheduler.cache
    return {
        "simulated": True,
        "model": values["model"],
        "gpu": values["gpu"],
        "mesh": str(replica.info.mesh),
        "seed": values["seed"],
        "noise": values["noise"],
        "kv_tokens_per_lane": cache.needs.longest(cache.usable) // replica.info.mesh.kvp,
        "scheduler": dataclasses.asdict(scheduler),
        "workload": workload_summary(arrivals),
        "results": {
            name: outcome_summary(outcome, scheduler.tpot, tpot_by_kind(scheduler))
            for name, outcome in outcomes.items()
        },
    }


def shown(report: Mapping[str, Any]) -> str:
    """Formats a report as tables."""
    work = report["workload"]
    head = (
        f"simulated: {report['model']} on {report['gpu']}, {report['mesh']}, KV of "
        f"{report['kv_tokens_per_lane']:,} tokens per lane; "
        f"{work['count']} requests at {work['rate']:.3g}/s, prompts of "
        f"{work['prompt']['mean']:,.0f} tokens (p99 "
        f"{work['prompt']['p99']:,.0f}), outputs of {work['output']['mean']:.0f}"
    )
    rows = []
    for name, result in report["results"].items():
        for kind, figures in result.items():
            if isinstance(figures, dict) and "ttft" in figures:
                rows.append(
                    [
                        f"{name} {kind}",
                        f"{figures['finished']}/{figures['requests']}",
                        str(figures["begun"]),
                        *_cells(figures["ttft"], 1, 2),
                        *_cells(figures["tpot"], 1e3, 1),
                        f"{figures['ttft_met']:.0%}",
                        f"{figures['tpot_met']:.0%}",
                        f"{figures['in_time']:.0%}",
                    ]
                )
    headers = [
        "",
        "finished",
        "begun",
        "TTFT s p50",
        "p90",
        "p99",
        "TPOT ms p50",
        "p90",
        "p99",
        "TTFT met",
        "TPOT met",
        "in time",
    ]
    use = [
        [
            name,
            f"{result['busy']:.0%}",
            f"{result['tokens_per_s']:,.0f}",
            f"{result['goodput_per_s']:.3g}",
            f"{result['goodput_tokens_per_s']:,.1f}",
            *_cells(result["token_gap"], 1e3, 1),
        ]
        for name, result in report["results"].items()
    ]
    refused = [
        f"{name} refused {count}: {reason}"
        for name, result in report["results"].items()
        for reason, count in result["refused"].items()
    ]
    parts = [
        head,
        table(headers, rows),
        "TTFT is over the requests that had a first token (begun), TPOT over the finished ones. Met"
        "\nand in time are shares of all requests: those in time kept both objectives, and goodput "
        "counts them and their tokens.",
        "\n".join(refused),
        table(["", "busy", "tokens/s", *GOODPUT, "gap ms p50", "p90", "p99"], use),
    ]
    return "\n\n".join(filter(None, parts))


def _cells(spread: Mapping[str, float], factor: float, digits: int) -> list[str]:
    return [cell(spread.get(name), f".{digits}f", factor) for name in ("p50", "p90", "p99")]


def write_csv(name: str, outcomes: Mapping[str, Outcome]) -> None:
    """Writes a row per request of each system; times in seconds."""
    fields = [field.name for field in dataclasses.fields(RequestRecord)]
    with open(name, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["system", *fields, "ttft", "tpot", "in_time"])
        for system, outcome in outcomes.items():
            for record in outcome.records:
                out.writerow(
                    [
                        system,
                        *(getattr(record, field) for field in fields),
                        record.ttft,
                        record.tpot,
                        record.in_time,
                    ]
                )


def draw(name: str, outcomes: Mapping[str, Outcome]) -> None:
    """Draws each request as a line from its arrival to its first token (light) and on to its end
    (dark), one picture per system."""
    figure = figure_class()(figsize=(10, 3 * len(outcomes)), layout="constrained")
    for axes, (system, outcome) in zip(
        figure.subplots(len(outcomes), sharex=True, squeeze=False)[:, 0], outcomes.items()
    ):
        kinds = sorted({record.kind for record in outcome.records})
        for place, record in enumerate(sorted(outcome.records, key=lambda record: record.arrival)):
            color = f"C{kinds.index(record.kind)}"
            axes.hlines(place, record.arrival, record.first, color=color, alpha=0.35)
            axes.hlines(place, record.first, record.end, color=color)
        axes.set(
            title=f"{system} (simulated): "
            f"{', '.join(f'C{i} {kind}' for i, kind in enumerate(kinds))}",
            ylabel="request",
        )
    axes.set_xlabel("seconds")
    figure.savefig(name)


COMMAND = Command(
    {"system": SYSTEM, "workload": WORKLOAD, "scheduling": scheduling_options(), "output": OUTPUT},
    run,
    ABOUT,
)
