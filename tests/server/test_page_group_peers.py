"""A replica computes prompts and another one decodes them, over TCP: pages of layers with sliding
windows come beside the blocks, latents as they are, and tokens are those of a replica alone."""

from __future__ import annotations

import contextlib
import itertools
import time

import numpy as np
import pytest

from jaxserve.api.request import KvSource
from jaxserve.engine.build import build
from jaxserve.engine.engine import Engine
from jaxserve.server.peer_blocks import PeerReplicas
from jaxserve.settings.schema import (
    CacheConfig,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)
from tests.engine.harness import Runner, assert_empty
from tests.engine.test_page_group_tiers import ASKED, BLOCK, prompts
from tests.engine.test_peers import JOB, Ran, ended
from tests.models.test_families import write_model
from tests.server.test_layer_groups import SECRET, begun_when_wanted, served
from tests.waiting import eventually

PROMPT = prompts()[2]
BLOCKS = (len(PROMPT) - 1) // BLOCK
FAMILIES = [
    "gemma3",
    pytest.param("gpt_oss", marks=pytest.mark.matrix),
    "deepseek_v3",
    "qwen3_5",
    pytest.param("gemma4", marks=pytest.mark.matrix),
]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp(family) / "model", family)


def replica(
    folder,
    role: str = "mixed",
    peers: PeerReplicas | None = None,
    mesh: str = "",
    gib: float = 0.02,
    layer_groups: int = 1,
    **cache,
) -> Engine:
    config = EngineConfig(
        ModelSource(model=str(folder), max_model_len=160, dtype="float32"),
        MeshConfig.parse(mesh),
        CacheConfig(**{"block_size": BLOCK, "pages": 160, "host_cache_gib": gib, **cache}),
        SchedulerConfig(max_seqs=2, chunk_tokens=24),
        layer_groups=layer_groups,
        role=role,
    )
    return build(config, progress=False, warm_up=False, peers=peers)


@pytest.fixture(scope="module")
def expected(folder) -> list[int]:
    alone = replica(folder, gib=0.0)
    runner = Runner(alone)
    id = runner.submit(PROMPT, **ASKED)
    runner.run()
    return runner.ids(id)


class Pair:
    """A replica for prompts, its port, and one that decodes and asks it."""

    def __init__(self, stack, folder, far: dict | None = None, near: dict | None = None):
        self.peers = PeerReplicas(SECRET)
        stack.callback(self.peers.close)
        self.far = replica(folder, "prefill", **(far or {}))
        self.source = served(stack, self.far)
        self.near = replica(folder, "decode", peers=self.peers, **(near or {}))
        stack.callback(self.near.close)

    def kv(self, job: str = "", block: int = BLOCK) -> KvSource:
        return KvSource(self.source.address, len(PROMPT) // block, job, block)

    def ask(self, job: str = "", block: int = BLOCK):
        """Asks the near replica, with the far one as source. job: which the far one begins to
        compute when it is asked. Returns its tokens, and how many of the prompt it did not
        compute."""
        runner = Runner(self.near)
        rest = dict(kv_source=self.kv(job, block))
        computed = begun_when_wanted(self.far, PROMPT, job, **JOB)
        with computed if job else contextlib.nullcontext():
            id = runner.submit(PROMPT, **ASKED, rest=rest)
            self.near.step()
        while self.near.step() or not ended(runner, id):
            self.near.scheduler.check()
            time.sleep(0.001)
        return runner.ids(id), runner.completion(id).finished.usage.cached

    @property
    def came(self) -> int:
        counts = self.near.worker.lower_tiers.counts()
        return counts.peer_reads + counts.further_reads

    @property
    def all(self) -> int:
        """Pages of all that the prompt's blocks need."""
        return BLOCKS + len(self.near.scheduler.cache.published.seen.parts(BLOCKS))


def test_a_prompt_is_computed_there_and_decoded_here(stack, folder, family, expected):
    pair = Pair(stack, folder)
    assert pair.ask("job") == (expected, BLOCKS * BLOCK)
    assert pair.came == pair.all
    if pair.near.worker.plan.windows:  # only the last blocks of these
        assert BLOCKS < pair.came < BLOCKS * pair.near.worker.plan.page_groups
    assert_empty(pair.near)


def test_layers_in_groups_send_their_pools_as_they_run(stack, folder, family, expected):
    if family == "qwen3_5":
        pytest.skip("a half of its four layers has no pages to keep states on")
    pair = Pair(stack, folder, dict(layer_groups=2), dict(layer_groups=2))
    assert pair.ask("job") == (expected, BLOCKS * BLOCK)
    assert pair.came == pair.all and not pair.near.worker.lower_tiers.counts().wrong
    assert_empty(pair.near)


def test_what_is_there_already_comes_after_it_was_evicted_too(stack, folder, expected):
    """From its pages, and from its host memory."""
    pair = Pair(stack, folder)
    Ran(pair.far, PROMPT, "before", **JOB).wait()
    assert pair.ask() == (expected, BLOCKS * BLOCK)
    assert pair.came == pair.all
    for number, other in enumerate(prompts(1)):
        Ran(pair.far, other, f"other{number}", **JOB).wait()
    pair.near.scheduler.cache.flush()
    again = Pair(stack, folder)
    again.source = pair.source
    assert again.ask() == (expected, BLOCKS * BLOCK)
    assert again.came == again.all


@pytest.mark.parametrize("when", [1, 20])
def test_a_source_that_is_killed_in_the_midst_is_computed_without(stack, folder, expected, when):
    pair = Pair(stack, folder)
    exporter = pair.far.block_exporter
    read = exporter.read
    reads = itertools.count(1)

    def killed(key, into, seconds):
        if next(reads) == when:
            pair.source.server.stop()
            pair.source.transfer.close()
        return read(key, into, seconds)

    exporter.read = killed
    Ran(pair.far, PROMPT, "before", **JOB).wait()
    found, hit = pair.ask()
    assert found == expected and hit < BLOCKS * BLOCK
    assert next(reads) > when
    assert pair.near.scheduler.slots.preemptions == 0
    assert_empty(pair.near)


def test_what_is_gone_there_beside_blocks_is_computed_here(stack, folder, expected):
    """A page of a window, or of a checkpoint."""
    pair = Pair(stack, folder)
    if not pair.near.scheduler.cache.published.seen:
        pytest.skip("all of its layers see all")
    Ran(pair.far, PROMPT, "before", **JOB).wait()
    cache = pair.far.scheduler.cache
    tokens = np.array(PROMPT, np.int32)
    hashes = cache.block_hashes("", lambda first, last: tokens[first:last])
    lost = cache.published.seen.keys(BLOCKS, hashes)[-1]
    pair.far.post(lambda: cache.pages.retract(cache.pages.with_key[lost]))
    assert pair.ask() == (expected, 0)
    assert pair.came < pair.all
    assert_empty(pair.near)


@pytest.mark.parametrize("near", [dict(mesh="spp=2"), dict(block_size=8)], ids=str)
def test_replicas_with_other_pools_read_nothing_of_each_other(
    stack, folder, family, expected, near
):
    """Where all layers see all, blocks are the same for every mesh, and made to size."""
    if family == "qwen3_5":
        near = dict(mesh="tp=2") if "mesh" in near else near
    pair = Pair(stack, folder, near=near)
    Ran(pair.far, PROMPT, "before", **JOB).wait()
    found, hit = pair.ask()
    assert found == expected
    assert (hit == 0) == bool(pair.near.scheduler.cache.published.seen)
    assert not pair.near.worker.lower_tiers.counts().wrong
    assert_empty(pair.near)


@pytest.mark.parametrize("length", [len(PROMPT), 100])
def test_a_router_s_ticket_stands_for_all_that_is_asked(stack, folder, length):
    """The far replica reads it all to host memory while it computes the prompt. A prompt of 100
    tokens ends with a block."""
    pair = Pair(stack, folder)
    prompt = PROMPT[:length]
    tokens = np.array(prompt, np.int32)
    exporter = pair.far.block_exporter
    hashes = pair.far.info.block_hashes(tokens, "")
    keys = exporter.keys_of(hashes, length // BLOCK)
    exporter.want(keys)
    Ran(pair.far, prompt, "job", **JOB).wait()
    exporter.unwant(keys)
    eventually(lambda: pair.far.worker.mover.stored)
    pair.far.flush_cache()
    runner = Runner(pair.near)
    source = KvSource(pair.source.address, length // BLOCK, "", BLOCK)
    id = runner.submit(prompt, **ASKED, rest=dict(kv_source=source))
    while pair.near.step() or not ended(runner, id):
        time.sleep(0.001)
    blocks = (length - 1) // BLOCK
    assert runner.completion(id).finished.usage.cached == blocks * BLOCK
    again = runner.submit(prompt, **ASKED, rest=dict(bypass_prefix_cache=True))
    runner.run()
    assert runner.ids(again) == runner.ids(id)
