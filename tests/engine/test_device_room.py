"""Sizes KV by what a device's memory has left, and chooses the type of weights, where the settings
leave both open."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.model_config import from_hf
from jaxserve.engine import memory
from jaxserve.engine.memory import SHARE_VARIABLES, DeviceRoom, claim, sizes
from jaxserve.engine.sizing import make_plan
from jaxserve.settings.options import make
from jaxserve.settings.schema import ConfigError, EngineConfig

H200 = DeviceRoom("gpu", 130 * 10**9)  # what JAX has of it
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
    assert sizes(made).total < H200.bytes


@pytest.mark.parametrize("mesh", ["tp=2", "spp=2", "tp=4,spp=2", "kvp=2"])
@pytest.mark.parametrize("gigabytes", [70, 130])
def test_whatever_the_mesh_what_jax_has_is_filled_and_no_more(llama, mesh, gigabytes):
    room = DeviceRoom("gpu", gigabytes * 10**9)
    assert room.bytes - 2.2 * 2**30 < sizes(plan(llama, room, mesh=mesh)).total < room.bytes


@pytest.mark.parametrize(("devices", "taken"), [(1, "0.8"), (8, "0.78")])
def test_jax_takes_the_share_that_settings_name_less_what_collectives_take(
    monkeypatch, devices, taken
):
    for name in SHARE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    claim(0.8, devices)
    assert os.environ[SHARE_VARIABLES[0]] == taken


@pytest.mark.parametrize("name", SHARE_VARIABLES)
def test_a_share_in_the_environment_stays(monkeypatch, name):
    monkeypatch.setattr(os, "environ", {name: "0.5"})
    claim(0.8, 1)
    assert os.environ == {name: "0.5"}


def test_a_leader_counts_the_memory_of_the_gpu_that_has_least(monkeypatch, tmp_path):
    """Its workers have the devices, and follow it in the number of pages."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 81559\necho 24564\n")
    smi.chmod(0o755)
    monkeypatch.setattr(memory, "_likely_platform", lambda: "gpu")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in SHARE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert DeviceRoom.of_machine(0.92, 2) == DeviceRoom("gpu", int(24564 * 2**20 * 0.9))


def test_a_leader_without_the_drivers_tool_says_so_and_goes_on(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(memory, "_likely_platform", lambda: "gpu")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert DeviceRoom.of_machine(0.92, 1) == DeviceRoom("gpu", None)
    assert "memory of GPUs is not known" in caplog.text


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
    assert plan(dataclasses.replace(llama, stored="float32"), H200, dtype="float32").dtype == (
        np.float32
    )


def test_a_checkpoint_in_float32_is_bfloat16_on_gpus(llama):
    assert plan(dataclasses.replace(llama, stored="float32"), H200).dtype == np.dtype("bfloat16")


def test_a_device_that_is_too_small_is_named_with_what_is_missing(llama):
    small = DeviceRoom("gpu", 16 * 10**9)
    with pytest.raises(ConfigError, match=r"14\.9 GiB, at 0\.92 of the device, leave nothing"):
        plan(llama, small)
    assert plan(llama, small, mesh="tp=2").pages > 1000
