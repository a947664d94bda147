"""A replica over several processes says what one process says."""

from __future__ import annotations

import pytest

from tests.engine.groups import led
from tests.engine.test_golden import assert_golden

ALL = [("64", "random"), ("7", "striped"), ("512", "grow")]


@pytest.mark.parametrize(
    "mesh, processes",
    [
        pytest.param("spp=2,kvp=2,tp=3", 2, id="a stage each", marks=pytest.mark.matrix),
        pytest.param("kvp=2,tp=3", 2, id="a lane each", marks=pytest.mark.matrix),
        pytest.param("spp=2,kvp=2,tp=3", 4, id="a lane of a stage each", marks=pytest.mark.matrix),
    ],
)
def test_tokens_equal_the_reference(mesh, processes, golden, smollm2_gguf, monkeypatch):
    with led(
        monkeypatch, smollm2_gguf, mesh, processes, chunk_tokens=512, pages=640, max_model_len=8192
    ) as (real, _):
        assert_golden(real, golden["cases"], ALL, 1500)
