"""One policy at one load in both simulators."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.lab.cli.simulate import configs, scheduling_options
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.baselines import SCHEDULERS
from jaxserve.lab.simulate.mixes import MIXES
from jaxserve.lab.simulate.recorder import RequestRecord
from jaxserve.lab.simulate.run import System, execute, shape_of
from jaxserve.lab.simulate.workload import parse
from jaxserve.settings.schema import ConfigError, MeshConfig, SchedulerConfig

DRIVER = Path(__file__).with_name("driver.py")
ROOT = DRIVER.parents[2]
SYSTEM = System(shape_of("llama3-8b"), "a100", MeshConfig(tp=8, spp=2))
STEP_SECONDS = 0.05  # of a step through all stages with prompts in it: vidur's default
LOOKAHEAD = 0  # vidur decides on a step when the first stage is free
PERCENTILES = (50, 90, 99)
SHIPPED = "as shipped"


class VidurError(Exception):
    """Vidur did not run to its end."""


@dataclass(frozen=True)
class Peer:
    """One way of vidur's scheduling, and the row of jaxserve's BASELINES that is compared with it.

    one_queue, full_chunks, order: as `driver` says; all of them off is vidur as shipped.
    """

    policy: str
    baseline: str
    scheduler: str  # of the driver's SCHEDULERS
    one_queue: bool = False
    full_chunks: bool = False
    order: str = ""

    @property
    def difference(self) -> str:
        """Names what was replaced in vidur's scheduler."""
        replaced = {
            "one queue": self.one_queue,
            "full chunks": self.full_chunks,
            "late ones behind": bool(self.order),
        }
        return ", ".join(name for name, so in replaced.items() if so) or SHIPPED


MATCHED: Mapping[str, Any] = dict(one_queue=True, full_chunks=True)
PEERS = (
    Peer("fcfs, chunks of 512", "sarathi-512", "fcfs-512"),
    Peer("fcfs", "fcfs-unshared", "fcfs"),
    Peer("fcfs", "fcfs-unshared", "fcfs", full_chunks=True),
    Peer("edf", "edf-unshared", "edf"),
    Peer("edf", "edf-unshared", "edf", **MATCHED),
    Peer("relative slack", "slack-unshared", "slack"),
    Peer("relative slack", "slack-unshared", "slack", **MATCHED),
    Peer("relative slack", "slack-unshared", "slack", **MATCHED, order="slack"),
)


@dataclass(frozen=True)
class Load:
    """A mix of lengths that comes as a Poisson process of a number of requests per second."""

    mix: str
    qps: float

    @classmethod
    def parse(cls, text: str) -> Load:
        """Parses MIX@QPS. Errors: ConfigError."""
        mix, _, qps = text.partition("@")
        try:
            load = cls(mix, float(qps))
        except ValueError:
            raise ConfigError("loads", f"{text!r} is not MIX@QPS") from None
        if mix not in MIXES:
            raise ConfigError("loads", f"{mix!r} is not one of {', '.join(MIXES)}")
        return load

    def __str__(self) -> str:
        return f"{self.mix} at {self.qps:g}/s"

    def arrivals(self, count: int, seed: int) -> list[Arrival]:
        """Requests, none of which shares a prefix: vidur has no prefix cache."""
        found = parse(f"poisson:mix={self.mix}", qps=self.qps, requests=count, seed=seed)
        return [dataclasses.replace(arrival, blocks=None) for arrival in found]


def settings_of(baseline: str) -> SchedulerConfig:
    """A row of BASELINES with vidur's time of steps."""
    defaults = {option.name: option.default for option in scheduling_options()}
    scheduler, _ = configs(defaults | {"tpot": STEP_SECONDS, "step_time": STEP_SECONDS})
    return dataclasses.replace(scheduler, **SCHEDULERS[baseline])


def simulated(baseline: str, arrivals: Sequence[Arrival]) -> list[RequestRecord]:
    """Simulates the requests in jaxserve, in the order of their arrival."""
    _, cache = configs({option.name: option.default for option in scheduling_options()})
    replica = SYSTEM.replica(settings_of(baseline), cache, LOOKAHEAD, observed=False)
    records = execute(replica, arrivals).records
    return sorted(records, key=lambda record: int(record.id))


def job_of(
    peer: Peer, arrivals: Sequence[Arrival], records: Sequence[RequestRecord]
) -> dict[str, Any]:
    """Returns the driver's input: the costs, pages and settings of `simulated`, the requests with
    their deadlines there."""
    _, cache = configs({option.name: option.default for option in scheduling_options()})
    scheduler = settings_of(peer.baseline)
    return {
        "tp": SYSTEM.mesh.tp,
        "spp": SYSTEM.mesh.spp,
        "costs": dataclasses.asdict(SYSTEM.costs),
        "blocks": SYSTEM.kv_tokens() // cache.block_size,
        "block_size": cache.block_size,
        "max_seqs": scheduler.max_seqs,
        "chunk_tokens": scheduler.chunk_tokens,
        "step_time": scheduler.step_time,
        "scheduler": peer.scheduler,
        "one_queue": peer.one_queue,
        "full_chunks": peer.full_chunks,
        "order": peer.order,
        "requests": [
            {
                "arrival": record.arrival,
                "prompt": record.prompt,
                "output": arrival.output,
                "due": record.due,
            }
            for arrival, record in zip(arrivals, records)
        ],
    }


def run_vidur(python: str, job: Mapping[str, Any], seconds: float) -> list[float]:
    """Clock seconds of the first tokens of a job's requests in vidur. python: that of its
    environment. Errors: VidurError where it fails or takes longer than `seconds`."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "first_tokens.json")
        try:
            done = subprocess.run(
                [python, str(DRIVER), str(result)],
                input=json.dumps(job),
                capture_output=True,
                text=True,
                timeout=seconds,
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise VidurError(f"vidur: {error}") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise VidurError(f"vidur ended with code {done.returncode}: {last}")
        return json.loads(result.read_text())


@dataclass(frozen=True)
class Comparison:
    """Seconds to the first token of the same requests [n] in both."""

    ours: np.ndarray
    vidur: np.ndarray

    @property
    def percentiles(self) -> dict[str, list[float]]:
        """At PERCENTILES: ours, vidur's, and the ratio of ours to vidur's."""
        ours, vidur = (np.percentile(values, PERCENTILES) for values in (self.ours, self.vidur))
        return {
            "ours": ours.tolist(),
            "vidur": vidur.tolist(),
            "ratio": (ours / vidur).tolist(),
        }

    @property
    def correlation(self) -> float:
        """Pearson's, over the requests; NaN where one side has no spread."""
        if not self.ours.std() or not self.vidur.std():
            return float("nan")
        return float(np.corrcoef(self.ours, self.vidur)[0, 1])
