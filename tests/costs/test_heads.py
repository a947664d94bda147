"""What the lanes of each kind of model send and compute, by hand from the published configs."""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve.checkpoint.model_config import from_hf
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.costs.heads import heads_of
from jaxserve.costs.profiles import devices, windows_of
from jaxserve.lab.simulate.run import System
from jaxserve.lanes.exchange import gather_traffic, pass_kv_traffic
from jaxserve.lanes.work import work_of_decodes
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig

DEEPSEEK_V3 = from_hf(
    {  # its config.json, as far as attention goes; with layers of one kind
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
    }
)
NEXT = MODELS["qwen3-next-80b-a3b"]
GPT_OSS = MODELS["gpt-oss-120b"]


def test_lanes_send_the_queries_and_results_of_latents_and_one_latent():
    """DeepSeek V3, a rank of eight: 16 heads with queries of 512 + 64 numbers and results of 512;
    one latent for all of them."""
    heads = heads_of(DEEPSEEK_V3, 8)
    assert heads.query_bytes == 16 * 576 * 2
    assert heads.new_kv_bytes == heads.kv_bytes == 576 * 2
    assert heads.partial_bytes == 16 * (512 + 1) * 4
    assert heads.pair_flops == 16 * 2 * (576 + 512)
    assert heads_of(DEEPSEEK_V3, 8, fp8=True).kv_bytes == 576 + 2
    work = work_of_decodes(4, 10, 5000.0)
    gathered = gather_traffic(work, heads)
    assert gathered.gathered == 3 * 10 * (18_432 + 1_152)
    assert gathered.returned == 3 * 10 * 32_832
    ring = pass_kv_traffic(work, heads, piece=2048)
    assert (ring.rounds, ring.hops, ring.hop) == (3, 9, 2048 * 1152)


def test_keys_and_values_of_a_hybrid_are_sent_in_one_layer_of_four():
    """Qwen3-Next: 16 heads of 256, 2 kv heads, in 12 of 48 layers. In the others lanes send what
    their tokens make of 32 states of 128 x 128: two matrices of that size in f32. Seconds are per
    layer, averaged over all."""
    heads = heads_of(NEXT, 1)
    assert heads.attending == 1 / 4
    assert heads.passed == 32 * 2 * 128 * 128 * 4 and heads_of(NEXT, 4).passed == heads.passed / 4
    assert heads.query_bytes == 16 * 256 * 2 and heads.new_kv_bytes == 2 * 2 * 256 * 2
    system = System(NEXT, "h100", MeshConfig(kvp=4, tp=2))
    sizes = system.sizes(SchedulerConfig(), CacheConfig(pages=100, block_size=256))
    chooser = sizes.chooser(system.profile)
    attends = System(dataclasses.replace(NEXT, mixers=NEXT.mixers[3:4]), "h100", system.mesh)
    whole = attends.sizes(SchedulerConfig(), sizes.cache).chooser(attends.profile)
    work = work_of_decodes(4, 10, 5000.0)
    seconds, of_whole = (each.seconds(work)["gather"] for each in (chooser, whole))
    attention = [each.attention(work.gathered_pairs, work.shard, 40) for each in (chooser, whole)]
    states = 3 / 4 * whole.rates.all_gather(3 * chooser.heads.passed)
    assert seconds - attention[0] - states == pytest.approx((of_whole - attention[1]) / 4)
    assert states > attention[0] / 10
    found, of_all = system.costs, attends.costs
    assert found.kvp == pytest.approx(of_all.kvp / 4)
    assert found.kvp_token == pytest.approx(of_all.kvp_token / 4)


def test_memory_of_a_hybrid_holds_pages_of_some_layers_beside_the_states_of_all_slots():
    """By hand: 12 layers x 2 x 2 kv heads x 256 x 2 bytes a token on one rank; 36 layers of 32
    states of 128 x 128 in f32 a sequence."""
    system = System(NEXT, "h200", MeshConfig(tp=2, spp=1), kv_gib=8.0)
    token = 12 * 2 * 1 * 256 * 2
    states = 36 * 32 * 128 * 128 * 4 / 2
    assert system.kv_tokens() == 2**33 // token
    assert system.kv_tokens(32) == int((2**33 - 32 * states) / token)


def test_latents_take_the_memory_of_one_vector():
    system = System(DEEPSEEK_V3, "h200", MeshConfig(tp=8), kv_gib=8.0)
    assert system.kv_tokens() == 2**33 // (61 * 576 * 2)


def test_layers_with_a_window_cost_no_more_beyond_it():
    """gpt-oss: every second layer sees 128 tokens."""
    device = devices()["h100"]
    found = device.costs(GPT_OSS, 1)
    assert (found.window, found.windowed) == (128, 0.5)
    plain = device.costs(dataclasses.replace(GPT_OSS, windows=(None,)), 1)
    fixed = plain.decode + 8 * plain.decode_seq
    far, near = (each.attend_decodes(8, 8 * 100_000) - fixed for each in (plain, found))
    assert near == pytest.approx((far + plain.decode_kv * 8 * 128) / 2)
    assert found.attend_decodes(8, 8 * 100) == plain.attend_decodes(8, 8 * 100)
    # a chunk: half of the layers compute all pairs, the others 128 for each query
    launched = found.chunk + 2048 * found.chunk_token
    chunk = found.attend_chunk(100_000, 2048) - launched
    pairs = 2048 * (100_000 + 1024), 2048 * 128
    assert chunk == pytest.approx(found.pair * sum(pairs) / 2, rel=0.03)
    assert found.chunks(4, 4 * 2048, 100_000, 2048) == pytest.approx(
        4 * (found.linear(2048) + found.attend_chunk(100_000 - 1024, 2048)), rel=0.01
    )


@pytest.mark.parametrize("name", ["gemma", "mistral-7b-v0.1", "llama3-8b"])
def test_the_share_of_layers_with_a_window_is_that_of_the_config(name):
    gemma = {  # of Gemma 3 27B
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 168,
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "rms_norm_eps": 1e-6,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    }
    model = MODELS.get(name) or from_hf(gemma)
    windows = {"gemma": (1024, 52 / 62), "mistral-7b-v0.1": (4096, 1.0), "llama3-8b": (0, 0.0)}
    assert windows_of(model) == windows[name]
