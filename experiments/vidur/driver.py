"""Runs a workload in vidur with jaxserve's costs. This program runs inside vidur's environment: it
reads a job as JSON from stdin and writes clock seconds of each request's first token, in the order
of the requests, as JSON to the file that its argument names.

Vidur's clusters, events, pages and schedulers are its own. What is replaced: the times of steps and
of whole prompts (`Times`, `PrefillTimes`); requests and their deadlines, which the job gives; and,
where the job says so, the two things in which its schedulers differ from Medha's description
(`one_queue`, `full_chunks`) and its order of late requests (`order`).
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.costs.coefficients import Costs
from jaxserve.costs.predictor import Predictor
from jaxserve.lanes.groups import ChunkPlace
from jaxserve.policies import POLICIES, PromptView
from jaxserve.settings.schema import MeshConfig
from vidur import config as settings
from vidur.entities import Batch, KVParallelBatch, Request
from vidur.execution_time_predictor import ExecutionTimePredictorRegistry
from vidur.request_generator import RequestGeneratorRegistry
from vidur.scheduler.replica_scheduler import mnemosyne_edf_replica_scheduler as edf
from vidur.scheduler.replica_scheduler import mnemosyne_fcfs_replica_scheduler as fcfs
from vidur.scheduler.replica_scheduler.replica_scheduler_registry import ReplicaSchedulerRegistry
from vidur.simulator import Simulator

SCHEDULERS = {
    "fcfs-512": settings.config.MnemosyneFCFSFixedChunkSchedulerConfig,
    "fcfs": settings.config.MnemosyneFCFSSchedulerConfig,
    "edf": settings.config.MnemosyneEDFSchedulerConfig,
    "slack": settings.config.MnemosyneLRSSchedulerConfig,
}
TILE = fcfs.EXECUTION_TIME_PREDICTION_CHUNK_SIZE_GRANULARITY


@dataclass(frozen=True)
class Seconds:
    """Execution time as vidur's stages ask for it."""

    total_time: float

    @property
    def model_time(self) -> float:
        return self.total_time


class Times:
    """Stands in for vidur's predictor of execution times: asks jaxserve's. All but the last stage
    take the hop to the next one too, and no time for sampling."""

    def __init__(self, predictor: Predictor):
        self.predictor = predictor

    def get_execution_time(self, batch: Batch | KVParallelBatch, pipeline_stage: int) -> Seconds:
        if isinstance(batch, KVParallelBatch):
            (batch,) = batch.batch_mapping.values()
        tokens = np.array(batch.num_q_tokens)
        context = np.array(batch.num_kv_tokens)
        single = tokens == 1
        count = int(single.sum())
        nowhere = np.zeros(count, int)
        lanes = self.predictor.lane_costs.decodes(
            context[single], nowhere, nowhere + 1, np.ones((count, 1), int)
        )
        for cached, new in zip(context[~single].tolist(), tokens[~single].tolist()):
            self.predictor.add_chunk(lanes, ChunkPlace(0), cached, new)
        seconds = self.predictor.stage(lanes)
        if pipeline_stage + 1 < self.predictor.mesh.spp:
            seconds += self.predictor.hop(int(tokens.sum())) - self.predictor.head(count)
        return Seconds(seconds)


class PrefillTimes:
    """Stands in for vidur's PrefillTimeCalculator."""

    def __init__(self, predictor: Predictor, chunk_tokens: int):
        self.predictor = predictor
        self.chunk_tokens = chunk_tokens

    def get_prefill_time(self, num_prefill_tokens: int, num_processed_tokens: int = 0) -> float:
        return self.predictor.prefill(num_processed_tokens, num_prefill_tokens, self.chunk_tokens)


class Requests:
    """Stands in for vidur's request generators: the job's requests."""

    def __init__(self, rows: list[dict[str, Any]], prefill_times: PrefillTimes):
        self.requests = []
        for row in rows:
            request = Request(row["arrival"], row["prompt"], row["output"])
            # vidur leaves deadlines alone that are there
            request.deadline = row["due"]
            request.deadline_time = row["due"] - row["arrival"]
            request.prefill_time = prefill_times.get_prefill_time(row["prompt"])
            self.requests.append(request)

    def generate(self) -> list[Request]:
        return self.requests


def one_queue(scheduler: type) -> type:
    """A scheduler in which partly prefilled requests wait in the same queue as new ones, so that
    these can go before them. Vidur's own serves all partly prefilled ones first."""

    class OneQueue(scheduler):  # type: ignore[misc, valid-type]
        def _get_next_batch(self, time: float) -> KVParallelBatch:
            tracker = self._get_batch_formation_tracker()
            self._add_running_decodes(tracker)
            self._request_queue += self._partial_prefill_queue
            self._partial_prefill_queue = []
            self._sort_request_queue(time, self._request_queue)
            self._add_prefill_requests(time, tracker, self._request_queue)
            return tracker.get_batch()

    return OneQueue


def ordered(scheduler: type, policy: str) -> type:
    """A scheduler that serves requests in the order of a jaxserve policy."""

    class Ordered(scheduler):  # type: ignore[misc, valid-type]
        def _sort_request_queue(self, time: float, request_queue: list) -> None:
            arrival, due, work = (
                np.array(
                    [
                        (
                            request.arrived_at,
                            request.deadline,
                            self._prefill_time_calculator.get_prefill_time(
                                request.num_prefill_tokens, self._get_num_processed_tokens(request)
                            ),
                        )
                        for _, request in request_queue
                    ]
                )
                .reshape(-1, 3)
                .T
            )
            keys = POLICIES[policy].rank(PromptView(time, arrival, due, work))
            request_queue[:] = [request_queue[place] for place in np.argsort(keys, kind="stable")]

    return Ordered


class FullChunks(fcfs.BatchFormationTrackerWithRuntimePrediction):
    """Chunks that fill the time of a step, in whole tiles, as jaxserve's do without sharing: a
    prompt that does not end in a step is the last one in it, though a tile of a shorter context
    would still fit. Vidur's own chunks end within a tenth of the time, and have 1024 tokens at
    most: its search starts from twice the size of the last chunk, which it never finds, for Python
    gives that attribute another name."""

    full = False  # the last chunk added does not end its prompt

    def get_max_chunk_size_for_request(
        self,
        request: Request,
        num_processed_tokens: int,
        active_kvp_groups: list[int],
        target_batch_time: float,
    ) -> int:
        if self.full:
            return 0
        rest = request.num_prefill_tokens - num_processed_tokens

        def seconds(tokens: int) -> float:
            return self._compute_batch_execution_time(
                0, [request], [tokens], [num_processed_tokens], [1], [0]
            )

        if seconds(rest) <= target_batch_time:
            return rest
        self.full = True
        fits, too_many = 0, -(-rest // TILE)  # tiles
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if seconds(middle * TILE) <= target_batch_time:
                fits = middle
            else:
                too_many = middle
        # something always runs
        return TILE * fits or (0 if self.num_requests else min(TILE, rest))


def simulation(job: dict[str, Any], folder: str) -> Simulator:
    """Vidur's simulator of the job; what it writes goes to `folder`."""
    mesh = MeshConfig(tp=job["tp"], spp=job["spp"])
    predictor = Predictor(Costs(**job["costs"]), mesh)
    prefill_times = PrefillTimes(predictor, job["chunk_tokens"])
    requests = Requests(job["requests"], prefill_times)
    most = max(row["prompt"] + row["output"] for row in job["requests"])
    make = SCHEDULERS[job["scheduler"]]
    scheduling = {"batch_size_cap": job["max_seqs"]}
    if job["scheduler"] == "fcfs-512":
        scheduling["chunk_size"] = 512
    else:
        scheduling["target_batch_time"] = job["step_time"]
    kind = make.get_type()
    scheduler = ReplicaSchedulerRegistry.get_class(kind)
    if job["one_queue"]:
        scheduler = one_queue(scheduler)
    if job["order"]:
        scheduler = ordered(scheduler, job["order"])
    if job["full_chunks"]:
        fcfs.BatchFormationTrackerWithRuntimePrediction = FullChunks
    edf.PrefillTimeCalculator = lambda *_: prefill_times
    ReplicaSchedulerRegistry._registry[kind] = scheduler
    predictor_config = settings.config.RandomForrestExecutionTimePredictorConfig()
    ExecutionTimePredictorRegistry._registry[predictor_config.get_type()] = lambda **_: Times(
        predictor
    )
    generator_config = settings.config.SyntheticRequestGeneratorConfig()
    generator_config.max_tokens = most
    RequestGeneratorRegistry._registry[generator_config.get_type()] = lambda _: requests
    replica = settings.config.ReplicaConfig(
        num_pipeline_stages=job["spp"],
        tensor_parallel_size=job["tp"],
        enable_sequence_pipeline_parallel=job["spp"] > 1,
        device="a100",
        network_device="a100_dgx",
    )
    cluster = settings.config.ClusterConfig(
        replica_config=replica,
        cache_config=settings.config.CacheConfig(
            block_size=job["block_size"],
            num_blocks=job["blocks"],
            watermark_blocks_fraction=0.0,
        ),
        replica_scheduler_config=make(**scheduling),
    )
    metrics = settings.config.MetricsConfig(
        write_metrics=False, enable_chrome_trace=False, store_plots=False, output_dir=folder
    )
    return Simulator(
        settings.config.SimulationConfig(
            cluster_config=cluster,
            request_generator_config=generator_config,
            execution_time_predictor_config=predictor_config,
            metrics_config=metrics,
        )
    )


def first_tokens(job: dict[str, Any]) -> list[float]:
    """Clock seconds of the first token of each request of the job."""
    with tempfile.TemporaryDirectory() as folder:
        simulator = simulation(job, folder)
        generator = simulator._request_generator
        simulator.run()
    return [request.prefill_completed_at for request in generator.requests]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(first_tokens(json.load(sys.stdin))))
