"""`jaxserve bench serve`: open-loop load over gRPC. Requests are sent when a Poisson process says
so, whether earlier ones are done or not.

Latencies count from the planned moment, so a generator that falls behind cannot flatter the server;
how far behind it fell is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.api.sampling import SamplingParams
from jaxserve.cli.display import table
from jaxserve.cli.engine_flags import engine_groups
from jaxserve.cli.own_server import own_server
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError
from jaxserve.text.output import Delta

ABOUT = """\
Without --target a server is started on this machine with the flags below, in a process of its
own. Prompts are random token ids, outputs have exactly the asked length. A length is a number or
LOW:HIGH, drawn evenly.

  jaxserve bench serve --rates=0.5,1,2 --requests=30 --prompt_len=64:512 --output_len=32
"""
LOAD = [
    Option("target", str, None, "address of a running server; default: start one"),
    Option(
        "api_key",
        str,
        None,
        "key for --target, where it asks for one; default: JAXSERVE_API_KEY, which no list of "
        "processes shows",
    ),
    Option(
        "tls_ca",
        str,
        None,
        "PEM file of the authorities of --target's certificate; default: no TLS",
    ),
    Option("rates", str, "1", "requests per second, as X,X,X: one run each"),
    Option("requests", int, 20, "measured requests of a run", 1),
    Option("warmup", int, 2, "requests before a run that do not count", 0),
    Option("prompt_len", str, "128", "tokens of a prompt, N or LOW:HIGH"),
    Option("output_len", str, "32", "tokens of an output, N or LOW:HIGH"),
    Option("seed", int, 0, "of arrivals, lengths and prompts", 0),
    Option("timeout", float, 600.0, "seconds that a request may take", 0.001),
    Option("json", str, None, "file for all figures"),
]
PERCENTILES = (50, 90, 99)


@dataclasses.dataclass
class Sent:
    """One request; times are seconds since the run began. status: OK, or why there is no answer."""

    planned: float
    prompt: int
    output: int
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    status: str = "OK"


Run = tuple[float, list[Sent]]  # a rate and its requests


def run(values: dict[str, Any]) -> int:
    rates = [_rate(text) for text in values["rates"].split(",")]
    lengths = [_range(name, values[name]) for name in ("prompt_len", "output_len")]
    with _server(values) as target:
        runs = asyncio.run(_measure(target, rates, lengths, values))
    print(report(runs))
    if values["json"]:
        with open(values["json"], "w", encoding="utf-8") as file:
            json.dump(
                {
                    "flags": {name: value for name, value in values.items() if name != "api_key"},
                    "runs": [
                        {
                            "rate": rate,
                            **figures(sent),
                            "requests": [dataclasses.asdict(s) for s in sent],
                        }
                        for rate, sent in runs
                    ],
                },
                file,
                indent=1,
            )
    return 0


def plan(
    rate: float, count: int, lengths: Sequence[tuple[int, int]], dice: np.random.Generator
) -> list[Sent]:
    """`count` requests whose gaps are exponential with mean 1/rate seconds."""
    moments = np.cumsum(dice.exponential(1 / rate, count))
    prompts, outputs = (dice.integers(low, high, count, endpoint=True) for low, high in lengths)
    return [
        Sent(float(moment), int(prompt), int(output))
        for moment, prompt, output in zip(moments, prompts, outputs)
    ]


def figures(sent: Sequence[Sent]) -> dict[str, Any]:
    """Percentiles in milliseconds, rates per second, over the requests that were answered."""
    done = [s for s in sent if s.status == "OK"]
    wall = max((s.last for s in done), default=0.0) - min(s.planned for s in sent)
    return {
        "done": len(done),
        "refused": dict(Counter(s.status for s in sent if s.status != "OK")),
        "ttft_ms": _percentiles([s.first - s.planned for s in done]),
        "tpot_ms": _percentiles(
            [(s.last - s.first) / (s.tokens - 1) for s in done if s.tokens > 1]
        ),
        "e2e_ms": _percentiles([s.last - s.planned for s in done]),
        "lag_ms": _percentiles([s.sent - s.planned for s in sent]),
        "output_tokens_per_s": sum(s.tokens for s in done) / wall if done else 0.0,
        "total_tokens_per_s": sum(s.tokens + s.prompt for s in done) / wall if done else 0.0,
        "requests_per_s": len(done) / wall if done else 0.0,
    }


def report(runs: Sequence[Run]) -> str:
    """The table of all runs."""
    headers = [
        "rate/s",
        "done",
        "refused",
        "TTFT ms",
        "TPOT ms",
        "E2E ms",
        "out tok/s",
        "all tok/s",
        "req/s",
        "lag ms",
    ]
    rows = []
    for rate, sent in runs:
        found = figures(sent)
        spreads = [
            "/".join(f"{value:.{1 if name == 'lag_ms' else 0}f}" for value in found[name].values())
            for name in ("ttft_ms", "tpot_ms", "e2e_ms", "lag_ms")
        ]
        speeds = [
            f"{found['output_tokens_per_s']:.1f}",
            f"{found['total_tokens_per_s']:.1f}",
            f"{found['requests_per_s']:.2f}",
        ]
        rows.append(
            [
                f"{rate:g}",
                str(found["done"]),
                str(sum(found["refused"].values())),
                *spreads[:3],
                *speeds,
                spreads[3],
            ]
        )
    note = (
        "Milliseconds are p50/p90/p99, from the planned moment of sending; lag is how late "
        "the generator sent."
    )
    return table(headers, rows) + "\n\n" + note


async def _measure(
    target: str, rates: list[float], lengths: list[tuple[int, int]], values: dict[str, Any]
) -> list[Run]:
    from jaxserve.server.client import AsyncClient

    runs = []
    async with AsyncClient(target, **_credentials(values)) as client:
        model = await client.model_info()
        dice = np.random.default_rng(values["seed"])
        print(f"{model.model} ({model.dtype}) at {target}", file=sys.stderr)
        longest = sum(high for _, high in lengths)
        if longest > model.max_len:
            raise ConfigError(
                "prompt_len",
                f"prompt and output reach {longest} tokens; the model's limit is {model.max_len}",
            )
        for rate in rates:
            warm_up = plan(1000.0, values["warmup"], lengths, dice)
            await _play(client, warm_up, model.vocab, dice, values["timeout"])
            sent = plan(rate, values["requests"], lengths, dice)
            await _play(client, sent, model.vocab, dice, values["timeout"])
            print(
                f"rate {rate:g}/s: {sum(s.status == 'OK' for s in sent)} of {len(sent)} answered",
                file=sys.stderr,
            )
            runs.append((rate, sent))
    return runs


async def _play(
    client: Any, requests: list[Sent], vocab: int, dice: np.random.Generator, timeout: float
) -> None:
    """Sends each request at its moment; returns when all have ended."""
    prompts = [dice.integers(0, vocab, request.prompt) for request in requests]
    began = time.perf_counter()
    tasks = []
    for request, prompt in zip(requests, prompts):
        await asyncio.sleep(max(0.0, request.planned - (time.perf_counter() - began)))
        tasks.append(asyncio.create_task(_send(client, request, prompt, began, timeout)))
    await asyncio.gather(*tasks)


async def _send(
    client: Any, request: Sent, prompt: np.ndarray, began: float, timeout: float
) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=request.output, ignore_eos=True)
    request.sent = time.perf_counter() - began
    try:
        async for output in client.generate(prompt, sampling, timeout=timeout, ids_only=True):
            if isinstance(output, Delta):
                request.last = time.perf_counter() - began
                request.first = request.first or request.last
                request.tokens += len(output.ids)
    except RequestError as error:
        request.status = error.status


@contextlib.contextmanager
def _server(values: dict[str, Any]) -> Iterator[str]:
    """The address of the server to measure; one of our own ends with the measurement."""
    if values["target"]:
        yield values["target"]
    else:
        with own_server(values) as server:
            yield server.grpc


def _credentials(values: dict[str, Any]) -> dict[str, Any]:
    """Of the client, for --target; a server of our own asks for none."""
    if not values["target"]:
        return {}
    try:
        roots = None if values["tls_ca"] is None else Path(values["tls_ca"]).read_bytes()
    except OSError as error:
        raise ConfigError("tls_ca", f"{values['tls_ca']}: {error.strerror}") from None
    return {
        "api_key": values["api_key"] or os.environ.get("JAXSERVE_API_KEY") or None,
        "root_certificates": roots,
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    values = (
        np.percentile(seconds, PERCENTILES) * 1000 if len(seconds) else [0.0] * len(PERCENTILES)
    )
    return {f"p{p}": round(float(value), 3) for p, value in zip(PERCENTILES, values)}


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate <= 1e6:
        raise ConfigError("rates", f"{text!r} is not a number of requests per second above 0")
    return rate


def _range(name: str, text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        bounds = (0, 0)
    if not 1 <= bounds[0] <= bounds[1]:
        raise ConfigError(name, f"{text!r} is neither a number above 0 nor LOW:HIGH")
    return bounds


COMMAND = Command({"load": LOAD, **engine_groups()}, run, ABOUT)
