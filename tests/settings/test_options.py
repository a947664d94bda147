import dataclasses

import pytest

from jaxserve.settings.options import make, options_of
from jaxserve.settings.schema import ConfigError, EngineConfig, MeshConfig, ServerConfig


def test_flat_names_are_unique():
    names = [*options_of(EngineConfig), *options_of(ServerConfig)]
    assert len(names) == len(set(names)) and {
        "model",
        "mesh",
        "chunk_tokens",
        "pages",
        "lookahead",
        "port",
    } <= set(names)


def test_every_setting_has_help_and_a_kind():
    for option in [*options_of(EngineConfig).values(), *options_of(ServerConfig).values()]:
        assert option.help and option.kind in (int, float, bool, str, MeshConfig)


def test_settings_land_where_they_belong_and_the_rest_is_default():
    config = make(
        EngineConfig, {"model": "x", "mesh": "tp=3", "chunk_tokens": 7, "pages": 9, "lookahead": 0}
    )
    assert (
        config.source.model,
        config.mesh.tp,
        config.scheduler.chunk_tokens,
        config.cache.pages,
        config.lookahead,
    ) == ("x", 3, 7, 9, 0)
    assert make(EngineConfig, {}) == EngineConfig()
    assert dataclasses.replace(config.cache, pages=None) == EngineConfig().cache


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"chunk_token": 1}, "chunk_token: unknown setting; did you mean chunk_tokens"),
        ({"chunk_tokens": "1"}, "chunk_tokens: must be of type int"),
        ({"chunk_tokens": True}, "chunk_tokens: must be of type int"),
        ({"chunk_tokens": 0}, "chunk_tokens: 0 is below the limit 1"),
        ({"chunk_tokens": None}, "chunk_tokens: must be of type int"),
        ({"prefix_caching": 1}, "prefix_caching: must be of type bool"),
        ({"mesh": "x=2"}, "mesh: 'x=2' is not AXIS=DEGREE"),
        ({"dtype": "int8"}, "dtype: 'int8' is not one of float32"),
        (
            {"mesh": "kvp=2", "exchange": "auto", "profile": "none"},
            "exchange: auto goes by what steps cost",
        ),
        (
            {"mesh": "kvp=2", "planner": "cdsp", "placement": "zigzag", "profile": "none"},
            "planner: cdsp goes by what steps cost",
        ),
        ({"mesh": "kvp=2", "planner": "cdsp"}, "placement: grow leaves no lane to a planner"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        make(EngineConfig, settings)
