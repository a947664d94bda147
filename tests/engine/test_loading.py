"""What makes two replicas' blocks of KV the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.checkpoint.rope import Rope, RopeScaling
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.engine.loading import cache_identity
from jaxserve.engine.sizing import max_length
from jaxserve.settings.schema import ConfigError, EngineConfig, ModelSource

DYNAMIC = RopeScaling("dynamic", 4.0, 128)
SCALING = RopeScaling("longrope", 4.0, 128, short=(1.0,) * 8, long=(2.0,) * 8)


def identity(max_model_len: int | None, *ropes: Rope | None):
    model = replace(MODELS["tiny"], max_len=512, ropes=ropes)
    source = ModelSource(model="random:tiny", max_model_len=max_model_len)
    return cache_identity(EngineConfig(source=source), model)


def test_longrope_of_another_length_is_another_model():
    """Within the original length other frequencies turn queries and keys than beyond it."""
    within = identity(128, Rope(scaling=SCALING), None)
    assert within == identity(64, Rope(scaling=SCALING), None)
    assert within != identity(129, Rope(scaling=SCALING), None)
    assert identity(None, Rope(scaling=SCALING)) == identity(129, Rope(scaling=SCALING))


def test_dynamic_scaling_of_another_length_is_another_model():
    dynamic = Rope(scaling=DYNAMIC)
    assert identity(128, dynamic) == identity(64, dynamic)
    assert identity(129, dynamic) != identity(128, dynamic)
    assert identity(129, dynamic) != identity(256, dynamic)


def test_dynamic_scaling_serves_longer_sequences_where_settings_ask_for_them():
    model = replace(MODELS["tiny"], max_len=128, ropes=(Rope(scaling=DYNAMIC),))
    served = lambda length: max_length(
        EngineConfig(source=ModelSource(model="random:tiny", max_model_len=length)), model
    )
    assert served(None) == 128 and served(512) == 512
    with pytest.raises(ConfigError, match="513 is above the model's limit 512"):
        served(513)


def test_the_longest_sequence_makes_no_difference_otherwise():
    assert identity(64, Rope()) == identity(None, Rope())
