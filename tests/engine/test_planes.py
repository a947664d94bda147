"""The real model's tokens are the reference's where its KV comes from another replica by a plane
that is taken before tcp."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from jaxserve.api.request import KvSource
from jaxserve.engine.build import build
from jaxserve.engine.engine import Engine
from jaxserve.server.block_service import BlockService
from jaxserve.server.peer_blocks import PeerReplicas
from jaxserve.server.replica_service import ReplicaService
from jaxserve.settings.schema import (
    CacheConfig,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)
from tests.engine.harness import Runner, assert_empty
from tests.engine.test_golden import submit
from tests.engine.test_peers import ended
from tests.transfer.planes import NAME, InProcessPlane, engines
from tests.waiting import eventually

SECRET = b"of the tests of planes with the model"
BLOCK = 16  # tokens


def replica(model: Path, peers: PeerReplicas) -> Engine:
    config = EngineConfig(
        ModelSource(model=str(model), max_model_len=512, dtype="float32"),
        MeshConfig(),
        CacheConfig(pages=48, host_cache_gib=0.1),
        SchedulerConfig(max_seqs=2, chunk_tokens=128),
    )
    return build(config, progress=False, warm_up=False, peers=peers)


@pytest.mark.parametrize(
    "faster, name", [pytest.param(InProcessPlane, NAME, id=NAME), *engines(64 << 20)]
)
def test_the_first_layers_say_the_same_where_their_kv_comes_by_a_plane(
    faster, name, golden_first_layers, smollm2_first_layers
):
    (case,) = [one for one in golden_first_layers["cases"] if len(one["prompt_ids"]) == 333]
    prompt = case["prompt_ids"]
    with contextlib.ExitStack() as stack:
        engines, sides = [], []
        for _ in range(2):
            sides.append(PeerReplicas(SECRET, faster=faster))
            stack.callback(sides[-1].close)
            engines.append(replica(smollm2_first_layers, sides[-1]))
            stack.callback(engines[-1].close)
        far, near = engines
        service = ReplicaService(SECRET, blocks=BlockService(sides[0].planes))
        port = service.start("127.0.0.1:0")
        stack.callback(service.stop)
        far.start()
        service.open(far)
        runner = Runner(far)
        id = runner.submit(prompt, max_tokens=1, ignore_eos=True)
        eventually(lambda: ended(runner, id), 120)
        source = KvSource(f"127.0.0.1:{port}", len(prompt) // BLOCK)
        runner = Runner(near)
        id = submit(runner, case, rest=dict(kv_source=source))
        runner.run()
        assert runner.ids(id) == case["output_ids"]
        cached = runner.completion(id).finished.usage.cached
        assert cached == (len(prompt) - 1) // BLOCK * BLOCK
        (fetched,) = near.kv_fetched()
        assert (fetched.plane, fetched.blocks) == (name, cached // BLOCK)
        assert fetched.bytes_per_s > 0 and not near.worker.lower_tiers.counts().wrong
        assert_empty(near)
