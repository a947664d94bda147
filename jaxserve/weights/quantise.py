"""Quantises weights that a checkpoint holds as floats, while they are loaded."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from jaxserve.kernels.quantised import Form
from jaxserve.weights.quantised import Blocks

GROUP = 128  # most inputs that share a scale
# by value of the setting: the form of codes, and the largest number of one
METHODS = {"int8": (Form(8, 128), 127.0), "fp8": (Form(8, mantissa=3), 448.0)}


def quantised(matrix: np.ndarray, method: str) -> Blocks:
    """Quantises a matrix [outputs, inputs] of floats to nearest; the largest of a group becomes the
    largest code. method: a key of `METHODS`."""
    form, largest = METHODS[method]
    outputs, inputs = matrix.shape
    group = math.gcd(GROUP, inputs)
    groups = matrix.astype(np.float32).reshape(outputs, inputs // group, group)
    scales = np.abs(groups).max(-1) / np.float32(largest)
    scaled = groups / np.where(scales > 0, scales, np.float32(1))[..., None]
    if form.mantissa:
        codes = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    else:
        codes = (np.rint(scaled) + np.float32(form.zero)).astype(np.uint8)
    return Blocks(form, codes.reshape(outputs, inputs), scales)
