"""Quantised matrices of safetensors mean what the libraries of their formats say, whole and in
parts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.quantization import Quantization, read_quantization
from jaxserve.weights.quantised import dequantised
from jaxserve.weights.quantised_layouts import quantised_tensors
from jaxserve.weights.quantised_tensors import QuantisedTensor
from jaxserve.weights.safetensors_files import MappedTensors, safetensors_header
from tests.weights.quantised import FOLDER

NAMES = sorted(file.stem for file in FOLDER.glob("*.safetensors"))
ROWS = (slice(0, 24), slice(3, 20), slice(5, 5))
COLUMNS = (slice(0, 128), slice(32, 96), slice(64, 128))
PARTS = tuple(itertools.product(ROWS, COLUMNS))


def opened(file: Path, quantization: Quantization | None) -> tuple[MappedTensors, QuantisedTensor]:
    """The only quantised matrix of a file, and its tensors."""
    files = MappedTensors(safetensors_header(file))
    assert quantization is not None
    (tensor,) = quantised_tensors(files, quantization).values()
    return files, tensor


def from_library(name: str) -> tuple[MappedTensors, QuantisedTensor, np.ndarray]:
    file = FOLDER / f"{name}.safetensors"
    with safe_open(file, "numpy") as stored:
        config = json.loads(stored.metadata()["quantization_config"])
    files, tensor = opened(file, read_quantization({"quantization_config": config}))
    return files, tensor, files.read("expected")


@pytest.mark.parametrize("name", [name for name in NAMES if "experts" not in name])
def test_any_part_of_a_matrix_is_that_of_its_library(name):
    files, tensor, expected = from_library(name)
    assert tensor.matrix == expected.shape == (24, 128)
    for rows, columns in PARTS:
        found = dequantised(tensor.blocks(files, rows, columns))
        np.testing.assert_allclose(found, expected[rows, columns], rtol=1e-6, atol=1e-6)


def test_matrices_of_experts_are_those_of_their_library():
    files, tensor, expected = from_library("mxfp4-experts")
    assert tensor.shape == expected.shape == (2, 64, 24)
    for expert in range(2):
        blocks = tensor.blocks(files, slice(1, 20), slice(32, 64), expert)
        np.testing.assert_array_equal(dequantised(blocks).T, expected[expert, 32:, 1:20])
    found = tensor.values(files, slice(1, 2), slice(0, 40))
    np.testing.assert_array_equal(found, expected[1:, :40])


def test_a_part_is_all_that_is_read():
    files, tensor, _ = from_library("mxfp4-experts")
    before = files.bytes_read
    tensor.blocks(files, slice(0, 8), slice(32, 64), 1)
    assert files.bytes_read - before == 8 * 16 + 8
    files, tensor, _ = from_library("int4-zeros")
    before = files.bytes_read
    tensor.blocks(files, slice(0, 8), slice(32, 64))
    assert files.bytes_read - before == 8 * 16 + 8 * 4 + 4  # codes, scales, a word of zero points


def words(codes: np.ndarray, places: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Packs eight codes of 4 bits of the last dimension in each word, code i at place places[i]."""
    packed = np.zeros((*codes.shape[:-1], codes.shape[-1] // 8), np.uint32)
    for i, place in enumerate(places):
        packed |= codes[..., i::8].astype(np.uint32) << np.uint32(4 * place)
    return packed.view(np.int32)


GROUP = 32
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@pytest.mark.parametrize("form", ["gptq", "gptq_v2", "desc_act", "sym", "awq"])
def test_gptq_and_awq_are_as_published(form, tmp_path):
    """Frantar et al., 2022 (AutoGPTQ's tensors, whose zero points are less 1 before version 2), and
    Lin et al., 2023 (AutoAWQ's)."""
    noise = np.random.default_rng(0)
    codes = noise.integers(0, 16, (128, 24), np.uint8)
    zeros = noise.integers(1, 16, (4, 24), np.uint8)
    scales = noise.uniform(0.5, 1, (4, 24)).astype(np.float16)
    groups = np.arange(128, dtype=np.int32) // GROUP
    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": form == "sym"}
    if form == "sym":
        zeros[:] = 8
    if form == "desc_act":
        noise.shuffle(groups)
        config["desc_act"] = True
    if form == "gptq_v2":
        config["checkpoint_format"] = form
    if form == "awq":
        config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
        tensors = {"m.qweight": words(codes, AWQ_PLACES), "m.qzeros": words(zeros, AWQ_PLACES)}
    else:
        stored = zeros if form == "gptq_v2" else zeros - 1
        tensors = {
            "m.qweight": np.ascontiguousarray(words(codes.T).T),
            "m.qzeros": words(stored),
            "m.g_idx": groups,
        }
    save_file(tensors | {"m.scales": scales}, tmp_path / "m.safetensors")
    quantization = read_quantization({"quantization_config": config})
    files, tensor = opened(tmp_path / "m.safetensors", quantization)
    wide = scales.astype(np.float32)
    expected = (wide[groups] * (codes.astype(np.float32) - zeros[groups])).T
    for rows, columns in PARTS:
        blocks = tensor.blocks(files, rows, columns)
        np.testing.assert_array_equal(dequantised(blocks), expected[rows, columns])
        assert (blocks.offsets is None) == (form == "sym")


def replaced(name: str, change: dict[str, np.ndarray | None], folder: Path) -> Path:
    """A library's file with other tensors; None: without."""
    with safe_open(FOLDER / f"{name}.safetensors", "numpy") as stored:
        files = MappedTensors(safetensors_header(FOLDER / f"{name}.safetensors"))
        tensors = {key: np.asarray(files.read(key)) for key in stored.keys()}  # noqa: SIM118
    tensors = {key: value for key, value in (tensors | change).items() if value is not None}
    save_file(tensors, folder / "m.safetensors")
    return folder / "m.safetensors"


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("fp8-channel", {"m.weight_scale": None}, "m.weight_scale is missing beside m.weight"),
        (
            "fp8-channel",
            {"m.weight_scale": np.ones((5, 3), np.float32)},
            r"m.weight_scale is \[5, 3\]: no scales of m.weight, a matrix \[24, 128\]",
        ),
        ("int4-group", {"m.weight_shape": np.array([25, 128])}, r"m.weight_shape is \[25, 128\]"),
        ("int4-group", {"m.weight_shape": np.array([24, 100])}, "codes of 5 bits"),
        (
            "int4-zeros",
            {"m.weight_zero_point": np.ones((2, 4), np.int32)},
            r"m.weight_zero_point is \[2, 4\], should be \[3, 4\]",
        ),
        ("mxfp4-experts", {"m_scales": np.ones((2, 24), np.uint8)}, r"m_scales \[2, 24\]"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(name, change, message, tmp_path):
    file = replaced(name, change, tmp_path)
    with pytest.raises(CheckpointError, match=message):
        opened(file, Quantization("compressed-tensors"))


def test_zero_points_that_differ_from_the_config_are_refused(tmp_path):
    tensors = {
        "m.qweight": np.zeros((4, 8), np.int32),
        "m.qzeros": np.full((1, 1), 0x77777776, np.int32),
        "m.scales": np.ones((1, 8), np.float16),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    quantization = read_quantization(
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "sym": True}}
    )
    files, tensor = opened(tmp_path / "m.safetensors", quantization)
    with pytest.raises(CheckpointError, match=r"m\.qzeros: zero points differ from 8"):
        tensor.blocks(files, slice(0, 8), slice(0, 32))
