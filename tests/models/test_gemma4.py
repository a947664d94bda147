"""Gemma 4 as hubs hold it, and what is refused of it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoint.model_config import from_hf
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.page_groups import page_windows, pool_page
from jaxserve.settings.schema import ConfigError
from jaxserve.weights.checkpoint import check, open_checkpoint
from jaxserve.weights.names import tensors_of
from tests.checkpoint.test_page_groups import GEMMA4_31B
from tests.engine.harness import engine
from tests.models.oracle.cases import CASES
from tests.models.test_families import write_model


def test_a_config_has_the_sizes_of_the_published_model():
    model = from_hf(GEMMA4_31B)
    assert 30.6e9 < model.parameters < 30.8e9
    bytes_ = 50 * 2 * 16 * 256 * 2 + 10 * 2 * 4 * 512 * 2
    assert model.kv_bytes_per_token() == bytes_
    assert pool_page(model).size == 2 * 16 * 256


def test_small_models_have_a_table_of_inputs_beside_the_embedding():
    config = dict(CASES["gemma4-small"].config)
    whole = from_hf(config)
    without = from_hf(config | {"hidden_size_per_layer_input": 0})
    layers = whole.layers
    table = 128 * layers * 12 + 64 * layers * 12 + 12
    assert whole.parameters - without.parameters == table + layers * (2 * 64 * 12 + 64)
    assert page_windows(whole) == page_windows(without)


def test_keys_of_layers_that_read_those_of_others_are_left_out(tmp_path):
    folder = write_model(tmp_path / "model", "gemma4-small")
    tensors = load_file(folder / "model.safetensors")
    keys = {
        f"model.layers.7.self_attn.{name}.weight": np.ones((32, 64), np.float32)
        for name in ("k_proj", "v_proj", "k_norm")
    }
    save_file(tensors | keys, folder / "model.safetensors")
    found = open_checkpoint(folder)
    check(found, found.config)
    stored = {"model.layers.3.self_attn.q_proj.bias": np.ones(128, np.float32)}
    save_file(tensors | stored, folder / "model.safetensors")
    found = open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"1 unexpected: model.layers.3.self_attn.q_proj"):
        check(found, found.config)


@pytest.mark.parametrize(
    "fields, reason",
    [
        (dict(use_bidirectional_attention="all"), "use_bidirectional_attention: 'all'"),
        (dict(vocab_size_per_layer_input=64, hidden_size_per_layer_input=8), "vocab_size_per_l"),
        (dict(num_global_key_value_heads=3), "num_global_key_value_heads: 4 heads do not share 3"),
        (dict(num_kv_shared_layers=8), "num_kv_shared_layers: must be .* from 0 to 7"),
        (dict(num_kv_shared_layers=5), "num_kv_shared_layers: 5 leave no layer of each kind"),
        (dict(layer_types=["full_attention"] * 7 + ["sliding_attention"]), "layer_types: the last"),
        (dict(enable_moe_block=True), "num_experts: is missing"),
        (dict(per_layer_config=[1]), "per_layer_config: must be an object"),
        (dict(per_layer_config={"3": 1}), "per_layer_config: that of layer 3"),
        (dict(per_layer_config={"3": {"head_dim": 0}}), "head_dim: must be"),
        (dict(attention_bias=True), "attention_bias: True is not supported"),
    ],
    ids=str,
)
def test_configs_that_cannot_be_served_are_refused_by_field(fields, reason):
    with pytest.raises(CheckpointError, match=reason):
        from_hf(CASES["gemma4"].config | fields)


@pytest.mark.parametrize(
    "name, mesh, fields, reason",
    [
        ("gemma4", "", dict(kv_cache_dtype="fp8"), "kv_cache_dtype: fp8 is not possible"),
        ("gemma4-small", "kvp=2", {}, "mesh: layers of model read the keys .*: kvp=1"),
        ("gemma4-small", "spp=2", {}, "mesh: layers of model have inputs of their own"),
        ("gemma4-small", "", dict(layer_groups=2), "mesh: layers of model have inputs"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_with_its_layers_are_refused(name, mesh, fields, reason, tmp_path):
    folder = write_model(tmp_path / "model", name)
    with pytest.raises(ConfigError, match=reason):
        engine(folder, mesh, **fields)


def test_layers_that_read_others_pages_may_be_cut_from_no_stage(tmp_path):
    """Leaves out the inputs of layers, which are refused on several stages for a reason of their
    own."""
    folder = write_model(tmp_path / "model", "gemma4-small")
    config = CASES["gemma4-small"].config | {"hidden_size_per_layer_input": 0}
    (folder / "config.json").write_text(json.dumps(config))
    kept = tensors_of(from_hf(config))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensors[name] for name in kept}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"mesh: layer \d of model reads the keys and values of"):
        engine(folder, "spp=2", max_len=160)
