"""Adapters: each request is computed with its own, as on a checkpoint that has it merged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.engine.engine import Engine
from tests.engine.adapters import merge, write_adapter
from tests.engine.harness import Runner, assert_empty, engine
from tests.models.test_families import write_model

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
SHARED = dict(chunk=32, seqs=6, pages=96, max_len=256)
TOKENS = 12
ALL_AXES = "spp=2,kvp=2,tp=2"
MESHES = ("tp=2", "kvp=2", "kvp=4", "spp=2", "kvp=2,tp=2", ALL_AXES)


def prompts(count: int) -> list[list[int]]:
    random = np.random.default_rng(count)
    return [random.integers(3, 120, size).tolist() for size in (5, 40, 17, 66, 9, 30)[:count]]


def run(real: Engine, every: list[list[int]], adapters: list[str]) -> list[tuple]:
    """Greedy completions of prompts, each with the adapter of this name ('': none): their ids and
    log-probabilities."""
    runner = Runner(real)
    known = real.adapters.by_name
    ids = [
        runner.submit(
            prompt,
            max_tokens=TOKENS,
            ignore_eos=True,
            logprobs=1,
            temperature=0,
            rest={"adapter": known[name].identity if name else ""},
        )
        for prompt, name in zip(every, adapters)
    ]
    runner.run((7, 32))
    assert_empty(real)
    done = [runner.completion(id) for id in ids]
    return [(one.ids, [each.chosen for each in one.logprobs]) for one in done]


def assert_same(some: list[tuple], others: list[tuple]) -> None:
    for (ids, chosen), (right, expected) in zip(some, others, strict=True):
        assert ids == right
        assert chosen == pytest.approx(expected, abs=2e-4)


def assert_as_merged(folder: Path, base: Path, adapters: dict[str, Path], **settings) -> None:
    """Asserts that requests with each of the adapters and without, in one batch, are those of
    engines whose checkpoints have them merged."""
    real = engine(str(base), **SHARED, loras=len(adapters), **settings)
    for name, path in adapters.items():
        real.adapters.load(name, str(path))
    names = ["", *adapters]
    every = prompts(len(names))
    mixed = run(real, every, names)
    apart = [run(real, [prompt], [name])[0] for prompt, name in zip(every, names)]
    assert_same(apart, mixed)
    real.close()
    for prompt, name, result in zip(every, names, mixed):
        plain = str(merge(folder / f"merged-{name}", base, adapters[name]) if name else base)
        alone = engine(plain, **SHARED)
        assert_same([result], run(alone, [prompt], [""]))
        alone.close()
    assert len({tuple(chosen) for _, chosen in mixed}) == len(mixed)


def three_adapters(folder: Path, base: Path) -> dict[str, Path]:
    return {
        "all": write_adapter(folder / "all", base, ATTENTION + MLP, rank=8, alpha=4, seed=1),
        "few": write_adapter(
            folder / "few",
            base,
            ("q_proj", "v_proj", "down_proj"),
            rank=2,
            seed=2,
            use_rslora=True,
            rank_pattern={"down_proj": 5},
            alpha_pattern={"v_proj": 3},
        ),
        "one": write_adapter(folder / "one", base, ("up_proj",), rank=3, seed=3),
    }


@pytest.mark.parametrize(
    "mesh",
    ["", ALL_AXES, *(pytest.param(mesh, marks=pytest.mark.matrix) for mesh in MESHES[:-1])],
)
def test_requests_of_a_batch_have_each_their_own_adapter(mesh, tmp_path):
    base = write_model(tmp_path / "base", "granite")
    assert_as_merged(tmp_path, base, three_adapters(tmp_path, base), mesh=mesh)
