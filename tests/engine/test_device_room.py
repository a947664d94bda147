"""What a device has left for KV, and in which type weights are held, where the settings leave it
open."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.model_config import from_hf
from jaxserve.engine.memory import DeviceRoom, sizes
from jaxserve.engine.sizing import make_plan
from jaxserve.settings.options import make
from jaxserve.settings.schema import ConfigError, EngineConfig

H200 = DeviceRoom("gpu", 141 * 10**9)
CPU = DeviceRoom("cpu", None)
LLAMA = {  # its config.json, as far as it says something
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


@pytest.fixture
def llama() -> ModelConfig:
    return from_hf(LLAMA)


def plan(model: ModelConfig, room: DeviceRoom, **settings):
    config = make(EngineConfig, settings)
    return make_plan(config, model.with_tp(config.mesh.tp), room)


def test_a_plain_start_of_llama_3_8b_on_an_h200_holds_400k_tokens_in_bfloat16(llama):
    made = plan(llama, H200)
    assert made.dtype == made.kv_dtype == np.dtype("bfloat16")
    assert made.pages * made.block_size > 400_000
    assert sizes(made).total < 0.9 * H200.bytes


@pytest.mark.parametrize("mesh", ["tp=2", "spp=2", "tp=4,spp=2", "kvp=2"])
@pytest.mark.parametrize("share", [0.5, 0.95])
def test_whatever_the_mesh_a_device_is_filled_to_its_share_and_no_further(llama, mesh, share):
    made = plan(llama, H200, mesh=mesh, gpu_memory_utilization=share)
    total = sizes(made).total
    assert share * H200.bytes - 2.2 * 2**30 < total < share * H200.bytes


def test_half_the_bytes_of_a_token_are_twice_the_tokens(llama):
    plain, fp8 = plan(llama, H200), plan(llama, H200, kv_cache_dtype="fp8")
    assert 1.8 < fp8.pages / plain.pages < 2.0


def test_on_cpus_weights_are_float32_and_kv_has_a_gib(llama):
    made = plan(llama, CPU)
    assert made.dtype == np.float32
    assert 0.99 * 2**30 < sizes(made).kv <= 2**30
    assert plan(llama, CPU, dtype="bfloat16").dtype == np.dtype("bfloat16")


def test_what_is_given_wins(llama):
    assert plan(llama, H200, pages=77).pages == 77
    assert sizes(plan(llama, H200, kv_memory_gib=2.0)).kv <= 2 * 2**30
    assert plan(llama, H200, dtype="float16").dtype == np.float16
    assert plan(dataclasses.replace(llama, stored="float32"), H200).dtype == np.float32


def test_a_device_that_is_too_small_is_named_with_what_is_missing(llama):
    small = DeviceRoom("gpu", 16 * 10**9)
    with pytest.raises(ConfigError, match=r"0\.9 of 14\.9 GiB leave nothing for KV"):
        plan(llama, small)
    assert plan(llama, small, mesh="tp=2").pages > 1000
