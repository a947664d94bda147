"""GGUF files of every family hold what the folder holds that they were made of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve import weights
from jaxserve.checkpoint.families import FAMILIES
from jaxserve.checkpoint.gguf_config import from_gguf
from jaxserve.checkpoint.gguf_file import read_header
from jaxserve.checkpoint.model_config import from_hf
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.weights.names import tensors_of
from tests.models.oracle.cases import CASES
from tests.weights.gguf_files import write_gguf
from tests.weights.models import placed

# what GGUF files cannot say has the value of the published models
PUBLISHED = {
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    "qwen3_5": {"linear_num_value_heads": 2},
    "qwen3_5_moe": {"linear_num_value_heads": 2},
    "qwen3_moe": {"mlp_only_layers": []},
    "qwen3_next": {"mlp_only_layers": []},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
}
NAMES = [name for name in CASES if FAMILIES[from_hf(CASES[name].config).family].gguf]


def both(name: str, folder: Path, **changes) -> tuple[Path, Path]:
    """Writes a case as a folder and as a GGUF file of the same name."""
    config = CASES[name].config | PUBLISHED.get(name, {}) | changes
    values = CASES[name].weights(tensors_of(from_hf(config)))
    inner = folder / "folder" / "m"
    inner.mkdir(parents=True)
    (inner / "config.json").write_text(json.dumps(config))
    save_file(values, inner / "model.safetensors")
    return inner, write_gguf(folder / "m.gguf", config, values)


@pytest.mark.parametrize("name", NAMES)
def test_a_gguf_file_is_the_folder_it_was_made_of(name, tmp_path):
    folder, file = map(weights.open_checkpoint, both(name, tmp_path))
    norms = replace(folder.config.norms, less_one=False)
    wanted = replace(folder.config, norms=norms, stored="bfloat16", gguf=True)
    assert file.config == replace(wanted, ropes=file.config.ropes)
    for layer in range(wanted.layers):
        if wanted.rope(layer) is None:
            assert file.config.rope(layer) is None
        else:
            ours, theirs = (
                x.rope(layer).frequencies(wanted.head_dim, 256) for x in (file.config, wanted)
            )
            np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
            assert ours[1] == pytest.approx(theirs[1])
    config, declared, shardings = placed(folder.config, 1, 2)
    wanted = weights.load(folder, config, declared, shardings, "float32", progress=False)
    config, declared, shardings = placed(file.config, 1, 2)
    found = weights.load(file, config, declared, shardings, "float32", progress=False)
    assert found.keys() == wanted.keys()
    for path in wanted:
        # norms that are stored less 1 are rounded once more, and so are decays
        np.testing.assert_allclose(found[path], wanted[path], rtol=1e-6, atol=1e-7, err_msg=path)


def test_value_heads_in_another_order_are_refused(tmp_path):
    header = read_header(both("qwen3_5", tmp_path)[1])
    heads = {"qwen35.ssm.time_step_rank": 6, "qwen35.ssm.inner_size": 6 * 24}
    with pytest.raises(CheckpointError, match="time_step_rank: 6 value heads of 2 key heads"):
        from_gguf(header.fields | heads, header.tensors)


def test_files_with_one_projection_of_all_are_refused(tmp_path):
    header = read_header(both("qwen3_next", tmp_path)[1])
    with pytest.raises(CheckpointError, match=r"ssm_in\.weight: is of older files"):
        from_gguf(header.fields, {*header.tensors, "blk.0.ssm_in.weight"})


@pytest.mark.parametrize("name", ["granite", "olmo2", "smollm3"])
def test_tensors_can_also_be_read_by_the_names_of_a_folder(name, tmp_path):
    folder, file = map(weights.open_checkpoint, both(name, tmp_path))
    for tensor in folder.tensors():
        np.testing.assert_array_equal(file.read(tensor), folder.read(tensor), err_msg=tensor)
    norm = "model.layers.1.post_attention_layernorm.weight"
    np.testing.assert_array_equal(file.read(norm, slice(3, 9)), folder.read(norm, slice(3, 9)))
    query = ("model.layers.1.self_attn.q_proj.weight", slice(5, 11), slice(2, 7))
    np.testing.assert_array_equal(file.read(*query), folder.read(*query))
    with pytest.raises(KeyError):
        file.read("model.layers.1.self_attn.nothing.weight")


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("deepseek2.attention.key_length_mla", None, "key_length_mla: is missing"),
        ("deepseek2.expert_count", 15, "deepseek2.expert_group_count: 15 experts"),
    ],
)
def test_what_a_file_lacks_is_refused_by_the_name_of_its_field(name, change, message, tmp_path):
    header = read_header(both("deepseek_v3", tmp_path)[1])
    with pytest.raises(CheckpointError, match=message):
        from_gguf(header.fields | {name: change}, header.tensors)
