"""Blocks that another replica has or computes are fetched from it and change no token."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from jaxserve.api.events import Finished
from jaxserve.api.request import KvSource
from jaxserve.engine.build import build
from jaxserve.engine.engine import Engine
from jaxserve.settings.schema import (
    CacheConfig,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)
from jaxserve.store.block_part import PartBytes
from jaxserve.store.peers import Route
from tests.engine.harness import Runner, assert_empty, generate, shared
from tests.engine.test_golden import short, submit
from tests.waiting import eventually

MATRIX = pytest.mark.matrix
LENGTHS = (200, 37, 333, 17, 8)


def prompts(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 200) for _ in range(length)] for length in LENGTHS]


class Direct:
    """Blocks of engines in this process by their names. flip: how many bytes to damage; gone: it
    gives nothing more."""

    def __init__(self):
        self.engines: dict[str, Engine] = {}
        self.given = 0
        self.gone = False

    def open(
        self, source: KvSource, keys: Sequence[bytes], time_left: float, layout: PartBytes
    ) -> Stream:
        return Stream(self, self.engines[source.address], source, list(keys))

    def close(self) -> None:
        pass


class Stream:
    def __init__(self, peers: Direct, engine: Engine, source: KvSource, keys: list[bytes]):
        self.peers = peers
        self.exporter = engine.block_exporter
        self.source = source
        self.keys = keys
        self.exporter.want(keys)

    @property
    def route(self) -> Route:
        return Route("fake", 1e9)

    def read(self, key: bytes, into: np.ndarray) -> bool:
        last = False
        while not self.peers.gone:
            if self.exporter.read(key, into, 0.2):
                self.peers.given += 1
                return True
            if last:
                return False
            last = not self.exporter.coming(self.source.request_id)
        return False

    def close(self) -> None:
        self.exporter.unwant(self.keys)


def replica(
    peers: Direct,
    mesh: str = "",
    model: str = "random:tiny",
    length: int = 512,
    gib: float = 0.02,
    **cache,
) -> Engine:
    config = EngineConfig(
        ModelSource(model=str(model), max_model_len=length, dtype="float32"),
        MeshConfig.parse(mesh),
        CacheConfig(**{"pages": 96 if length == 512 else 160, "host_cache_gib": gib, **cache}),
        SchedulerConfig(max_seqs=4, chunk_tokens=32),
    )
    return build(config, progress=False, warm_up=False, peers=peers)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return generate(shared(), prompts(), max_tokens=6)


@pytest.fixture
def pair(request):
    """A replica that runs on a thread of its own and one that asks it; a fake way between them."""
    peers = Direct()
    source, mesh = getattr(request, "param", ("", ""))
    far = replica(peers, source)
    near = replica(peers, mesh)
    peers.engines["far"] = far
    far.start()
    yield peers, far, near
    near.close()
    far.close()


def ended(runner: Runner, id: str) -> bool:
    return any(isinstance(event, Finished) for event in runner.events[id])


# a prompt that is computed for another replica
JOB = dict(max_tokens=1, rest=dict(job=True))


class Ran:
    """A request on an engine that runs on its own thread."""

    def __init__(self, engine: Engine, prompt: list[int], id: str, **fields):
        self.runner = Runner(engine)
        self.id = self.runner.submit(prompt, id, **fields)

    def wait(self):
        eventually(lambda: ended(self.runner, self.id), 60)
        return self.runner.completion(self.id)


def asked(near: Engine, prompt: list[int], source: KvSource | None, **fields):
    """Returns what the near replica says, with the far one as source."""
    runner = Runner(near)
    id = runner.submit(prompt, max_tokens=6, rest=dict(kv_source=source), **fields)
    while near.step() or not ended(runner, id):
        near.scheduler.check()
        time.sleep(0.001)
    return runner.completion(id)


def source_of(prompt: list[int], job: str = "", block: int = 16) -> KvSource:
    return KvSource("far", len(prompt) // block, job, block)


MESHES = [
    pytest.param(("spp=2,kvp=2", "tp=2"), id="all axes to ranks"),
    *(
        pytest.param(meshes, id=" to ".join(mesh or "one" for mesh in meshes), marks=MATRIX)
        for meshes in (("", ""), ("kvp=2", ""), ("", "spp=2"), ("tp=2", "kvp=2"))
    ),
]


@pytest.mark.parametrize("pair", MESHES, indirect=True)
def test_what_another_replica_has_is_not_computed_again(pair, expected):
    peers, far, near = pair
    for number, (prompt, tokens) in enumerate(zip(prompts(), expected)):
        Ran(far, prompt, f"a{number}", max_tokens=1).wait()
        got = asked(near, prompt, source_of(prompt))
        assert got.ids == tokens
        assert got.finished.usage.cached == (len(prompt) - 1) // 16 * 16
    assert peers.given == sum((length - 1) // 16 for length in LENGTHS)
    assert near.worker.lower_tiers.counts().peer_reads == peers.given
    kv = near.view()["kv"]
    assert kv["from_peers"] == 16 * peers.given <= kv["hit_tokens"]
    (fetched,) = kv["fetched"]
    assert (fetched["source"], fetched["plane"]) == ("far", "fake")
    assert (fetched["blocks"], fetched["bytes_per_s"]) == (peers.given, 1e9)
    assert fetched["bytes"] == peers.given * near.worker.lower_tiers.block_bytes
    assert fetched["seconds"] > 0.0
    eventually(lambda: not far.scheduler.cache.stores.wanted)
    assert_empty(near)


def test_blocks_come_while_they_are_computed(pair, expected):
    peers, far, near = pair
    for number, (prompt, tokens) in enumerate(zip(prompts(), expected)):
        job = Ran(far, prompt, f"job{number}", max_tokens=1)
        got = asked(near, prompt, source_of(prompt, f"job{number}"))
        assert got.ids == tokens
        assert got.finished.usage.cached == (len(prompt) - 1) // 16 * 16
        job.wait()
    assert_empty(near)


def test_many_at_once_beside_prompts_without_a_source(pair, expected):
    peers, far, near = pair
    runner = Runner(near)
    ids = []
    for number, prompt in enumerate(prompts()):
        Ran(far, prompt, f"job{number}", max_tokens=1)
        source = source_of(prompt, f"job{number}") if number % 2 == 0 else None
        ids.append(runner.submit(prompt, f"n{number}", max_tokens=6, rest=dict(kv_source=source)))
    while near.step() or not all(ended(runner, id) for id in ids):
        near.scheduler.check()
        time.sleep(0.001)
    assert [runner.ids(id) for id in ids] == expected
    assert_empty(near)


@pytest.mark.parametrize("when", [0, 3, 11])
def test_a_source_that_is_lost_is_computed_without(pair, expected, when):
    peers, far, near = pair
    prompt = prompts()[2]
    Ran(far, prompt, "job", max_tokens=1)

    def lose():
        eventually(lambda: peers.given >= when)
        peers.gone = True

    losing = threading.Thread(target=lose)
    losing.start()
    got = asked(near, prompt, source_of(prompt, "job"))
    losing.join()
    assert got.ids == expected[2]
    assert when * 16 <= got.finished.usage.cached < 333
    assert_empty(near)


def test_what_nobody_computes_is_not_waited_for(pair, expected):
    peers, far, near = pair
    prompt = prompts()[0]
    assert asked(near, prompt, source_of(prompt, "unknown")).ids == expected[0]
    assert not peers.given


def test_a_cancelled_request_wants_nothing_more(pair, expected):
    peers, far, near = pair
    prompt = prompts()[2]
    runner = Runner(near)
    far.weights.pause("keep")
    Ran(far, prompt, "never", max_tokens=1)
    id = runner.submit(prompt, rest=dict(kv_source=source_of(prompt, "never")), max_tokens=6)
    near.step()
    eventually(lambda: bool(far.scheduler.cache.stores.wanted))
    near.cancel(id)
    far.cancel("never")  # which the fake waits for, whatever happens here
    eventually(lambda: (near.step(), not far.scheduler.cache.stores.wanted)[1])
    eventually(lambda: (near.step(), near.worker.mover.idle)[1])
    assert_empty(near)


SIZES = [(16, 32), (32, 16), pytest.param(16, 24, marks=MATRIX), pytest.param(24, 7, marks=MATRIX)]


@pytest.mark.parametrize("there, here", SIZES)
def test_blocks_of_another_size_are_made_into_ones_own(there, here, expected):
    """The second request finds a part of its blocks on the devices."""

    def whole(length: int) -> int:
        """Tokens of the asker's full blocks of which the source has all."""
        return min(length // there * there, length - 1) // here * here

    peers = Direct()
    far = peers.engines["far"] = replica(peers, block_size=there)
    near = replica(peers, "spp=2", block_size=here, pages=512 // here + 60)
    far.start()
    for number, (prompt, tokens) in enumerate(zip(prompts(), expected)):
        Ran(far, prompt, f"job{number}", max_tokens=1)
        half = prompt[: len(prompt) // 2]
        first = asked(near, half, source_of(prompt, f"job{number}", there))
        assert first.finished.usage.cached == whole(len(half))
        got = asked(near, prompt, source_of(prompt, f"job{number}", there))
        assert got.ids == tokens
        assert got.finished.usage.cached >= whole(len(prompt))
    assert peers.given and not near.worker.lower_tiers.counts().wrong
    eventually(lambda: not far.scheduler.cache.stores.wanted)
    assert_empty(near)
    near.close()
    far.close()


@MATRIX
@pytest.mark.parametrize("meshes", [("spp=2", "kvp=2"), ("", "tp=3")], ids=str)
def test_the_real_model_says_the_same_where_others_compute_its_prompts(
    meshes, golden, smollm2_gguf
):
    """The first mesh has no collectives: two replicas of one process share devices, where those of
    both would wait for each other."""
    peers = Direct()
    far, near = (replica(peers, mesh, smollm2_gguf, 2048, 0.5) for mesh in meshes)
    peers.engines["far"] = far
    far.start()
    for number, case in enumerate(short(golden["cases"], 1500)):
        prompt = case["prompt_ids"]
        runner = Runner(near)
        Ran(far, prompt, f"job{number}", max_tokens=1)
        id = submit(runner, case, rest=dict(kv_source=source_of(prompt, f"job{number}")))
        while near.step() or not ended(runner, id):
            time.sleep(0.001)
        assert runner.ids(id) == case["output_ids"]
        assert runner.completion(id).finished.usage.cached == (len(prompt) - 1) // 16 * 16
    assert_empty(near)
    near.close()
    far.close()
