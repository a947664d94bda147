"""Loading gives the declared parameters on every mesh from every kind of checkpoint, and reads only
what is needed."""

import tracemalloc
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import weights
from jaxserve.checkpoint.model_config import from_hf, to_hf
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.kernels.quantised import dequantise
from jaxserve.sharding import rules
from jaxserve.weights.kept import Kept
from jaxserve.weights.names import build, tensors_of
from jaxserve.weights.random_weights import RandomWeights
from tests.models.oracle.cases import CASES
from tests.weights.models import (
    GGUF_KINDS,
    KINDS,
    TINY,
    assembled,
    placed,
    tensors,
    write_folder,
    write_gguf,
)
from tests.weights.quantised.folders import FORMATS, write_both


def loaded(source, kvp=1, tp=1, dtype="float32", layers=None):
    checkpoint = weights.open_checkpoint(source)
    config, declared, shardings = placed(checkpoint.config, kvp, tp, layers)
    return checkpoint, weights.load(checkpoint, config, declared, shardings, dtype, progress=False)


def same(params, expected):
    assert params.keys() <= expected.keys()
    for path, param in params.items():
        np.testing.assert_array_equal(np.asarray(param), expected[path], err_msg=path)


@pytest.mark.parametrize("kvp, tp", [(1, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_folders_load_on_every_split(kind, kvp, tp, tmp_path):
    config = KINDS[kind]
    values = tensors(config)
    _, params = loaded(write_folder(tmp_path, config, values, shards=3), kvp, tp)
    assert len(params) == len(assembled(config, values, tp))
    same(params, assembled(config, values, tp))


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_gguf_files_load_like_folders(kind, tmp_path):
    config = KINDS[kind]
    values = tensors(config)
    checkpoint, params = loaded(write_gguf(tmp_path / "m.gguf", config, values), 1, 2)
    assert checkpoint.config == replace(config, name="m", gguf=True)
    same(params, assembled(config, values, 2))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantised_columns_and_rows_are_those_of_the_whole(kind, tmp_path):
    checkpoint = weights.open_checkpoint(write_gguf(tmp_path / "m.gguf", TINY, tensors(TINY), kind))
    for name in (
        "blk.1.attn_q.weight",
        "blk.1.ffn_down.weight",
        "token_embd.weight",
    ):
        whole = checkpoint.read(name)
        for rows, columns in (
            ((16, 48), (32, 64)),
            ((3, 21), (5, 40)),
            ((0, 0), (0, 64)),
            ((7, 8), (0, 64)),
        ):
            part = checkpoint.read(name, slice(*rows), slice(*columns))
            np.testing.assert_array_equal(part, whole[slice(*rows), slice(*columns)])


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes_are_converted_to_nearest(stored, dtype, tmp_path):
    values = {name: value.astype(stored) for name, value in tensors(TINY).items()}
    _, params = loaded(write_folder(tmp_path, TINY, values), dtype=dtype)
    expected = values["model.layers.0.mlp.down_proj.weight"].T.astype(
        params["layers.0.mlp.down"].dtype
    )
    assert params["layers.0.mlp.down"].dtype == dtype
    np.testing.assert_array_equal(np.asarray(params["layers.0.mlp.down"]), expected)


def test_a_stage_reads_its_own_tensors_once_whatever_the_number_of_lanes(tmp_path):
    values = tensors(TINY)
    folder = write_folder(tmp_path, TINY, values)
    first = sum(
        v.nbytes
        for name, v in values.items()
        if name.startswith(("model.layers.0.", "model.embed_tokens"))
    )
    last = sum(
        v.nbytes
        for name, v in values.items()
        if name.startswith(("model.layers.1.", "model.norm", "lm_head"))
    )
    for kvp, tp in ((1, 1), (4, 1), (2, 2)):
        for layers, nbytes in ((range(1), first), (range(1, 2), last)):
            checkpoint, _ = loaded(folder, kvp, tp, layers=layers)
            assert checkpoint.bytes_read == nbytes, (kvp, tp, layers)


@pytest.mark.parametrize(
    "write",
    [lambda p, v: write_folder(p, TINY, v), lambda p, v: write_gguf(p / "m.gguf", TINY, v, "Q8_0")],
)
def test_a_rank_reads_its_part_of_each_split_tensor(write, tmp_path):
    checkpoint = weights.open_checkpoint(write(tmp_path, tensors(TINY)))
    tp = 2
    config, declared, shardings = placed(TINY, 1, tp)

    def bytes_of(path, index):
        before = checkpoint.bytes_read
        full = tuple(slice(*s.indices(size)[:2]) for s, size in zip(index, declared[path].shape))
        build(path, full, checkpoint, checkpoint.config, config, np.dtype(np.float32))
        return checkpoint.bytes_read - before

    for path, d in declared.items():
        whole = bytes_of(path, (slice(None),) * len(d.shape))
        for index in shardings[path].devices_indices_map(d.shape).values():
            assert bytes_of(path, index) == (whole if "norm" in path else whole // tp), path


def test_building_a_parameter_holds_little_more_than_the_parameter(tmp_path):
    """Converted and transposed piece by piece: no copy of the whole tensor in between."""
    config = replace(TINY, d_model=512, heads=8, kv_heads=4, head_dim=64, d_ff=2048, vocab=8192)
    values = {name: v.astype(ml_dtypes.bfloat16) for name, v in tensors(config).items()}
    checkpoint = weights.open_checkpoint(write_folder(tmp_path, config, values))
    split, declared, _ = placed(config, 1, 1, range(1))
    for path, d in declared.items():
        whole = tuple(slice(0, size) for size in d.shape)
        tracemalloc.start()
        build(path, whole, checkpoint, config, split, np.dtype(np.float32))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1.6 * np.prod(d.shape) * 4 + 2**20, path


@pytest.mark.parametrize("kvp, tp", [(1, 1), (2, 1), (2, 2)])
def test_cpu_devices_take_over_what_was_built(kvp, tp, tmp_path, monkeypatch):
    """Without a copy: lanes share the memory of one array."""
    folder = write_folder(tmp_path, TINY, tensors(TINY))
    _, params = loaded(folder, kvp, tp)
    for path in (
        "embed",
        "head",
        "layers.0.attention.qkv",
        "layers.0.attention.o_proj",
        "layers.0.mlp.gate_up",
    ):
        shards = params[path].addressable_shards
        places = {shard.data.unsafe_buffer_pointer() for shard in shards}
        assert len(shards) == kvp * tp and len(places) == tp, path


def test_random_weights_do_not_depend_on_the_split():
    checkpoint = weights.open_checkpoint("random:tiny")
    values = {name: checkpoint.read(name) for name in checkpoint.tensors()}
    for kvp, tp in ((1, 1), (2, 2), (1, 4)):
        same(loaded("random:tiny", kvp, tp)[1], assembled(MODELS["tiny"], values, tp))
    assert checkpoint.bytes_read == 0 and checkpoint.tokenizer is None


def test_random_weights_are_normal_and_differ_by_tensor_and_seed():
    big = RandomWeights(replace(TINY, d_ff=40000, d_model=512))
    down, up = (big.read(f"model.layers.0.mlp.{name}_proj.weight") for name in ("down", "up"))
    assert abs(down.std() - 0.02) < 1e-4 and abs(down.mean()) < 1e-4
    # no row repeats on the tape
    assert len(np.unique(down[0])) > 10000 and not np.array_equal(down[0], down[1])
    assert not np.array_equal(down.ravel()[:1000], up.ravel()[:1000])
    assert not np.array_equal(
        RandomWeights(TINY, 1).read("lm_head.weight"), RandomWeights(TINY).read("lm_head.weight")
    )
    np.testing.assert_array_equal(
        big.read("model.layers.0.mlp.down_proj.weight", slice(5, 500), slice(7, 39999)),
        down[5:500, 7:39999],
    )


def test_all_that_is_wrong_is_reported_at_once_and_nothing_is_loaded(tmp_path):
    values = tensors(TINY)
    del values["model.layers.0.mlp.up_proj.weight"], values["model.layers.1.mlp.up_proj.weight"]
    values["model.layers.0.self_attn.q_proj.bias"] = np.ones(64, np.float32)
    values["model.layers.1.mlp.down_proj.weight"] = np.zeros((64, 127), np.float32)
    values["model.norm.weight"] = np.zeros(64, np.int32)
    with pytest.raises(weights.CheckpointError) as error:
        loaded(write_folder(tmp_path, TINY, values))
    text = str(error.value)
    assert "2 missing: model.layers.0.mlp.up_proj.weight, model.layers.1.mlp.up" in text
    assert "1 unexpected: model.layers.0.self_attn.q_proj.bias" in text
    assert (
        "1 misshaped: model.layers.1.mlp.down_proj.weight is [64, 127], should be [64, 128]" in text
    )
    assert "model.norm.weight is I32" in text


def test_biases_of_zero_of_quantised_layers_are_left_out_and_said_once(tmp_path, caplog):
    quantised, _ = write_both(tmp_path, to_hf(TINY), tensors(TINY), "gptq")
    file = quantised / "model.safetensors"
    held = load_file(file)
    names = [name.removesuffix("qweight") + "bias" for name in held if name.endswith(".qweight")]
    _, expected = loaded(quantised)
    zeros = {name: np.zeros(held[f"{name[:-4]}scales"].shape[1], np.float16) for name in names}
    save_file(held | zeros, file)
    for _ in range(2):
        same(loaded(quantised)[1], expected)
    assert caplog.text.count("left out biases of zero: ['model.layers.0.mlp.down_proj.bias'") == 1
    zeros[names[0]][-1] = 1
    save_file(held | zeros, file)
    with pytest.raises(weights.CheckpointError, match=f"1 unexpected: {names[0]}$"):
        loaded(quantised)


def test_copies_and_derived_tensors_of_old_checkpoints_are_not_unexpected(tmp_path):
    config = KINDS["tied"]
    values = tensors(config)
    extra = {
        "lm_head.weight": values["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32),
    }
    same(loaded(write_folder(tmp_path, config, values | extra))[1], assembled(config, values, 1))


def test_the_real_first_layer_is_the_same_from_gguf_and_from_safetensors(
    smollm2_gguf, smollm2_first_layers
):
    gguf = weights.open_checkpoint(smollm2_gguf).config
    folder = weights.open_checkpoint(smollm2_first_layers)
    assert replace(gguf, name="", layers=5, gguf=False) == replace(folder.config, name="")
    weights.check(folder, folder.config.with_tp(3))
    (_, a), (_, b) = (
        loaded(source, 1, 3, layers=range(1)) for source in (smollm2_gguf, smollm2_first_layers)
    )
    same(a, {path: np.asarray(value) for path, value in b.items()})


@pytest.mark.matrix
def test_the_real_model_is_the_same_from_gguf_and_from_safetensors(smollm2_gguf, smollm2_folder):
    gguf = weights.open_checkpoint(smollm2_gguf)
    folder = weights.open_checkpoint(smollm2_folder)
    assert (
        replace(gguf.config, name="", gguf=False)
        == replace(folder.config, name="")
        == replace(MODELS["smollm2-135m"], name="")
    )
    weights.check(folder, folder.config.with_tp(3))
    (_, a), (_, b) = (
        loaded(source, 1, 3, layers=range(29, 30)) for source in (smollm2_gguf, smollm2_folder)
    )
    same(a, {path: np.asarray(value) for path, value in b.items()})


DENSE = {"qkv", "o_proj", "gate_up", "down"}
# by format; groups whose inputs are no neighbours are dequantised
KEPT = {"mxfp4": {"expert_gate_up", "expert_down"}, "desc_act": set()}


def written(folder, form):
    """A tiny model in a format, and in floats."""
    if form != "mxfp4":
        return write_both(folder, to_hf(TINY), tensors(TINY), form)
    case = CASES["gpt_oss"]
    return write_both(folder, case.config, case.weights(tensors_of(from_hf(case.config))), form)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("form", FORMATS)
def test_quantised_folders_load_like_the_floats_that_they_mean(form, tp, tmp_path):
    quantised, floats = written(tmp_path, form)
    _, expected = loaded(floats, 2, tp)
    _, params = loaded(quantised, 2, tp)
    assert params.keys() == expected.keys()
    for path, param in params.items():
        np.testing.assert_allclose(param, expected[path], rtol=1e-6, atol=1e-7, err_msg=path)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("form", FORMATS)
def test_parameters_that_stay_quantised_are_the_floats_that_they_mean(form, tp, tmp_path):
    quantised, floats = written(tmp_path, form)
    _, expected = loaded(floats, 2, tp)
    checkpoint = weights.open_checkpoint(quantised)
    model, declared, shardings = placed(checkpoint.config, 2, tp)
    kept = Kept(checkpoint, checkpoint.config).parameters(declared, model, {"kvp": 2, "tp": tp})
    assert {path.split(".")[-1] for path in kept} == KEPT.get(form, DENSE)
    mesh = next(iter(shardings.values())).mesh
    for path, parameter in kept.items():
        places = jax.tree.map(lambda array: rules.sharding(mesh, *array.axes), parameter.tree())
        w = parameter.place(places, np.dtype(np.float32))
        values = dequantise(w.flat(experts="expert" in path)).reshape(expected[path].shape)
        np.testing.assert_allclose(values, expected[path], rtol=1e-6, atol=1e-6, err_msg=path)
