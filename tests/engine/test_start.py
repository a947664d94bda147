"""The order of a start: programs are compiled, and on GPUs tuned, before pools fill the devices."""

from __future__ import annotations

import gc
import threading

import jax
import pytest

from jaxserve.engine import build, loading
from jaxserve.engine.memory import sizes
from jaxserve.engine.programs import Programs
from jaxserve.engine.stages import Stages
from jaxserve.settings.schema import CacheConfig, EngineConfig, ModelSource, SchedulerConfig
from jaxserve.weights import CheckpointError, open_checkpoint

CONFIG = EngineConfig(
    ModelSource("random:tiny", max_model_len=256),
    cache=CacheConfig(pages=2000, block_size=16),
    scheduler=SchedulerConfig(max_seqs=2, chunk_tokens=32),
    profile="none",
    compile_cache="",
)


def on_devices() -> int:
    """Bytes of all arrays that there are."""
    return sum(array.nbytes for array in jax.live_arrays())


def test_all_programs_compile_where_there_is_no_room_for_pools(monkeypatch):
    """Each compilation fails as on a GPU that has room for the weights and a third of the pools:
    one that came after these would."""
    gc.collect()
    before = on_devices()
    taken = []
    get = Programs.get

    def limited(programs, name, lower):
        if name not in programs.compiled:
            taken.append(on_devices() - before)
            if taken[-1] > limit:
                raise jax.errors.JaxRuntimeError(f"out of memory while tuning {name}")
        return get(programs, name, lower)

    plan = loading.make_plan(CONFIG, loading.split_model(CONFIG, tiny()))
    needed = sizes(plan)
    limit = needed.weights + needed.kv // 3
    monkeypatch.setattr(Programs, "get", limited)
    worker, _ = build.open_worker(CONFIG, progress=False, everything=False)
    assert len(taken) >= 8
    assert on_devices() - before >= needed.weights + needed.kv  # and then there are pools
    worker.close()


def tiny():
    return open_checkpoint("random:tiny", None).config


def test_programs_compile_while_weights_are_read(monkeypatch):
    """Weights wait for a program, which would wait forever for the weights if they came first."""
    compiled = threading.Event()
    load = Stages.load

    def waiting(stages, loader):
        assert compiled.wait(120), "no program was compiled before the weights were there"
        load(stages, loader)

    monkeypatch.setattr(Stages, "load", waiting)
    get = Programs.get

    def counted(programs, name, lower):
        program = get(programs, name, lower)
        compiled.set()
        return program

    monkeypatch.setattr(Programs, "get", counted)
    worker, _ = build.open_worker(CONFIG, progress=False, everything=False)
    worker.close()


def test_a_fault_of_the_checkpoint_ends_the_start_without_the_other_programs(monkeypatch):
    def faulty(stages, loader):
        raise CheckpointError("a tensor is missing")

    monkeypatch.setattr(Stages, "load", faulty)
    compiled = []
    get = Programs.get
    monkeypatch.setattr(
        Programs, "get", lambda self, name, lower: compiled.append(name) or get(self, name, lower)
    )
    with pytest.raises(CheckpointError, match="a tensor is missing"):
        build.open_worker(CONFIG, progress=False)
    assert len(compiled) < 12
