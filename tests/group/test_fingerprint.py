"""Equal weights have equal fingerprints, wherever they lie."""

import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoint.fingerprint import PIECE, SAMPLES, fingerprint


def tensors(seed, size=40_000):
    numbers = np.random.default_rng(seed)
    return {f"layer.{at}": numbers.random(size, np.float32) for at in range(4)}


@pytest.fixture
def model(tmp_path):
    """Sharded safetensors with what lies beside them."""
    folder = tmp_path / "model"
    folder.mkdir()
    for shard in range(3):
        save_file(tensors(shard), folder / f"model-{shard + 1:05}-of-00003.safetensors")
    (folder / "config.json").write_text('{"hidden_size": 64}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_copy_elsewhere_has_the_same(model, tmp_path):
    copy = tmp_path / "elsewhere" / "deep"
    shutil.copytree(model, copy)
    assert fingerprint(copy) == fingerprint(model)
    assert fingerprint(copy) == fingerprint(copy)


def test_it_is_the_same_in_whatever_order_the_files_were_written(model, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in sorted(model.iterdir(), reverse=True):
        shutil.copy(file, copy)
        os.utime(copy / file.name, (1, 1))
    assert fingerprint(copy) == fingerprint(model)


def test_links_to_the_files_are_the_files(model, tmp_path):
    """The folders of Hugging Face's hub have such links."""
    links = tmp_path / "snapshot"
    links.mkdir()
    for file in model.iterdir():
        (links / file.name).symlink_to(file)
    assert fingerprint(links) == fingerprint(model)


def test_what_is_no_weight_does_not_count(model):
    before = fingerprint(model)
    (model / "README.md").write_text("a better model")
    (model / "tokenizer.json").write_text('{"version": 2}')
    assert fingerprint(model) == before


@pytest.mark.parametrize("shard", [0, 1, 2])
@pytest.mark.parametrize("layer", range(4))
def test_a_changed_tensor_is_seen(model, shard, layer):
    before = fingerprint(model)
    changed = tensors(shard)
    changed[f"layer.{layer}"] *= 1.001
    save_file(changed, model / f"model-{shard + 1:05}-of-00003.safetensors")
    assert fingerprint(model) != before


def test_files_that_changed_places_are_seen(model):
    before = fingerprint(model)
    first, second = sorted(model.glob("*.safetensors"))[:2]
    first.rename(model / "kept")
    second.rename(first)
    (model / "kept").rename(second)
    assert fingerprint(model) != before


def test_another_config_is_seen(model):
    before = fingerprint(model)
    (model / "config.json").write_text('{"hidden_size": 65}')
    assert fingerprint(model) != before


def test_a_missing_shard_is_seen(model):
    before = fingerprint(model)
    (model / "model-00003-of-00003.safetensors").unlink()
    assert fingerprint(model) != before


def test_a_file_cut_short_is_seen(model):
    before = fingerprint(model)
    file = model / "model-00002-of-00003.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    assert fingerprint(model) != before


def test_a_gguf_file_is_one_model_whatever_it_is_called(tmp_path):
    first, second = tmp_path / "a.gguf", tmp_path / "sub" / "b.gguf"
    second.parent.mkdir()
    first.write_bytes(b"GGUF" + os.urandom(3 * PIECE))
    shutil.copy(first, second)
    assert fingerprint(first) == fingerprint(second)
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    second.write_bytes(data)
    assert fingerprint(first) != fingerprint(second)


def test_of_a_saved_folder_without_weight_files_all_counts(tmp_path):
    """Such as Orbax's."""
    folder = tmp_path / "orbax"
    (folder / "d").mkdir(parents=True)
    (folder / "manifest.ocdbt").write_bytes(b"manifest")
    (folder / "d" / "0001").write_bytes(os.urandom(1000))
    before = fingerprint(folder)
    (folder / "d" / "0001").write_bytes(os.urandom(1000))
    assert fingerprint(folder) != before


def test_of_a_large_file_only_samples_are_read(tmp_path):
    file = tmp_path / "large.gguf"
    with open(file, "wb") as opened:
        opened.truncate(1 << 36)  # 64 GiB without anything in them
    before = fingerprint(file)
    with open(file, "r+b") as opened:  # as training changes all of it
        opened.seek((1 << 36) * 30 // (SAMPLES - 1))
        opened.write(b"x" * 3 * PIECE)
    assert fingerprint(file) != before


def test_an_empty_file_and_a_missing_one(tmp_path):
    empty = tmp_path / "empty.gguf"
    empty.write_bytes(b"")
    assert len(fingerprint(empty)) == 64
    with pytest.raises(OSError):
        fingerprint(tmp_path / "none" / "x.gguf")
