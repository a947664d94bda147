"""`jaxserve plan`: which mesh and which chunks serve a workload best on a number of GPUs,
without a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.cli.display import table
from jaxserve.cli.files import check_picture, check_writable, figure_class
from jaxserve.lab.cli import simulate
from jaxserve.lab.cli.simulate import configs, scheduling_options
from jaxserve.lab.quotients import cell
from jaxserve.lab.simulate.arrival import workload_summary
from jaxserve.lab.simulate.mixes import MIXES
from jaxserve.lab.simulate.plan import (
    CHUNKS,
    GIB,
    PlanAnswer,
    PlanQuestion,
    PlanRunner,
    meshes,
    plans,
    search,
    simulations,
)
from jaxserve.lab.simulate.run import shape_of
from jaxserve.lab.simulate.workload import parse
from jaxserve.progress import terminal_bar
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError, MeshConfig

ABOUT = f"""\
Every mesh of that many GPUs is simulated with
{", ".join(f"{kind}:{tokens}" for kind, tokens in CHUNKS)} chunks on a part of the workload, the
best of them on all of it. Plans are ranked by the share of requests that meet both objectives,
then by TTFT p90. Objectives for long prompts are those of the plan that prefills the longest one
soonest. Capacity is the most requests per second with which --attainment of each kind of requests
(long, short) meets both objectives, arriving for as long as the workload does. GiB/GPU are those
of the weights; "longest" is the time to the first token of the longest prompt alone. All figures
are simulated.

A workload is a file (.jsonl, .csv) or a generator, as for `jaxserve simulate`: poisson:mix=NAME
with {", ".join(MIXES)}, and others.

  jaxserve plan --model=llama3-70b --gpu=h100 --gpus=16 --workload=poisson:mix=medha-5 --qps=0.5
  jaxserve plan --gpus=8,16 --qps=1 --ttft=1 --tpot=0.05 --json=plans.json
"""
PLANNED = ("chunking", "chunk_tokens", "pages", "kv_memory_gib")  # by the plan itself
_SIMULATED = {option.name: option for option in (*simulate.SYSTEM, *simulate.WORKLOAD)}
SYSTEM = [
    _SIMULATED["model"],
    _SIMULATED["gpu"],
    Option("gpus", str, "8", "how many GPUs a replica has; several counts, as N,N, are compared"),
    _SIMULATED["lookahead"],
    _SIMULATED["enable_expert_parallel"],
    _SIMULATED["ffn_over_lanes"],
]
WORKLOAD = [
    _SIMULATED["workload"],
    _SIMULATED["qps"],
    Option("requests", int, 100, "how many requests", 1),
    _SIMULATED["seed"],
]
SEARCH = [
    Option("best", int, 4, "plans that are simulated at length and pushed to their capacity", 0),
    Option(
        "attainment",
        float,
        0.9,
        "share of each kind of requests that meets both objectives at capacity",
        0.01,
        1.0,
    ),
]
SCHEDULING = [option for option in scheduling_options() if option.name not in PLANNED]
OUTPUT = [
    Option("json", str, None, "file for all plans"),
    Option(
        "plot",
        str,
        None,
        "picture of the plans, TTFT p90 against TPOT p90, .png or .svg (needs matplotlib)",
    ),
]
HEADERS = [
    "plan",
    "requests",
    "met",
    "TTFT s p50",
    "p90",
    "TPOT ms p50",
    "p90",
    "capacity/s",
    "KV tokens",
    "GiB/GPU",
    "longest s",
]
SHOWN = 15  # rows of the table


def run(values: dict[str, Any]) -> int:
    question = question_of(values)
    fit, out = _meshes(values["gpus"], question)
    _check_files(values)
    candidates = plans(fit)
    trial = PlanRunner(question, candidates)
    with terminal_bar("plans", simulations(len(candidates), values["best"])) as bar:
        answers = search(trial, candidates, values["best"], bar)
    report = report_of(values, trial, answers, out)
    print(shown(report))
    if values["json"]:
        Path(values["json"]).write_text(json.dumps(report, indent=1) + "\n")
    if values["plot"]:
        draw(values["plot"], report)
    return 0


def question_of(values: Mapping[str, Any]) -> PlanQuestion:
    """Makes the question of the flags. Errors: ConfigError."""
    scheduler, cache = configs(
        {
            **values,
            "chunking": "adaptive",
            "chunk_tokens": CHUNKS[0][1],
            "pages": None,
            "kv_memory_gib": None,
        }
    )
    arrivals = lambda qps, requests: parse(
        values["workload"], qps=qps, requests=requests, seed=values["seed"]
    )
    return PlanQuestion(
        shape_of(values["model"]),
        values["gpu"],
        scheduler,
        cache,
        arrivals,
        values["qps"],
        values["requests"],
        values["attainment"],
        values["lookahead"],
        values["enable_expert_parallel"],
        values["ffn_over_lanes"],
    )


def counts_of(text: str) -> list[int]:
    """'8,16' -> [8, 16]. Errors: ConfigError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and 1 <= int(part) <= 1024 for part in parts):
        raise ConfigError(
            "gpus", f"{text!r} is not a number of GPUs from 1 to 1024, or several as N,N"
        )
    return sorted({int(part) for part in parts})


def _meshes(
    gpus: str, question: PlanQuestion
) -> tuple[list[MeshConfig], list[tuple[MeshConfig, str]]]:
    fit: list[MeshConfig] = []
    out: list[tuple[MeshConfig, str]] = []
    for count in counts_of(gpus):
        fitting, refused = meshes(count, question)
        fit = fit + fitting
        out = out + refused
    if not fit:
        reasons = "; ".join(f"{mesh}: {why}" for mesh, why in out)
        raise ConfigError("gpus", f"no mesh of {gpus} {question.device} runs the model ({reasons})")
    return fit, out


def _check_files(values: Mapping[str, Any]) -> None:
    """Says before anything is simulated what cannot be written. Errors: ConfigError."""
    if values["plot"]:
        check_picture("plot", values["plot"])
    for flag in filter(values.get, ("json", "plot")):
        check_writable(flag, values[flag])


def report_of(
    values: Mapping[str, Any],
    trial: PlanRunner,
    answers: Sequence[PlanAnswer],
    out: Sequence[tuple[MeshConfig, str]],
) -> dict[str, Any]:
    scheduler = trial.question.scheduler
    return {
        "simulated": True,
        "model": values["model"],
        "gpu": values["gpu"],
        "gpus": counts_of(values["gpus"]),
        "seed": values["seed"],
        "workload": workload_summary(trial.arrivals),
        "attainment": values["attainment"],
        "objectives": {
            "ttft": scheduler.ttft,
            "tpot": scheduler.tpot,
            "ttft_stretch": scheduler.ttft_stretch,
            "ttft_of_longest": trial.objective(trial.longest),
        },
        "plans": [answer.row for answer in answers],
        "left_out": [{"mesh": str(mesh), "reason": reason} for mesh, reason in out],
    }


def shown(report: Mapping[str, Any]) -> str:
    """A report as a table."""
    work = report["workload"]
    aims = report["objectives"]
    head = (
        f"simulated: {report['model']} on {' or '.join(map(str, report['gpus']))} "
        f"{report['gpu']}; {work['count']} requests at "
        f"{work['rate']:.3g}/s, prompts of {work['prompt']['mean']:,.0f} tokens (most "
        f"{work['prompt']['max']:,})\n"
        f"objectives: first token in {aims['ttft']:g} s ({aims['ttft_of_longest']:.3g} s after "
        "the longest prompt), "
        f"{1e3 * aims['tpot']:g} ms per token"
    )
    parts = [head, table(HEADERS, [_cells(row) for row in report["plans"][:SHOWN]])]
    if len(report["plans"]) > SHOWN:
        parts.append(
            f"{len(report['plans']) - SHOWN} plans that rank lower are not shown; --json has all"
        )
    if report["left_out"]:
        parts.append(
            "\n".join(
                [
                    "left out:",
                    *(f"  {row['mesh']:20} {row['reason']}" for row in report["left_out"]),
                ]
            )
        )
    return "\n\n".join(parts)


def _cells(row: Mapping[str, Any]) -> list[str]:
    ttft = row["figures"]["ttft"]
    tpot = row["figures"]["tpot"]
    return [
        row["plan"],
        str(row["requests"]),
        f"{row['met']:.0%}",
        *(cell(ttft.get(p), ".2f") for p in ("p50", "p90")),
        *(cell(tpot.get(p), ".1f", 1e3) for p in ("p50", "p90")),
        cell(row["capacity"], ".3g", empty=""),
        f"{row['kv_tokens']:,}",
        f"{row['weight_bytes_per_gpu'] / GIB:.1f}",
        cell(row["longest_alone"], ".1f"),
    ]


def draw(name: str, report: Mapping[str, Any]) -> None:
    """A point per plan, with its name; a colour per number of GPUs."""
    figure = figure_class()(figsize=(11, 7), layout="constrained")
    axes = figure.subplots()
    for row in report["plans"]:
        ttft = row["figures"]["ttft"]
        tpot = row["figures"]["tpot"]
        if ttft and tpot:
            point = ttft["p90"], 1e3 * tpot["p90"]
            axes.plot(*point, "o", color=f"C{report['gpus'].index(row['gpus'])}")
            axes.annotate(row["plan"], point, xytext=(4, 2), textcoords="offset points", fontsize=7)
    axes.axhline(1e3 * report["objectives"]["tpot"], color="gray", lw=0.8)
    axes.set(
        xscale="log",
        xlabel="TTFT p90, s",
        ylabel="TPOT p90, ms",
        title=f"{report['model']} on {report['gpu']} (simulated)",
    )
    figure.savefig(name)


COMMAND = Command(
    {
        "system": SYSTEM,
        "workload": WORKLOAD,
        "search": SEARCH,
        "scheduling": SCHEDULING,
        "output": OUTPUT,
    },
    run,
    ABOUT,
)
