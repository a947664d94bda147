"""Norms, rotary positions and the gated MLP against their formulas in f64."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.checkpoint.rope import Rope, RopeScaling, llama3_scaling
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.kernels import qkv
from jaxserve.models import layers
from tests.models import reference

BASE = replace(MODELS["tiny"], head_dim=64)
CONFIGS = {
    "default": BASE,
    "default-theta-1e6": replace(BASE, ropes=(Rope(1e6),), head_dim=128),
    "linear": replace(BASE, ropes=(Rope(1e4, RopeScaling("linear", 4.0)),)),
    "dynamic": replace(BASE, max_len=8192, ropes=(Rope(1e4, RopeScaling("dynamic", 4.0, 2048)),)),
    "dynamic-within": replace(
        BASE, max_len=1024, ropes=(Rope(1e4, RopeScaling("dynamic", 4.0, 2048)),)
    ),
    "llama3.1": replace(BASE, head_dim=128, ropes=(Rope(5e5, llama3_scaling(8.0)),)),
    "llama3.2": replace(BASE, ropes=(Rope(5e5, llama3_scaling(32.0)),)),
    "yarn": replace(BASE, head_dim=128, ropes=(Rope(1e6, RopeScaling("yarn", 4.0, 32768)),)),
    "yarn-short": replace(BASE, ropes=(Rope(1e4, RopeScaling("yarn", 2.5, 64)),)),
    "yarn-own-attention": replace(
        BASE, ropes=(Rope(1e4, RopeScaling("yarn", 8.0, 4096, attention_factor=1.25)),)
    ),
    "yarn-mscale": replace(
        BASE, ropes=(Rope(1e4, RopeScaling("yarn", 40.0, 4096, mscale=0.707, mscale_all_dim=1.0)),)
    ),
    "yarn-betas": replace(
        BASE,
        ropes=(
            Rope(
                1e4,
                RopeScaling("yarn", 16.0, 2048, beta_fast=20.0, beta_slow=2.0, truncate=False),
            ),
        ),
    ),
    "yarn-no-growth": replace(BASE, ropes=(Rope(1e4, RopeScaling("yarn", 1.0, 4096)),)),
}


def frequencies(config):
    return config.ropes[0].frequencies(config.head_dim, config.max_len)


def cos_sin(positions, config):
    return layers.rope_cos_sin(positions, config.ropes[0], config.head_dim, config.max_len)


@pytest.mark.parametrize("name", CONFIGS)
def test_rotary_frequencies_follow_their_formulas(name):
    config = CONFIGS[name]
    found, factor = frequencies(config)
    right, right_factor = reference.rope_frequencies(config)
    np.testing.assert_allclose(found, right, rtol=1e-6)
    assert factor == pytest.approx(right_factor, rel=1e-6)


def test_scaling_keeps_high_frequencies_and_divides_low_ones_by_the_factor():
    for name in ("llama3.1", "llama3.2", "yarn", "yarn-mscale", "yarn-betas"):
        config = CONFIGS[name]
        plain, _ = frequencies(replace(config, ropes=(Rope(config.ropes[0].theta),)))
        scaled, _ = frequencies(config)
        assert scaled[0] == plain[0] and scaled[-1] == pytest.approx(
            plain[-1] / config.ropes[0].scaling.factor, rel=1e-6
        )
        ratio = plain / scaled
        assert (np.diff(ratio) > -1e-4).all()
        assert ((ratio > 1.01) & (ratio < ratio[-1] - 0.01)).any()  # and there is something between


@pytest.mark.parametrize("name", CONFIGS)
def test_rotation_follows_its_formula(name):
    config = CONFIGS[name]
    x = np.random.default_rng(0).standard_normal((600, 3, config.head_dim)).astype(np.float32)
    got = qkv.rotate(jnp.asarray(x)[:, :, None], *cos_sin(jnp.arange(600), config))[:, :, 0]
    # f32 angles of up to 600 radians
    np.testing.assert_allclose(got, reference.rope(x.astype(np.float64), config), atol=3e-4)


def test_the_product_of_two_rotated_vectors_depends_on_their_distance_only():
    q, k = np.random.default_rng(1).standard_normal((2, 1, 1, 1, BASE.head_dim)).astype(np.float32)
    at = lambda x, position: qkv.rotate(jnp.asarray(x), *cos_sin(jnp.array([position]), BASE))
    products = [float((at(q, 17 + shift) * at(k, 5 + shift)).sum()) for shift in (0, 1, 100, 1000)]
    np.testing.assert_allclose(products, products[0], atol=2e-3)
    assert abs(float((at(q, 30) * at(k, 5)).sum()) - products[0]) > 0.1


def test_position_zero_is_not_rotated():
    x = np.random.default_rng(2).standard_normal((1, 2, 1, BASE.head_dim)).astype(np.float32)
    np.testing.assert_array_equal(
        qkv.rotate(jnp.asarray(x), *cos_sin(jnp.zeros(1, jnp.int32), BASE)), x
    )


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.1])
def test_rms_norm_follows_its_formula(eps):
    rng = np.random.default_rng(3)
    x = rng.normal(0, 0.3, (5, 2, 96)).astype(np.float32)
    weight = rng.standard_normal(96).astype(np.float32)
    x[0], x[1] = 0, x[1] * 1e4
    np.testing.assert_allclose(
        qkv.rms_norm(jnp.asarray(x), weight, eps),
        reference.norm(x.astype(np.float64), weight, eps),
        rtol=1e-5,
    )


def test_rms_norm_of_half_precision_is_taken_in_single_precision():
    x = jnp.full((1, 4096), 300.0, jnp.float16)  # squares are beyond float16
    got = qkv.rms_norm(x, jnp.ones(4096, jnp.float16), 1e-5)
    assert got.dtype == jnp.float16
    np.testing.assert_allclose(got, 1.0, rtol=1e-3)


def test_the_first_half_gates_the_second():
    x = np.random.default_rng(4).normal(0, 5, (7, 2, 33)).astype(np.float32)
    gate = x[:, 0].astype(np.float64)
    up = x[:, 1].astype(np.float64)
    np.testing.assert_allclose(
        layers.gated(jnp.asarray(x), "silu"), gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-6
    )
