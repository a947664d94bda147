"""Weights stay quantised on every mesh: they have the values of the dequantised ones, take the
memory of the file, and what cannot stay so is dequantised, with the reason in the log."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxserve import weights
from jaxserve.checkpoint.specs import Declared, ExpertsSpec
from jaxserve.kernels.quantised import Joined, Quantised, dequantise
from jaxserve.sharding import rules
from jaxserve.weights.kept import Kept, KeptParameter, arrays, tree_of
from tests.weights.models import TINY, of_family, placed, tensors, write_gguf

SIZES = dict(d_model=128, heads=4, kv_heads=2, head_dim=32, d_ff=256, vocab=500)
DENSE = replace(TINY, **SIZES)
MODELS = {
    "dense": DENSE,
    "tied": replace(DENSE, tied=True),
    "experts": of_family("qwen3_moe", **SIZES, mlps=(ExpertsSpec(4, 2, 64),)),
}
MIXED = {"attn_v": "Q5_1", "ffn_up": "Q4_0", "ffn_down": "Q4_1", "attn_output": "F16"}
KINDS = {"Q8_0": "Q8_0", "Q4_1": "Q4_1", "mixed": MIXED}


def kept(file, kvp=1, tp=1, layers=None):
    """The checkpoint, its parameters with those that stay quantised, and their values."""
    checkpoint = weights.open_checkpoint(file)
    config, declared, shardings = placed(checkpoint.config, kvp, tp, layers)
    mesh = shardings[next(iter(declared))].mesh
    some = Kept(checkpoint, checkpoint.config).parameters(declared, config, {"kvp": kvp, "tp": tp})
    parameters = {**declared, **some}
    shardings = {
        path: jax.tree.map(lambda d: rules.sharding(mesh, *d.axes), tree_of(parameter))
        for path, parameter in parameters.items()
    }
    params = weights.load(checkpoint, config, parameters, shardings, "float32", progress=False)
    return checkpoint, parameters, params


def matrix(value, declared: Declared) -> np.ndarray:
    """The parameter that a value stands for."""
    experts = declared.axes[0] == "experts"
    if isinstance(value, Joined):
        parts = [flat(part, experts) for part in value.parts]
        return np.concatenate(parts, value.axis).reshape(declared.shape)
    if declared.axes == ("vocab", "embed") and isinstance(value, Quantised):
        return flat(value, experts).T
    return flat(value, experts).reshape(declared.shape)


def flat(value, experts: bool) -> np.ndarray:
    """A matrix [experts, inputs, ...] with all dimensions of its outputs."""
    if not isinstance(value, Quantised):
        return np.asarray(value)
    value = jax.tree.map(np.asarray, value)
    found = np.asarray(dequantise(jax.tree.map(np.asarray, value.flat(experts))))
    return found.reshape(*found.shape[:-1], *value.leading[int(experts) :], value.outputs)


@pytest.mark.parametrize("kvp, tp", [(1, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_values_are_those_of_the_dequantised_file(model, kind, kvp, tp, tmp_path):
    config = MODELS[model]
    file = write_gguf(tmp_path / "m.gguf", config, tensors(config), KINDS[kind])
    checkpoint, parameters, params = kept(file, kvp, tp)
    split, declared, shardings = placed(checkpoint.config, kvp, tp)
    right = weights.load(checkpoint, split, declared, shardings, "float32", progress=False)
    assert any(isinstance(value, Quantised) for value in params.values())
    assert any(isinstance(value, Joined) for value in params.values()) == (kind == "mixed")
    for path, d in declared.items():
        found = matrix(params[path], d)
        np.testing.assert_allclose(found, right[path], rtol=1e-6, atol=1e-7, err_msg=path)


@pytest.mark.parametrize("kvp, tp", [(1, 1), (2, 2)])
def test_a_stage_reads_its_own_tensors_once_and_takes_no_more_memory(kvp, tp, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", DENSE, tensors(DENSE), "Q8_0")
    checkpoint, parameters, params = kept(file, kvp, tp, range(1))
    nbytes = sum(
        d.size * d.dtype(np.dtype(np.float32)).itemsize for d in arrays(parameters.values())
    )
    assert nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    padding = 12 * DENSE.d_model * 34 // 32
    assert nbytes == checkpoint.bytes_read + padding


def test_a_tied_head_is_the_embedding_itself(tmp_path):
    config = MODELS["tied"]
    file = write_gguf(tmp_path / "m.gguf", config, tensors(config), "Q8_0")
    _, parameters, params = kept(file)
    assert params["head"] is params["embed"]
    distinct = list(arrays([parameters["head"], parameters["embed"]]))
    assert len(distinct) == len(jax.tree.leaves(params["embed"]))


def test_what_cannot_be_split_at_whole_tiles_is_dequantised_with_the_reason(tmp_path, caplog):
    file = write_gguf(tmp_path / "m.gguf", TINY, tensors(TINY), "Q8_0")
    _, parameters, params = kept(file, 1, 4)
    assert isinstance(params["layers.1.attention.o_proj"], jax.Array)
    assert isinstance(params["layers.1.attention.qkv"], Quantised)
    assert (
        "layers.*.attention.o_proj cannot stay quantised: "
        "16 inputs on a device are no multiple of 32" in caplog.text
    )


def test_a_file_of_floats_keeps_nothing(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", DENSE, tensors(DENSE), "F16")
    _, parameters, _ = kept(file)
    assert not any(isinstance(parameter, KeptParameter) for parameter in parameters.values())


def test_quantised_parameters_are_not_saved_as_floats_by_mistake(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", DENSE, tensors(DENSE), "Q8_0")
    checkpoint, _, params = kept(file)
    with pytest.raises(weights.CheckpointError, match=r"embed is quantised, .*=none"):
        weights.save(tmp_path / "saved", params, checkpoint.config)
    assert not (tmp_path / "saved").exists()
