"""Pages of layers with sliding windows go through host memory, disk and other replicas: tokens are
those of an engine that keeps all it has, whatever is missing, damaged or lost on the way."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.cache.hashes import is_block
from jaxserve.checkpoint.page_groups import ONE_GROUP
from jaxserve.engine import loading
from jaxserve.scheduling import prefetch
from jaxserve.store.kv_file import read_kv_file
from tests.engine.groups import led
from tests.engine.harness import Runner, assert_empty, engine, fresh
from tests.engine.test_peers import Ran
from tests.models.test_families import write_model
from tests.store.fakes import flip_bit, slot_of
from tests.store.test_shared import Shelves
from tests.waiting import eventually

BLOCK = 4
ASKED = dict(max_tokens=12, ignore_eos=True)
LENGTHS = (100, 37, 130, 21, 90, 117)
FAMILIES = [
    "gemma3",
    pytest.param("gpt_oss", marks=pytest.mark.matrix),
    pytest.param("gemma4", marks=pytest.mark.matrix),
]
PAGES = {"gemma4": 170}  # for one long prompt and little more, where 100 are not
MANY = 1500  # pages: no sequence lacks any


def prompts(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(120) for _ in range(length)] for length in LENGTHS]


def tiny(folder, name: str, mesh: str = "", **settings):
    """A replica of a family with pages for one long prompt and little more."""
    if not folder.exists():
        write_model(folder, name)
    return engine(
        folder,
        mesh,
        **{
            "chunk": 24,
            "seqs": 2,
            "block": BLOCK,
            "max_len": 160,
            "pages": PAGES.get(name, 100),
            "host_cache_gib": 0.01,
            **settings,
        },
    )


def ask(real, asked, **fields) -> list[list[int]]:
    """Tokens of the prompts, each run alone, so that the next one evicts its pages."""
    runner = Runner(real)
    found = []
    for prompt in asked:
        id = runner.submit(prompt, **{**ASKED, **fields})
        runner.run()
        found.append(runner.ids(id))
    return found


def cached(real, prompt: list[int]) -> tuple[list[int], int]:
    """Tokens that follow a prompt, and how many of its own were not computed."""
    runner = Runner(real)
    id = runner.submit(prompt, **ASKED)
    runner.run()
    return runner.ids(id), runner.completion(id).finished.usage.cached


def settled(real) -> None:
    eventually(lambda: real.worker.mover.stored)


def store_all(real) -> None:
    """Copies all that is on pages to host memory."""
    cache = real.scheduler.cache
    cache.stores.want(list(cache.pages.with_key), lambda key: False)
    real.step()
    settled(real)


def assert_same_with_shared_prefixes(real, plain, asked: list[list[int]]) -> None:
    """Asks four times for five prompts at once that begin like some of those `asked`, and compares
    tokens with those of an engine with room for all."""
    rng = random.Random(7)
    for _ in range(4):
        mixed = []
        for _ in range(5):
            prompt = rng.choice(asked)
            kept = rng.randint(1, len(prompt))
            mixed.append(prompt[:kept] + [7] * rng.randint(0, 20))
        runner = Runner(real)
        ids = [runner.submit(prompt, **ASKED) for prompt in mixed]
        runner.run()
        assert [runner.ids(id) for id in ids] == ask(plain, mixed)
        settled(real)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    return tmp_path_factory.mktemp(family) / "model"


@pytest.fixture(scope="module")
def expected(folder, family) -> list[list[int]]:
    """Tokens of an engine without tiers, with room for all."""
    real = tiny(folder, family, pages=MANY, host_cache_gib=0.0)
    return ask(real, prompts())


def test_pages_that_were_evicted_come_back_from_host_memory(folder, family, expected):
    real = tiny(folder, family)
    assert real.worker.plan.windows != ONE_GROUP
    assert ask(real, prompts()) == expected
    settled(real)
    before = real.worker.lower_tiers.counts().host_reads
    for prompt, tokens in zip(prompts(), expected):
        found, hit = cached(real, prompt)
        assert found == tokens
        assert hit == (len(prompt) - 1) // BLOCK * BLOCK
        settled(real)
    assert real.worker.lower_tiers.counts().host_reads > before + 20
    assert not real.worker.lower_tiers.counts().wrong
    assert_empty(real)
    real.close()


def test_it_fetches_what_only_windows_lack(folder, family, expected):
    """Where the blocks of the first page group are all on the devices."""
    real = tiny(folder, family, pages=MANY)
    cache = real.scheduler.cache
    prompt = prompts()[2]
    assert ask(real, [prompt]) == [expected[2]]
    # host memory gets all of it; the devices keep the first group's pages
    store_all(real)
    further = [page for page, key in cache.pages.key_of.items() if not is_block(key)]
    cache.pages.retract(further)
    before = real.worker.lower_tiers.counts()
    found, hit = cached(real, prompt)
    assert (found, hit) == (expected[2], (len(prompt) - 1) // BLOCK * BLOCK)
    counts = real.worker.lower_tiers.counts()
    assert counts.host_reads == before.host_reads
    parts = cache.published.seen.parts(hit // BLOCK)
    assert counts.further_reads - before.further_reads == len(parts) > 0
    assert_empty(real)
    real.close()


@pytest.mark.parametrize(
    "mesh, fields",
    [
        ("kvp=2", {}),
        ("spp=2", dict(layer_groups=2)),
        *(
            pytest.param(*case, marks=pytest.mark.matrix)
            for case in (
                ("", dict(layer_groups=3)),
                ("kvp=4", dict(placement="round_robin")),
                ("spp=2,kvp=2,tp=2", {}),
                ("", dict(kv_cache_dtype="fp8")),
            )
        ),
    ],
    ids=str,
)
def test_on_every_mesh_and_placement(mesh, fields, tmp_path):
    """Rows of all of a mesh's pools go to host memory, of layers in several groups too."""
    name = "gemma3"
    lanes = dict(part.split("=") for part in mesh.split(",") if part).get("kvp", 1)
    real = tiny(tmp_path / "model", name, mesh, pages=100 // int(lanes) + 3, **fields)
    plain = real
    if "kv_cache_dtype" not in fields:
        plain = tiny(tmp_path / "model", name, pages=MANY, host_cache_gib=0.0)
    expected = ask(plain, prompts())
    assert ask(real, prompts()) == expected
    settled(real)
    for prompt, tokens in zip(prompts(), expected):
        found, hit = cached(real, prompt)
        assert found == tokens
        # lanes lose blocks out of their order
        assert "kvp" in mesh or hit == (len(prompt) - 1) // BLOCK * BLOCK
        settled(real)
    assert real.worker.lower_tiers.counts().host_reads > 50
    assert_empty(real)
    real.close()


def test_prompts_at_once_that_share_prefixes(folder, family):
    """With pages for hardly more than one: sequences are preempted and fetch what they had."""
    real = fresh(tiny(folder, family, seqs=4), "grow", decode_reserve=0.0)
    plain = tiny(folder, family, pages=MANY, host_cache_gib=0.0)
    assert_same_with_shared_prefixes(real, plain, prompts())
    counts = real.worker.lower_tiers.counts()
    assert counts.host_reads + counts.further_reads > 20
    assert_empty(real)
    real.close()


def test_pages_on_disk_outlast_a_restart(folder, family, expected, tmp_path):
    disk = dict(disk_cache=f"{tmp_path}:0.05")
    real = tiny(folder, family, **disk)
    assert ask(real, prompts()) == expected
    settled(real)
    real.close()
    again = tiny(folder, family, **disk)
    for prompt, tokens in zip(prompts(), expected):
        assert cached(again, prompt) == (tokens, (len(prompt) - 1) // BLOCK * BLOCK)
        settled(again)
    assert again.worker.lower_tiers.counts().disk_reads > 20
    again.close()
    # rows of other pools mean something else: a replica with other stages reads none of them
    other = tiny(folder, family, "spp=2", **disk)
    assert other.worker.lower_tiers.counts().disk_blocks == 0
    assert ask(other, prompts()[:2]) == expected[:2]
    other.close()


def further(real, prompt: list[int], blocks: int) -> list[bytes]:
    """Keys of what windows see behind the first blocks of a prompt."""
    cache = real.scheduler.cache
    tokens = np.array(prompt, np.int32)
    hashes = cache.block_hashes("", lambda first, last: tokens[first:last])
    return cache.published.seen.keys(blocks, hashes)


@pytest.mark.parametrize("fault", ["missing", "damaged"])
def test_what_windows_lack_below_makes_the_match_shorter(folder, family, expected, fault):
    real = tiny(folder, family)
    tiers = real.worker.lower_tiers
    prompt = prompts()[2]
    assert ask(real, prompts()) == expected
    real.scheduler.cache.flush()
    settled(real)
    blocks = (len(prompt) - 1) // BLOCK
    lost = further(real, prompt, blocks)[-1]
    flip_bit(tiers, slot_of(tiers, lost), 77)
    if fault == "missing":
        assert not tiers.read(lost, np.empty(tiers.block_bytes, np.uint8))
        assert not tiers.holds(lost)
    found, hit = cached(real, prompt)
    assert found == expected[2] and 0 < hit < blocks * BLOCK
    assert_empty(real)
    real.close()


def test_a_file_has_what_windows_see_at_its_end(folder, family, expected):
    """So that who takes it need not compute the prompt, also where it ends with a block."""
    real = tiny(folder, family, pages=MANY)
    real.start()
    for prompt, tokens in ((prompts()[2], expected[2]), (prompts()[0], expected[0])):
        Ran(real, prompt, f"of {len(prompt)}", **ASKED).wait()
        file = real.kv_pool.get(np.array(prompt, np.int32), "", 0, 1 << 30)
        other = tiny(folder, family)
        assert other.kv_pool.put(read_kv_file(file.content()), "") == len(prompt) // BLOCK
        assert cached(other, prompt) == (tokens, (len(prompt) - 1) // BLOCK * BLOCK)
        changed = file.pages.copy()
        changed[0, 9] ^= 1
        with pytest.raises(RequestError, match="wrong checksum"):
            other.kv_pool.put(dataclasses.replace(file, pages=changed), "")
        with pytest.raises(RequestError, match="places"):
            dataclasses.replace(file, places=file.places + 1000)
        other.close()
    real.close()


def test_a_replica_finds_what_another_one_has_put_into_a_shared_store(
    folder, family, expected, monkeypatch
):
    """Also of a prompt that begins like one that was longer, whose windows have passed its end."""
    store = Shelves()
    monkeypatch.setattr(loading, "load_client", lambda: None)
    monkeypatch.setattr(loading, "MooncakeBlocks", lambda *_: store)
    monkeypatch.setattr(prefetch, "LOOKUP_SECONDS", 60.0)  # a thread may wait for a core
    shared = dict(kv_store="mooncake://127.0.0.1:1", host_cache_gib=0.02)
    one = tiny(folder, family, **shared)
    assert ask(one, prompts()) == expected
    one.close()
    other = tiny(folder, family, **shared)
    whole = prompts()[2]
    assert cached(other, whole) == (expected[2], (len(whole) - 1) // BLOCK * BLOCK)
    begun = prompts()[5][:81]
    found, hit = cached(other, begun)
    assert hit == 80
    assert [found] == ask(tiny(folder, family, pages=MANY, host_cache_gib=0.0), [begun])
    assert other.worker.lower_tiers.counts().shared_reads > 20
    assert_empty(other)
    other.close()


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["spp=2", "kvp=2"])
def test_every_process_of_a_replica_keeps_its_part_of_all_pages(mesh, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    plain = tiny(folder, "gemma3", pages=MANY, host_cache_gib=0.0)
    fields = dict(
        chunk_tokens=24,
        max_seqs=2,
        block_size=BLOCK,
        max_model_len=160,
        pages=53 if mesh == "kvp=2" else 100,
        host_cache_gib=0.01,
    )
    expected = ask(plain, prompts())
    with led(monkeypatch, str(folder), mesh, 2, **fields) as (real, _):
        assert ask(real, prompts()) == expected
        eventually(lambda: real.worker.lower_tiers.settled)
        for prompt, tokens in zip(prompts(), expected):
            found, hit = cached(real, prompt)
            assert found == tokens
            assert mesh == "kvp=2" or hit == (len(prompt) - 1) // BLOCK * BLOCK
            eventually(lambda: real.worker.lower_tiers.settled)
        counts = real.worker.lower_tiers.counts()
        assert counts.host_reads + counts.further_reads > 50 and not counts.wrong
        assert_empty(real)
