"""Replicas of several processes fetch blocks from others and send theirs, whatever the meshes of
both; no token changes."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from jaxserve.api.request import KvSource
from jaxserve.engine.build import build
from jaxserve.engine.engine import Engine
from jaxserve.server.block_service import BlockService
from jaxserve.server.peer_blocks import PeerReplicas
from jaxserve.server.replica_service import ReplicaService
from jaxserve.settings.options import make
from jaxserve.settings.schema import EngineConfig
from tests.engine.groups import OFFERS, SETTINGS, led
from tests.engine.harness import generate, shared
from tests.engine.test_peers import Ran, prompts
from tests.waiting import eventually

TINY = "random:tiny"
FIELDS = dict(chunk_tokens=32, max_seqs=4, pages=96, max_model_len=512, host_cache_gib=0.02)
# from when there is a file on, the seventh of twenty blocks is damaged on its way
DAMAGE = """
import pathlib
from jaxserve.transfer import TcpTransfer
write = TcpTransfer.write
def damaging(self, window, offset, data, seconds):
    size = window.size // 20
    if pathlib.Path(os.environ["DAMAGE"]).exists() and offset <= 6 * size < offset + len(data):
        data = data.copy()
        data[6 * size - offset + 99] ^= 4
    return write(self, window, offset, data, seconds)
TcpTransfer.write = damaging
"""


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return generate(shared(), prompts(), max_tokens=6)


class Side:
    """A replica that runs, and its port for others."""

    def __init__(self, engine: Engine, address: str):
        self.engine = engine
        self.address = address

    def computes(self, number: int, id: str) -> Ran:
        return Ran(self.engine, prompts()[number], id, max_tokens=1)

    def says(self, number: int, far: Side, job: str = "") -> Any:
        """Returns what this side says to a prompt, with the other one as the source."""
        prompt = prompts()[number]
        size = far.engine.info.block_size
        source = KvSource(far.address, len(prompt) // size, job, size)
        rest = dict(kv_source=source)
        return Ran(self.engine, prompt, f"said{number}", max_tokens=6, rest=rest).wait()

    def fetched(self) -> int:
        return self.engine.worker.lower_tiers.counts().peer_reads


@contextlib.contextmanager
def replica(
    monkeypatch,
    mesh: str = "",
    processes: int = 0,
    faults: Mapping[int, str] | None = None,
    **fields: Any,
) -> Iterator[Side]:
    """A replica of this process, or led by it."""
    with contextlib.ExitStack() as stack:
        secret = os.environ["BLOCKS"].encode()
        settings = {**FIELDS, **fields}
        if processes:
            codes = dict.fromkeys(range(processes), OFFERS)
            codes |= {number: OFFERS + code for number, code in (faults or {}).items()}
            engine, _ = stack.enter_context(
                led(monkeypatch, TINY, mesh, processes, codes, ranks_across_hosts=True, **settings)
            )
            blocks = BlockService(())
        else:
            peers = PeerReplicas(secret)
            stack.callback(peers.close)
            config = {**SETTINGS, "model": TINY, "mesh": mesh, **settings}
            engine = build(make(EngineConfig, config), False, False, peers=peers)
            blocks = BlockService(peers.planes)
        service = ReplicaService(secret, blocks=blocks)
        port = service.start("127.0.0.1:0")
        engine.start()
        service.open(engine)
        stack.callback(engine.close)
        stack.callback(service.stop)
        yield Side(engine, f"127.0.0.1:{port}")


@pytest.fixture(autouse=True)
def secret(monkeypatch) -> None:
    monkeypatch.setenv("BLOCKS", secrets.token_hex(16))


def whole(number: int) -> int:
    """Tokens of a prompt that need not be computed, in blocks of 16."""
    return (len(prompts()[number]) - 1) // 16 * 16


def test_a_group_and_a_single_process_fetch_from_each_other(expected, monkeypatch, tmp_path):
    monkeypatch.setenv("DAMAGE", str(tmp_path / "damage"))
    with (
        replica(monkeypatch, "spp=2", 2, {1: DAMAGE}) as group,
        replica(monkeypatch) as single,
    ):
        for number in (1, 3):
            job = group.computes(number, f"job{number}")
            said = single.says(number, group, f"job{number}")
            assert (said.ids, said.finished.usage.cached) == (expected[number], whole(number))
            job.wait()
        single.computes(0, "job").wait()
        said = group.says(0, single)
        assert (said.ids, said.finished.usage.cached) == (expected[0], whole(0))
        eventually(lambda: group.fetched() == whole(0) // 16)
        (tmp_path / "damage").touch()
        assert whole(2) == 20 * 16
        group.computes(2, "damaged").wait()
        said = single.says(2, group)
        assert (said.ids, said.finished.usage.cached) == (expected[2], 6 * 16)
        assert single.fetched() == (whole(1) + whole(3)) // 16 + 6
        for side in (group, single):
            eventually(lambda s=side: not s.engine.scheduler.cache.stores.wanted)


GROUPS = [
    pytest.param(("tp=2", 2, {}), ("spp=2", 2, {}), id="ranks to stages"),
    pytest.param(("spp=2", 2, {}), ("tp=2", 2, {}), id="stages to ranks"),
    pytest.param(("kvp=2", 2, {}), ("spp=2", 2, {}), id="lanes to stages"),
    pytest.param(("tp=4", 2, {}), ("spp=2", 2, {}), id="more ranks than heads to stages"),
    pytest.param(("spp=2", 2, {}), ("tp=4", 2, {}), id="stages to more ranks than heads"),
    pytest.param(
        ("spp=2", 2, dict(block_size=32)), ("tp=2", 2, dict(block_size=16)), id="other sizes"
    ),
    pytest.param(
        ("tp=2", 2, dict(kv_cache_dtype="fp8")),
        ("spp=2", 2, dict(kv_cache_dtype="fp8")),
        id="fp8",
    ),
    pytest.param(("spp=2,kvp=2,tp=2", 4, {}), ("tp=2", 2, {}), id="all axes to ranks"),
    pytest.param(("spp=2", 2, {}), ("tp=2", 0, {}), id="group to one process"),
    pytest.param(("kvp=2", 0, {}), ("tp=2", 2, {}), id="one process to group"),
]


@pytest.mark.matrix
@pytest.mark.parametrize("there, here", GROUPS)
def test_groups_fetch_from_each_other(there, here, expected, monkeypatch):
    with (
        replica(monkeypatch, there[0], there[1], **there[2]) as far,
        replica(monkeypatch, here[0], here[1], **here[2]) as near,
    ):
        sizes = [side.engine.info.block_size for side in (far, near)]
        blocks = 0
        for number, tokens in enumerate(expected):
            length = len(prompts()[number])
            job = far.computes(number, f"job{number}")
            said = near.says(number, far, f"job{number}")
            if "kv_cache_dtype" in here[2]:
                job.wait()
                tokens = Ran(far.engine, prompts()[number], f"own{number}", max_tokens=6).wait().ids
            assert said.ids == tokens
            came = min(length // sizes[0] * sizes[0], length - 1) // sizes[1]
            assert said.finished.usage.cached == came * sizes[1]
            blocks += came
            job.wait()
        eventually(lambda: near.fetched() == blocks)  # workers report ten times a second
        eventually(lambda: not far.engine.scheduler.cache.stores.wanted)
