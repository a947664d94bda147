"""A published file of another family, Gemma 3 270M in Q4_K_M, says what transformers says of its
dequantised weights."""

from __future__ import annotations

import json
import random
from pathlib import Path

import httpx
import pytest

from jaxserve.checkpoint.fetch import local_files
from jaxserve.llm import open_engine
from jaxserve.server.supervisor import Background
from jaxserve.settings.options import make
from jaxserve.settings.schema import EngineConfig, ServerConfig
from jaxserve.text import Tokenizer
from tests.engine.harness import Runner, assert_empty, engine

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "gemma3_270m_f32.json").read_text())
CASES = GOLDEN["cases"]

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1200)]  # 18 layers are compiled


@pytest.fixture(scope="module")
def gemma() -> Path:
    return local_files("gemma3-270m", progress=False)


def test_texts_have_the_ids_of_llama_cpp(gemma):
    tokenizer = Tokenizer.load(gemma)
    for case in CASES:
        if "prompt" in case:
            assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]


@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_tokens_and_log_probabilities_are_those_of_transformers(quantization, gemma):
    real = engine(gemma, chunk=256, seqs=4, pages=200, quantization=quantization)
    runner = Runner(real)
    ids = [
        runner.submit(case["prompt_ids"], max_tokens=32, ignore_eos=True, logprobs=1)
        for case in CASES
    ]
    runner.run()
    for id, case in zip(ids, CASES):
        got = runner.completion(id)
        assert got.ids == case["output_ids"]
        assert [row.chosen for row in got.logprobs] == pytest.approx(case["logprobs"], abs=1e-3)
    assert_empty(real)


def test_it_is_served_over_http(gemma):
    settings = {"model": "gemma3-270m", "max_model_len": 256, "max_seqs": 2, "dtype": "float32"}
    config = make(EngineConfig, settings)
    ports = ServerConfig(grpc_port=0, port=0)
    with Background(ports, lambda: open_engine(config, False, warm_up=False)) as server:
        server.wait_ready()
        body = {"prompt": CASES[0]["prompt"], "temperature": 0, "max_tokens": 8}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).json()
    text = Tokenizer.load(gemma).decode(CASES[0]["output_ids"][:8])
    assert answer["choices"][0]["text"] == text


def test_windows_that_keep_what_they_see_give_the_tokens_of_one_table(gemma):
    """A prompt of three windows, in chunks, and again after a prefix hit."""
    rng = random.Random(0)
    prompt = [rng.randrange(1000, 200_000) for _ in range(3 * 512)]
    tokens = []
    for settings in (dict(host_cache_gib=0.01), {}):
        real = engine(gemma, chunk=256, seqs=4, pages=1000, quantization="none", **settings)
        assert bool(real.worker.plan.windows) != bool(settings)
        runner = Runner(real)
        for _ in range(2):
            id = runner.submit(prompt, max_tokens=32, ignore_eos=True)
            runner.run()
            tokens.append(runner.ids(id))
        assert runner.completion(id).finished.usage.cached == len(prompt) - 16
        assert_empty(real)
    assert len(set(map(tuple, tokens))) == 1
