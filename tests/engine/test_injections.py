"""Faults of KV on its way and at rest, one after the other: bits that flip on the wire, in host
memory and on disk, torn writes, a full disk, another model's blocks, replayed writes, a peer
without the secret. Each is noticed, and the tokens are those of one process without any fault."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
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
from jaxserve.store.record import SECTOR, record_bytes
from jaxserve.transfer import Window
from jaxserve.transfer.frames import SLICE_BYTES
from tests.engine.harness import Runner, assert_empty, generate, shared
from tests.engine.test_peers import ended
from tests.store.fakes import descriptors_of, flip_bit, slot_of
from tests.transfer.proxies import Proxy, flip
from tests.waiting import eventually

SECRET = b"of the tests of injected faults"
BLOCK = 16  # tokens
MAX_LEN = 512
PAGES = MAX_LEN // BLOCK + 2  # so that the next prompt evicts the last
FILLER = 28  # blocks of a prompt of no interest
HEADER = 1000  # bytes before which a connection has no block's bytes yet
Case = tuple[list[int], list[int]]  # a prompt, and the tokens that it must give


class Replicas:
    """A replica `near` that keeps KV in host memory, for two prompts, and on disk, and three others
    that it may ask for KV: `far`, with the same model; the same under another secret; and one with
    another model."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, model: str):
        self._stack = stack
        self.far, self.transfer, self.source = self._source(model, SECRET)
        self.stranger = self._offered(self.far, b"of some other cluster, not of ours")[1]
        self.other = self._source("random:tiny-window", SECRET)[2]
        self.peers = PeerReplicas(SECRET)
        stack.callback(self.peers.close)
        block_bytes = self.far.worker.lower_tiers.block_bytes
        gib = (FILLER + 8) * block_bytes / (1 << 30)
        disk_gib = 100 * FILLER * record_bytes(block_bytes) / (1 << 30)
        self.near = self._replica(model, self.peers, gib, f"{folder}:{disk_gib}")
        self.tiers = self.near.worker.lower_tiers
        # Learnt where others have the cores, a read takes longer than computing, and is left out.
        self.tiers.seconds = lambda keys: 0.0
        self.disk = self.tiers.behind.disk
        self.file = folder / "blocks"
        self.fillers = itertools.count()

    def _replica(self, model: str, peers: PeerReplicas, gib: float, disk: str | None) -> Engine:
        config = EngineConfig(
            ModelSource(model=model, max_model_len=MAX_LEN, dtype="float32"),
            MeshConfig(),
            CacheConfig(pages=PAGES, block_size=BLOCK, host_cache_gib=gib, disk_cache=disk),
            SchedulerConfig(max_seqs=2, chunk_tokens=128),
        )
        engine = build(config, progress=False, warm_up=False, peers=peers)
        self._stack.callback(engine.close)
        return engine

    def _source(self, model: str, secret: bytes) -> tuple[Engine, PeerReplicas, str]:
        peers = PeerReplicas(secret)
        self._stack.callback(peers.close)
        engine = self._replica(model, peers, 0.2, None)
        engine.start()
        return engine, *self._offered(engine, secret, peers)

    def _offered(
        self, engine: Engine, secret: bytes, peers: PeerReplicas | None = None
    ) -> tuple[PeerReplicas, str]:
        """Serves an engine's blocks: who sends them, and at which address."""
        if peers is None:
            peers = PeerReplicas(secret)
            self._stack.callback(peers.close)
        service = ReplicaService(secret, blocks=BlockService(peers.planes))
        port = service.start("127.0.0.1:0")
        service.open(engine)
        self._stack.callback(service.stop)
        return peers, f"127.0.0.1:{port}"

    # --- what is asked

    def near_says(
        self, case: Case, salt: str, address: str | None = None, count: int | None = None
    ) -> int:
        """Asks `near`, with another replica as source where there is an address; the tokens must be
        right. Returns how many blocks of the prompt it did not compute."""
        prompt, tokens = case
        source = KvSource(address, len(prompt) // BLOCK) if address else None
        runner = Runner(self.near)
        rest = dict(kv_source=source, cache_salt=salt)
        id = runner.submit(prompt, max_tokens=count or len(tokens), ignore_eos=True, rest=rest)
        runner.run()
        completion = runner.completion(id)
        assert completion.ids == tokens[:count]
        return completion.finished.usage.cached // BLOCK

    def far_says(self, case: Case, salt: str) -> None:
        """Has `far` compute the prompt's KV."""
        runner = Runner(self.far)
        id = runner.submit(case[0], max_tokens=1, ignore_eos=True, rest=dict(cache_salt=salt))
        eventually(lambda: ended(runner, id), 120)
        assert runner.ids(id) == case[1][:1]

    def fill(self, count: int = 1) -> None:
        """Runs prompts of no interest, until what was on devices is in host memory, and what was
        there is on disk."""
        for _ in range(count):
            rng = random.Random(next(self.fillers))
            prompt = [rng.randrange(1, 200) for _ in range(FILLER * BLOCK)]
            generate(self.near, [prompt], max_tokens=1)
            eventually(lambda: self.near.worker.mover.stored, 60)

    def keys(self, case: Case, salt: str) -> list[bytes]:
        prompt = np.asarray(case[0], np.int32)
        hashes = self.near.scheduler.cache.block_hashes(salt, lambda a, b: prompt[a:b])
        return [hashes[block] for block in range(len(prompt) // BLOCK)]

    def assert_nothing_left(self) -> None:
        assert_empty(self.near)
        assert not len(self.peers) and not self.peers.buffers.used
        assert not self.peers.transfer.counts().windows
        eventually(lambda: not self.transfer.transfer.counts().tickets)
        self.near.scheduler.check()


@contextlib.contextmanager
def writes(replicas: Replicas, harm) -> Iterator[None]:
    """Has `harm(write, window, offset, data, seconds)` stand where `far` writes to others."""
    transfer = replicas.transfer.transfer
    write = transfer.write
    transfer.write = lambda *call: harm(write, *call)
    try:
        yield
    finally:
        del transfer.write


# --- the faults: each returns whether it was noticed


def flipped_on_the_wire(replicas: Replicas, case: Case, salt: str, dice: random.Random) -> bool:
    proxies: list[Proxy] = []

    def harm(write, window: Window, offset: int, data: np.ndarray, seconds: float):
        harm = flip(dice.randrange(HEADER, min(data.size, SLICE_BYTES)), dice.randrange(8), 1)
        proxies.append(Proxy(window, harm))
        return write(proxies[-1].window, offset, data, seconds)

    replicas.far_says(case, salt)
    with writes(replicas, harm):
        came = replicas.near_says(case, salt, replicas.source)
    for proxy in proxies:
        proxy.close()
    return bool(proxies) and came < len(case[0]) // BLOCK


def replayed(replicas: Replicas, case: Case, salt: str, dice: random.Random) -> bool:
    """Writes once more, with other bytes, what was written to a window that is over."""
    stolen: list[tuple[Window, int]] = []

    def note(write, window: Window, offset: int, data: np.ndarray, seconds: float):
        stolen.append((window, data.size))
        return write(window, offset, data, seconds)

    replicas.far_says(case, salt)
    with writes(replicas, note):
        replicas.near_says(case, salt, replicas.source)
    transfer = replicas.transfer.transfer
    refused = []
    for window, size in stolen:
        ticket = transfer.write(window, 0, np.full(size, dice.randrange(256), np.uint8), 5.0)
        refused.append(bool(transfer.wait(ticket, 6.0)))
        transfer.release(ticket)
    replicas.fill()
    return bool(refused) and all(refused) and replicas.near_says(case, salt) > 0


def without_the_secret(replicas: Replicas, case: Case, salt: str, dice: random.Random) -> bool:
    replicas.far_says(case, salt)
    return replicas.near_says(case, salt, replicas.stranger) == 0


def of_another_model(replicas: Replicas, case: Case, salt: str, dice: random.Random) -> bool:
    """A source with other weights and another layout of KV."""
    return replicas.near_says(case, salt, replicas.other) == 0


def flipped_in_host_memory(replicas: Replicas, case: Case, salt: str, dice: random.Random) -> bool:
    replicas.near_says(case, salt, count=1)
    replicas.fill()
    tiers = replicas.tiers
    key = dice.choice([key for key in replicas.keys(case, salt) if key in tiers.host])
    flip_bit(tiers, slot_of(tiers, key), dice.randrange(8 * tiers.block_bytes))
    before = tiers.counts().wrong
    replicas.near_says(case, salt)
    return tiers.counts().wrong == before + 1


def flipped_on_disk(replicas: Replicas, case: Case, salt: str, dice: random.Random) -> bool:
    def damage(record: bytearray) -> None:
        at = dice.randrange(SECTOR, SECTOR + replicas.tiers.block_bytes)
        record[at] ^= 1 << dice.randrange(8)

    return noticed_on_disk(replicas, case, salt, dice, damage)


def torn(replicas: Replicas, case: Case, salt: str, dice: random.Random) -> bool:
    """Sectors of a record are still those of what was written there before."""

    def damage(record: bytearray) -> None:
        sectors = len(record) // SECTOR
        first = dice.randrange(1, sectors)
        record[first * SECTOR :] = dice.randbytes((sectors - first) * SECTOR)

    return noticed_on_disk(replicas, case, salt, dice, damage)


def noticed_on_disk(replicas: Replicas, case: Case, salt: str, dice: random.Random, damage) -> bool:
    replicas.near_says(case, salt, count=1)
    replicas.fill(2)
    keys = [
        key
        for key in replicas.keys(case, salt)
        if key in replicas.disk and key not in replicas.tiers.host
    ]
    size = record_bytes(replicas.tiers.block_bytes)
    key = dice.choice(keys)
    with open(replicas.file, "r+b") as file:
        for record, content in enumerate(iter(lambda: bytearray(file.read(size)), b"")):
            if key in content[:SECTOR]:
                damage(content)
                file.seek(record * size)
                file.write(content)
                file.seek((record + 1) * size)
        os.fsync(file.fileno())
    before = replicas.disk.counts().damaged
    replicas.near_says(case, salt)
    return replicas.disk.counts().damaged == before + 1


def full_disk(replicas: Replicas, case: Case, salt: str, dice: random.Random) -> bool:
    """The disk has no room while the prompt's blocks leave host memory for it."""
    replicas.near_says(case, salt, count=1)
    replicas.fill()
    before = replicas.disk.counts().refused
    (file,) = descriptors_of(replicas.file)
    kept, full = os.dup(file), os.open("/dev/full", os.O_RDWR)
    os.dup2(full, file)
    try:
        replicas.fill()
    finally:
        os.dup2(kept, file)
        os.close(kept)
        os.close(full)
    replicas.near_says(case, salt)
    return replicas.disk.counts().refused > before


FAULTS = (
    flipped_on_the_wire,
    replayed,
    without_the_secret,
    of_another_model,
    flipped_in_host_memory,
    flipped_on_disk,
    torn,
    full_disk,
)


def inject(replicas: Replicas, cases: list[Case], count: int, seed: int) -> None:
    """Injects `count` faults, each kind as often as the others, in random order."""
    dice = random.Random(seed)
    noticed: collections.Counter[str] = collections.Counter()
    for number in range(count):
        if number % len(FAULTS) == 0:
            order = dice.sample(FAULTS, len(FAULTS))
        fault = order[number % len(FAULTS)]
        assert fault(replicas, dice.choice(cases), f"{seed}.{number}", dice), fault.__name__
        replicas.assert_nothing_left()
        noticed[fault.__name__] += 1
    print(dict(noticed), replicas.tiers.counts(), replicas.disk.counts())


@pytest.mark.parametrize("count", [16, pytest.param(1000, marks=pytest.mark.matrix)])
def test_each_fault_is_noticed_and_changes_no_token(tmp_path, count):
    rng = random.Random(3)
    prompts = [[rng.randrange(1, 200) for _ in range(size)] for size in (300, 420, 333)]
    cases = [(prompt, generate(shared(), [prompt], max_tokens=6)[0]) for prompt in prompts]
    with contextlib.ExitStack() as stack:
        inject(Replicas(stack, tmp_path, "random:tiny"), cases, count, seed=1)


@pytest.mark.matrix
def test_the_real_model_gives_its_tokens_whatever_fails(tmp_path, golden, smollm2_gguf):
    cases = [
        (case["prompt_ids"], case["output_ids"])
        for case in golden["cases"]
        if 300 < len(case["prompt_ids"]) < MAX_LEN - len(case["output_ids"])
    ]
    assert cases
    with contextlib.ExitStack() as stack:
        inject(Replicas(stack, tmp_path, str(smollm2_gguf)), cases, 2 * len(FAULTS), seed=2)
