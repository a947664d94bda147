"""Weights that stay quantised say what the same weights in floats say, token for token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from jaxserve.checkpoint.model_config import from_hf, to_hf
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.kernels.cpu import library
from jaxserve.weights.kept import KeptParameter
from jaxserve.weights.names import tensors_of
from tests.engine.harness import Runner, assert_empty, engine
from tests.models.oracle.cases import CASES
from tests.weights.quantised.folders import write_both

pytestmark = pytest.mark.skipif(
    library.unsupported() is not None, reason=f"no kernels for CPUs: {library.unsupported()}"
)
DENSE = replace(MODELS["tiny"], d_ff=128, max_len=512)
FEW = 12  # tokens
MATRICES = {"qkv", "o_proj", "gate_up", "down"}


def written(folder: Path, form: str, case: str = "") -> tuple[Path, Path]:
    """A model in a format, and in floats; of a family's tiny model, or dense."""
    if not case:
        noise = np.random.default_rng(1)
        shapes = tensors_of(DENSE)
        tensors = {
            name: noise.standard_normal(shape, np.float32) / np.sqrt(shape[-1])
            for name, shape in shapes.items()
        }
        return write_both(folder, to_hf(DENSE), tensors, form)
    config = CASES[case].config
    return write_both(folder, config, CASES[case].weights(tensors_of(from_hf(config))), form)


@dataclass(frozen=True)
class Said:
    """Greedy tokens of two requests at once, log-probabilities of their prompts' tokens, and the
    names of parameters that are quantised."""

    tokens: list[list[int]]
    logprobs: np.ndarray
    kept: set[str]


def say(folder: Path, mesh: str, **options) -> Said:
    noise = np.random.default_rng(0)
    real = engine(folder, mesh, chunk=32, seqs=4, pages=64, max_len=256, **options)
    runner = Runner(real)
    prompts = [noise.integers(3, 128, length).tolist() for length in (40, 7)]
    requests = [
        runner.submit(prompt, max_tokens=FEW, ignore_eos=True, prompt_logprobs=0)
        for prompt in prompts
    ]
    runner.run()
    scored = [runner.completion(request).finished.prompt_logprobs[1:] for request in requests]
    logprobs = np.array([token.chosen for tokens in scored for token in tokens])
    plan = real.worker.plan
    parameters = plan.parameters(range(plan.model.layers))
    kept = {path for path, parameter in parameters.items() if isinstance(parameter, KeptParameter)}
    assert_empty(real)
    real.close()
    tokens = [runner.ids(request) for request in requests]
    return Said(tokens, logprobs, {path.split(".")[-1] for path in kept})


@pytest.mark.parametrize(
    "form, mesh",
    [
        ("fp8", "tp=2"),
        *(
            pytest.param(form, mesh, marks=pytest.mark.matrix)
            for form in ("fp8", "int4", "int8", "gptq", "awq")
            for mesh in ("", "tp=2", "kvp=2,tp=2")
        ),
    ],
)
def test_a_dense_model_says_what_its_floats_say(form, mesh, tmp_path):
    quantised, floats = written(tmp_path, form)
    said = say(quantised, mesh)
    assert said.kept == MATRICES
    assert said.tokens == say(floats, mesh).tokens


@pytest.mark.parametrize(
    "case, form, expected",
    [
        ("gpt_oss", "mxfp4", {"expert_gate_up", "expert_down"}),
        # its 48 inner states are no multiple of 32
        pytest.param("qwen3_moe", "fp8", {"expert_gate_up"}, marks=pytest.mark.matrix),
    ],
)
def test_experts_say_what_their_floats_say(case, form, expected, tmp_path):
    quantised, floats = written(tmp_path, form, case)
    mesh = "kvp=2,tp=2"
    said = say(quantised, mesh, expert_parallel=True)
    assert {name for name in said.kept if "expert" in name} == expected
    assert said.tokens == say(floats, mesh, expert_parallel=True).tokens


@pytest.mark.parametrize(
    "method, most", [("int8", 0.05), pytest.param("fp8", 0.3, marks=pytest.mark.matrix)]
)
def test_floats_may_be_quantised_while_they_are_loaded(method, most, tmp_path):
    """The largest difference of a log-probability of a tiny random model."""
    _, floats = written(tmp_path, "int8")
    said = say(floats, "tp=2", quantization=method)
    assert said.kept == MATRICES
    plain = say(floats, "tp=2")
    assert not plain.kept
    assert 0 < np.abs(said.logprobs - plain.logprobs).max() < most
