"""Times a conductor's decision at 64 replicas and a million cached blocks: finding how much of a
prompt each replica has, and Algorithm 1 over them; then what a live `Router` does beside that.
`python -m tests.cluster.time_decision`"""

from __future__ import annotations

import time

import numpy as np

from jaxserve.cache.hashes import BlockHashes, CacheIdentity, root_key
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.cluster.directory import Directory
from jaxserve.cluster.routing import ROUTING, PrefillView, RoutingQuery
from jaxserve.costs.predictor import Predictor
from jaxserve.costs.profiles import costs
from jaxserve.replica.info import ReplicaInfo
from jaxserve.scheduling import Load
from jaxserve.settings.schema import MeshConfig
from tests.cluster.fakes import RoleCluster, RoleReplica

MEMBERS = 64
BLOCK = 16  # tokens
DOCUMENTS = 1400  # of 12,000 tokens: a million blocks
DOCUMENT_BLOCKS = 750
COPIES = 2  # members that have a document
DECISIONS = 1000


class MeasuredCosts:
    """Costs of a 70B model on 8 A100s, and a network of 87 GB/s."""

    def __init__(self) -> None:
        shape = MODELS["llama3-70b"]
        mesh = MeshConfig(tp=8)
        self.predictor = Predictor(costs("a100", shape, 8), mesh)
        self.token_seconds = shape.kv_bytes_per_token() / 87e9

    def prefill(self, member: int, cached: int, total: int) -> float:
        return self.predictor.prefill(cached, total, 8192)

    def transfer(self, source: int, target: int, tokens: int) -> float:
        return tokens * self.token_seconds


def chain(document: int, own: int, blocks: int) -> BlockHashes:
    """Keys of a prompt of `blocks` blocks: a document's, then its own."""
    shared = np.full(DOCUMENT_BLOCKS * BLOCK, document, np.int32)
    rest = np.full((blocks - DOCUMENT_BLOCKS) * BLOCK, own, np.int32)
    prompt = np.concatenate([shared, rest])
    root = root_key(CacheIdentity(), BLOCK, "")
    return BlockHashes(root, BLOCK, lambda a, b: prompt[a:b])


def filled(rng: np.random.Generator) -> Directory:
    directory = Directory()
    for document in range(DOCUMENTS):
        hashes = chain(document, 0, DOCUMENT_BLOCKS)
        keys = [hashes[block] for block in range(DOCUMENT_BLOCKS)]
        for member in rng.choice(MEMBERS, COPIES, replace=False).tolist():
            directory.stored(member, keys[: int(rng.integers(1, DOCUMENT_BLOCKS + 1))])
        directory.stored(int(rng.integers(MEMBERS)), keys)
    return directory


def decide(directory: Directory, hashes: BlockHashes, blocks: int, measured: MeasuredCosts) -> None:
    depths = directory.prefix_blocks(hashes, blocks, MEMBERS)
    views = [PrefillView(n, depth * BLOCK, 0.01 * n, n) for n, depth in enumerate(depths)]
    ROUTING["cache_aware"](RoutingQuery(views, (blocks + 1) * BLOCK, measured))


class Told(RoleReplica):
    """A fake that makes the facts about itself once, as replicas do."""

    def __init__(self, role: str):
        super().__init__(role)
        self._told = super().info

    @property
    def info(self) -> ReplicaInfo:
        return getattr(self, "_told", None) or super().info


LOAD = Load(36, 4, 10_000, 1.0, 1000, 4000, 3000)


def time_live(roles: list[str]) -> None:
    """Times a router over fakes of these roles, each of which decodes 32 sequences, beside 8
    requests of another conductor."""
    cluster = RoleCluster(*map(Told, roles), routing="cache_aware")
    for member in cluster.members:
        member.recent_load = lambda: LOAD
        member.other_requests = lambda: 8
        for number in range(32):
            member.work.expect_decode(f"{number}", 100, 0.0)
            member.work.begin_decode(f"{number}", 0.0)
    router = cluster.conductor.router
    request = cluster.request(prompt=[number % 250 for number in range(12_000)])
    prefixes = router.prefixes(request)
    seconds = []
    for _ in range(DECISIONS):
        began = time.perf_counter()
        router.place(request, prefixes, 1.0)
        seconds.append(time.perf_counter() - began)
    p50, p99 = np.percentile(seconds, (50, 99)) * 1e3
    print(f"live, {' and '.join(sorted(set(roles)))}: p50 {p50:.2f} ms, p99 {p99:.2f} ms")


def main() -> None:
    rng = np.random.default_rng(0)
    directory = filled(rng)
    measured = MeasuredCosts()
    print(f"{len(directory):,} blocks on {MEMBERS} replicas")
    for blocks in (DOCUMENT_BLOCKS + 50, 8000):
        for hashed in (True, False):
            seconds = []
            for number in range(DECISIONS if blocks < 1000 else DECISIONS // 10):
                hashes = chain(int(rng.integers(DOCUMENTS)), number, blocks)
                if hashed:
                    _ = hashes[blocks - 1]
                began = time.perf_counter()
                decide(directory, hashes, blocks, measured)
                seconds.append(time.perf_counter() - began)
            p50, p99 = np.percentile(seconds, (50, 99)) * 1e3
            said = "keys known" if hashed else "with its keys hashed"
            print(f"{blocks * BLOCK:,} tokens, {said}: p50 {p50:.2f} ms, p99 {p99:.2f} ms")
    time_live(["mixed"] * MEMBERS)
    time_live(["prefill", "decode"] * (MEMBERS // 2))


if __name__ == "__main__":
    main()
