"""Weights that are quantised while they are loaded are near what they were."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.weights.quantise import METHODS, quantised
from jaxserve.weights.quantised import dequantised

# largest error as a share of the largest weight of a group: half a step
ERRORS = {"int8": 0.5 / 127, "fp8": 16 / 448}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("inputs, group", [(256, 128), (192, 64), (96, 32)])
def test_every_weight_is_rounded_to_nearest_in_groups(inputs, group, method):
    noise = np.random.default_rng(0)
    matrix = noise.standard_normal((16, inputs)).astype(np.float32)
    matrix *= np.exp(noise.standard_normal((16, 1))).astype(np.float32)
    blocks = quantised(matrix, method)
    assert blocks.scales.shape == (16, inputs // group)
    largest = np.abs(matrix).reshape(16, -1, group).max(-1, keepdims=True)
    error = np.abs(dequantised(blocks) - matrix).reshape(16, -1, group)
    assert (error <= 1.001 * ERRORS[method] * largest).all()


@pytest.mark.parametrize("method", METHODS)
def test_zeros_stay_zeros_and_no_rows_are_no_rows(method):
    assert not dequantised(quantised(np.zeros((16, 128), np.float32), method)).any()
    assert quantised(np.zeros((0, 128), np.float16), method).codes.shape == (0, 128)
