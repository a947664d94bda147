"""Every kind of layer, on every number of lanes, gives the same tokens whatever becomes of its
sequences: prompts planned over lanes, blocks moved, copied and evicted, sequences preempted."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import jax
import pytest

from jaxserve.cache.page_needs import PageNeeds
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.model_config import from_hf
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.engine.engine import Engine
from jaxserve.engine.memory import DeviceRoom
from jaxserve.engine.sizing import make_plan
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.kernels.kv_pages import KVPages
from jaxserve.settings.options import make
from jaxserve.settings.schema import EngineConfig
from tests.checkpoint.test_page_groups import GEMMA, GEMMA4_31B, GEMMA4_SMALL
from tests.engine.harness import Runner, assert_empty, engine, fresh, watch_batches
from tests.lanes.plans import Plans
from tests.models import oracle
from tests.models.test_families import write_model

BLOCK = 4
MAX_LEN = 160
KINDS = {
    "dense": "granite",
    "windows": "gemma3",
    "latent": "deepseek_v3",
    "states": "qwen3_next",
    "experts": "qwen3_moe",
    "sizes": "gemma4",
}
MESHES = ("", "kvp=2", "kvp=4", "kvp=8", "spp=2,kvp=2,tp=2")
DEFAULT = ("latent", "")
DEEPSEEK_V3 = {  # its config.json, as far as the KV of a token depends on it
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
}
TOKENS = 128 * 1024


def tiny(folder: Path, kind: str, mesh: str) -> Engine:
    """An engine with the programs that move and copy pages, where the kind and the mesh have
    several lanes to move them between."""
    moves = "kvp" in mesh
    name = KINDS[kind]
    return engine(
        write_model(folder, name),
        mesh,
        chunk=24,
        seqs=4,
        pages=800,
        block=BLOCK,
        max_len=MAX_LEN,
        planned=moves,
        prefix_copies=moves and kind != "states",
    )


def traffic(kind: str) -> list[list[int]]:
    """Prompts of which most begin alike, that of the oracle among them."""
    rng = random.Random(kind)
    own = oracle.load(KINDS[kind]).prompt
    common = [rng.randrange(120) for _ in range(60)]
    fresh = lambda most: [rng.randrange(120) for _ in range(rng.randint(1, most))]
    begun = [common[: rng.choice((0, 28, 48))] + fresh(60) for _ in range(5)]
    return [own, *begun, *(common[:48] + fresh(8) for _ in range(6))]


@pytest.mark.parametrize(
    "kind, mesh",
    [
        pytest.param(kind, mesh, marks=[] if (kind, mesh) == DEFAULT else pytest.mark.matrix)
        for kind in KINDS
        for mesh in MESHES
    ],
)
def test_tokens_are_those_of_a_quiet_engine_and_of_transformers(kind, mesh, tmp_path):
    prompts = traffic(kind)
    quiet = Runner(tiny(tmp_path / "quiet", kind, ""))
    asked = dict(max_tokens=40, ignore_eos=True)
    right = []
    for prompt in prompts:
        id = quiet.submit(prompt, **asked)
        quiet.run()
        right.append(quiet.ids(id))
    answer = oracle.load(KINDS[kind])
    assert right[0][: len(answer.tokens)] == answer.tokens

    real = tiny(tmp_path / "real", kind, mesh)
    plan = real.worker.plan
    lanes = plan.mesh.kvp
    longest = max(map(len, prompts)) + asked["max_tokens"]
    short = int(1.5 * PageNeeds(BLOCK, plan.windows).of(longest)) // lanes + 2 * plan.page_groups
    serving = [("random" if lanes > 1 else "grow", None, short)]
    if plan.moves:
        serving += [
            ("striped", Plans(1, lanes, longest=40), short),
            ("zigzag", Plans(2, lanes, longest=40), short),
        ]
    if plan.moves and kind != "states":  # whose blocks are not copied
        serving.append(("grow", None, 800))
    preempted = 0
    evicted: list[int] = []
    for placement, planner, pages in serving:
        tight = fresh(real, placement, pages, planner, decode_reserve=0.0)
        cache = tight.scheduler.cache
        cache.pages.on_evict = lambda page, key: evicted.append(page)
        moves: list[int] = []
        watch_batches(tight, lambda batch, moves=moves: moves.append(len(batch.moves)))
        serve(tight, prompts, right, asked)
        preempted += tight.scheduler.slots.preemptions
        copies = placement == "grow" and lanes > 1
        assert sum(moves) or not (planner or copies), "no block changed lanes"
    assert preempted, "pages were not short"
    assert evicted or kind == "states", "no block was evicted"


def serve(
    real: Engine, prompts: list[list[int]], right: list[list[int]], asked: dict[str, object]
) -> None:
    """Serves the prompts twice, in another order each time, in small chunks and in large ones, and
    compares their tokens."""
    runner = Runner(real)
    for seed, chunks in enumerate(((1, 3, 11), (5, 24))):
        order = random.Random(seed).sample(range(len(prompts)), len(prompts))
        ids = [(at, runner.submit(prompts[at], **asked)) for at in order]
        runner.run(chunks=chunks, seed=seed)
        for at, id in ids:
            assert runner.ids(id) == right[at], f"prompt {at}"
    assert_empty(real)


def made(model: ModelConfig) -> StagePlan:
    """Plans an engine with eight slots and 100 pages on one device that everything fits."""
    settings = dict(pages=100, max_seqs=8, dtype="bfloat16", max_model_len=TOKENS)
    config = make(EngineConfig, settings)
    model = dataclasses.replace(model, max_len=TOKENS)
    return make_plan(config, model.with_tp(1), DeviceRoom("gpu", 10**13))


def bytes_of(plan: StagePlan) -> tuple[int, float]:
    """Returns the bytes of a page in all pools, and of a sequence's states."""
    size = lambda cache: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache))
    pages = states = 0
    for cache in plan.caches(range(plan.model.layers)):
        if isinstance(cache, KVPages):
            pages += size(cache)
        else:
            states += size(cache)
    return pages // plan.pages, states / plan.slots


@pytest.mark.parametrize(
    "model, token, states",
    [
        # a latent of 512 numbers and a rotated key of 64, for all heads
        (from_hf(DEEPSEEK_V3), 61 * 576 * 2, 0),
        # 12 layers with keys and values of two heads; 36 with matrices of f32 of 32 heads, and the
        # last three inputs of a convolution
        (
            MODELS["qwen3-next-80b-a3b"],
            12 * 2 * 2 * 256 * 2,
            36 * (32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2),
        ),
    ],
    ids=["deepseek-v3", "qwen3-next-80b"],
)
def test_pools_and_states_have_the_bytes_of_the_formulas(model, token, states):
    plan = made(model)
    page, kept = bytes_of(plan)
    assert page == plan.block_size * token and kept == states
    assert not states or 75e6 < states < 78e6


@pytest.mark.parametrize(
    "model, windowed, whole",
    [
        (GEMMA, 52 * 2 * 16 * 128 * 2, 10 * 2 * 16 * 128 * 2),
        (MODELS["gpt-oss-120b"], 18 * 2 * 8 * 64 * 2, 18 * 2 * 8 * 64 * 2),
        # two layers that see all tokens share a page, of the size of one with a window
        (from_hf(GEMMA4_31B), 50 * 2 * 16 * 256 * 2, 10 * 2 * 4 * 512 * 2),
        # the other way round; the last 20 layers keep nothing
        (from_hf(GEMMA4_SMALL), 12 * 2 * 256 * 2, 3 * 2 * 512 * 2),
    ],
    ids=["gemma-3-27b", "gpt-oss-120b", "gemma-4-31b", "gemma-4-small"],
)
def test_pools_of_windows_have_the_bytes_of_what_these_see(model, windowed, whole):
    """Counts the bytes of 128K tokens. windowed, whole: bytes of a token in all layers with a
    window, and in those that see all tokens."""
    plan = made(model)
    page, _ = bytes_of(plan)
    window = max(filter(None, map(model.window, range(model.layers))))
    formula = whole * TOKENS + windowed * window
    taken = page * int(PageNeeds(plan.block_size, plan.windows).of(TOKENS))
    assert formula <= taken < formula * 1.01 + 2 * page * len(plan.windows)
