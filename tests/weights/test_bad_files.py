"""Damaged, inconsistent and malicious files give a CheckpointError before anything is allocated or
executed."""

import contextlib
import json
import os
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve import weights
from jaxserve.checkpoint.gguf_file import read_header
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.weights.safetensors_files import safetensors_header
from tests.examples import examples
from tests.weights.models import TINY, tensors, write_folder, write_gguf

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def safetensors_bytes(header, data=32, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


def changed(name, **fields):
    return GOOD | {name: GOOD[name] | fields}


def test_a_good_header_is_believed(tmp_path):
    (tmp_path / "x").write_bytes(safetensors_bytes(GOOD | {"__metadata__": {"format": "pt"}}))
    assert {name: place.shape for name, place in safetensors_header(tmp_path / "x").items()} == {
        "a": (2, 3),
        "b": (4,),
    }


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "truncated"),
        (b"\x10\0\0", "truncated"),
        (safetensors_bytes(GOOD, length=2**63), "truncated"),
        (safetensors_bytes(GOOD, length=10**9), "truncated"),
        (safetensors_bytes(b"{'a'"), "not JSON"),
        (safetensors_bytes(b"[" * 50_000), "not JSON"),
        (safetensors_bytes(b'{"a":{},"a":{}}'), "twice"),
        (safetensors_bytes(b"[]"), "no tensor claims"),
        (safetensors_bytes(GOOD, data=31), "truncated"),
        (safetensors_bytes(GOOD, data=33), "no tensor claims"),
        (safetensors_bytes(changed("b", data_offsets=[20, 28])), "overlap or a gap"),
        (safetensors_bytes(changed("b", data_offsets=[26, 34])), "overlap or a gap"),
        (safetensors_bytes(changed("b", data_offsets=[2**62, 2**62 + 8])), "overlap or a gap"),
        (safetensors_bytes(changed("b", data_offsets=[-8, 0])), "no valid"),
        (safetensors_bytes(changed("b", data_offsets=[24])), "no valid"),
        (safetensors_bytes(changed("b", shape=[2**40] * 2)), "cannot have 8 bytes"),
        (safetensors_bytes(changed("b", shape=[-4])), "no valid"),
        (safetensors_bytes(changed("b", shape=[4.0])), "no valid"),
        (safetensors_bytes(changed("b", dtype="F31")), "no valid"),
        (safetensors_bytes(changed("b", dtype="F32")), "cannot have"),
        (safetensors_bytes(GOOD | {"c": 7}), "no valid"),
    ],
)
def test_safetensors_headers_that_lie_are_refused_before_allocation(content, message, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=message):
        safetensors_header(tmp_path / "x.safetensors")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_mutated_safetensors_headers_never_do_worse_than_an_error(tmp_path_factory, data):
    content = bytearray(safetensors_bytes(GOOD))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(CheckpointError):
        safetensors_header(path)


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "model.bin",
        "..",
        "x.safetensors\n",
    ],
)
def test_an_index_may_name_only_safetensors_files_of_its_folder(name, tmp_path):
    folder = write_folder(tmp_path / "m", TINY, tensors(TINY))
    (tmp_path / "x.safetensors").write_bytes(safetensors_bytes(GOOD))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="not the plain name"):
        weights.open_checkpoint(folder)


def test_an_index_with_missing_files_or_tensors_is_refused(tmp_path):
    folder = write_folder(tmp_path, TINY, tensors(TINY), shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="files of the model are missing: model-00002"):
        weights.open_checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="no weight_map"):
        weights.open_checkpoint(folder)


def test_the_same_tensor_in_two_files_is_refused(tmp_path):
    folder = write_folder(tmp_path, TINY, tensors(TINY))
    (folder / "model-00001-of-00001.safetensors").rename(folder / "part.safetensors")
    os.link(folder / "part.safetensors", folder / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"is in other\.safetensors as well"):
        weights.open_checkpoint(folder)


def test_code_and_pickles_in_a_checkpoint_are_never_opened(tmp_path, monkeypatch):
    folder = write_folder(tmp_path, TINY, tensors(TINY))
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("evil.py", "modeling_evil.py", "pytorch_model.bin"):
        (folder / name).write_text("raise SystemExit('executed')")
        (folder / name).chmod(0)
    opened = []
    for name in ("io.open", "builtins.open"):
        monkeypatch.setattr(
            name,
            lambda path, *rest, real=open, **more: (
                opened.append(str(path)) or real(path, *rest, **more)
            ),
        )
    checkpoint = weights.open_checkpoint(folder)
    weights.check(checkpoint, checkpoint.config)
    assert opened and not [path for path in opened if path.endswith((".py", ".bin"))]
    config["architectures"] = ["EvilForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="'EvilForCausalLM' is not supported"):
        weights.open_checkpoint(folder)


def test_a_folder_of_pickles_says_what_to_do(tmp_path):
    folder = write_folder(tmp_path, TINY, tensors(TINY))
    (folder / "model-00001-of-00001.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=r"pytorch_model\.bin is a pickle, which is never read: convert it"
    ):
        weights.open_checkpoint(folder)


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "not JSON"),
        ("[1]", "must hold an object"),
        ("{}", "architecture None"),
        ("[" * 100_000, "not JSON"),
        (json.dumps({"architectures": [["x"]]}), r"config\.json: "),
        (json.dumps({"architectures": ["LlamaForCausalLM"]}), "is missing"),
        (
            json.dumps(
                {
                    "architectures": ["Qwen3ForCausalLM"],
                    "num_attention_heads": 1,
                    "num_hidden_layers": 2**40,
                }
            ),
            "num_hidden_layers",
        ),
    ],
)
def test_a_config_that_cannot_be_read_is_named(content, message, tmp_path):
    folder = write_folder(tmp_path, TINY, tensors(TINY))
    (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        weights.open_checkpoint(folder)


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory):
    return write_gguf(
        tmp_path_factory.mktemp("gguf") / "m.gguf", TINY, tensors(TINY), "Q8_0"
    ).read_bytes()


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 24, 300, 2000, -40_000, -1])
def test_a_truncated_gguf_is_refused(keep, small_gguf, tmp_path):
    (tmp_path / "m.gguf").write_bytes(small_gguf[:keep])
    with pytest.raises(
        CheckpointError, match=r"m\.gguf: .*(truncated|more than fit|not a readable)"
    ):
        weights.open_checkpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "at, value, message",
    [
        (0, b"GGML", "first four bytes"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "big endian"),
        (8, struct.pack("<Q", 2**63), "tensors are announced"),
        (16, struct.pack("<Q", 2**40), "fields are announced"),
        (24, struct.pack("<Q", 2**62), "truncated"),
    ],
)
def test_a_lying_gguf_header_is_refused_before_allocation(at, value, message, small_gguf, tmp_path):
    content = bytearray(small_gguf)
    content[at : at + len(value)] = value
    (tmp_path / "m.gguf").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=message):
        read_header(tmp_path / "m.gguf")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize(
    "field, message",
    [
        (lambda info: info.update(shape=(2**40, 64)), "truncated"),
        (lambda info: info.update(offset=2**60), "overlap or a gap"),
        (lambda info: info.update(offset=0), "overlap or a gap"),
        (lambda info: info.update(kind=999), "unknown type 999"),
        (lambda info: info.update(shape=(512, 63)), "whole blocks"),
        (lambda info: info.update(shape=(1,) * 5), "5 dimensions"),
        (lambda info: info.update(name="token_embd.weight"), "twice"),
    ],
)
def test_tensor_tables_that_lie_are_refused(field, message, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(two_tensors(field))
    with pytest.raises(CheckpointError, match=message):
        read_header(path)
    path.write_bytes(two_tensors(lambda info: None))
    assert list(read_header(path).tensors) == ["token_embd.weight", "output_norm.weight"]


def two_tensors(change) -> bytes:
    """A GGUF of no fields and two tensors, the second of which is changed in the table."""
    infos = [
        {"name": "token_embd.weight", "shape": (512, 64), "kind": 8, "offset": 0},
        {"name": "output_norm.weight", "shape": (64, 64), "kind": 8, "offset": 512 * 68},
    ]
    change(infos[1])
    table = b"GGUF" + struct.pack("<IQQ", 3, 2, 0)
    for info in infos:
        name = info["name"].encode()
        shape = info["shape"]
        table += (
            struct.pack("<Q", len(name))
            + name
            + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        )
        table += struct.pack("<IQ", info["kind"], info["offset"])
    return table + bytes(-len(table) % 32 + 512 * 68 + 64 * 68)


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_mutated_gguf_headers_never_do_worse_than_an_error(small_gguf, tmp_path_factory, data):
    content = bytearray(small_gguf)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 2500))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    path.write_bytes(content)
    with contextlib.suppress(CheckpointError):
        checkpoint = weights.open_checkpoint(path)
        weights.check(checkpoint, checkpoint.config)


def test_values_that_the_library_cannot_dequantise_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    # I32, of as many bytes
    path.write_bytes(two_tensors(lambda info: info.update(kind=26, shape=(64, 17))))
    with pytest.raises(CheckpointError, match="is I32, which the gguf library cannot dequantise"):
        weights.open_checkpoint(path)


@pytest.mark.parametrize(
    "name", ["blk.0.token_embd.weight", "blk.3.output.weight", "attn_q.weight", "blk.0.other.bias"]
)
def test_gguf_tensors_of_unknown_names_are_listed(name, tmp_path):
    """A tensor of a layer cannot stand for one of the whole model, nor the reverse."""
    values = tensors(TINY)
    path = write_gguf(tmp_path / "m.gguf", TINY, values, extra={name: np.zeros(3)})
    checkpoint = weights.open_checkpoint(path)
    with pytest.raises(CheckpointError, match=f"1 unexpected: {name}"):
        weights.check(checkpoint, checkpoint.config)
