"""Layers in groups give the same tokens, and KV of a group goes to other replicas while the layers
behind it compute, byte for byte the same."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator

import numpy as np
import pytest

from jaxserve.api.request import KvSource
from jaxserve.cache.hashes import KEY_BYTES
from jaxserve.engine.build import build
from jaxserve.engine.command import DeviceError
from jaxserve.engine.engine import Engine
from jaxserve.server.block_service import BlockService
from jaxserve.server.peer_blocks import PeerReplicas
from jaxserve.server.replica_service import ReplicaService
from jaxserve.settings.schema import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)
from jaxserve.transfer import TcpTransfer
from jaxserve.transfer.tcp_plane import TcpPlane
from tests.engine.harness import Runner, assert_empty
from tests.engine.test_golden import short, submit, with_tokens
from tests.engine.test_peers import Ran, ended
from tests.waiting import eventually

SECRET = b"a secret of layers"
MATRIX = pytest.mark.matrix
BLOCK = 16
PACE_SECONDS = 2.0


def replica(
    model: str, groups: int, mesh: str = "", peers: PeerReplicas | None = None, gib: float = 0.05
) -> Engine:
    """A replica of the model in groups of layers, with this host memory."""
    config = EngineConfig(
        ModelSource(model=str(model), max_model_len=2048, dtype="float32"),
        MeshConfig.parse(mesh),
        CacheConfig(block_size=BLOCK, pages=160, host_cache_gib=gib),
        SchedulerConfig(max_seqs=4, chunk_tokens=512),
        layer_groups=groups,
    )
    return build(config, progress=False, warm_up=False, peers=peers)


class Source:
    """A replica's port for blocks. pieces: of each write, the number of pieces it was of."""

    def __init__(self, stack: contextlib.ExitStack, engine: Engine):
        self.pieces: list[int] = []
        self.transfer = TcpTransfer(np.empty(1, np.uint8), SECRET)
        self.write_many = self.transfer.write_many
        self.transfer.write_many = self._write_many
        service = BlockService([TcpPlane(self.transfer)])
        service.open(engine.block_exporter)
        self.server = ReplicaService(SECRET, blocks=service)
        self.address = f"127.0.0.1:{self.server.start('127.0.0.1:0')}"
        stack.callback(self.transfer.close)
        stack.callback(self.server.stop)

    def _write_many(self, window, pieces, seconds):
        self.pieces.append(len(pieces))
        return self.write_many(window, pieces, seconds)

    def of(self, prompt: list[int], job: str) -> KvSource:
        return KvSource(self.address, len(prompt) // BLOCK, job)


@pytest.fixture
def peers(stack) -> PeerReplicas:
    peers = PeerReplicas(SECRET)
    stack.callback(peers.close)
    return peers


def served(stack: contextlib.ExitStack, engine: Engine) -> Source:
    """The port of a replica that runs on a thread of its own."""
    engine.start()
    stack.callback(engine.close)
    return Source(stack, engine)


@contextlib.contextmanager
def begun_when_wanted(far: Engine, prompt: list[int], job: str, **fields) -> Iterator[None]:
    """The replica has a job from the first, as behind a conductor, and begins it after the block,
    once its blocks are wanted. A source ends streams for jobs that it does not know."""
    far.weights.pause("keep")
    Ran(far, prompt, job, **fields)
    yield
    eventually(lambda: bool(far.scheduler.cache.stores.wanted))
    far.weights.resume()


def pace(engine: Engine, source: Source) -> None:
    """Has each group of layers wait, at most PACE_SECONDS, until parts of the one before it were
    sent: on a busy machine all layers could have run before anything is read."""
    layers = engine.worker.stages.programs.layers
    sent = 0

    def paced(stage, shape):
        nonlocal sent
        until = time.monotonic() + PACE_SECONDS
        while engine.scheduler.cache.stores.wanted and len(source.pieces) == sent:
            if time.monotonic() > until or not engine.scheduler.cache.stores.promised:
                break
            time.sleep(0.002)
        sent = len(source.pieces)
        return layers(stage, shape)

    engine.worker.stages.programs.layers = paced


GROUPS = [
    pytest.param("", 5, id="a layer each"),
    *(
        pytest.param(mesh, groups, id=f"{mesh or 'one'} in {groups}", marks=MATRIX)
        for mesh, groups in (("", 2), ("spp=2", 2), ("kvp=2,tp=3", 3), ("spp=2,kvp=2", 2))
    ),
]


@pytest.mark.parametrize("mesh, groups", GROUPS)
def test_tokens_are_those_of_layers_that_run_at_once(
    mesh, groups, golden_first_layers, smollm2_first_layers
):
    real = replica(smollm2_first_layers, groups, mesh, gib=0.0)
    runner = Runner(real)
    cases = short([with_tokens(case, 8) for case in golden_first_layers["cases"]])
    ids = [submit(runner, case) for case in cases]
    runner.run()
    assert [runner.ids(id) for id in ids] == [case["output_ids"] for case in cases]
    assert_empty(real)
    real.close()


def test_more_groups_than_layers_are_refused():
    with pytest.raises(ConfigError, match="layer_groups: 3 is above 2, the layers of a stage"):
        replica("random:tiny", 3)
    with pytest.raises(ConfigError, match="layer_groups: 2 is above 1, the layers of a stage"):
        replica("random:tiny", 2, "spp=2")


def long(cases: list[dict]) -> dict:
    """A case whose prompt is of several chunks."""
    return next(case for case in cases if len(case["prompt_ids"]) == 1500)


@pytest.mark.parametrize(
    "groups", [5, *(pytest.param(groups, marks=MATRIX) for groups in (1, 2, 3))]
)
@pytest.mark.parametrize(
    "meshes", [("", ""), *(pytest.param(meshes, marks=MATRIX) for meshes in (("", "spp=2"),))]
)
def test_blocks_that_come_by_layers_are_those_that_come_whole(
    stack, peers, groups, meshes, golden_first_layers, smollm2_first_layers
):
    far = replica(smollm2_first_layers, groups, meshes[0])
    source = served(stack, far)
    pace(far, source)
    near = replica(smollm2_first_layers, 1, meshes[1], peers)
    stack.callback(near.close)
    case = long(golden_first_layers["cases"])
    prompt = case["prompt_ids"]
    blocks = (len(prompt) - 1) // BLOCK
    assert asked(far, source, near, case) == blocks * BLOCK
    counts = near.worker.lower_tiers.counts()
    assert (counts.peer_reads, counts.wrong) == (blocks, 0)
    in_parts = [pieces for pieces in source.pieces if pieces > 1]
    assert bool(in_parts) == (groups > 1)
    # again, from host memory, where all of them are whole
    hashes = far.scheduler.cache.block_hashes("", lambda a, b: np.array(prompt[a:b], np.int32))
    keys = list(hashes.keys(0, blocks))
    assert all(len(key) == KEY_BYTES for key in keys)
    exporter = far.block_exporter
    stream = peers.open(source.of(prompt, ""), keys, 10.0, exporter.layout)
    sent, kept = (np.empty(exporter.layout.bytes, np.uint8) for _ in range(2))
    for key in keys:
        assert stream.read(key, sent) and exporter.read(key, kept, 0.0)
        assert np.array_equal(sent, kept)
    stream.close()
    far.worker.lower_tiers.host.check()
    assert_empty(near)


@pytest.fixture
def by_layers(stack, peers, smollm2_first_layers) -> tuple[Engine, Source, Engine]:
    """A replica that sends layer by layer, its port, and one that asks it."""
    far = replica(smollm2_first_layers, 5)
    source = served(stack, far)
    pace(far, source)
    near = replica(smollm2_first_layers, 1, "", peers)
    stack.callback(near.close)
    return far, source, near


def asked(far: Engine, source: Source, near: Engine, case: dict) -> int:
    """Has the near replica answer a case, whose prompt the far one computes meanwhile; the tokens
    are right. Returns the prompt's tokens that it did not compute."""
    runner = Runner(near)
    with begun_when_wanted(far, case["prompt_ids"], "job", max_tokens=1):
        id = submit(runner, case, rest=dict(kv_source=source.of(case["prompt_ids"], "job")))
        near.step()
    while near.step() or not ended(runner, id):
        time.sleep(0.001)
    assert runner.ids(id) == case["output_ids"]
    return runner.completion(id).finished.usage.cached


def test_a_part_that_is_damaged_on_its_way_is_never_used(by_layers, golden_first_layers):
    far, source, near = by_layers
    write_many = source.write_many

    def damaged(window, pieces, seconds):
        if len(source.pieces) == 7:  # a part in the midst of the prompt
            pieces[0][1][3] ^= 1
        return write_many(window, pieces, seconds)

    source.write_many = damaged
    case = long(golden_first_layers["cases"])
    cached = asked(far, source, near, case)
    assert len(source.pieces) >= 7 and cached < (len(case["prompt_ids"]) - 1) // BLOCK * BLOCK
    assert_empty(near)


def test_layers_that_fail_behind_parts_that_were_sent_are_computed_again(
    by_layers, golden_first_layers, monkeypatch
):
    """The source's second chunk fails at its third layer, when its first two were sent."""
    far, source, near = by_layers
    layers = far.worker.stages.programs.layers
    launches = itertools.count()

    def failing(stage, shape):
        if next(launches) == 5 + 2:
            raise DeviceError("injected: a layer fails")
        return layers(stage, shape)

    monkeypatch.setattr(far.worker.stages.programs, "layers", failing)
    asked(far, source, near, long(golden_first_layers["cases"]))
    assert next(launches) > 5 + 2
    eventually(lambda: far.worker.mover.stored)
    far.worker.lower_tiers.host.check()
    assert_empty(near)
