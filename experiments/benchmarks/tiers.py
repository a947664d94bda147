"""A long prefix from each tier beside computing it: time to the first token, bytes, CPU.

    python -m experiments.benchmarks.tiers --tokens=8000 --rounds=3 --json=tiers.json

One replica whose pages hold one document at a time. In each round two documents are asked in turn
so that each time the other one is on the devices: the answer is computed, comes from pages that are
there still, from host memory, by a replica that was started again on the same folder, from disk,
and by one that has nothing, over loopback sockets, from the devices of another replica in the same
process; with --kv_store also by one that has nothing but that store. Beside each time is what Eq. 2
of the Mooncake paper predicts: bytes over bandwidth for what is loaded, the profile's prefill for
what is computed."""

from __future__ import annotations

import contextlib
import resource
import statistics
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np

from experiments.script import command_line, keep
from jaxserve.api.events import Finished, Token
from jaxserve.api.request import KvSource, Request
from jaxserve.api.sampling import SamplingParams
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

OPTIONS = {
    "tiers": [
        Option("model", str, "smollm2-135m", "model: a fetched name, a folder or a .gguf file"),
        Option("tokens", int, 8000, "of the prefix", 64),
        Option("question", int, 32, "tokens after the prefix", 1),
        Option("rounds", int, 3, "of all ways", 1),
        Option("block", int, 16, "tokens of a block", 1),
        Option("kv_store", str, None, "mooncake://HOST:PORT, a store with room for the documents"),
        Option("json", str, None, "file for all figures"),
    ]
}
WAYS = ("computed", "device", "host", "disk", "peer", "store")
PEER_BANDWIDTH = 1e9  # bytes per second that the conductor expects (`--kv_bandwidth`)
SECRET = b"of the benchmark of tiers of blocks"


class Asked:
    """One request, run to its end. seconds: to its first token; cpu: of this process meanwhile."""

    def __init__(
        self,
        engine: Engine,
        prompt: np.ndarray,
        bypass: bool = False,
        source: KvSource | None = None,
    ):
        self.tokens: list[int] = []
        self.ended: Finished | None = None
        began, cpu = time.perf_counter(), cpu_seconds()
        self.seconds = 0.0
        info = engine.info
        request = Request.make(
            f"{began}",
            prompt,
            SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
            vocab=info.vocab,
            max_len=info.max_model_len,
            arrival=engine.now(),
            bypass_prefix_cache=bypass,
            kv_source=source,
        )
        self._began = began
        self._over = threading.Event()
        engine.submit(request, self._hear)
        self._over.wait()
        assert self.ended is not None
        self.cpu = cpu_seconds() - cpu
        self.cached = self.ended.usage.cached

    def _hear(self, events: Any) -> None:
        for event in events:
            if isinstance(event, Token):
                self.seconds = self.seconds or time.perf_counter() - self._began
                self.tokens.append(event.id)
            elif isinstance(event, Finished):
                self.ended = event
                self._over.set()


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def replica(values: dict[str, Any], folder: str, peers: PeerReplicas | None = None) -> Engine:
    """A replica with pages for one document, host memory for four, and a folder on disk."""
    length = values["tokens"] + values["question"] + 8
    block = values["block"]
    config = EngineConfig(
        ModelSource(model=values["model"], dtype="float32", max_model_len=length),
        cache=CacheConfig(
            block_size=block,
            pages=-(-length // block) + 4,
            host_cache_gib=6.0,
            disk_cache=f"{folder}:6",
            kv_store=values["kv_store"],
        ),
        scheduler=SchedulerConfig(max_seqs=1, chunk_tokens=512, policy="slack"),
    )
    engine = build(config, progress=False, peers=peers)
    engine.start()
    return engine


def measure(values: dict[str, Any]) -> list[dict[str, Any]]:
    """All rounds. Errors: AssertionError where an answer differs from the computed one."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for number in range(values["rounds"]):
        with tempfile.TemporaryDirectory() as folder:
            size = values["tokens"] + values["question"]
            first, second = rng.integers(20, 500, (2, size)).astype(np.int32)
            engine = replica(values, folder)
            Asked(engine, second[:200], bypass=True)  # what is first used is slow
            bytes_of = engine.worker.lower_tiers.block_bytes
            asked = {"computed": Asked(engine, first), "device": Asked(engine, first)}
            Asked(engine, second)
            predicted = predictions(engine, size)
            asked["host"] = Asked(engine, first)
            Asked(engine, second)
            wait_for_stores(engine)
            engine.close()
            engine = replica(values, folder)
            Asked(engine, second[:200], bypass=True)
            asked["disk"] = Asked(engine, first)
            asked["peer"] = from_peer(values, engine, first)
            engine.close()
        if values["kv_store"]:
            asked["store"] = from_store(values, first)
        for way, one in asked.items():
            assert one.tokens == asked["computed"].tokens, f"{way}: other tokens"
            moved = 0 if way in ("computed", "device") else one.cached // values["block"] * bytes_of
            rows.append(
                {
                    "way": way,
                    "round": number,
                    "ttft": one.seconds,
                    "cpu": one.cpu,
                    "cached": one.cached,
                    "bytes": moved,
                    "predicted": predicted[way],
                }
            )
            print(f"round {number}: {way} {one.seconds:.3f} s", file=sys.stderr, flush=True)
    return rows


def from_peer(values: dict[str, Any], engine: Engine, prompt: np.ndarray) -> Asked:
    """A document that `engine` has, asked of a replica that has nothing."""
    with contextlib.ExitStack() as stack:
        peers = PeerReplicas(SECRET)
        stack.callback(peers.close)
        service = ReplicaService(SECRET, blocks=BlockService(peers.planes))
        port = service.start("127.0.0.1:0")
        service.open(engine)
        stack.callback(service.stop)
        near = replica(values, stack.enter_context(tempfile.TemporaryDirectory()), peers)
        stack.callback(near.close)
        Asked(near, prompt[::-1][:200], bypass=True)
        source = KvSource(f"127.0.0.1:{port}", len(prompt) // values["block"])
        return Asked(near, prompt, source=source)


def from_store(values: dict[str, Any], prompt: np.ndarray) -> Asked:
    """A document that is in the shared store, asked of a replica that has nothing."""
    with tempfile.TemporaryDirectory() as folder:
        engine = replica(values, folder)
        Asked(engine, prompt[::-1][:200], bypass=True)
        asked = Asked(engine, prompt)
        engine.close()
        return asked


def predictions(engine: Engine, size: int) -> dict[str, float]:
    """Seconds of each way: by the profile what is to be computed, by the bandwidths that are
    believed before anything was loaded what is to be loaded."""
    work = engine.scheduler.slots.work
    block = engine.info.block_size
    hit = (size - 1) // block * block
    rest = work(hit, size)
    tiers = engine.worker.lower_tiers
    size_of_hit = hit // block * tiers.block_bytes
    host, disk = (size_of_hit / bandwidth for bandwidth in tiers.bandwidths())
    return {
        "computed": work(0, size),
        "device": rest,
        "host": host + rest,
        "disk": disk + rest,
        "peer": size_of_hit / PEER_BANDWIDTH + rest,
        "store": host + rest,  # once it has come, which is seen only when it comes
    }


def wait_for_stores(engine: Engine) -> None:
    """Waits until what left the devices is stored."""
    while not engine.worker.mover.stored:
        time.sleep(0.01)


def shown(found: list[dict[str, Any]]) -> str:
    by_way = {way: [row for row in found if row["way"] == way] for way in WAYS}
    rows = []
    for way, mine in by_way.items():
        if not mine:
            continue
        times = [row["ttft"] for row in mine]
        ratio = statistics.median(
            row["ttft"] / computed["ttft"] for row, computed in zip(mine, by_way["computed"])
        )
        rows.append(
            [
                way,
                f"{statistics.median(times):.2f}",
                f"{min(times):.2f} to {max(times):.2f}",
                f"{ratio:.3f}",
                f"{statistics.median(row['predicted'] for row in mine):.2f}",
                f"{mine[0]['bytes'] / 2**20:.0f}",
                f"{statistics.median(row['cpu'] for row in mine):.2f}",
            ]
        )
    head = ["prefix", "TTFT s", "spread", "of computed", "predicted s", "MiB moved", "CPU s"]
    return table(head, rows)


def run(values: dict[str, Any]) -> int:
    found = measure(values)
    print(described(machine()))
    print(shown(found))
    keep(values, rows=found)
    return 0


COMMAND = Command(OPTIONS, run, __doc__.partition("\n\n")[2] if __doc__ else "")
if __name__ == "__main__":
    sys.exit(
        command_line(
            "experiments.benchmarks.tiers",
            "a long prefix from each tier beside computing it",
            COMMAND,
            sys.argv[1:],
        )
    )
