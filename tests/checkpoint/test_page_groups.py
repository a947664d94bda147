"""Which layers share a page table, and the bytes of KV that follow."""

from __future__ import annotations

import dataclasses
import math

import pytest

from jaxserve.cache import CacheManager, LaneRules
from jaxserve.cache.page_needs import PageNeeds
from jaxserve.checkpoint.model import layers_of
from jaxserve.checkpoint.model_config import from_hf
from jaxserve.checkpoint.page_groups import (
    ONE_GROUP,
    layer_page,
    page_places,
    page_windows,
    pool_count,
    pool_page,
    window_blocks,
)
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.settings.schema import CacheConfig, ConfigError

BLOCK = 16
TOKENS = 128 * 1024
GEMMA = dataclasses.replace(
    MODELS["llama3-8b"],
    name="gemma-3-27b",
    layers=62,
    heads=32,
    kv_heads=16,
    head_dim=128,
    windows=(1024,) * 5 + (None,),
)
GPT_OSS = MODELS["gpt-oss-120b"]
GEMMA4_31B = {  # a config.json
    "architectures": ["Gemma4ForCausalLM"],
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
}
GEMMA4_SMALL = {  # the last 20 of 35 layers read the pages of two others
    "architectures": ["Gemma4ForCausalLM"],
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
}


@pytest.mark.parametrize("model, windows, pools", [(GEMMA, (1024,) * 6, 10), (GPT_OSS, (128,), 18)])
def test_groups_of_a_window_are_as_large_as_the_group_that_sees_all(model, windows, pools):
    assert page_windows(model) == windows
    assert pool_count(model, windows, range(model.layers)) == pools


@pytest.mark.parametrize(
    "tp, windows, pools, parts",
    # with 8 ranks there are copies of kv heads, and a layer that sees all fills a page
    [(1, 10, 5, {2}), (4, 10, 5, {2}), (8, 5, 10, {1})],
)
def test_layers_with_smaller_heads_share_the_pages_of_larger_ones(tp, windows, pools, parts):
    model = from_hf(GEMMA4_31B).with_tp(tp)
    assert page_windows(model) == (1024,) * windows
    assert pool_count(model, page_windows(model), range(60)) == pools
    places = page_places(model, page_windows(model), range(60))
    whole = [layer for layer in range(60) if model.window(layer) is None]
    assert {places[layer].parts for layer in whole} == parts
    assert len(set(places.values())) == 60
    for layer, place in places.items():
        page = layer_page(model, layer)
        assert page.size * place.parts == pool_page(model).size and place.part < place.parts


def test_layers_that_read_the_pages_of_others_have_their_places():
    model = from_hf(GEMMA4_SMALL)
    places = page_places(model, page_windows(model), range(35))
    assert len({places[layer] for layer in range(15)}) == 15
    for layer in range(15, 35):
        assert places[layer] == places[14 if model.window(layer) is None else 13]
    with pytest.raises(ConfigError, match=r"mesh: layer 17 of .* of layer 13"):
        page_places(model, page_windows(model), range(17, 35))


@pytest.mark.parametrize("windows", [(None,), (4096,), (None, None, 64)])
def test_models_without_windows_or_with_few_or_with_nothing_else_have_one_group(windows):
    model = dataclasses.replace(GEMMA, windows=windows)
    assert page_windows(model) == ONE_GROUP
    places = page_places(model, ONE_GROUP, range(5, 9))
    assert [place.pool for place in places.values()] == list(range(4))


@pytest.mark.parametrize("stages", [1, 2, 3, 7])
@pytest.mark.parametrize("model", [GEMMA, GPT_OSS], ids=lambda model: model.name)
def test_every_layer_has_a_pool_that_no_other_of_its_group_has(model, stages):
    windows = page_windows(model)
    for layers in layers_of(model, stages):
        places = page_places(model, windows, layers)
        assert sorted(places) == list(layers)
        assert len(set(places.values())) == len(layers)
        for layer, place in places.items():
            assert model.window(layer) == (None, *windows)[place.group]


@pytest.mark.parametrize("model, gain", [(GEMMA, 5.5), (GPT_OSS, 1.9)], ids=["gemma", "gpt-oss"])
def test_kv_of_a_long_sequence_has_the_bytes_of_the_formula(model, gain):
    """Full layers keep all tokens, others what their window sees, and each group of layers at most
    a block more."""
    windows = page_windows(model)
    pools = pool_count(model, windows, range(model.layers))
    cache = CacheManager(CacheConfig(block_size=BLOCK, pages=20_000), 1, 1, rules=rules(windows))
    layer = model.kv_bytes_per_token() // model.layers
    page = pools * layer * BLOCK
    whole = layer * sum(min(TOKENS, model.window(at) or TOKENS) for at in range(model.layers))
    taken = cache.needs.of(TOKENS) * page
    assert whole <= taken <= whole * 1.01 + len(windows) * 2 * page
    assert TOKENS * model.kv_bytes_per_token() / taken > gain


def test_five_times_as_many_sequences_of_128k_tokens_fit():
    """With the shape of Gemma 3, memory that holds two sequences in one table holds ten in page
    groups."""
    memory = 2 * TOKENS * GEMMA.kv_bytes_per_token()
    assert fitting(GEMMA, ONE_GROUP, memory) == 2
    assert fitting(GEMMA, page_windows(GEMMA), memory) >= 2 * 5


def fitting(model, windows, memory: int) -> int:
    """Counts the sequences that are computed whole, in chunks, before pages run out; all stay."""
    pools = pool_count(model, windows, range(model.layers))
    page = pools * model.kv_bytes_per_token() // model.layers * BLOCK
    config = CacheConfig(block_size=BLOCK, pages=memory // page, prefix_caching=False)
    cache = CacheManager(config, 1, 20, rules=rules(windows))
    chunk = 2048
    for slot in range(20):
        cache.admit(slot, cache.match(None, 0).pages, 0)
        for start in range(0, TOKENS, chunk):
            cache.pass_windows(slot, start)
            if cache.available < chunk // BLOCK * cache.needs.per_block:
                return slot
            cache.extend(slot, chunk // BLOCK)
        cache.pass_windows(slot, TOKENS)
        cache.check()
    return 20


@pytest.mark.parametrize("windows", [(), (33,), (129, 1025), (33,) * 6])
@pytest.mark.parametrize("pages", [3, 50, 100, 1000])
def test_no_longer_sequence_takes_as_few_pages_as_the_longest(windows, pages):
    needs = PageNeeds(BLOCK, windows)
    longest = needs.longest(pages)
    assert needs.of(longest) <= pages < needs.of(longest + 1)


def rules(windows) -> LaneRules:
    return LaneRules(ascending=True, windows=windows)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 128])
def test_the_blocks_of_a_window_are_those_that_a_token_sees_wherever_it_is(window):
    seen = [
        position // BLOCK - max(0, position - window + 1) // BLOCK + 1 for position in range(400)
    ]
    assert window_blocks(window, BLOCK) == max(seen) == math.ceil((window - 1) / BLOCK) + 1
