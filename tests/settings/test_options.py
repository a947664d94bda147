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
        assert option.help and option.kind in (int, float, bool, str, tuple, MeshConfig)


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


HASHED = {"mesh": "kvp=6", "placement": "hashed"}


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"chunk_token": 1}, "chunk_token: unknown setting; did you mean chunk_tokens"),
        ({"chunk_tokens": "1"}, "chunk_tokens: must be a whole number"),
        ({"chunk_tokens": True}, "chunk_tokens: must be a whole number"),
        ({"chunk_tokens": 0}, "chunk_tokens: 0 is below the limit 1"),
        ({"chunk_tokens": None}, "chunk_tokens: must be a whole number"),
        ({"prefix_caching": 1}, "prefix_caching: must be true or false"),
        ({"mesh": "x=2"}, "mesh: 'x=2' is not AXIS=DEGREE"),
        ({"dtype": "int8"}, "dtype: 'int8' is not one of auto, float32"),
        (
            {"mesh": "kvp=2", "exchange": "auto", "profile": "none"},
            "exchange: auto needs to know what steps cost, which --profile=none rules out",
        ),
        (
            {
                "mesh": "kvp=2",
                "planner": "cdsp",
                "placement": "zigzag",
                "exchange": "pass_q",
                "profile": "none",
            },
            "planner: cdsp needs to know what steps cost",
        ),
        (
            {"mesh": "kvp=2", "planner": "cdsp"},
            "placement: grow cannot follow --planner=cdsp; that needs striped or zigzag",
        ),
        (
            {"mesh": "kvp=6", "planner": "fixed-4", "placement": "zigzag", "exchange": "auto"},
            "planner: fixed-4 needs a kvp that 4 divides; --mesh has kvp=6",
        ),
        ({"mesh": "kvp=2", "improvement": 0.2}, "improvement: has no effect with --planner=none"),
        ({"mesh": "kvp=2", "placement": "zigzag"}, "placement: zigzag .* --lane_tokens, which is"),
        ({"mesh": "kvp=2", "pool_lanes": 2}, "pool_lanes: has no effect with --placement=grow"),
        ({"mesh": "kvp=2", "segment_tokens": 9}, "segment_tokens: has no effect with --placement"),
        ({**HASHED, "pool_lanes": 3}, "pool_lanes: 3 is not one of 2, 6"),
        ({"mesh": "kvp=2", "matched_homes": True}, "matched_homes: has no effect with --placement"),
        ({**HASHED, "planner": "cdsp"}, "placement: hashed cannot follow --planner=cdsp"),
        (
            {"mesh": "kvp=2", "planner": "elastic"},
            "placement: grow cannot follow --planner=elastic; that needs round_robin or random or "
            "hashed",
        ),
        ({"prefix_copies": True}, "prefix_copies: True has no effect on one lane; give --mesh"),
        ({**HASHED, "prefix_copies": True, "prefix_caching": False}, "without prefix_caching"),
        ({"placement": "random"}, "placement: random has no effect on one lane; give --mesh a kvp"),
        ({"mesh": "tp=3", "exchange": "pass_q"}, "exchange: pass_q has no effect on one lane"),
        ({"decode_exchange": "pass_q"}, "decode_exchange: pass_q has no effect on one lane"),
        ({"decode_exchange": "pass_kv"}, "decode_exchange: 'pass_kv' is not one of gather, pass_q"),
        ({"mesh": "tp=3", "planner": "cdsp"}, "planner: cdsp has no effect on one lane"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        make(EngineConfig, settings)


@pytest.mark.parametrize(
    "settings, timed",
    [
        ({"mesh": "kvp=2"}, False),  # decodes are gathered
        ({"mesh": "kvp=2", "decode_exchange": "auto", "profile": "none"}, False),
        ({"mesh": "kvp=2", "policy": "slack", "profile": "none"}, False),
        ({"mesh": "kvp=2", "policy": "slack"}, True),
        ({"chunking": "adaptive"}, True),
        ({"mesh": "kvp=2", "exchange": "auto"}, True),
        ({"mesh": "kvp=2", "profile": "costs.json"}, True),
    ],
)
def test_what_steps_cost_is_measured_where_something_is_decided_by_it(settings, timed):
    assert make(EngineConfig, settings).timed == timed


@pytest.mark.parametrize("mesh", ["", "spp=2,tp=3", "kvp=2", "spp=2,kvp=3,tp=2"])
def test_defaults_and_every_plan_of_lanes_work_on_every_mesh(mesh):
    assert make(EngineConfig, {"mesh": mesh}).mesh == MeshConfig.parse(mesh)
    assert make(EngineConfig, {"mesh": mesh, "exchange": "gather", "planner": "none"})
    if "kvp" in mesh:
        dealt = {"mesh": mesh, "placement": "striped", "exchange": "auto"}
        assert make(EngineConfig, {**dealt, "lane_tokens": 64})
        assert make(EngineConfig, {**dealt, "planner": "cdsp", "improvement": 0.2})
