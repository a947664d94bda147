"""What a start without flags chooses on a machine with GPUs; on CPUs it is the defaults."""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve.checkpoint.zoo import MODELS
from jaxserve.cli.engine_flags import engine_config, engine_groups
from jaxserve.engine.machine import fitted
from jaxserve.engine.memory import DeviceRoom, sizes
from jaxserve.engine.sizing import for_this_machine, kv_tokens, make_plan
from jaxserve.lab.cli import profile_steps
from jaxserve.settings.flags import Command, parse
from jaxserve.settings.options import make, values_of
from jaxserve.settings.schema import EngineConfig, MeshConfig
from jaxserve.settings.schema.engine import SERVED

LLAMA = MODELS["llama3-8b"]
H200 = DeviceRoom("gpu", 141 * 10**9)


def fit(given, room=H200, devices=1, model=LLAMA):
    return fitted(make(EngineConfig, given), model, room, devices, kv_tokens(model, room))


def test_on_cpus_the_defaults_stay():
    config = make(EngineConfig, {})
    found, choices = fitted(config, LLAMA, DeviceRoom("cpu", None), 8, lambda config: 0)
    assert values_of(found) == values_of(EngineConfig()) and not choices
    assert for_this_machine(config) is config


def test_a_start_without_flags_takes_the_gpus_that_there_are():
    for devices, tp, kvp in ((1, 1, 1), (2, 2, 1), (8, 8, 1), (16, 8, 2), (6, 4, 1), (3, 2, 1)):
        found, _ = fit({}, devices=devices)
        assert (found.mesh.spp, found.mesh.kvp, found.mesh.tp) == (1, kvp, tp)
    three_heads = dataclasses.replace(LLAMA, heads=9, kv_heads=3, d_ff=1536)
    found, _ = fit({}, devices=8, model=three_heads)
    assert (found.mesh.kvp, found.mesh.tp) == (2, 3)


def test_as_many_sequences_run_as_there_is_room_for():
    sequences = {}
    for gigabytes in (24, 32, 80, 141):
        found, _ = fit({}, DeviceRoom("gpu", gigabytes * 10**9))
        sequences[gigabytes] = found.scheduler.max_seqs
        plan = make_plan(found, LLAMA, DeviceRoom("gpu", gigabytes * 10**9))
        room = plan.pages * plan.block_size
        assert found.scheduler.max_seqs == 16 or room >= 900 * found.scheduler.max_seqs
    assert sequences[24] < sequences[80] <= sequences[141] == 256


@pytest.mark.parametrize("mesh", [{}, {"spp": 2, "tp": 4}, {"spp": 3}, {"kvp": 2, "tp": 2}])
@pytest.mark.parametrize("name", ["llama3-8b", "gpt-oss-20b", "qwen3-next-80b-a3b"])
def test_simulations_count_the_weights_that_a_device_holds(name, mesh):
    degrees = MeshConfig(**mesh)
    for lanes in {1, degrees.kvp}:  # experts over ranks, or over lanes too
        model = MODELS[name].with_tp(degrees.tp, lanes)
        config = dataclasses.replace(make(EngineConfig, {"max_seqs": 2}), mesh=degrees)
        plan = make_plan(config, model, DeviceRoom("gpu", 10**12))
        counted = MODELS[name].over(lanes).weight_bytes(degrees.tp, degrees.spp)
        assert counted == sizes(plan).weights


@pytest.mark.parametrize(
    "given", [{"mesh": "tp=1"}, {"block_size": 16}, {"chunk_tokens": 512}, {"max_seqs": 16}]
)
def test_what_is_given_stays_also_where_it_is_the_default(given):
    found, choices = fit(given, devices=8)
    for name, value in given.items():
        assert values_of(found)[name] == values_of(make(EngineConfig, {name: value}))[name]
        assert name not in {choice.setting for choice in choices}
    assert len(choices) == 3 and not found.automatic


def test_choices_say_why_and_what_would_change_them():
    _, choices = fit({}, devices=8)
    told = [str(choice) for choice in choices]
    assert told[0] == (
        "mesh=spp=1,kvp=1,tp=8: 8 devices, 8 kv heads "
        "(-tp, --context-parallel-size to change it)"
    )  # fmt: skip
    assert [choice.setting for choice in choices] == [
        "mesh", "block_size", "chunk_tokens", "max_seqs",
    ]  # fmt: skip


def test_flags_the_environment_and_files_give_settings_and_defaults_do_not(monkeypatch, tmp_path):
    command = Command(engine_groups(**SERVED), lambda values: 0, "")
    everything = {"mesh", "block_size", "chunk_tokens", "max_seqs"}
    assert set(engine_config(parse(command, [])).automatic) == everything
    assert set(engine_config(parse(command, ["-tp", "1"])).automatic) == everything - {"mesh"}
    monkeypatch.setenv("JAXSERVE_MAX_SEQS", "16")
    (tmp_path / "settings.yaml").write_text("block_size: 16\n")
    found = engine_config(parse(command, [f"--config={tmp_path / 'settings.yaml'}"]))
    assert set(found.automatic) == {"mesh", "chunk_tokens"}
    fewer = Command(engine_groups(**SERVED, max_seqs=4), lambda values: 0, "")
    monkeypatch.delenv("JAXSERVE_MAX_SEQS")
    assert set(engine_config(parse(fewer, [])).automatic) == everything - {"max_seqs"}


def test_a_command_that_sets_a_setting_itself_needs_no_flag_for_it():
    """`jaxserve profile` is one: it has no --profile."""
    assert engine_config(parse(profile_steps.COMMAND, []), profile="auto").profile == "auto"
