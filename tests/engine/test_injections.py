"""Faults of KV, and of checkpoints of states, on their way and at rest, one after the other: bits
that flip on the wire, in host memory and on disk, torn writes, a full disk, another model's blocks,
replayed writes, a peer without the secret. Each is noticed, and the tokens are those of one process
without any fault."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from jaxserve.api.request import KvSource
from jaxserve.cache.hashes import PART_BYTES, STATE_PART
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
from tests.engine.harness import Runner, assert_empty, engine, generate, shared
from tests.engine.test_peers import ended
from tests.models.test_families import write_model
from tests.store.fakes import descriptors_of, flip_bit, slot_of
from tests.transfer.proxies import Proxy, flip
from tests.waiting import eventually

SECRET = b"of the tests of injected faults"
BLOCKS = 32  # of the longest sequence
ROOM = BLOCKS + 2  # blocks that devices have pages for, so that the next prompt evicts the last
FILLER = 28  # blocks of a prompt of no interest
HEADER = 1000  # bytes before which a connection has no block's bytes yet
Case = tuple[list[int], list[int]]  # a prompt, and the tokens that it must give


class Served(NamedTuple):
    """A model, and how its KV is kept. block: tokens of a block. pages: that a block has, one in
    each page group. spacing: tokens between checkpoints of states; checkpoints: pages of those of a
    prompt."""

    model: str
    block: int = 16
    pages: int = 1
    spacing: int | None = None
    checkpoints: int = 0

    @property
    def max_len(self) -> int:
        return BLOCKS * self.block

    def pages_of(self, blocks: int) -> int:
        """Returns how many pages a prompt of this many blocks has."""
        return blocks * self.pages + self.checkpoints


class Replicas:
    """A replica `near` that keeps KV in host memory, for two prompts, and on disk, and three others
    that it may ask for KV: `far`, with the same model; the same under another secret; and one with
    another model."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, served: Served):
        self._stack = stack
        self.served = served
        model = served.model
        self.far, self.transfer, self.source = self._source(model, SECRET)
        self.stranger = self._offered(self.far, b"of some other cluster, not of ours")[1]
        self.other = self._source("random:tiny-window", SECRET)[2]
        self.peers = PeerReplicas(SECRET)
        stack.callback(self.peers.close)
        block_bytes = self.far.worker.lower_tiers.block_bytes
        gib = served.pages_of(FILLER + 8) * block_bytes / (1 << 30)
        disk_gib = 100 * served.pages_of(FILLER) * record_bytes(block_bytes) / (1 << 30)
        self.near = self._replica(model, self.peers, gib, f"{folder}:{disk_gib}")
        self.tiers = self.near.worker.lower_tiers
        # Learnt where others have the cores, a read takes longer than computing, and is left out.
        self.tiers.seconds = lambda keys: 0.0
        self.disk = self.tiers.behind.disk
        self.file = folder / "blocks"
        self.fillers = itertools.count()

    def _replica(self, model: str, peers: PeerReplicas, gib: float, disk: str | None) -> Engine:
        config = EngineConfig(
            ModelSource(model=model, max_model_len=self.served.max_len, dtype="float32"),
            MeshConfig(),
            CacheConfig(
                pages=self.served.pages_of(ROOM),
                block_size=self.served.block,
                checkpoint_tokens=self.served.spacing,
                host_cache_gib=gib,
                disk_cache=disk,
            ),
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
        """Asks `near` for the tokens of a case, which must be right, or for the first `count` of
        them. address: of a replica that it may fetch KV from. Returns how many blocks of the prompt
        it did not compute."""
        prompt, tokens = case
        source = KvSource(address, self.blocks(case)) if address else None
        runner = Runner(self.near)
        # a job ends with a checkpoint of states
        rest = dict(kv_source=source, cache_salt=salt, job=count is not None)
        id = runner.submit(prompt, max_tokens=count or len(tokens), ignore_eos=True, rest=rest)
        runner.run()
        completion = runner.completion(id)
        assert completion.ids == tokens[:count]
        return completion.finished.usage.cached // self.served.block

    def far_says(self, case: Case, salt: str) -> None:
        """Has `far` compute the prompt's KV."""
        runner = Runner(self.far)
        rest = dict(cache_salt=salt, job=True)
        id = runner.submit(case[0], max_tokens=1, ignore_eos=True, rest=rest)
        eventually(lambda: ended(runner, id), 120)
        assert runner.ids(id) == case[1][:1]

    def fill(self) -> None:
        """Runs a prompt of no interest: what was on devices goes to host memory, and what was there
        goes to disk."""
        rng = random.Random(next(self.fillers))
        prompt = [rng.randrange(1, 120) for _ in range(FILLER * self.served.block)]
        generate(self.near, [prompt], max_tokens=1)
        eventually(lambda: self.near.worker.mover.stored, 60)

    def fill_until(self, find: Callable[[], list[bytes]]) -> list[bytes]:
        """Runs prompts of no interest until there are such keys; returns these."""
        for _ in range(4):
            self.fill()
            if keys := find():
                return keys
        raise AssertionError("no block went where it was to be harmed")

    def blocks(self, case: Case) -> int:
        """Returns how many full blocks a prompt has."""
        return len(case[0]) // self.served.block

    def keys(self, case: Case, salt: str) -> list[bytes]:
        """Returns the keys of all that a prompt can be continued with: of its full blocks, and of
        what windows see at their end, and of the checkpoint of states there."""
        prompt = np.asarray(case[0], np.int32)
        cache = self.near.scheduler.cache
        hashes = cache.block_hashes(salt, lambda a, b: prompt[a:b])
        blocks = self.blocks(case)
        return [*hashes.keys(0, blocks), *cache.published.seen.keys(blocks, hashes)]

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


def one_of(keys: list[bytes], dice: random.Random) -> bytes:
    """Chooses a key, as often of each page group that there is, and of checkpoints."""

    def part(key: bytes) -> int:
        return min(int.from_bytes(key[:PART_BYTES], "big"), STATE_PART)

    chosen = dice.choice(sorted(set(map(part, keys))))
    return dice.choice([key for key in keys if part(key) == chosen])


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
    return bool(proxies) and came < replicas.blocks(case)


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
    tiers = replicas.tiers
    keys = replicas.keys(case, salt)
    key = one_of(replicas.fill_until(lambda: [key for key in keys if key in tiers.host]), dice)
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
    host = replicas.tiers.host
    keys = replicas.keys(case, salt)
    on_disk = lambda: [key for key in keys if key in replicas.disk and key not in host]
    key = one_of(replicas.fill_until(on_disk), dice)
    size = record_bytes(replicas.tiers.block_bytes)
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


def served(kind: str, folder: Path) -> Served:
    """Returns a tiny model of a kind whose KV goes to other replicas and to lower tiers."""
    match kind:
        case "windows":  # three layers that see 20 tokens, each with pages of its own
            return Served(str(write_model(folder, "gemma3")), block=8, pages=4)
        case "latents":
            return Served(str(write_model(folder, "deepseek_v3")), block=8)
        case "states":  # checkpoints of eight pages: one of each chunk of a prompt
            model = str(write_model(folder, "qwen3_5"))
            return Served(model, block=8, spacing=64, checkpoints=2 * 8)
    return Served("random:tiny")


@pytest.mark.parametrize(
    "kind, count",
    [
        ("full", 2 * len(FAULTS)),
        ("windows", len(FAULTS)),
        ("states", len(FAULTS)),
        *(
            pytest.param(kind, 1000, marks=pytest.mark.matrix)
            for kind in ("full", "windows", "latents", "states")
        ),
    ],
)
def test_each_fault_is_noticed_and_changes_no_token(tmp_path, kind, count):
    model = served(kind, tmp_path / "model")
    rng = random.Random(3)
    lengths = [int(blocks * model.block) for blocks in (18.75, 26.25, 20.9)]
    prompts = [[rng.randrange(1, 120) for _ in range(length)] for length in lengths]
    plain = shared()
    if kind != "full":
        plain = engine(model.model, block=model.block, max_len=model.max_len)
    cases = [(prompt, generate(plain, [prompt], max_tokens=6)[0]) for prompt in prompts]
    with contextlib.ExitStack() as stack:
        inject(Replicas(stack, tmp_path, model), cases, count, seed=1)


@pytest.mark.matrix
def test_the_real_model_gives_its_tokens_whatever_fails(tmp_path, golden, smollm2_gguf):
    model = Served(str(smollm2_gguf))
    cases = [
        (case["prompt_ids"], case["output_ids"])
        for case in golden["cases"]
        if 300 < len(case["prompt_ids"]) < model.max_len - len(case["output_ids"])
    ]
    assert cases
    with contextlib.ExitStack() as stack:
        inject(Replicas(stack, tmp_path, model), cases, 2 * len(FAULTS), seed=2)
