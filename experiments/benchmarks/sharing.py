"""Short requests and running decodes while a long prompt prefills, on one engine: time-shared, and
first come, first served.

    python -m experiments.benchmarks.sharing --json=sharing.json

Each engine is measured idle first, so that its figures are ratios to its own. Every request's
tokens are compared with those it got alone.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.script import command_line, keep
from jaxserve.api.events import Event, Finished, Token
from jaxserve.api.request import Request, Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.cli.display import table
from jaxserve.observe.machine import described, machine
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)

OPTIONS = {
    "sharing": [
        Option("model", str, "smollm2-135m", "model: a fetched name, a folder or a .gguf file"),
        Option("long", int, 8000, "tokens of the long prompt", 2),
        Option("short", int, 64, "tokens of a short prompt", 1),
        Option("every", float, 0.7, "seconds from one short request to the next", 0.01),
        Option("decodes", int, 2, "sequences that decode meanwhile", 1),
        Option(
            "ttft",
            float,
            0.15,
            "objective of the short requests, seconds to the first token",
            0.001,
        ),
        Option("tpot", float, 0.1, "objective of the decodes, seconds per token", 0.001),
        Option("step_time", float, 0.06, "most seconds of a step without decodes", 0.001),
        Option("min_chunk", int, 8, "fewest tokens of a chunk where steps are shared", 1),
        Option("json", str, None, "file for all figures"),
    ]
}
OUTPUT = 8  # tokens of a short request and of the long one
WAIT = 600.0  # most seconds for anything


class TimedSink:
    """A request's tokens and when they came, in seconds of the process."""

    def __init__(self) -> None:
        self.sent = time.perf_counter()
        self.ids: list[int] = []
        self.times: list[float] = []
        self.done = threading.Event()

    def __call__(self, events: Sequence[Event]) -> None:
        now = time.perf_counter()
        for event in events:
            if isinstance(event, Token):
                self.ids.append(event.id)
                self.times.append(now)
            elif isinstance(event, Finished):
                self.done.set()

    def wait(self) -> TimedSink:
        if not self.done.wait(WAIT):
            raise TimeoutError("a request did not end")
        return self

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent


def send_random(
    engine: Any,
    id: str,
    tokens: int,
    output: int,
    seed: int,
    slo: Slo | None = None,
    heard: TimedSink | None = None,
) -> TimedSink:
    """Submits a random prompt of `tokens` tokens, the same for the same seed; see `send`."""
    prompt = np.random.default_rng(seed).integers(0, engine.info.vocab, tokens)
    return send(engine, id, prompt, output, heard, slo=slo or Slo())


def send(
    engine: Any,
    id: str,
    prompt: np.ndarray,
    output: int,
    heard: TimedSink | None = None,
    **options: Any,
) -> TimedSink:
    """Submits a prompt to be answered greedily with `output` tokens. heard: its sink, if that is
    not to be a new one. options: of the request."""
    heard = TimedSink() if heard is None else heard
    request = Request.make(
        id,
        prompt,
        SamplingParams.make(temperature=0, max_tokens=output, ignore_eos=True),
        vocab=engine.info.vocab,
        max_len=engine.info.max_model_len,
        arrival=engine.now(),
        **options,
    )
    engine.submit(request, heard)
    return heard


class SharingBench:
    """An engine that runs, and the requests of this benchmark."""

    def __init__(self, values: dict[str, Any], scheduler: SchedulerConfig, lookahead: int):
        from jaxserve.engine.build import build

        self.values = values
        length = values["long"] + OUTPUT + 64
        block = 16
        pages = -(-length // block) + (values["decodes"] + 4) * 64
        config = EngineConfig(
            ModelSource(values["model"]),
            MeshConfig(),
            CacheConfig(block_size=block, pages=pages, prefix_caching=False),
            scheduler,
            lookahead=lookahead,
        )
        self.engine = build(config, progress=sys.stderr.isatty())
        if length > self.engine.info.max_model_len:
            raise ConfigError(
                "long",
                f"{values['long']} tokens and {OUTPUT + 64} more are above the model's "
                f"{self.engine.info.max_model_len}",
            )
        self.engine.start()
        self._serial = 0

    def send(self, tokens: int, output: int, seed: int) -> TimedSink:
        """Sends a random prompt of `tokens` tokens, the same for the same seed."""
        self._serial += 1
        slo = Slo(
            ttft=self.values["ttft"] if tokens == self.values["short"] else None,
            tpot=self.values["tpot"],
        )
        return send_random(self.engine, f"{self._serial}", tokens, output, seed, slo)

    def idle(self, shorts: int) -> tuple[list[TimedSink], list[TimedSink]]:
        """Short requests one at a time, then the decodes alone."""
        alone = [self.send(self.values["short"], OUTPUT, seed).wait() for seed in range(shorts)]
        decodes = [
            self.send(self.values["short"], 48, 1000 + number)
            for number in range(self.values["decodes"])
        ]
        return alone, [heard.wait() for heard in decodes]

    def shared(self) -> tuple[TimedSink, list[TimedSink], list[TimedSink]]:
        """The long prompt beside decodes, and short requests until its first token: (long, shorts,
        decodes)."""
        decodes = [
            self.send(self.values["short"], 400, 1000 + number)
            for number in range(self.values["decodes"])
        ]
        while not all(heard.times for heard in decodes):
            time.sleep(0.01)
        long = self.send(self.values["long"], OUTPUT, 77)
        shorts = []
        seed = 0
        while not long.times and time.perf_counter() - long.sent < WAIT:
            time.sleep(self.values["every"])
            shorts.append(self.send(self.values["short"], OUTPUT, seed))
            seed += 1
        for heard in (*shorts, long):
            heard.wait()
        for number in range(1, self._serial + 1):
            self.engine.cancel(str(number))
        return long, shorts, decodes


def measured(
    values: dict[str, Any], name: str, scheduler: SchedulerConfig, lookahead: int
) -> dict[str, Any]:
    """Figures of one engine."""
    bench = SharingBench(values, scheduler, lookahead)
    try:
        bench.idle(3)
        alone, decodes_alone = bench.idle(12)
        alone_long = bench.send(values["long"], OUTPUT, 77).wait()
        long, shorts, decodes = bench.shared()
        during = [
            np.diff([t for t in heard.times if long.sent < t < long.times[0]]) for heard in decodes
        ]
        known = {seed: heard.ids for seed, heard in enumerate(alone)}
        same = [heard.ids == known[seed] for seed, heard in enumerate(shorts) if seed in known]
        same.append(long.ids == alone_long.ids)
        same += [
            heard.ids[:48] == other.ids[: len(heard.ids)]
            for heard, other in zip(decodes, decodes_alone)
        ]
        idle = float(np.median([heard.ttft for heard in alone]))
        gaps = np.concatenate([gap for gap in during if len(gap)] or [np.array([long.ttft])])
        return {
            "engine": name,
            "short_ttft_idle": idle,
            "short_ttft": spread([heard.ttft for heard in shorts]),
            "shorts": len(shorts),
            "short_ratio": float(np.median([heard.ttft for heard in shorts])) / idle,
            "decode_gap": spread(gaps),
            "decode_gap_idle": spread(
                np.concatenate([np.diff(heard.times) for heard in decodes_alone])
            ),
            "decode_mean": float(gaps.mean()),
            "long_ttft": long.ttft,
            "long_ttft_alone": alone_long.ttft,
            "tokens_compared": len(same),
            "tokens_same": bool(all(same)),
            "scale": bench.engine.scheduler.predictor.scale,
        }
    finally:
        bench.engine.close()


def spread(values: Any) -> dict[str, float]:
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return {"p50": p50, "p90": p90, "p99": p99, "max": float(np.max(values))}


def shown(results: Sequence[dict[str, Any]]) -> str:
    ms = lambda seconds: f"{seconds * 1e3:.0f}"
    rows = [
        [
            r["engine"],
            ms(r["short_ttft_idle"]),
            *(ms(r["short_ttft"][p]) for p in ("p50", "p90", "max")),
            f"{r['short_ratio']:.2f}",
            ms(r["decode_gap_idle"]["p50"]),
            ms(r["decode_mean"]),
            ms(r["decode_gap"]["p90"]),
            f"{r['long_ttft']:.1f}",
            f"{r['long_ttft_alone']:.1f}",
            "yes" if r["tokens_same"] else "NO",
        ]
        for r in results
    ]
    return table(
        [
            "milliseconds",
            "short TTFT idle",
            "p50",
            "p90",
            "max",
            "p50 / idle",
            "gap idle",
            "gap mean",
            "gap p90",
            "long TTFT s",
            "alone s",
            "same tokens",
        ],
        rows,
    )


def run(values: dict[str, Any]) -> int:
    common: dict[str, Any] = dict(max_seqs=8, chunk_tokens=512)
    ours: dict[str, Any] = dict(
        policy="slack",
        chunking="adaptive",
        min_chunk=values["min_chunk"],
        step_time=values["step_time"],
    )
    shared = SchedulerConfig(**ours, **common)
    results = [
        measured(values, "slack, adaptive", shared, 0),
        measured(values, "fcfs, static 512", SchedulerConfig(**common), 1),
    ]
    print(described(machine()))
    print(
        f"{values['model']}: a prompt of {values['long']} tokens, {values['decodes']} decodes "
        f"with an objective of {values['tpot'] * 1e3:.0f} ms per token, a prompt of "
        f"{values['short']} tokens every {values['every']} s with one of "
        f"{values['ttft'] * 1e3:.0f} ms to its first token\n"
    )
    print(shown(results))
    keep(values, results=results)
    return 0


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])

if __name__ == "__main__":
    sys.exit(command_line("sharing", "short requests beside a long prompt", COMMAND, sys.argv[1:]))
