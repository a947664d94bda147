"""Blocks that left the devices come back from the tiers below, and change no token."""

from __future__ import annotations

import importlib.util
import itertools
import random
import threading

import pytest

from jaxserve.api.errors import RequestError
from jaxserve.api.request import EPHEMERAL
from jaxserve.cache.block_events import Medium
from jaxserve.costs.coefficients import Costs
from jaxserve.engine import build, loading, page_io
from jaxserve.lanes.cost import lane_costs
from jaxserve.observe.kv_events import MEDIA, KvEventLog, block_hash
from jaxserve.scheduling import fetches, prefetch
from jaxserve.settings.schema import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)
from jaxserve.store import shared
from tests.cache.test_tier_events import Picture
from tests.engine.harness import Runner, assert_empty, engine, generate, watch_batches
from tests.engine.harness import shared as shared_engine
from tests.store.fakes import flip_bit, slot_of
from tests.store.test_shared import Shelves
from tests.waiting import eventually

# pages for few prompts at a time, host memory for all: what is asked again was evicted
SMALL = dict(chunk=32, seqs=4, pages=40, max_len=512, host_cache_gib=0.02)
LENGTHS = (200, 37, 333, 130, 256, 90, 400)


def prompts(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 200) for _ in range(length)] for length in LENGTHS]


def ask(real, asked, **fields) -> list[list[int]]:
    """Tokens of the prompts, each run alone, so that the next one evicts its blocks."""
    return [generate(real, [prompt], max_tokens=6, **fields)[0] for prompt in asked]


def settled(real) -> None:
    """Waits until all blocks that left the devices are stored."""
    eventually(lambda: real.worker.mover.stored)


@pytest.fixture(scope="module")
def tiered():
    real = engine(mesh="", **SMALL)
    yield real
    real.close()


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return ask(shared_engine(), prompts())


def test_blocks_that_were_evicted_come_back_and_give_the_same_tokens(tiered, expected):
    assert ask(tiered, prompts()) == expected
    settled(tiered)
    runner = Runner(tiered)
    ids = [runner.submit(prompt, max_tokens=6) for prompt in prompts()]
    runner.run()
    assert [runner.ids(id) for id in ids] == expected
    cached = [runner.completion(id).finished.usage.cached for id in ids]
    assert cached == [(length - 1) // 16 * 16 for length in LENGTHS]
    counts = tiered.worker.lower_tiers.counts()
    assert counts.host_reads > 20 and not counts.missed and not counts.wrong
    assert tiered.worker.recompiles == 0
    assert_empty(tiered)


def test_blocks_that_are_still_on_their_way_to_host_memory_are_hits(expected, monkeypatch):
    real = engine(mesh="", **SMALL)
    go = threading.Event()
    copy = page_io.BlocksRead.wait

    def slowly(blocks) -> None:
        go.wait(60)
        copy(blocks)

    monkeypatch.setattr(page_io.BlocksRead, "wait", slowly)
    try:
        ask(real, prompts())
        assert not real.worker.lower_tiers.counts().stored
        threading.Timer(0.3, go.set).start()
        runner = Runner(real)
        id = runner.submit(prompts()[0], max_tokens=6)
        runner.run()
        assert runner.ids(id) == expected[0]
        assert runner.completion(id).finished.usage.cached == (LENGTHS[0] - 1) // 16 * 16
        settled(real)
        assert not real.worker.lower_tiers.host.expected
        assert_empty(real)
    finally:
        go.set()
        real.close()


def test_a_request_that_does_not_read_the_cache_fetches_nothing(tiered, expected):
    ask(tiered, prompts())
    settled(tiered)
    before = tiered.worker.lower_tiers.counts().host_reads
    rest = dict(bypass_prefix_cache=True)
    assert ask(tiered, prompts()[:1], rest=rest) == expected[:1]
    assert tiered.worker.lower_tiers.counts().host_reads == before


@pytest.mark.parametrize("faster", ["computing", "fetching"])
def test_what_takes_less_time_is_done(tiered, expected, faster, monkeypatch):
    """Mooncake, Eq. 2: of bringing blocks and computing them."""
    token = 1e-9 if faster == "computing" else 1.0
    costs = Costs(1, linear_token=token)
    monkeypatch.setattr(tiered.scheduler.predictor, "costs", costs)
    monkeypatch.setattr(tiered.scheduler.predictor, "lane_costs", lane_costs(costs, 1))
    monkeypatch.setattr(tiered.scheduler.predictor, "calibrated", True)
    ask(tiered, prompts())
    settled(tiered)
    before = tiered.worker.lower_tiers.counts().host_reads
    assert ask(tiered, prompts()[:1]) == expected[:1]
    read = tiered.worker.lower_tiers.counts().host_reads > before
    assert read == (faster == "fetching")


def test_another_salt_finds_nothing(tiered, expected):
    ask(tiered, prompts())
    settled(tiered)
    before = tiered.worker.lower_tiers.counts()
    assert ask(tiered, prompts()[:1], rest=dict(cache_salt="another")) == expected[:1]
    assert tiered.worker.lower_tiers.counts().host_reads == before.host_reads


def test_flipped_bits_in_host_memory_are_computed_anew(tiered, expected):
    ask(tiered, prompts())
    settled(tiered)
    tiers = tiered.worker.lower_tiers
    rng = random.Random(1)
    for slot in range(tiers.counts().host_blocks):
        if rng.random() < 0.3:
            flip_bit(tiers, slot, rng.randrange(8 * tiers.block_bytes))
    assert ask(tiered, prompts()) == expected
    assert tiers.counts().wrong > 0
    assert_empty(tiered)


def test_who_is_cancelled_while_its_blocks_come_leaves_nothing_behind(tiered, expected):
    ask(tiered, prompts())
    settled(tiered)
    runner = Runner(tiered)
    id = runner.submit(prompts()[2], max_tokens=6)
    tiered.step()
    assert tiered.scheduler.slots.prefilling[0].ticket is not None
    tiered.cancel(id)
    tiered.scheduler.check()
    assert runner.completion(id).finished.reason == "cancelled"
    eventually(lambda: (tiered.step(), tiered.worker.mover.idle)[1])
    assert ask(tiered, prompts()) == expected
    assert_empty(tiered)


def test_what_never_comes_is_computed(tiered, expected, monkeypatch):
    ask(tiered, prompts())
    settled(tiered)
    monkeypatch.setattr(fetches, "FETCH_SECONDS", 0.2)
    monkeypatch.setattr(tiered.worker.mover, "fetch", lambda fetch: None)
    assert ask(tiered, prompts()[:2]) == expected[:2]
    assert_empty(tiered)


def test_a_fetch_that_fails_is_computed_at_once(tiered, expected, monkeypatch):
    ask(tiered, prompts())
    settled(tiered)

    def fail(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(tiered.worker.lower_tiers, "read", fail)
    assert ask(tiered, prompts()[:2]) == expected[:2]
    assert tiered.worker.mover.idle
    assert_empty(tiered)


def test_a_reset_of_the_devices_loses_no_block_below_them(tiered, expected):
    ask(tiered, prompts())
    settled(tiered)
    tiered.steps.reset_devices()
    tiered.steps.lose(lambda sequence: False, RequestError("", "no sequence ends"))
    before = tiered.worker.lower_tiers.counts().host_reads
    assert ask(tiered, prompts()) == expected
    assert tiered.worker.lower_tiers.counts().host_reads > before


def test_programs_of_the_warm_up_are_all_that_is_needed():
    before = set(threading.enumerate())
    real = engine(mesh="", **SMALL)
    real.worker.warm_up(lambda name: None, ("greedy",))
    ask(real, prompts())
    settled(real)
    ask(real, prompts())
    assert real.worker.lower_tiers.counts().host_reads and not real.worker.recompiles
    real.close()
    begun = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not any(name.startswith("kv-") for name in begun)


@pytest.mark.parametrize(
    "mesh, fields",
    [
        ("kvp=2", dict(lane_tokens=64)),
        pytest.param("spp=2,kvp=2,tp=2", dict(lane_tokens=64), marks=pytest.mark.matrix),
        pytest.param("kvp=3", dict(placement="round_robin", pages=11), marks=pytest.mark.matrix),
        pytest.param("tp=4", {}, marks=pytest.mark.matrix),  # more ranks than kv heads
        pytest.param("", dict(kv_cache_dtype="fp8"), marks=pytest.mark.matrix),
        pytest.param("spp=2", dict(block=7, pages=64), marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_on_every_mesh_and_placement(mesh, fields, expected):
    real = engine(mesh=mesh, **{**SMALL, "pages": 30, **fields})
    first = ask(real, prompts())
    if "kv_cache_dtype" not in fields:
        assert first == expected
    settled(real)
    assert generate(real, prompts(), max_tokens=6) == first
    assert real.worker.lower_tiers.counts().host_reads > 20
    assert_empty(real)
    real.close()


@pytest.mark.matrix
def test_the_real_model_says_the_same_from_host_memory(golden, smollm2_gguf):
    real = engine(str(smollm2_gguf), chunk=256, seqs=2, pages=330, max_len=5200, host_cache_gib=2.0)
    for _ in range(2):
        for case in golden["cases"]:
            count = len(case["output_ids"])
            asked = [case["prompt_ids"]]
            found = generate(real, asked, max_tokens=count, ignore_eos=True)
            assert found == [case["output_ids"]], f"prompt of {len(case['prompt_ids'])} tokens"
        settled(real)
    assert real.worker.lower_tiers.counts().host_reads > 100
    real.close()


@pytest.mark.matrix
def test_under_random_traffic(expected):
    """Prompts that share prefixes, asked at once and one by one, with cancellations and flips."""
    real = engine(mesh="", **SMALL)
    rng = random.Random(3)
    plain = shared_engine()
    tiers = real.worker.lower_tiers
    for _ in range(60):
        asked = []
        for _ in range(rng.randint(1, 6)):
            prompt = rng.choice(prompts())
            asked.append(prompt[: rng.randint(1, len(prompt))] + [7] * rng.randint(0, 40))
        assert generate(real, asked, max_tokens=4) == generate(plain, asked, max_tokens=4)
        for slot in range(tiers.counts().host_blocks):
            if rng.random() < 0.05:
                flip_bit(tiers, slot, rng.randrange(8 * tiers.block_bytes))
    assert tiers.counts().host_reads > 100 and tiers.counts().wrong
    assert_empty(real)
    real.close()


def test_what_a_preempted_decode_had_is_fetched_not_computed():
    """Pages are promised to more decodes than there are. A decode that has to go finds its full
    blocks again, those of its answer too: on the devices, else in host memory."""
    config = EngineConfig(
        ModelSource("random:tiny", max_model_len=512),
        MeshConfig(),
        CacheConfig(block_size=16, pages=14, host_cache_gib=0.02),
        SchedulerConfig(max_seqs=4, chunk_tokens=32, decode_reserve=0.0),
    )
    real = build.build(config, progress=False, warm_up=False)
    asked = [prompt[:40] for prompt in prompts() if len(prompt) > 40][:4]
    computed = 0

    def count(batch) -> None:
        nonlocal computed
        computed += int(batch.length[~batch.is_decode].sum())

    watch_batches(real, count)
    found = generate(real, asked, max_tokens=120, ignore_eos=True)
    assert found == generate(shared_engine(), asked, max_tokens=120, ignore_eos=True)
    assert real.scheduler.slots.preemptions > 1
    assert real.worker.lower_tiers.counts().host_reads > 4
    # each time no more than what no full block had
    assert computed - sum(map(len, asked)) <= 2 * 16 * real.scheduler.slots.preemptions
    assert_empty(real)
    real.close()


# --- on disk


def on_disk(folder, **fields):
    return engine(mesh="", **{**SMALL, "disk_cache": f"{folder}:0.05", **fields})


def test_blocks_on_disk_outlast_a_restart_and_damage_is_computed_anew(tmp_path, expected):
    real = on_disk(tmp_path)
    assert ask(real, prompts()) == expected
    settled(real)
    real.close()
    again = on_disk(tmp_path)
    assert again.worker.lower_tiers.counts().disk_blocks > 20
    runner = Runner(again)
    ids = [runner.submit(prompt, max_tokens=6) for prompt in prompts()]
    runner.run()
    assert [runner.ids(id) for id in ids] == expected
    cached = [runner.completion(id).finished.usage.cached for id in ids]
    assert cached == [(length - 1) // 16 * 16 for length in LENGTHS]
    again.close()
    rng = random.Random(5)
    for file in tmp_path.iterdir():
        damage(file, rng)
    last = on_disk(tmp_path)
    assert ask(last, prompts()) == expected
    last.close()


def test_what_a_waiting_prompt_will_hit_is_brought_up_from_disk(tmp_path, expected):
    real = on_disk(tmp_path, seqs=1, host_cache_gib=0.0008)
    tiers = real.worker.lower_tiers
    assert ask(real, prompts()) == expected
    for seed in range(1, 4):  # which push those blocks out of host memory
        ask(real, prompts(seed))
    settled(real)
    asked = prompts()[4]
    runner = Runner(real)
    first = runner.submit([5, 6, 7], max_tokens=300, ignore_eos=True)  # takes the only slot
    waits = runner.submit(asked, max_tokens=6)
    before = tiers.counts()
    while real.step() and tiers.counts().prefetched < before.prefetched + 15:
        assert len(runner.events[waits]) == 1, "it was accepted, and waits"
    runner.run()
    assert runner.ids(waits) == expected[4] and len(runner.ids(first)) == 300
    counts = tiers.counts()
    assert counts.prefetched == before.prefetched + 15
    assert counts.host_reads >= before.host_reads + 15 and counts.disk_reads == before.disk_reads
    assert_empty(real)
    real.close()


def damage(file, rng: random.Random, share: float = 0.002) -> None:
    """Flips bits of sectors here and there."""
    size = file.stat().st_size
    with open(file, "r+b") as opened:
        for _ in range(int(size / 4096 * share) + 1 if size else 0):
            at = rng.randrange(size)
            opened.seek(at)
            (byte,) = opened.read(1)
            opened.seek(at)
            opened.write(bytes([byte ^ 1 << rng.randrange(8)]))


def test_blocks_of_another_model_on_disk_are_misses(tmp_path, expected):
    real = on_disk(tmp_path)
    ask(real, prompts())
    settled(real)
    real.close()
    other = on_disk(tmp_path, model="random:tiny-window")
    assert other.worker.lower_tiers.counts().disk_blocks == 0
    other.close()


@pytest.mark.parametrize("given", ["", ":1", "/tmp", "/tmp:x", "/tmp:0", "/tmp:-1", "/tmp:nan"])
def test_a_disk_cache_that_is_none_is_named(given):
    with pytest.raises(ConfigError, match="disk_cache"):
        CacheConfig(host_cache_gib=1.0, disk_cache=given)


def test_lower_tiers_that_have_no_effect_are_refused():
    with pytest.raises(ConfigError, match="needs host_cache_gib"):
        CacheConfig(disk_cache="/tmp:1")
    with pytest.raises(ConfigError, match="without prefix_caching"):
        CacheConfig(host_cache_gib=1.0, prefix_caching=False)
    with pytest.raises(ConfigError, match="host_cache_gib"):
        engine(mesh="", **{**SMALL, "host_cache_gib": 1e-6})


def test_ephemeral_blocks_are_not_stored_and_those_to_be_kept_outlast_others(expected):
    real = engine(mesh="", **{**SMALL, "host_cache_gib": 0.0003})  # 39 blocks
    tiers = real.worker.lower_tiers
    try:
        assert ask(real, prompts()[:1], rest=dict(cache_retention=EPHEMERAL)) == expected[:1]
        ask(real, prompts()[6:])  # takes all pages
        settled(real)
        assert not tiers.counts().stored
        assert ask(real, prompts()[:1], rest=dict(cache_retention=600)) == expected[:1]
        assert ask(real, prompts()[1:]) == expected[1:]
        settled(real)
        before = tiers.counts().host_reads
        assert ask(real, prompts()[:1]) == expected[:1]
        assert tiers.counts().host_reads - before == LENGTHS[0] // 16
        assert_empty(real)
    finally:
        real.close()


def test_listeners_know_what_every_tier_holds(tmp_path, expected):
    real = on_disk(tmp_path, host_cache_gib=0.0003)
    tiers = real.worker.lower_tiers
    picture = Picture()
    log = KvEventLog(16)
    real.block_events.subscribe(picture)
    real.block_events.subscribe(log)

    def agrees() -> bool:
        real.step()
        on_pages = set(real.scheduler.cache.pages.with_key)
        below = {Medium.HOST: set(tiers.host.keys()), Medium.DISK: set(tiers.behind.keys())}
        return picture.on == {Medium.DEVICE: on_pages, **below}

    try:
        assert ask(real, prompts()) == expected
        settled(real)
        eventually(agrees)
        assert picture.on[Medium.HOST] and picture.on[Medium.DISK] - picture.on[Medium.HOST]
        # routers can use what is below the devices: its tokens were published with the first page
        log.lose()
        sent: dict[str, set[int]] = {name: set() for name in MEDIA.values()}
        for event in itertools.chain.from_iterable(log.take()):
            if event["type"] == "BlockStored":
                sent[event["medium"]].update(event["block_hashes"])
        assert sent == {MEDIA[at]: set(map(block_hash, keys)) for at, keys in picture.on.items()}
        flip_bit(tiers, slot_of(tiers, tiers.host.keys()[0]), 0)
        assert ask(real, prompts()) == expected
        settled(real)
        eventually(agrees)
    finally:
        real.close()


def test_a_listener_after_a_restart_hears_what_is_on_disk(tmp_path):
    real = on_disk(tmp_path)
    ask(real, prompts()[:2])
    real.close()
    again = on_disk(tmp_path)
    picture = Picture()
    again.block_events.subscribe(picture)
    assert len(picture.on[Medium.DISK]) == again.worker.lower_tiers.counts().disk_blocks > 10
    again.close()


# --- a store that replicas share

STORE = dict(kv_store="mooncake://127.0.0.1:1", host_cache_gib=0.02)


@pytest.fixture
def store(monkeypatch) -> Shelves:
    """A store of all engines that a test makes, beside which the real one is tested elsewhere."""
    store = Shelves()
    monkeypatch.setattr(loading, "load_client", lambda: None)
    monkeypatch.setattr(loading, "MooncakeBlocks", lambda *_: store)
    return store


def test_a_replica_that_is_idle_hits_what_another_one_has_put(store, expected, monkeypatch):
    monkeypatch.setattr(prefetch, "LOOKUP_SECONDS", 60.0)  # a thread may wait for a core
    one = engine(mesh="", **SMALL | STORE)
    assert ask(one, prompts()) == expected
    one.close()
    assert len(store.blocks) > 50
    other = engine(mesh="tp=2", **SMALL | STORE)
    try:
        runner = Runner(other)
        for prompt, length, tokens in zip(prompts(), LENGTHS, expected):
            id = runner.submit(prompt, max_tokens=6)
            runner.run()
            assert runner.ids(id) == tokens
            cached = runner.completion(id).finished.usage.cached
            assert cached == (0 if length < 80 else (length - 1) // 16 * 16)
        assert other.worker.lower_tiers.counts().shared_reads > 50
        assert_empty(other)
    finally:
        other.close()


@pytest.mark.parametrize("fault", ["flipped", "gone", "hangs", "raises"])
def test_a_store_with_faults_changes_no_token(store, expected, fault, monkeypatch):
    monkeypatch.setattr(shared, "SLOW_SECONDS", 0.3)
    one = engine(mesh="", **SMALL | STORE)
    ask(one, prompts())
    one.close()
    if fault == "flipped":  # the store's own checksums find it: it says that the block is not there
        store.lies = {key for number, key in enumerate(store.blocks) if number % 3 == 0}
    elif fault == "gone":
        store.lies = set(store.blocks)
    for key in store.lies:
        del store.blocks[key]
    if fault == "raises":
        store.error = OSError("gone")
    elif fault == "hangs":
        store.go.clear()
        threading.Timer(1.0, store.go.set).start()
    other = engine(mesh="", **SMALL | STORE)
    try:
        assert ask(other, prompts()) == expected
        assert_empty(other)
    finally:
        store.go.set()
        other.close()


@pytest.mark.parametrize(
    "given",
    ["", "mooncake://", "mooncake://host", "mooncake://:1", "redis://host:1", "mooncake://h:x"]
    + ["mooncake://host:0", "mooncake://host:65536", "host:1"],
)
def test_a_store_that_is_none_is_named(given):
    with pytest.raises(ConfigError, match="kv_store"):
        CacheConfig(host_cache_gib=1.0, kv_store=given)


def test_a_store_needs_host_memory_and_its_client():
    with pytest.raises(ConfigError, match="kv_store: needs host_cache_gib"):
        CacheConfig(kv_store="mooncake://127.0.0.1:1")
    if importlib.util.find_spec("mooncake") is None:
        with pytest.raises(
            ConfigError, match=r"kv_store: needs pip install 'jaxserve\[mooncake\]'"
        ):
            engine(mesh="", **SMALL | STORE)
