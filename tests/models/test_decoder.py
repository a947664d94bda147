"""Every kind of model, on meshes that split it in every way, equals a dense forward pass in f64."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxserve.checkpoint.model import layers_of
from jaxserve.checkpoint.rope import Rope, RopeScaling, llama3_scaling
from jaxserve.settings.schema import ConfigError
from tests.engine.harness import Runner, assert_empty, engine
from tests.models import reference
from tests.weights.models import TINY, of_family, write_folder

PROMPT = 45
NEW = 6
QWEN2 = of_family("qwen2", vocab=509, ropes=(Rope(1e6),))
QWEN3 = of_family("qwen3", head_dim=32)
CASES = {  # model, mesh, placement of blocks
    "llama": (replace(TINY, ropes=(Rope(1e4, llama3_scaling(8.0)),)), "", "grow"),
    "llama, mha, tied": (replace(TINY, kv_heads=4, tied=True), "tp=2", "grow"),
    "mqa, yarn, repeated kv heads, vocabulary that does not divide": (
        replace(TINY, kv_heads=1, vocab=511, ropes=(Rope(1e4, RopeScaling("yarn", 4.0, 64)),)),
        "tp=4",
        "grow",
    ),
    "mistral, window in all layers": (of_family("mistral", windows=(20,)), "kvp=2", "random"),
    "qwen2, tied, vocabulary that does not divide": (replace(QWEN2, tied=True), "tp=2", "grow"),
    "qwen2, kv heads repeated once": (QWEN2, "tp=4", "grow"),
    "qwen2, window in some layers, uneven stages": (
        replace(QWEN2, layers=4, windows=(None, 9, 9, None)),
        "spp=3",
        "grow",
    ),
    "qwen3": (QWEN3, "kvp=2", "grow"),
    "qwen3, all axes": (
        replace(QWEN3, layers=3, tied=True, ropes=(Rope(1e4, RopeScaling("linear", 2.0)),)),
        "spp=2,kvp=2,tp=2",
        "round_robin",
    ),
}


# parts of them are those of another case
MORE = ("qwen2, kv heads repeated once", "qwen3")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.matrix if name in MORE else []) for name in CASES],
)
def test_tokens_and_log_probabilities_are_those_of_the_dense_forward_pass(name, tmp_path):
    config, mesh, placement = CASES[name]
    weights = reference.random_weights(config, len(name))
    folder = write_folder(tmp_path / "model", config, weights)
    real = engine(
        folder, mesh, chunk=16, seqs=2, pages=24, block=8, max_len=64, placement=placement
    )
    prompt = np.random.default_rng(0).integers(0, config.vocab, PROMPT).tolist()
    runner = Runner(real)
    id = runner.submit(prompt, max_tokens=NEW, ignore_eos=True, logprobs=20, prompt_logprobs=20)
    runner.run()
    assert_empty(real)
    got = runner.completion(id)
    right = reference.forward(config, weights, prompt + got.ids)
    assert got.ids == right[PROMPT - 1 : -1].argmax(-1).tolist()
    told = list(got.finished.prompt_logprobs[1:]) + got.logprobs  # of each token after the first
    for logprobs, token, row in zip(
        told, [*prompt, *got.ids][1:], reference.log_softmax(right), strict=False
    ):
        ids, values = map(list, zip(*logprobs.top))
        assert logprobs.chosen == pytest.approx(row[token], abs=1e-4)
        np.testing.assert_allclose(values, row[ids], atol=1e-4)
        np.testing.assert_allclose(values, np.sort(row)[:-21:-1], atol=1e-4)
    assert len(told) == PROMPT + NEW - 1


def test_stages_share_the_layers_as_evenly_as_can_be():
    for layers in (2, 5, 30):
        for spp in range(1, layers + 1):
            parts = layers_of(replace(TINY, layers=layers), spp)
            assert [layer for part in parts for layer in part] == list(range(layers))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    "mesh, message",
    [("tp=3", "1, 2, 4"), ("tp=8", "1, 2, 4"), ("spp=3", "1 to 2"), ("kvp=13", "needs 13 devices")],
)
def test_a_mesh_that_cannot_hold_the_model_is_refused_with_what_can(mesh, message):
    jax.devices()  # from now on there are as many as there are
    with pytest.raises(ConfigError, match=message):
        engine("random:tiny", mesh)
