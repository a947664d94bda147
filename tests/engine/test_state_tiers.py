"""Checkpoints of states go through host memory, disk, files and the layers' meshes as blocks do:
tokens are those of an engine that computes all prompts, whatever is missing or damaged."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.engine.engine import Engine
from jaxserve.store.kv_file import read_kv_file
from tests.engine.harness import Runner, assert_empty, engine, fresh
from tests.engine.test_page_group_tiers import (
    ASKED,
    ask,
    assert_same_with_shared_prefixes,
    cached,
    prompts,
    settled,
    store_all,
)
from tests.engine.test_peers import JOB, Ran
from tests.models.test_families import write_model
from tests.store.fakes import flip_bit, slot_of

NAME = "qwen3_5"
BLOCK = 8
SPACING = 24  # tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp(NAME) / "model", NAME)


def replica(folder, mesh: str = "", **settings) -> Engine:
    """An engine with pages for one long prompt, its checkpoints and little more."""
    return engine(
        folder,
        mesh,
        **{
            "chunk": 24,
            "seqs": 2,
            "block": BLOCK,
            "max_len": 160,
            "pages": 60,
            "host_cache_gib": 0.02,
            "checkpoint_tokens": SPACING,
            **settings,
        },
    )


@pytest.fixture(scope="module")
def expected(folder) -> list[list[int]]:
    """Tokens of an engine that keeps nothing."""
    return ask(replica(folder, pages=400, host_cache_gib=0.0, prefix_caching=False), prompts())


def least(prompt: list[int]) -> int:
    """Tokens that a prompt must find at least, of which all is kept."""
    return (len(prompt) - 1) // SPACING * SPACING - SPACING


def put_below(real: Engine) -> None:
    """Has all that is on pages in host memory alone."""
    store_all(real)
    real.scheduler.cache.flush()


def assert_found(real: Engine, expected: list[list[int]]) -> int:
    """Asks each prompt again; returns how many tokens were not computed."""
    hits = 0
    for prompt, tokens in zip(prompts(), expected):
        found, hit = cached(real, prompt)
        assert found == tokens and hit % BLOCK == 0
        settled(real)
        hits += hit
    return hits


def test_evicted_checkpoints_come_back_from_host_memory(folder, expected):
    real = replica(folder)
    assert ask(real, prompts()) == expected
    settled(real)
    before = real.worker.lower_tiers.counts()
    assert assert_found(real, expected) >= sum(map(least, prompts()))
    counts = real.worker.lower_tiers.counts()
    assert counts.further_reads > before.further_reads and not counts.wrong
    assert_empty(real)
    real.close()


def test_only_what_is_not_on_pages_is_fetched(folder, expected):
    """A checkpoint behind blocks that are all on the devices, and the last blocks before one that
    is."""
    real = replica(folder, pages=400)
    cache = real.scheduler.cache
    prompt = prompts()[2]
    assert ask(real, [prompt]) == [expected[2]]
    _, most = cached(real, prompt)
    _, whole = cached(real, prompt)  # it left a checkpoint behind the last block that it met
    assert whole > most
    store_all(real)
    tokens = np.array(prompt, np.int32)
    hashes = cache.block_hashes("", lambda first, last: tokens[first:last])
    states = cache.published.seen.checkpoint(hashes[whole // BLOCK - 1])
    ends = range(whole // BLOCK - 3, whole // BLOCK)
    last = [cache.pages.with_key[hashes[block]][0] for block in ends]
    for lost, blocks in ((states, 0), (last, 3)):
        cache.pages.retract(lost)
        before = real.worker.lower_tiers.counts()
        assert cached(real, prompt) == (expected[2], whole)
        counts = real.worker.lower_tiers.counts()
        assert counts.host_reads - before.host_reads == blocks
        of_states = 0 if blocks else len(states)
        assert counts.further_reads - before.further_reads == of_states
    assert_empty(real)
    real.close()


@pytest.mark.parametrize(
    "mesh, fields",
    [
        ("kvp=2", {}),
        *(
            pytest.param(*case, marks=pytest.mark.matrix)
            for case in (
                ("tp=2", {}),
                ("kvp=4", dict(placement="round_robin")),
                ("kvp=2,tp=2", {}),
                ("", dict(dtype="bfloat16")),
                ("", dict(kv_cache_dtype="fp8")),
            )
        ),
    ],
    ids=str,
)
def test_on_every_mesh_and_placement(mesh, fields, folder):
    lanes = int(dict(part.split("=") for part in mesh.split(",") if part).get("kvp", 1))
    real = replica(folder, mesh, pages=60 // lanes + 20, **fields)
    plain = replica(folder, mesh, pages=400, host_cache_gib=0.0, prefix_caching=False, **fields)
    expected = ask(plain, prompts())
    assert ask(real, prompts()) == expected
    put_below(real)
    assert assert_found(real, expected) > 200
    counts = real.worker.lower_tiers.counts()
    assert counts.further_reads > 5 and not counts.wrong
    assert_empty(real)
    real.close()


def test_prompts_at_once_that_share_prefixes(folder):
    """With pages for hardly more than one: sequences are preempted and fetch what they had."""
    real = fresh(replica(folder, seqs=4, pages=70), "grow", decode_reserve=0.0)
    plain = replica(folder, pages=400, host_cache_gib=0.0, prefix_caching=False)
    assert_same_with_shared_prefixes(real, plain, prompts())
    assert real.worker.lower_tiers.counts().further_reads > 20
    assert_empty(real)
    real.close()


def test_a_sequence_that_is_cancelled_while_its_states_come_leaves_none(folder, expected):
    """Its slot goes to another sequence, which begins without a state."""
    real = replica(folder, seqs=1)
    assert ask(real, prompts()) == expected
    settled(real)
    real.scheduler.cache.flush()
    for steps in (1, 2, 3):
        runner = Runner(real)
        gone = runner.submit(prompts()[0], **ASKED)
        for _ in range(steps):
            real.step()
        real.cancel(gone)
        new = [100 + steps] * 20
        id = runner.submit(new, **ASKED)
        runner.run()
        again = runner.submit(new, **ASKED, rest=dict(bypass_prefix_cache=True))
        runner.run()
        assert runner.ids(id) == runner.ids(again)
        assert_empty(real)
    real.close()


def test_checkpoints_on_disk_outlast_a_restart(folder, expected, tmp_path):
    disk = dict(disk_cache=f"{tmp_path}:0.05")
    real = replica(folder, **disk)
    assert ask(real, prompts()) == expected
    settled(real)
    real.close()
    again = replica(folder, **disk)
    assert assert_found(again, expected) >= sum(map(least, prompts()))
    again.close()
    # ranks have other parts of states on their pages
    other = replica(folder, "tp=2", **disk)
    assert other.worker.lower_tiers.counts().disk_blocks == 0
    assert ask(other, prompts()[:2]) == expected[:2]
    other.close()


@pytest.mark.parametrize("fault", ["missing", "damaged"])
def test_a_checkpoint_that_lacks_a_part_below_is_not_used(folder, expected, fault):
    real = replica(folder)
    tiers = real.worker.lower_tiers
    cache = real.scheduler.cache
    prompt = prompts()[2]
    assert ask(real, prompts()) == expected
    cache.flush()
    settled(real)
    tokens = np.array(prompt, np.int32)
    hashes = cache.block_hashes("", lambda first, last: tokens[first:last])
    last = (len(prompt) - 1) // BLOCK
    whole = cache.published.reachable(hashes, last, np.empty(0, np.intp)).blocks
    lost = cache.published.seen.keys(whole, hashes)[-1]
    flip_bit(tiers, slot_of(tiers, lost), 77)
    if fault == "missing":
        assert not tiers.read(lost, np.empty(tiers.block_bytes, np.uint8))
        assert not tiers.holds(lost)
    found, hit = cached(real, prompt)
    assert found == expected[2] and 0 < hit < whole * BLOCK
    assert_empty(real)
    real.close()


def test_a_file_has_the_states_at_its_end(folder, expected):
    real = replica(folder, pages=400)
    real.start()
    prompt = prompts()[2]
    Ran(real, prompt, "job", **JOB).wait()
    file = real.kv_pool.get(np.array(prompt, np.int32), "", 0, 1 << 30)
    blocks = (len(prompt) - 1) // BLOCK
    other = replica(folder)
    assert other.kv_pool.put(read_kv_file(file.content()), "") == blocks
    assert cached(other, prompt) == (expected[2], blocks * BLOCK)
    changed = file.pages.copy()
    changed[0, 9] ^= 1
    with pytest.raises(RequestError, match="wrong checksum"):
        other.kv_pool.put(dataclasses.replace(file, pages=changed), "")
    other.close()
    real.close()
