"""Saved parameters are restored on other meshes, if their shapes allow it."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import weights
from tests.weights.models import TINY, assembled, placed, tensors, write_folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory, smollm2_gguf):
    """Two stages on two lanes and two ranks each, saved into one folder."""
    folder = tmp_path_factory.mktemp("orbax")
    values = tensors(TINY)
    checkpoint = weights.open_checkpoint(write_folder(folder / "hf", TINY, values))
    params = {}
    for layers in (range(1), range(1, 2)):
        config, declared, shardings = placed(TINY, 2, 2, layers)
        params |= weights.load(checkpoint, config, declared, shardings, "float32", progress=False)
    weights.save(folder / "saved", params, checkpoint.config, smollm2_gguf)
    return folder / "saved", assembled(TINY, values, 1)


@pytest.mark.parametrize("kvp, tp", [(1, 1), (1, 2), (4, 1)])
@pytest.mark.parametrize("layers", [range(2), range(1, 2)])
def test_parameters_are_restored_onto_other_meshes(saved, kvp, tp, layers):
    folder, expected = saved
    config, declared, shardings = placed(TINY, kvp, tp, layers)
    params = weights.restore(folder, declared, shardings, "float32")
    assert params.keys() == declared.keys()
    for path, param in params.items():
        assert param.sharding == shardings[path]
        np.testing.assert_array_equal(np.asarray(param), expected[path], err_msg=path)


def test_a_saved_folder_is_a_source_like_any_other(saved):
    folder, expected = saved
    checkpoint = weights.open_checkpoint(folder)
    config, declared, shardings = placed(checkpoint.config, 1, 1)
    params = weights.load(checkpoint, config, declared, shardings, "bfloat16", progress=False)
    assert checkpoint.config.heads == TINY.heads and checkpoint.tokenizer == folder
    assert params["layers.0.attention.qkv"].dtype == "bfloat16"
    np.testing.assert_array_equal(
        np.asarray(params["norm"]), expected["norm"].astype(params["norm"].dtype)
    )
    assert weights.check(checkpoint, config) is None


def test_a_folder_with_the_names_of_version_0_1_is_read_with_a_warning(saved, tmp_path, caplog):
    folder, expected = saved
    config, declared, shardings = placed(TINY, 1, 1)
    params = weights.restore(folder, declared, shardings, "float32")
    old = {"attn_norm": "norm1", "mlp_norm": "norm2", "o_proj": "o"}
    named = {
        ".".join(
            old.get(part, part) for part in path.split(".") if part not in ("attention", "mlp")
        ): value
        for path, value in params.items()
    }
    assert {"layers.1.norm1", "layers.1.o", "layers.1.gate_up"} <= named.keys()
    weights.save(tmp_path, named, TINY)
    assert not caplog.records
    restored = weights.restore(tmp_path, declared, shardings, "float32")
    assert restored.keys() == declared.keys()
    for path, param in restored.items():
        np.testing.assert_array_equal(np.asarray(param), expected[path], err_msg=path)
    assert "names of jaxserve 0.1" in caplog.text and "save the model again" in caplog.text
    assert weights.open_checkpoint(tmp_path).tensors().keys() == declared.keys()


def test_a_degree_that_repeats_kv_heads_differently_is_refused_before_allocation(saved):
    config, declared, shardings = placed(TINY, 1, 4)
    with pytest.raises(
        weights.CheckpointError,
        match=r"layers.0.attention.qkv is \[64, 2, 4, 16\], should be \[64, 4, 3, 16\].*"
        "load the original",
    ):
        weights.restore(saved[0], declared, shardings, "float32")


def test_missing_parameters_are_named_together(saved):
    config, declared, shardings = placed(TINY, 1, 1)
    more = declared | {"layers.7.o_proj": declared["norm"], "layers.8.o_proj": declared["norm"]}
    with pytest.raises(
        weights.CheckpointError, match=r"layers\.7\.o_proj is missing; layers\.8\.o_proj is missing"
    ):
        weights.restore(
            saved[0],
            more,
            shardings | {"layers.7.o_proj": None, "layers.8.o_proj": None},
            "float32",
        )


def test_saved_parameters_are_never_overwritten(saved):
    with pytest.raises(weights.CheckpointError, match="holds saved parameters already"):
        weights.save(saved[0], {}, TINY)


def test_a_saved_folder_keeps_ends_and_recommended_sampling(tmp_path):
    config = replace(TINY, eos_ids=(7, 9), sampling=(("top_k", 5), ("max_tokens", 8)))
    weights.save(tmp_path, {"norm": jnp.ones(3)}, config)
    found = weights.open_checkpoint(tmp_path).config
    assert (found.eos_ids, found.sampling) == (config.eos_ids, config.sampling)


def test_a_damaged_folder_is_a_clear_error(tmp_path):
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / "_METADATA").write_text("{}")
    (tmp_path / "config.json").write_text(
        (write_folder(tmp_path / "hf", TINY, tensors(TINY)) / "config.json").read_text()
    )
    config, declared, shardings = placed(TINY, 1, 1)
    with pytest.raises(weights.CheckpointError, match="not readable as an orbax checkpoint"):
        weights.load(
            weights.open_checkpoint(tmp_path),
            config,
            declared,
            shardings,
            "float32",
            progress=False,
        )
