"""`jaxserve bench serve`: a load generator for one server, over HTTP or gRPC; a table of latencies,
throughput and goodput, and a line of JSON for each run."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from jaxserve.cli.engine_flags import engine_groups
from jaxserve.cli.files import check_picture, check_writable
from jaxserve.cli.own_server import own_server
from jaxserve.lab.cli.bench.serve_report import Run, plot, report
from jaxserve.lab.research.generator import OK, play
from jaxserve.lab.research.load import LOAD, Load
from jaxserve.lab.research.prompts import requests_of, warm_up_of
from jaxserve.lab.research.served_figures import OBJECTIVES, figures, parsed_goodput
from jaxserve.lab.research.transports import Served, Transport, over_grpc, over_http
from jaxserve.observe.machine import machine
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

ABOUT = """\
Without --url or --target a server is started on this machine with the flags below, in a process of
its own. Prompts are random token ids of the lengths that --prompt says, with --prefix and --groups
after one of some shared prefixes; or --workload names a trace (Mooncake's .jsonl, whose equal hash
ids are equal tokens, Azure's .csv), ShareGPT's conversations (.json), or a generator, as for
simulate. Outputs have exactly the asked length. The exit code is 1 where nothing was served.

  jaxserve bench serve --qps=0.5,1,2 --requests=30 --prompt=64:512 --output=32
  jaxserve bench serve --url=http://127.0.0.1:8000 --concurrency=4 --prefix=512 --groups=8
  jaxserve bench serve --workload=trace.jsonl --time_scale=0.1 --length_scale=0.03125
"""
SERVER = [
    Option("url", str, None, "a running server of the OpenAI protocol, http://HOST:PORT"),
    Option("target", str, None, "a running jaxserve's gRPC address; default: start one"),
    Option(
        "transport",
        str,
        None,
        "how to talk to a server that is started; default: grpc",
        choices=("grpc", "http"),
    ),
    Option(
        "api_key",
        str,
        None,
        "key for --url or --target, where it asks for one; default: JAXSERVE_API_KEY, which no "
        "list of processes shows",
    ),
    Option(
        "tls_ca",
        str,
        None,
        "PEM file of the authorities of the server's certificate; default: those of the system "
        "for https, no TLS for --target",
    ),
    Option(
        "vocab",
        int,
        None,
        "ids of random tokens are below it; default: the model's over gRPC, 256 over HTTP, which "
        "does not tell",
        1,
    ),
    Option(
        "ignore_eos",
        bool,
        True,
        "ask for outputs of exactly the asked length; no, for servers that refuse unknown fields",
    ),
]
RATES = "requests per second, as X,X,X: one run each; default: 1, or as a trace says"
GENERATED = list({**LOAD, "qps": Option("qps", str, None, RATES)}.values())
RUNS = [
    Option("repeats", int, 1, "runs of each load, each with the next seed", 1),
    Option("warmup", int, 2, "requests before a run that do not count", 0),
    Option("timeout", float, 600.0, "seconds that a request may take", 0.001),
    Option(
        "goodput",
        str,
        "",
        "objectives of a request in seconds, as NAME:X,NAME:X, of "
        + ", ".join(OBJECTIVES)
        + "; default: the server's own, where it says which requests were in time",
    ),
    Option("json", str, None, "file for all figures, a line for each run"),
    Option("plot", str, None, "picture of the latencies' distributions, .png or .svg"),
]


def run(values: dict[str, Any]) -> int:
    loads = loads_of(values)
    objectives = parsed_goodput(values["goodput"])
    if values["json"]:
        check_writable("json", values["json"])
    if values["plot"]:
        check_picture("plot", values["plot"])
    with _server(values) as connect:
        runs = asyncio.run(_measure(connect, loads, objectives, values))
    print(report(runs))
    if values["plot"]:
        plot(runs, values["plot"])
    return int(not any(run.figures["done"] for run in runs))


def loads_of(values: Mapping[str, Any]) -> list[Load]:
    """The load of each rate, checked as far as it can be without a server. Errors: ConfigError."""
    settings = {name: values[name] for name in LOAD}
    rates: Sequence[float | None] = [
        _rate(text) for text in (values["qps"] or "").split(",") if text
    ]
    if not rates:
        free = settings["concurrency"] is None and not Load(**{**settings, "qps": None}).own_times
        rates = [None]
        if free:
            rates = [1.0]
    loads = [Load(**{**settings, "qps": rate}) for rate in rates]
    for load in loads:
        load.check()
        if not load.conversations:
            load.schedule()
    return loads


Connect = contextlib.AbstractAsyncContextManager[Transport]


async def _measure(
    connect: Connect,
    loads: Sequence[Load],
    objectives: Mapping[str, float],
    values: Mapping[str, Any],
) -> list[Run]:
    runs = []
    with contextlib.ExitStack() as stack:
        out = None
        if values["json"]:
            out = stack.enter_context(open(values["json"], "w"))
        async with connect as transport:
            print(f"{transport.served.model} at {transport.served.address}", file=sys.stderr)
            async for run in _runs(transport, loads, objectives, values):
                runs.append(run)
                print(_progress(run), file=sys.stderr)
                if out:
                    print(json.dumps(line_of(run, transport.served, values)), file=out, flush=True)
    return runs


async def _runs(
    transport: Transport,
    loads: Sequence[Load],
    objectives: Mapping[str, float],
    values: Mapping[str, Any],
) -> AsyncIterator[Run]:
    served = transport.served
    timeout = values["timeout"]
    for place, first in enumerate(loads):
        for repeat in range(values["repeats"]):
            load = dataclasses.replace(first, seed=first.seed + repeat)
            seed = (load.seed, place)  # no run finds another's prompts in the server's cache
            arrivals, prompts = await requests_of(
                load, seed, served.vocab, served.max_len, transport.encode
            )
            warm_up = warm_up_of(arrivals, values["warmup"], served.vocab, seed)
            await play(transport, *warm_up, timeout, concurrency=1)
            sent = await play(transport, arrivals, prompts, timeout, load.concurrency)
            yield Run(load, repeat, sent, figures(sent, objectives))


def _progress(run: Run) -> str:
    answered = sum(each.status == OK for each in run.sent)
    return f"{run.name}, run {run.repeat + 1}: {answered} of {len(run.sent)} answered"


def line_of(run: Run, served: Served, values: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the line of JSON that is kept of a run."""
    return {
        "load": dataclasses.asdict(run.load),
        "repeat": run.repeat,
        "seed": run.load.seed,
        "served": dataclasses.asdict(served),
        "settings": {name: value for name, value in values.items() if name != "api_key"},
        "figures": run.figures,
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "requests": [dataclasses.asdict(each) for each in run.sent],
    }


@contextlib.contextmanager
def _server(values: Mapping[str, Any]) -> Iterator[Connect]:
    """A connection to the server to measure; one of our own ends with the measurement."""
    if values["url"] and values["target"]:
        raise ConfigError("url", "give either --url or --target")
    access: dict[str, Any] = {"tls_ca": None, "api_key": None}
    if values["url"] or values["target"]:
        for name, wanted in (("url", "http"), ("target", "grpc")):
            if values[name] and values["transport"] not in (None, wanted):
                raise ConfigError("transport", f"--{name} is for {wanted}")
        key = values["api_key"] or os.environ.get("JAXSERVE_API_KEY") or None
        access = {"tls_ca": values["tls_ca"], "api_key": key}
    how = {**access, "vocab": values["vocab"], "ignore_eos": values["ignore_eos"]}
    if values["url"]:
        yield over_http(values["url"], **how)
    elif values["target"]:
        yield over_grpc(values["target"], **how)
    else:
        with own_server(values) as server:
            if values["transport"] == "http":
                yield over_http(server.url, **how)
            else:
                yield over_grpc(server.grpc, **how)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate <= 1e6:
        raise ConfigError("qps", f"{text!r} is not a number of requests per second above 0")
    return rate


COMMAND = Command(
    {"server to measure": SERVER, "load": GENERATED, "runs": RUNS, **engine_groups()}, run, ABOUT
)
