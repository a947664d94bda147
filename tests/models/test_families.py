"""Families equal transformers: log-probabilities and greedy tokens of tiny random models, as
`oracle.json` has them, through the paged engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoint.families import FAMILIES, LLAMA_TENSORS, ConfigPart, Family
from jaxserve.checkpoint.fields import Fields
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.model_config import from_hf, to_hf
from jaxserve.checkpoint.rope import Rope
from jaxserve.checkpoint.specs import AttentionSpec, MlpSpec, Multipliers, NormSpec
from jaxserve.weights.names import tensors_of
from tests.engine.harness import Runner, assert_empty, engine
from tests.models import oracle

ANSWERS = json.loads(oracle.FILE.read_text())
CHUNKS = ((1, 2, 3), (5, 11, 32))
MESHES = {
    "phi3": ("", "tp=2", "spp=2", "kvp=2", "spp=2,kvp=2,tp=2"),
    "phi3, within the original length": ("",),
    "olmo2": ("", "tp=2", "tp=4", "kvp=2", "spp=2,kvp=2,tp=2"),
    "granite, tied": ("", "tp=2", "spp=2", "kvp=2", "spp=2,kvp=2,tp=2"),
    "gemma3, tied": ("", "spp=2,kvp=2,tp=2"),
}
# with the largest mesh, these have what is special of each family
DEFAULT = ("", "tp=4", "spp=2,kvp=2,tp=2")


def read_gemma(fields: Fields, model: ModelConfig) -> ModelConfig:
    kinds = fields.fields["layer_types"]
    local = Rope(fields.number("rope_local_base_freq"))
    slides = [kind == "sliding_attention" for kind in kinds]
    return replace(
        model,
        mixers=(
            AttentionSpec(qk_norm="head", scale=fields.number("query_pre_attn_scalar") ** -0.5),
        ),
        multipliers=Multipliers(embedding=model.d_model**0.5),
        ropes=tuple(local if mark else model.ropes[0] for mark in slides),
        windows=tuple(fields.count("sliding_window") if mark else None for mark in slides),
    )


def write_gemma(model: ModelConfig) -> dict:
    whole = next(i for i, window in enumerate(model.windows) if window is None)
    scaling = model.ropes[whole].scaling
    return {
        "layer_types": [
            "sliding_attention" if window else "full_attention" for window in model.windows
        ],
        "sliding_window": next(filter(None, model.windows)),
        "query_pre_attn_scalar": model.mixer(0).scale ** -2,
        "rope_theta": model.ropes[whole].theta,
        "rope_scaling": {"rope_type": scaling.kind, "factor": scaling.factor},
        "rope_local_base_freq": model.ropes[1 - whole].theta,
    }


LAYER = "model.layers.{layers}."
GEMMA3 = Family(
    "Gemma3ForCausalLM",
    specs=dict(
        mixers=(AttentionSpec(qk_norm="head"),),
        mlps=(MlpSpec("gelu_pytorch_tanh"),),
        norms=NormSpec(before=True, after=True, less_one=True),
    ),
    parts=(ConfigPart(read_gemma, write_gemma),),
    tensors=dict(LLAMA_TENSORS)
    | {
        LAYER + "post_attention_layernorm.weight": ("attn_post_norm",),
        LAYER + "pre_feedforward_layernorm.weight": ("mlp_norm",),
        LAYER + "post_feedforward_layernorm.weight": ("mlp_post_norm",),
    },
)


@pytest.fixture(autouse=True)
def gemma(monkeypatch) -> None:
    """A family that the product does not have: a row is all that it needs."""
    monkeypatch.setitem(FAMILIES, "gemma3", GEMMA3)


def write_model(folder: Path, name: str) -> Path:
    config, _ = oracle.CASES[name]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(oracle.weights(config, tensors_of(from_hf(config))), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "name, mesh",
    [
        pytest.param(name, mesh, marks=[] if mesh in DEFAULT else pytest.mark.matrix)
        for name, meshes in MESHES.items()
        for mesh in meshes
    ],
)
def test_tokens_and_log_probabilities_are_those_of_transformers(name, mesh, tmp_path):
    answer = ANSWERS[name]
    prompt, tokens = answer["prompt"], answer["tokens"]
    assert len(set(tokens)) > 5  # a model that repeats itself would hide faults
    length = len(prompt) + len(tokens)
    real = engine(
        write_model(tmp_path / "model", name),
        mesh,
        chunk=32,
        seqs=2,
        pages=48,
        block=8,
        max_len=32 if length <= 32 else 80,
        placement="random" if "kvp" in mesh else "grow",
    )
    runner = Runner(real)
    asked = dict(max_tokens=len(tokens), ignore_eos=True)
    id = runner.submit(prompt, **asked, logprobs=oracle.BEST, prompt_logprobs=oracle.BEST)
    runner.run()
    got = runner.completion(id)
    assert got.ids == tokens
    rows = list(got.finished.prompt_logprobs[1:]) + got.logprobs
    assert len(rows) == len(answer["best"])
    for row, best, values in zip(rows, answer["best"], answer["logprobs"]):
        by_id = dict(row.top)
        np.testing.assert_allclose([by_id[token] for token in best], values, atol=1e-4)
    for sizes in CHUNKS:
        whole = runner.submit(prompt, **asked)
        runner.submit(prompt[: len(prompt) // 2], **asked)
        runner.run(chunks=sizes, seed=sum(sizes))
        assert runner.ids(whole) == tokens
    assert_empty(real)


@pytest.mark.parametrize("name", [name for name in oracle.CASES if "gemma" not in name])
def test_the_config_of_transformers_5_says_the_same_as_that_of_hubs(name):
    config, _ = oracle.CASES[name]
    model = from_hf(config, name="mine")
    assert from_hf(ANSWERS[name]["config"], name="mine") == model
    assert from_hf(to_hf(model)) == model


def test_a_family_of_one_row_survives_config_json():
    config, _ = oracle.CASES["gemma3, tied"]
    model = from_hf(config)
    assert len(set(model.ropes)) == len(set(model.windows)) == 2
    again = from_hf(to_hf(model))
    assert again.mixer(0).scale == pytest.approx(model.mixer(0).scale)
    assert replace(again, mixers=model.mixers, name=model.name) == model
