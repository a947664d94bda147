"""What attention gives rows of padding means nothing, and reaches no token."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import pytest

from jaxserve.sharding.attend import Attend
from tests.engine.harness import Runner, engine
from tests.models.test_families import write_model

MESHES = ["", "kvp=2,tp=2"]
FAMILIES = ["llama", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v2", "qwen3_next"]
DEFAULT = [("llama", "kvp=2,tp=2"), ("qwen3_moe", ""), ("qwen3_next", "")]
CASES = [
    pytest.param(family, mesh, marks=[] if (family, mesh) in DEFAULT else pytest.mark.matrix)
    for family, mesh in itertools.product(FAMILIES, MESHES)
]


def broken_padding(monkeypatch, value: float) -> None:
    """Has attention give this value for rows of which all tokens are padding."""
    attend = Attend.__call__

    def changed(self, q, rows, *arguments, **options):
        out, lse = attend(self, q, rows, *arguments, **options)
        padding = jnp.repeat(rows.pos.max(1) < 0, rows.shape[1])
        spoil = lambda x: jnp.where(padding.reshape(-1, *(1,) * (x.ndim - 1)), value, x)
        return spoil(out).astype(out.dtype), spoil(lse)

    monkeypatch.setattr(Attend, "__call__", changed)


def tokens(model, mesh: str) -> list[list[int]]:
    real = engine(model, mesh, chunk=32, seqs=8, max_len=256, lane_tokens=32 if mesh else None)
    runner = Runner(real)
    names = [
        runner.submit([(7 * at + number) % 50 for at in range(length)], max_tokens=5)
        for number, length in enumerate((1, 9, 70))
    ]
    runner.run()
    real.worker.close()
    return [runner.ids(name) for name in names]


@pytest.mark.parametrize("value", ["nan", pytest.param("inf", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("family, mesh", CASES)
def test_tokens_are_the_same_whatever_padding_gets(tmp_path, monkeypatch, family, mesh, value):
    model = "random:tiny" if family == "llama" else write_model(tmp_path / family, family)
    wanted = tokens(model, mesh)
    broken_padding(monkeypatch, float(value))
    assert tokens(model, mesh) == wanted
