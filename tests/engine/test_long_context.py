"""Prompts of 128K tokens, by each scaling of RoPE for them: tokens are those of the formulas in
f64, on one device and spread over lanes."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoint.model_config import from_hf
from jaxserve.weights.names import tensors_of
from tests.engine.harness import Runner, assert_empty, engine
from tests.models import reference
from tests.models.oracle.cases import case

TOKENS = 128 * 1024
OUTPUT = 6
ORIGINAL = 4096
DIVISORS = np.geomspace(1, 32, 8).tolist()
SCALINGS = {
    "yarn": {"factor": 32.0},
    "dynamic": {"factor": 40.0},
    "longrope": {"factor": 32.0, "short_factor": [1.0] * 8, "long_factor": DIVISORS},
}
CASES = [
    ("yarn", "", {}),
    ("dynamic", "kvp=4", dict(placement="striped", exchange="pass_kv", lane_tokens=4096)),
    ("longrope", "kvp=2,tp=2", dict(lane_tokens=50_000)),
]


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind, mesh, settings", CASES)
def test_128k_tokens_are_attended_to(kind, mesh, settings, tmp_path):
    scaling = {"rope_type": kind, "original_max_position_embeddings": ORIGINAL, **SCALINGS[kind]}
    tiny = case(
        "LlamaForCausalLM",
        "llama",
        num_hidden_layers=1,
        max_position_embeddings=ORIGINAL if kind == "dynamic" else TOKENS + 64,
        rope_scaling=scaling,
    )
    model = from_hf(tiny.config)
    tensors = tiny.weights(tensors_of(model))
    (tmp_path / "config.json").write_text(json.dumps(tiny.config))
    save_file(tensors, tmp_path / "model.safetensors")
    lanes = int(mesh[4]) if "kvp" in mesh else 1
    real = engine(
        tmp_path,
        mesh,
        chunk=2048,
        seqs=2,
        pages=TOKENS // 256 // lanes + 8,
        block=256,
        max_len=TOKENS + 64,
        **settings,
    )
    prompt = np.random.default_rng(0).integers(3, 128, TOKENS).tolist()
    runner = Runner(real)
    id = runner.submit(prompt, max_tokens=OUTPUT, ignore_eos=True)
    runner.run()
    got = runner.ids(id)
    served = dataclasses.replace(model, max_len=TOKENS + 64)
    logits = reference.forward(served, tensors, prompt + got[:-1], OUTPUT)
    best = np.sort(logits, 1)
    assert (best[:, -1] - best[:, -2] > 1e-3).all(), "equal tokens would be luck"
    assert got == logits.argmax(1).tolist() and len(set(got)) > 2
    assert_empty(real)
