"""KV that goes to another replica by groups of layers, beside blocks that go whole.

    python -m experiments.benchmarks.layer_groups --groups=1,2,5,15,30 --json=layer_groups.json

A replica computes a prompt in one chunk; its blocks are read over loopback sockets as they come, by
a thread of this process. The tail is the time from the first token, when all layers have run, to
the last block: what a replica that decodes would wait for. In each round all numbers of groups take
turns. Beside the tail: seconds of that step, and of a step that decodes one token, which has a
launch for each group too. The verdict: with more than one group, parts were sent before the first
token."""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.benchmarks.asked import Asked
from experiments.script import command_line, keep, numbers
from jaxserve.api.request import KvSource
from jaxserve.cli.display import table
from jaxserve.engine.build import build
from jaxserve.engine.engine import Engine
from jaxserve.observe.machine import described, machine
from jaxserve.server.block_service import BlockService
from jaxserve.server.peer_blocks import PeerReplicas
from jaxserve.server.replica_service import ReplicaService
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import CacheConfig, EngineConfig, ModelSource, SchedulerConfig
from jaxserve.store.peers import BlockStream
from jaxserve.transfer import TcpTransfer, Ticket, Window
from jaxserve.transfer.tcp_plane import TcpPlane

OPTIONS = {
    "layer_groups": [
        Option("model", str, "smollm2-135m", "model: a fetched name, a folder or a .gguf file"),
        Option("groups", str, "1,2,5,15,30", "groups of layers to compare, as N,N"),
        Option("tokens", int, 1024, "of the prompt, which is one chunk", 64),
        Option("answer", int, 17, "tokens of the answer", 2),
        Option("rounds", int, 5, "of all numbers of groups", 1),
        Option("json", str, None, "file for all figures"),
    ]
}
SECRET = b"of the benchmark of groups of layers"
BLOCK = 16
WAIT_SECONDS = 60.0
FIGURES = ("tail", "prefill", "decode", "early")


class CountedTransfer(TcpTransfer):
    """A transfer that keeps when each write in parts began."""

    def __init__(self) -> None:
        super().__init__(np.empty(1, np.uint8), SECRET)
        self.began: list[float] = []

    def write_many(
        self, window: Window, pieces: Sequence[tuple[int, np.ndarray]], seconds: float
    ) -> Ticket:
        self.began.append(time.perf_counter())
        return super().write_many(window, pieces, seconds)


class Source:
    """A replica in groups of layers, and its port for blocks."""

    def __init__(self, values: dict[str, Any], groups: int, stack: contextlib.ExitStack):
        length = values["tokens"] + values["answer"] + BLOCK
        config = EngineConfig(
            ModelSource(model=values["model"], dtype="float32", max_model_len=length),
            cache=CacheConfig(block_size=BLOCK, pages=2 * length // BLOCK + 4, host_cache_gib=1.0),
            scheduler=SchedulerConfig(max_seqs=2, chunk_tokens=values["tokens"]),
            layer_groups=groups,
        )
        self.engine = build(config, progress=False, warm_up=False)
        self.engine.start()
        self.transfer = CountedTransfer()
        service = BlockService([TcpPlane(self.transfer)])
        service.open(self.engine.block_exporter)
        server = ReplicaService(SECRET, blocks=service)
        self.address = f"127.0.0.1:{server.start('127.0.0.1:0')}"
        for end in (self.engine.close, self.transfer.close, server.stop):
            stack.callback(end)

    def measure(self, prompt: np.ndarray, answer: int, peers: PeerReplicas) -> dict[str, float]:
        """Computes a prompt whose blocks are read meanwhile; seconds and counts, see FIGURES."""
        keys = keys_of(self.engine, prompt)
        self.transfer.began.clear()
        job = f"{time.perf_counter()}"
        layout = self.engine.block_exporter.layout
        stream = peers.open(KvSource(self.address, len(keys), job), keys, WAIT_SECONDS, layout)
        reading = Reading(stream, keys, layout.bytes)
        until = time.perf_counter() + WAIT_SECONDS
        while not self.engine.scheduler.cache.stores.wanted:
            assert time.perf_counter() < until, "the source hears of no wish"
            time.sleep(0.001)
        ran = Asked(self.engine, prompt, answer, job)
        prefill = ran.ttft(WAIT_SECONDS)
        reading.join(WAIT_SECONDS)
        assert reading.came == len(keys), f"{reading.came} of {len(keys)} blocks came"
        first = ran.times[0]
        return {
            "tail": reading.last - first,
            "prefill": prefill,
            "decode": statistics.median(np.diff(ran.times)),
            "early": sum(at < first for at in self.transfer.began),
        }


def keys_of(engine: Engine, prompt: np.ndarray) -> list[bytes]:
    """Keys of the prompt's full blocks."""
    hashes = engine.scheduler.cache.block_hashes("", lambda a, b: prompt[a:b])
    return list(hashes.keys(0, len(prompt) // BLOCK))


class Reading(threading.Thread):
    """Reads the blocks of a stream. came: how many; last: when the last one came."""

    def __init__(self, stream: BlockStream, keys: Sequence[bytes], block_bytes: int):
        super().__init__(name="reading", daemon=True)
        self.came = 0
        self.last = 0.0
        self._stream = stream
        self._keys = keys
        self._block = np.empty(block_bytes, np.uint8)
        self.start()

    def run(self) -> None:
        with contextlib.closing(self._stream):
            for key in self._keys:
                if not self._stream.read(key, self._block):
                    return
                self.last = time.perf_counter()
                self.came += 1


def measure(values: dict[str, Any]) -> dict[int, list[dict[str, float]]]:
    """Figures of all rounds by number of groups."""
    all_groups = numbers(values["groups"])
    rng = np.random.default_rng(0)
    found: dict[int, list[dict[str, float]]] = {number: [] for number in all_groups}
    with contextlib.ExitStack() as stack:
        peers = PeerReplicas(SECRET)
        stack.callback(peers.close)
        sources = {number: Source(values, number, stack) for number in all_groups}
        for turn in range(values["rounds"] + 1):
            for number, source in sources.items():
                prompt = rng.integers(20, 500, values["tokens"]).astype(np.int32)
                figures = source.measure(prompt, values["answer"], peers)
                if turn:  # what is first used is slow
                    found[number].append(figures)
    return found


def run(values: dict[str, Any]) -> int:
    print(described(machine()))
    found = measure(values)
    rows = [("groups", "tail (ms)", "prefill step (ms)", "decode step (ms)", "parts sent early")]
    for number, rounds in found.items():
        each = {name: sorted(figures[name] for figures in rounds) for name in FIGURES}
        cells = [f"{1e3 * statistics.median(each[name]):.1f}" for name in FIGURES[:-1]]
        spread = f"{cells[0]} ({1e3 * each['tail'][0]:.1f} to {1e3 * each['tail'][-1]:.1f})"
        rows.append((str(number), spread, *cells[1:], f"{statistics.median(each['early']):.0f}"))
    print(table(rows[0], rows[1:]))
    keep(values, groups=found)
    idle = [number for number, rounds in found.items() if number > 1 and not rounds[-1]["early"]]
    if idle:
        print(f"no part was sent before the first token with groups of {idle}", file=sys.stderr)
    return 1 if idle else 0


if __name__ == "__main__":
    sys.exit(
        command_line(
            "python -m experiments.benchmarks.layer_groups",
            "KV that goes to another replica by groups of layers, beside blocks that go whole",
            Command(OPTIONS, run),
            sys.argv[1:],
        )
    )
