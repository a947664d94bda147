"""Folders as people have them: files that are not of the model, tensors under other prefixes, no
head, no index."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve import weights
from jaxserve.checkpoint.model_paths import CheckpointError
from tests.weights.models import KINDS, TINY, tensors, write_folder

ONE = {"other.weight": np.ones(3, np.float32)}
TIED = KINDS["tied"]


def opened(folder):
    checkpoint = weights.open_checkpoint(folder)
    weights.check(checkpoint, checkpoint.config)
    return checkpoint


@pytest.mark.parametrize(
    "name",
    [
        "consolidated-00001.safetensors",
        "adapter_model.safetensors",
        "optimizer.safetensors",
        "model.fp16.safetensors",
        "model-00001-of-00001.safetensors",
    ],
)
def test_files_beside_the_model_are_left_out_and_said(name, tmp_path, caplog):
    folder = write_folder(tmp_path, TINY, values := tensors(TINY))
    (folder / "model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
    save_file(ONE, folder / name)
    (folder / "model.safetensors.index.json").write_text("an older one")
    assert opened(folder).tensors().keys() == values.keys()
    assert f"left out, as they are not of the model: {name}" in caplog.text


def test_weights_may_have_any_name_where_nothing_says_which_they_are(tmp_path):
    folder = write_folder(tmp_path, TINY, values := tensors(TINY))
    (folder / "model-00001-of-00001.safetensors").rename(folder / "mine.safetensors")
    save_file(ONE, folder / "adapter_model.safetensors")
    assert opened(folder).tensors().keys() == values.keys()


def test_a_numbered_set_without_an_index_must_be_whole(tmp_path):
    folder = write_folder(tmp_path, TINY, values := tensors(TINY), shards=3)
    (folder / "model.safetensors.index.json").unlink()
    assert opened(folder).tensors().keys() == values.keys()
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"are missing: model-00002-of-00003\.safetensors$"):
        weights.open_checkpoint(folder)


def test_a_folder_of_an_adapter_says_what_to_do(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file(ONE, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="with weights beside it; adapter_config"):
        weights.open_checkpoint(tmp_path)
    folder = write_folder(tmp_path, TINY, tensors(TINY))
    (folder / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \.safetensors files; .*: merge it"):
        weights.open_checkpoint(folder)


@pytest.mark.parametrize("prefix", ["", "_orig_mod.model.", "base_model.model.model."])
@pytest.mark.parametrize("config", [TINY, TIED], ids=["head", "tied"])
def test_tensors_under_another_prefix_are_those_of_the_model(prefix, config, tmp_path):
    values = tensors(config)
    outer = prefix.removesuffix("model.")
    named = {
        outer + name if name.startswith("lm_head") else prefix + name.removeprefix("model."): value
        for name, value in values.items()
    }
    checkpoint = opened(write_folder(tmp_path, config, named))
    assert all(np.array_equal(checkpoint.read(name), value) for name, value in values.items())


def test_tensors_of_other_parts_are_left_out_and_said(tmp_path, caplog):
    values = tensors(TINY)
    more = {"v_head.summary.weight": np.ones((1, 64), np.float32)}
    assert opened(write_folder(tmp_path, TINY, values | more)).tensors().keys() == values.keys()
    assert "other parts than the decoder: ['v_head.summary.weight']" in caplog.text
    inside = {"lm_head.bias": np.ones(512, np.float32)}
    with pytest.raises(CheckpointError, match=r"1 unexpected: lm_head\.bias"):
        opened(write_folder(tmp_path, TINY, values | inside))


def test_the_embedding_is_the_head_of_a_model_without_one(tmp_path, caplog):
    values = tensors(TINY)
    del values["lm_head.weight"]
    folder = write_folder(tmp_path, TINY, values)
    assert opened(folder).config.tied
    assert "there is no lm_head.weight; the embedding is taken for it" in caplog.text


@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer_config.json", "model-00001-of-00001.safetensors"]
)
def test_git_lfs_pointers_are_named(file, tmp_path):
    folder = write_folder(tmp_path, TINY, tensors(TINY))
    (folder / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match=rf"{file}: is a git-lfs pointer"):
        weights.open_checkpoint(folder)


def test_a_gguf_may_be_a_git_lfs_pointer_too(tmp_path):
    (tmp_path / "m.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid x\n")
    with pytest.raises(CheckpointError, match=r"m\.gguf: is a git-lfs pointer"):
        weights.open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{'top_k': 1}"])
def test_a_generation_config_that_cannot_be_read_is_left_out_and_said(content, tmp_path, caplog):
    folder = write_folder(tmp_path, TINY, tensors(TINY))
    (folder / "generation_config.json").write_text(content)
    assert opened(folder).config.eos_ids == TINY.eos_ids
    assert f"left out: {folder / 'generation_config.json'}: " in caplog.text


def test_ends_and_sampling_of_a_folder_are_read_from_all_its_files(tmp_path):
    folder = write_folder(tmp_path, TINY, tensors(TINY))
    bom = b"\xef\xbb\xbf"
    decoder = {"300": {"content": "<end>", "special": True}}
    config = {"eos_token": "<end>", "added_tokens_decoder": decoder}
    (folder / "tokenizer_config.json").write_bytes(bom + json.dumps(config).encode())
    (folder / "generation_config.json").write_bytes(bom + b'{"eos_token_id": [9], "top_k": 7}')
    config = weights.open_checkpoint(folder).config
    assert (config.eos_ids, config.sampling) == ((9, 2, 300), (("top_k", 7),))
