"""Adapters: each request is computed with its own, as on a checkpoint that has it merged."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.engine.engine import Engine
from tests.engine.adapters import merge, write_adapter
from tests.engine.groups import led
from tests.engine.harness import Runner, assert_empty, engine
from tests.models.oracle import peft
from tests.models.test_families import write_model
from tests.waiting import eventually

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


MESH = pytest.mark.parametrize(
    "mesh",
    ["", ALL_AXES, *(pytest.param(mesh, marks=pytest.mark.matrix) for mesh in MESHES[:-1])],
)


@MESH
def test_log_probabilities_are_those_of_peft(mesh, tmp_path):
    """Three adapters are computed in one batch."""
    base = write_model(tmp_path / "base", peft.BASE)
    real = engine(str(base), mesh=mesh, **SHARED, loras=3)
    answers = np.load(peft.FILE)
    runner = Runner(real)
    ids = {}
    for name, path in peft.write_adapters(tmp_path, base).items():
        adapter = real.adapters.load(name, str(path))
        prompt = answers[f"{name}_ids"].tolist()
        rest = {"adapter": adapter.identity}
        ids[name] = runner.submit(prompt, max_tokens=1, prompt_logprobs=0, rest=rest)
    runner.run()
    for name, id in ids.items():
        scored = runner.completion(id).finished.prompt_logprobs[1:]
        found = [entry.chosen for entry in scored]
        assert found == pytest.approx(answers[f"{name}_logprobs"], abs=1e-4)
    real.close()


@MESH
def test_requests_of_a_batch_have_each_their_own_adapter(mesh, tmp_path):
    base = write_model(tmp_path / "base", peft.BASE)
    assert_as_merged(tmp_path, base, peft.write_adapters(tmp_path, base), mesh=mesh)


# modules of families whose projections lie in one tensor, have latents, states, several sizes of
# heads, or experts beside an MLP
FAMILIES = {
    "phi3": (("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), ""),
    "deepseek_v2": (("q_proj", "kv_a_proj_with_mqa", "o_proj"), "tp=2"),
    "qwen3_next": (("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"), "tp=2"),
    "qwen3_5": (("in_proj_qkv", "in_proj_z", "in_proj_b", "out_proj", "v_proj"), ""),
    "gemma4-experts": ((*ATTENTION, *MLP), "tp=2"),
    "glm4": (("q_proj", "gate_up_proj"), "tp=2"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_adapters_of_their_modules(family, tmp_path):
    ends, mesh = FAMILIES[family]
    base = write_model(tmp_path / "base", family)
    assert_as_merged(
        tmp_path, base, {"one": write_adapter(tmp_path / "one", base, ends)}, mesh=mesh
    )


def test_lanes_that_share_mlps_have_adapters_of_them(tmp_path):
    base = write_model(tmp_path / "base", "granite")
    adapters = {"mlp": write_adapter(tmp_path / "mlp", base, MLP)}
    assert_as_merged(tmp_path, base, adapters, mesh="kvp=2,tp=2", ffn_over_lanes=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "base", "granite")


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / f"a{i}", base, ATTENTION, rank=4, seed=i) for i in range(6)]


@pytest.mark.parametrize("drafts", ["none", "ngram"])
def test_more_adapters_than_places_take_turns(base, folders, drafts):
    """Adapters are brought to the devices again where others have taken their places."""
    real = engine(str(base), **SHARED, loras=2, drafts=drafts)
    names = [f"a{i}" for i in range(6)]
    for name, path in zip(names, folders):
        real.adapters.load(name, str(path))
    every = prompts(6) * 2
    asked = [*names, "", *names[:5]]
    mixed = run(real, every, asked)
    apart = [run(real, [prompt], [name])[0] for prompt, name in zip(every, asked)]
    assert_same(mixed, apart)
    assert len(real.scheduler.slots.adapters.resident) == 2
    assert len({tuple(chosen) for _, chosen in mixed}) == len(mixed)
    real.close()


@pytest.mark.parametrize("held", [1, 2])
def test_more_adapters_than_host_memory_holds_are_read_again(held, base, folders):
    """Each gives the tokens that it gives where all of them are in host memory."""
    real = engine(str(base), **SHARED, loras=1)
    names = [f"a{i}" for i in range(6)]
    for name, path in zip(names, folders):
        real.adapters.load(name, str(path))
    right = run(real, prompts(6), names)
    for name in names:
        real.adapters.unload(name)
    real.scheduler.slots.adapters.most_held = held
    for name, path in zip(names, folders):
        real.adapters.load(name, str(path))
        assert len(real.worker.adapters) <= held
    real.start()
    for _ in range(2):
        runner, ids = submit_all(real, names)
        eventually(lambda: not real.registry.ids(), 60)
        assert [runner.ids(id) for id in ids] == [ids for ids, _ in right]
        numbers = real.scheduler.slots.adapters.numbers.values()
        here = [number for number in numbers if number is not None]
        assert len(real.worker.adapters) == len(here) <= held
    assert list(real.adapters.by_name) == names
    real.close()


def submit_all(real: Engine, names: list[str]) -> tuple[Runner, list[str]]:
    """Submits a prompt for each of some adapters."""
    runner = Runner(real)
    fields = dict(max_tokens=TOKENS, ignore_eos=True)
    known = real.adapters.by_name
    ids = [
        runner.submit(prompt, rest={"adapter": known[name].identity}, **fields)
        for name, prompt in zip(names, prompts(len(names)))
    ]
    return runner, ids


def test_an_adapter_that_cannot_be_read_again_is_served_no_more(base, tmp_path):
    """Where its files are gone, or others by now; requests for the others go on."""
    for i in range(3):
        write_adapter(tmp_path / f"a{i}", base, ATTENTION, seed=i)
    names = ["a0", "a1", "a2"]
    real = engine(str(base), **SHARED, loras=1)
    real.scheduler.slots.adapters.most_held = 1
    for name in names:
        real.adapters.load(name, str(tmp_path / name))
    shutil.rmtree(tmp_path / "a0")
    write_adapter(tmp_path / "other", base, ATTENTION, seed=7)
    shutil.copytree(tmp_path / "other", tmp_path / "a1", dirs_exist_ok=True)
    runner, ids = submit_all(real, names)
    real.start()
    eventually(lambda: not real.registry.ids(), 60)
    for id in ids[:2]:
        assert runner.completion(id).finished.error.status == "UNAVAILABLE"
    assert runner.completion(ids[2]).finished.reason == "length"
    assert list(real.adapters.by_name) == ["a2"]
    assert len(real.worker.adapters) == len(real.scheduler.slots.adapters.numbers) == 1
    real.adapters.load("a1", str(tmp_path / "a1"))
    assert runner.engine.adapters.by_name.keys() == {"a1", "a2"}
    real.close()


def test_prefixes_are_shared_only_with_the_same_adapter(base, folders):
    real = engine(str(base), **SHARED, loras=2)
    for name in ("a0", "a1"):
        real.adapters.load(name, str(folders[int(name[1])]))
    prompt = [prompts(4)[3]]
    first = {name: run(real, prompt, [name]) for name in ("", "a0", "a1")}
    hits = [cached_tokens(real, prompt[0], name) for name in ("", "a0", "a1")]
    assert hits == [64, 64, 64]
    for name, result in first.items():
        assert_same(run(real, prompt, [name]), result)
    real.adapters.load("a0", str(folders[2]), in_place=True)
    assert cached_tokens(real, prompt[0], "a0") == 0  # its weights are others now
    assert cached_tokens(real, prompt[0], "a0") == 64
    real.close()


def cached_tokens(real: Engine, prompt: list[int], name: str) -> int:
    runner = Runner(real)
    adapter = real.adapters.by_name[name].identity if name else ""
    id = runner.submit(prompt, max_tokens=1, rest={"adapter": adapter})
    runner.run()
    return runner.completion(id).finished.usage.cached


def test_accepted_requests_go_on_with_an_adapter_that_is_unloaded(base, folders):
    real = engine(str(base), **SHARED, loras=1)
    real.adapters.load("a0", str(folders[0]))
    every = prompts(3)
    expected = run(real, every, ["a0"] * 3)
    identity = real.adapters.by_name["a0"].identity
    runner = Runner(real)
    rest = {"adapter": identity}
    fields = dict(max_tokens=TOKENS, ignore_eos=True, logprobs=1)
    ids = [runner.submit(prompt, rest=rest, **fields) for prompt in every]
    real.step()
    real.adapters.unload("a0")
    assert not real.adapters.by_name
    real.adapters.load("a0", str(folders[1]))
    other = runner.submit(
        every[0], rest={"adapter": real.adapters.by_name["a0"].identity}, **fields
    )
    runner.run()
    done = [runner.completion(id) for id in ids]
    assert_same([(one.ids, [each.chosen for each in one.logprobs]) for one in done], expected)
    assert runner.completion(other).finished.reason == "length"
    assert list(real.scheduler.slots.adapters.numbers) == [real.adapters.by_name["a0"].identity]
    assert len(real.worker.adapters) == 1  # host memory of the old one is free
    with pytest.raises(RequestError, match="'b' is not loaded"):
        real.adapters.unload("b")
    with pytest.raises(RequestError, match="'b' is not loaded"):
        runner.submit(every[0], rest={"adapter": "b@0"})
    real.close()


def test_adapters_come_to_the_devices_again_after_a_failed_step(base, folders):
    real = engine(str(base), **SHARED, loras=1)
    real.adapters.load("a0", str(folders[0]))
    every = prompts(2)
    expected = run(real, every, ["a0"] * 2)
    real.steps.reset_devices()
    real.steps.lose(lambda sequence: False, RequestError("", "a step failed"))
    assert_same(run(real, every, ["a0"] * 2), expected)
    real.close()


@functools.cache
def one_place(base: Path) -> Engine:
    return engine(str(base), **SHARED, loras=1)


@pytest.mark.parametrize(
    "change, fault",
    [
        (dict(peft_type="IA3"), "peft_type is IA3"),
        (dict(use_dora=True), "use_dora"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save"),
        (dict(bias="all"), "bias"),
        (dict(r=0), "r must be a whole number of at least 1"),
        (dict(r="8"), "r must be a whole number"),
        (dict(lora_alpha=float("nan")), "lora_alpha must be a number"),
        (dict(init_lora_weights="pissa_niter_4"), "pissa_niter_4 changes the base model"),
        (dict(rank_pattern={"(a+)+$": 2}), "is no name of a module"),
        (dict(r=16), "rank 16 is greater than max_lora_rank, 8"),
        (dict(r=3), "should be"),
    ],
)
def test_adapters_that_cannot_be_served_are_refused(change, fault, base, folders, tmp_path):
    real = one_place(base)
    folder = tmp_path / "bad"
    shutil.copytree(folders[0], folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(RequestError, match=fault.replace("(", r"\(")) as error:
        real.adapters.load("bad", str(folder))
    assert error.value.field == "lora_path"
    assert not real.adapters.by_name


def test_workers_of_a_group_have_adapters_also_after_one_was_lost(base, tmp_path, monkeypatch):
    """An adapter whose files have changed since is served no more: it would be another one."""
    for i in range(2):
        write_adapter(tmp_path / f"a{i}", base, ATTENTION, seed=i)
    names = ["", "a0", "a1"]
    every = prompts(3)
    alone = engine(str(base), "spp=2", **SHARED, loras=2)
    for name in names[1:]:
        alone.adapters.load(name, str(tmp_path / name))
    right = run(alone, every, names)
    alone.close()
    settings = dict(max_loras=2, max_lora_rank=8, lora_root=str(tmp_path), max_model_len=256)
    size = dict(chunk_tokens=32, max_seqs=6, pages=96)
    with led(monkeypatch, str(base), "spp=2", 2, **settings, **size) as (real, workers):
        with pytest.raises(RequestError, match=r"worker 0: lora_path: .* has no adapter_model"):
            real.adapters.load("none", ".")
        for name in names[1:]:
            real.adapters.load(name, name)
        assert_same(run(real, every, names), right)
        write_adapter(tmp_path / "other", base, ATTENTION, seed=7)
        shutil.copytree(tmp_path / "other", tmp_path / "a1", dirs_exist_ok=True)
        real.start()
        workers.processes[1].kill()
        eventually(lambda: not real.available)
        workers.end()
        for number in range(2):
            workers.start(number)
        eventually(lambda: real.available, 300)
        assert list(real.adapters.by_name) == ["a0"]
        runner = Runner(real)
        rest = {"adapter": real.adapters.by_name["a0"].identity}
        fields = dict(max_tokens=TOKENS, ignore_eos=True, logprobs=1, rest=rest)
        id = runner.submit(every[1], **fields)
        eventually(lambda: not real.registry.ids())
        assert runner.ids(id) == right[1][0]
        real.close()


def test_workers_of_a_group_read_adapters_again(base, folders, monkeypatch):
    names = ["a0", "a1", "a2"]
    alone = engine(str(base), "spp=2", **SHARED, loras=1)
    for name, path in zip(names, folders):
        alone.adapters.load(name, str(path))
    right = [ids for ids, _ in run(alone, prompts(3), names)]
    alone.close()
    settings = dict(max_loras=1, max_cpu_loras=1, max_lora_rank=8, lora_root="/", max_model_len=256)
    size = dict(chunk_tokens=32, max_seqs=6, pages=96)
    with led(monkeypatch, str(base), "spp=2", 2, **settings, **size) as (real, _):
        for name, path in zip(names, folders):
            real.adapters.load(name, str(path))
        real.start()
        runner, ids = submit_all(real, names)
        eventually(lambda: not real.registry.ids(), 60)
        assert [runner.ids(id) for id in ids] == right
        real.close()


def test_a_pending_load_is_of_the_adapter_as_it_is_now(base, folders):
    """As where a sequence has a slot and waits for KV of elsewhere, so that no step was issued."""
    real = engine(str(base), **SHARED, loras=1)
    real.adapters.load("a0", str(folders[0]))
    places = real.scheduler.slots.adapters
    identity = real.adapters.by_name["a0"].identity
    places.take(0, identity)
    real.adapters.load("a0", str(folders[0]), in_place=True)
    number = real.adapters.by_name["a0"].number
    assert places.take_loads().tolist() == [[0, number]]
    places.release(0)
    places.reset()
    places.take(0, identity)
    places.release(0)
    real.adapters.unload("a0")
    assert not len(places.take_loads())
    real.close()


def test_replacing_an_adapter_back_and_forth_keeps_one_of_them(base, folders):
    real = engine(str(base), **SHARED, loras=1)
    for i in (0, 1, 0, 1, 1, 0):
        real.adapters.load("a", str(folders[i]), in_place=True)
        assert len(real.worker.adapters) == len(real.scheduler.slots.adapters.numbers) == 1
    real.close()
