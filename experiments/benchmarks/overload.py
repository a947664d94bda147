"""Ten times as many requests as a live server can serve, for a minute: what is refused, how soon,
and how those that are not fare.

    python -m experiments.benchmarks.overload --way=http --json=overload.json
    python -m experiments.benchmarks.overload --way=grpc --replicas=2 --overload=predicted

First the engine's capacity is measured: requests per second with all slots always taken. Then
requests come as a Poisson process, whatever becomes of those before: for a while at 0.9 times the
capacity, which is what goodput is compared with, at `factor` times the capacity, and at half of it.
They come over gRPC or HTTP, each on a thread of its own in this process, or without a front; to
one replica or, by a conductor, to several in this process.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.script import command_line, keep
from jaxserve.api.errors import RequestError
from jaxserve.api.events import Event, Finished, Token
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.cli.display import table
from jaxserve.cluster.conductor import Conductor, ConductorSettings
from jaxserve.cluster.member import Member
from jaxserve.engine.engine import Engine
from jaxserve.llm import open_engine
from jaxserve.observe.machine import described, machine
from jaxserve.replica.protocol import Replica
from jaxserve.scheduling.events import StepIssued
from jaxserve.server.client import Client
from jaxserve.server.supervisor import Background
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import (
    CacheConfig,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
    ServerConfig,
)
from jaxserve.text import Tokenizer
from jaxserve.text.output import Delta

OPTIONS = {
    "overload": [
        Option("model", str, "smollm2-135m", "model: a fetched name, a folder or a .gguf file"),
        Option("prompt", int, 100, "tokens of a prompt, median", 1),
        Option("output", int, 16, "tokens of an answer, median", 2),
        Option("ttft", float, 4.0, "objective: seconds to the first token", 0.001),
        Option("tpot", float, 0.5, "objective: seconds per output token", 0.001),
        Option("max_seqs", int, 8, "sequences that run at once", 1),
        Option("factor", float, 10.0, "overload, times the capacity", 1),
        Option("seconds", float, 60.0, "of overload", 1),
        Option("way", str, "engine", "how requests come", choices=("engine", "grpc", "http")),
        Option("admission", str, "predict", "see jaxserve serve", choices=("predict", "queue")),
        Option("replicas", int, 0, "behind a conductor; 0: one replica without a conductor", 0),
        Option(
            "overload",
            str,
            "none",
            "see jaxserve conductor",
            choices=("none", "early", "predicted"),
        ),
        Option("seed", int, 0, "of arrivals and lengths", 0),
        Option("json", str, None, "file for all figures"),
    ]
}
LONGEST = 2048  # tokens of a sequence
# seconds at 0.9 times, and at half of the capacity
BASE = 30.0
AFTER = 40.0
RECOVERY = 10.0  # seconds after the overload within which all is as it should be
WAIT = 600.0  # most seconds for anything


class Asked:
    """One request: when it came, how long it took to be refused, when its first and last tokens
    came, in seconds of the process."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        self.came = time.perf_counter()
        self.refused = 0.0
        self.error: RequestError | None = None
        self.tokens = 0
        self.first = 0.0
        self.last = 0.0
        self.done = threading.Event()

    def heard(self, tokens: int) -> None:
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.tokens = self.tokens + tokens

    def refuse(self, error: RequestError) -> None:
        self.error = error
        self.refused = time.perf_counter() - self.came

    @property
    def ttft(self) -> float:
        return self.first - self.came

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / max(1, self.tokens - 1)


class WithoutFront:
    def __init__(self, server: Background):
        self._replica = server.server.frontend.replica

    def ask(self, asked: Asked, prompt: np.ndarray, output: int) -> None:
        engine = self._replica
        ended = threading.Event()

        def sink(events: Sequence[Event]) -> None:
            tokens = sum(isinstance(event, Token) for event in events)
            if tokens:
                asked.heard(tokens)
            for event in events:
                if isinstance(event, Finished):
                    asked.error = event.error
                    ended.set()

        engine.submit(
            Request.make(
                str(id(asked)),
                prompt,
                sampling(output),
                vocab=engine.info.vocab,
                max_len=engine.info.max_model_len,
                arrival=engine.now(),
            ),
            sink,
        )
        ended.wait(WAIT)


class OverGrpc:
    def __init__(self, target: str):
        self._client = Client(target)

    def ask(self, asked: Asked, prompt: np.ndarray, output: int) -> None:
        for event in self._client.generate(prompt, sampling(output)):
            if isinstance(event, Delta):
                asked.heard(len(event.ids))


class OverHttp:
    def __init__(self, port: int):
        self._port = port

    def ask(self, asked: Asked, prompt: np.ndarray, output: int) -> None:
        body = {
            "prompt": prompt.tolist(),
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", self._port, timeout=WAIT)
        ) as connection:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
            )
            answer = connection.getresponse()
            if answer.status != 200:
                raise RequestError(
                    "",
                    answer.read().decode(),
                    str(answer.status),
                    reason=answer.headers.get("jaxserve-reject-reason", str(answer.status)),
                    retry_after=float(answer.headers.get("retry-after", 0)),
                )
            for line in answer:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise RequestError(
                            "", chunk["error"]["message"], reason=chunk["error"]["code"]
                        )
                    asked.heard(chunk["usage"]["completion_tokens"] if chunk.get("usage") else 0)


WAYS: dict[str, Callable[[Background], Any]] = {
    "engine": WithoutFront,
    "grpc": lambda server: OverGrpc(server.target),
    "http": lambda server: OverHttp(server.server.ports["http"]),
}


def sampling(output: int) -> SamplingParams:
    return SamplingParams.make(temperature=0, max_tokens=output, ignore_eos=True)


class LoadGenerator:
    """Requests at random for a server. way: how they come, one of the classes above. vocabulary: of
    its model."""

    def __init__(self, values: dict[str, Any], way: Any, vocabulary: int):
        self.values = values
        self.dice = np.random.default_rng(values["seed"])
        self.slots = values["max_seqs"] * max(1, values["replicas"])
        self._way = way
        self._vocabulary = vocabulary

    def ask(self) -> Asked:
        dice = self.dice
        prompt = dice.integers(
            0,
            self._vocabulary,
            int(np.clip(dice.lognormal(np.log(self.values["prompt"]), 0.6), 8, 1000)),
        )
        asked = Asked(len(prompt))
        output = int(np.clip(dice.lognormal(np.log(self.values["output"]), 0.5), 2, 200))

        def main() -> None:
            try:
                self._way.ask(asked, prompt, output)
            except RequestError as error:
                asked.refuse(error)
            except OSError as error:  # the server did not even accept the connection, or cut it
                asked.refuse(RequestError("", str(error), type(error).__name__, reason="lost"))
            asked.done.set()

        threading.Thread(target=main, daemon=True).start()
        return asked

    def capacity(self, seconds: float) -> float:
        """Requests per second that end while as many as there are slots are always there."""
        until = time.perf_counter() + seconds
        ended = 0
        alive = [self.ask() for _ in range(self.slots)]
        while time.perf_counter() < until:
            ended += sum(asked.done.is_set() and asked.error is None for asked in alive)
            alive = [self.ask() if asked.done.is_set() else asked for asked in alive]
            time.sleep(0.005)
        finished(alive)
        return ended / seconds

    def poisson(self, rate: float, seconds: float) -> list[Asked]:
        began = time.perf_counter()
        at = 0.0
        out = []
        while (at := at + float(self.dice.exponential(1 / rate))) < seconds:
            time.sleep(max(0.0, began + at - time.perf_counter()))
            out.append(self.ask())
        time.sleep(max(0.0, began + seconds - time.perf_counter()))
        return out


def finished(all_asked: Iterable[Asked]) -> None:
    for asked in all_asked:
        if not asked.done.wait(WAIT):
            raise TimeoutError("a request did not end")


def figures(asked: Sequence[Asked], seconds: float, values: dict[str, Any]) -> dict[str, Any]:
    served = [one for one in asked if one.error is None]
    refused = [one for one in asked if one.error is not None]
    ttft, tpot = (np.array([getattr(one, name) for one in served]) for name in ("ttft", "tpot"))
    both = (ttft <= values["ttft"]) & (tpot <= values["tpot"])
    count = max(1, len(served))
    took = [one.refused for one in refused]
    hints = [one.error.retry_after or 0.0 for one in refused if one.error is not None]
    return {
        "asked": len(asked),
        "accepted": len(served),
        "refused": len(refused),
        "statuses": dict(Counter(one.error.status for one in refused if one.error is not None)),
        "reasons": {
            reason: sum(one.error is not None and one.error.reason == reason for one in refused)
            for reason in sorted({one.error.reason for one in refused if one.error is not None})
        },
        "ttft_met": float((ttft <= values["ttft"]).sum() / count),
        "tpot_met": float((tpot <= values["tpot"]).sum() / count),
        "both_met": float(both.sum() / count),
        "goodput": float(both.sum() / seconds),
        "ttft": percentiles(ttft),
        "tpot": percentiles(tpot),
        "refusal": percentiles(took),
        "retry_after": percentiles(hints),
    }


def resident() -> int:
    """Bytes of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def percentiles(values: Any) -> dict[str, float]:
    return {f"p{p}": float(np.percentile(values, p)) if len(values) else 0.0 for p in (50, 90, 99)}


def measured(values: dict[str, Any]) -> dict[str, Any]:
    scheduler = SchedulerConfig(
        policy="slack",
        chunking="adaptive",
        admission=values["admission"],
        max_seqs=values["max_seqs"],
        ttft=values["ttft"],
        tpot=values["tpot"],
    )
    source = ModelSource(values["model"], max_model_len=LONGEST)
    cache = CacheConfig(prefix_caching=False)
    config = EngineConfig(source, MeshConfig(), cache, scheduler)
    engines: list[Engine] = []

    def build() -> tuple[Replica, Tokenizer | None]:
        tokenizer = None
        for _ in range(max(1, values["replicas"])):
            engine, tokenizer = open_engine(config, progress=sys.stderr.isatty())
            assert isinstance(engine, Engine)
            engines.append(engine)
        if not values["replicas"]:
            return engines[0], tokenizer
        settings = ConductorSettings(overload=values["overload"])
        members = [Member(f"replica {number}", one) for number, one in enumerate(engines)]
        conductor = Conductor(members, settings, owns_members=True)
        return conductor, tokenizer

    with Background(ServerConfig(grpc_port=0, port=0), build) as server:
        server.wait_ready()
        vocabulary = server.server.frontend.replica.info.vocab
        load = LoadGenerator(values, WAYS[values["way"]](server), vocabulary)
        return phases(load, Computed(engines), engines)


class Computed:
    """Counts the tokens that engines' steps compute."""

    def __init__(self, engines: Iterable[Engine]):
        self.tokens = 0
        for engine in engines:
            engine.bus.subscribe(StepIssued, self._count)

    def _count(self, event: StepIssued) -> None:
        self.tokens += int(event.batch.length[event.batch.is_chunk].sum())


def phases(load: LoadGenerator, computed: Computed, engines: Sequence[Engine]) -> dict[str, Any]:
    values = load.values
    memory = resident()
    load.capacity(5.0)  # what runs first runs slower: it does not count
    capacity = load.capacity(15.0)
    factor = values["factor"]
    base = load.poisson(0.9 * capacity, BASE)
    finished(base)
    before = computed.tokens
    asked = load.poisson(factor * capacity, values["seconds"])
    depth = sum(engine.load().waiting for engine in engines)
    after = load.poisson(0.5 * capacity, AFTER)
    finished([*asked, *after])
    spent = (
        computed.tokens - before - sum(one.prompt for one in [*asked, *after] if one.error is None)
    )
    late = [one for one in after if one.came - after[0].came > RECOVERY]
    return {
        "capacity": capacity,
        "waiting_at_the_end": depth,
        "tokens_for_refused": spent,
        "scale": max(engine.scheduler.predictor.scale for engine in engines),
        "grown_mib": (resident() - memory) / 2**20,
        "phases": {
            "0.9x": figures(base, BASE, values),
            f"{factor:g}x": figures(asked, values["seconds"], values),
            "0.5x, after 10 s": figures(late, AFTER - RECOVERY, values),
        },
    }


def shown(result: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f["asked"],
            f["accepted"],
            f"{f['ttft_met']:.1%}",
            f"{f['tpot_met']:.1%}",
            f"{f['goodput']:.2f}",
            f"{f['ttft']['p50']:.2f}",
            f"{f['ttft']['p99']:.2f}",
            f"{f['tpot']['p50']:.3f}",
            f"{f['tpot']['p99']:.3f}",
            f"{f['refusal']['p50'] * 1e3:.1f}",
            f"{f['refusal']['p99'] * 1e3:.1f}",
        ]
        for name, f in result["phases"].items()
    ]
    return table(
        [
            "load",
            "asked",
            "accepted",
            "TTFT met",
            "TPOT met",
            "good/s",
            "TTFT p50 s",
            "p99",
            "TPOT p50 s",
            "p99",
            "ms to refuse p50",
            "p99",
        ],
        [[str(cell) for cell in row] for row in rows],
    )


def run(values: dict[str, Any]) -> int:
    result = measured(values)
    print(described(machine()))
    print(
        f"{values['way']}: {values['model']}, prompts of {values['prompt']} tokens and answers "
        f"of {values['output']} (medians), {values['max_seqs']} slots; objectives "
        f"{values['ttft']:g} s to the first token, {values['tpot']:g} s per token; capacity "
        f"{result['capacity']:.2f} requests/s\n"
    )
    print(shown(result))
    print(
        "\n"
        f"prompt tokens computed for refused requests: {result['tokens_for_refused']}; requests "
        f"that waited when the overload ended: {result['waiting_at_the_end']}; predictor's scale "
        f"{result['scale']:.2f}; resident memory grew by {result['grown_mib']:.0f} MiB"
    )
    keep(values, **result)
    return 0


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])

if __name__ == "__main__":
    sys.exit(
        command_line("overload", "ten times too many requests for a minute", COMMAND, sys.argv[1:])
    )
