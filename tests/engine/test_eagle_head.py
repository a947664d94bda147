"""A draft head proposes what its paper says it does, from hidden states of the model alone; and
changes nothing of what a completion says, on any mesh."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxserve.checkpoint.eagle import eagle_config
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.engine.build import build
from jaxserve.engine.command import DeviceError
from jaxserve.engine.eagle_head import EagleHead
from jaxserve.engine.engine import Engine
from jaxserve.settings.schema import (
    CacheConfig,
    ConfigError,
    DraftConfig,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)
from tests.engine.eagle import CAPTURED, DenseHead, head_config, head_tensors, write_head
from tests.engine.test_draft_model import EVERY_MESH, plainly
from tests.engine.test_drafts import SAMPLING, assert_same, checked, prompts, run
from tests.engine.test_engine import ask
from tests.engine.test_faults import at_launch, on_the_way, once
from tests.models.reference import random_weights
from tests.weights.models import TINY, write_folder

MODEL = dataclasses.replace(TINY, layers=6)
TOKENS = 4
TENSORS = random_weights(MODEL, 0)
WEIGHTS = head_tensors(head_config(MODEL))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"), MODEL, TENSORS)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), head_config(MODEL), WEIGHTS)


def drafting(
    model: Path,
    head: Path,
    mesh: str = "",
    profiled: bool = False,
    groups: int = 1,
    chunk: int = 32,
    pages: int = 400,
    **settings,
) -> Engine:
    return build(
        EngineConfig(
            ModelSource(model=str(model), max_model_len=512),
            MeshConfig.parse(mesh),
            CacheConfig(block_size=16, pages=pages),
            SchedulerConfig(max_seqs=4, chunk_tokens=chunk, drafts="eagle3", draft_tokens=TOKENS),
            draft=DraftConfig(draft_model=str(head), **settings),
            layer_groups=groups,
        ),
        progress=False,
        warm_up=False,
        profiled=profiled,
    )


def proposed(engine: Engine) -> list[tuple[list[int], list[int], int]]:
    """Records texts, what is proposed behind them, and the first position that the head sees, from
    now on. Proposals are wanted whatever they were worth."""
    head = engine.draft_model
    assert isinstance(head, EagleHead)
    made = head.make
    seen = []

    def make(wanted, seconds):
        every = made(wanted, seconds)
        for (source, _), tokens in zip(wanted, every):
            history = source.sequence.history
            place = head.place_of(source.sequence)
            text = history(0, len(history)).tolist()
            seen.append((text, tokens.tolist(), place.first))
        return every

    head.make = make
    return seen


def always(engine: Engine) -> None:
    """Has tokens proposed however often they were wrong."""
    drafting = engine.scheduler.packer.drafting
    drafting._acceptance.learn = lambda *_: None
    drafting._acceptance.begun = lambda hopeful: drafting._acceptance
    drafting._acceptance._rates[:] = 1


def assert_as_paper(seen: list[tuple[list[int], list[int], int]], dense: DenseHead) -> None:
    some = [one for one in seen if one[1]]
    assert len(some) > 20
    for text, tokens, first in some[:: len(some) // 10]:
        assert tokens == dense.propose(text, len(tokens), first)


@pytest.mark.parametrize("mesh", ["", "tp=2", "kvp=2", "spp=2", "spp=2,kvp=2,tp=2"])
def test_it_proposes_what_the_paper_says(model, head, mesh):
    engine = drafting(model, head, mesh)
    always(engine)
    seen = proposed(engine)
    run(engine, prompts(), {})
    assert {first for _, _, first in seen} == {1}
    assert max(len(tokens) for _, tokens, _ in seen) == TOKENS
    assert_as_paper(seen, DenseHead(head_config(MODEL), WEIGHTS, MODEL, TENSORS))


def test_layers_in_groups_are_captured_too(model, head):
    engine = drafting(model, head, groups=3)
    always(engine)
    seen = proposed(engine)
    run(engine, prompts(), {})
    assert_as_paper(seen, DenseHead(head_config(MODEL), WEIGHTS, MODEL, TENSORS))


def test_a_head_as_speculators_write_it(model, tmp_path):
    config = head_config(MODEL)
    layer = {name: config.pop(name) for name in list(config) if name.startswith(("num_", "hidden"))}
    layer |= {name: config[name] for name in ("head_dim", "intermediate_size", "vocab_size")}
    written = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": CAPTURED,
        "transformer_layer_config": config | layer,
    }
    embed = {"embed_tokens.weight": TENSORS["model.embed_tokens.weight"].astype(np.float32)}
    renamed = {name.replace("midlayer", "layers.0"): value for name, value in WEIGHTS.items()}
    engine = drafting(model, write_head(tmp_path, written, renamed | embed))
    always(engine)
    seen = proposed(engine)
    run(engine, prompts(), {})
    dense = DenseHead(head_config(MODEL), WEIGHTS, MODEL, TENSORS, norm_first=True)
    assert_as_paper(seen, dense)


def test_of_a_cached_prefix_it_sees_what_is_computed(model, head):
    engine = drafting(model, head)
    *others, prompt = prompts()
    run(engine, [prompt], {})
    run(engine, others, {})  # these have the places then
    always(engine)
    seen = proposed(engine)
    run(engine, [prompt], {})
    (first,) = {first for _, _, first in seen}
    assert 64 <= first < len(prompt)
    assert_as_paper(seen, DenseHead(head_config(MODEL), WEIGHTS, MODEL, TENSORS))


def test_of_a_conversation_that_goes_on_it_sees_all(model, head):
    engine = drafting(model, head)
    always(engine)
    prompt = prompts()[4]
    ((answer,),) = run(engine, [prompt], {})
    every = [prompt + answer.ids + [5, 6, 7], [8] + prompt]
    seen = proposed(engine)
    run(engine, every, {})
    assert {first for _, _, first in seen} == {1}
    assert_as_paper(seen, DenseHead(head_config(MODEL), WEIGHTS, MODEL, TENSORS))


def test_of_a_long_next_turn_it_sees_the_end(model, head):
    """The turn does not fit in a place beside the turns before it."""
    engine = drafting(model, head, draft_context=128, chunk=128)
    always(engine)
    random = np.random.default_rng(1)
    prompt = random.integers(3, 500, 60).tolist()
    ((answer,),) = run(engine, [prompt], {})
    seen = proposed(engine)
    for more in (80, 110, 10, 70):
        prompt = prompt + answer.ids + random.integers(3, 500, more).tolist()
        ((answer,),) = run(engine, [prompt], dict(max_tokens=20))
    assert not engine.draft_model.broken and len({first for _, _, first in seen}) >= 3
    assert_as_paper(seen, DenseHead(head_config(MODEL), WEIGHTS, MODEL, TENSORS))


@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_it_proposes_what_the_paper_says(model, head, seed):
    """Requests that go on and branch, in a pool so small that some are preempted."""
    engine = drafting(model, head, draft_context=128, draft_seqs=3, chunk=64, pages=24)
    always(engine)
    random = np.random.default_rng(seed)
    texts = [random.integers(3, 500, 20).tolist()]
    seen = proposed(engine)
    for _ in range(4):
        every = []
        for _ in range(5):
            text = texts[random.integers(len(texts))][: random.integers(10, 150)]
            every.append(text + random.integers(3, 500, random.integers(1, 40)).tolist())
        completions = run(engine, every, dict(max_tokens=int(random.integers(5, 60))))
        texts += [text + one.ids for text, (one,) in zip(every, completions)]
    assert not engine.draft_model.broken
    assert_as_paper(seen, DenseHead(head_config(MODEL), WEIGHTS, MODEL, TENSORS))


def test_of_long_texts_it_sees_the_end(model, head):
    engine = drafting(model, head, draft_context=128)
    always(engine)
    seen = proposed(engine)
    random = np.random.default_rng(0)
    every = [random.integers(3, 500, 150).tolist(), random.integers(3, 500, 20).tolist()]
    run(engine, every, dict(max_tokens=200))
    assert len({first for _, _, first in seen}) >= 3
    assert_as_paper(seen, DenseHead(head_config(MODEL), WEIGHTS, MODEL, TENSORS))


@pytest.mark.parametrize("kind", SAMPLING)
def test_completions_are_those_without_a_head(model, head, kind):
    every = prompts()
    engine = drafting(model, head)
    always(engine)
    right = checked(engine)
    assert_same(run(engine, every, SAMPLING[kind], (7, 32)), plainly(engine, every, SAMPLING[kind]))
    assert len(right) > 40


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=pytest.mark.matrix) for m in EVERY_MESH])
def test_completions_on_a_mesh_are_those_without_a_head(model, head, mesh):
    every = prompts()
    fields = dict(temperature=1.1, seed=3)
    engine = drafting(model, head, mesh)
    always(engine)
    right = checked(engine)
    assert_same(run(engine, every, fields), plainly(engine, every, fields))
    assert len(right) > 40


def test_its_launches_are_measured(model, head):
    engine = drafting(model, head, profiled=True)
    drafter = engine.draft_model
    assert 0 < drafter.seconds(1, 1) < drafter.seconds(1, TOKENS)


def test_it_sleeps_and_wakes_with_the_model(model, head):
    engine = drafting(model, head)
    every = prompts(3)
    before = run(engine, every, {})
    engine.draft_model.sleep()
    engine.draft_model.wake()
    always(engine)
    seen = proposed(engine)
    assert_same(run(engine, every, {}), before)
    assert any(tokens for _, tokens, _ in seen)


@pytest.mark.parametrize("what", ["store", "propose"])
def test_a_fault_of_the_head_ends_its_proposals_alone(model, head, what, monkeypatch, caplog):
    engine = drafting(model, head)
    every = prompts(3)

    def fail(*_):
        raise DeviceError("injected")

    monkeypatch.setattr(engine.draft_model._device, what, fail)
    assert_same(run(engine, every, {}), plainly(engine, every, {}))
    assert engine.draft_model.broken and "proposes nothing" in caplog.text


@pytest.mark.parametrize("fault", [at_launch, on_the_way])
def test_behind_a_step_that_is_lost_it_proposes_again(model, head, fault, monkeypatch):
    engine = drafting(model, head)
    always(engine)
    engine.start()
    try:
        before = ask(engine, "before", 20, max_tokens=60)
        assert before.finished().reason == "length"
        once(engine, monkeypatch, "step", fault(engine))
        assert ask(engine, "lost", 20).finished().reason == "error"
        seen = proposed(engine)
        after = ask(engine, "after", 20, max_tokens=60)
        assert after.finished().reason == "length" and after.tokens == before.tokens
        assert any(tokens for _, tokens, _ in seen) and not engine.draft_model.broken
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        (dict(architectures=["Qwen3ForCausalLM"]), "is no EAGLE-3 head"),
        (dict(hidden_size=128), "hidden_size: 128 in the head, 64 in"),
        (dict(vocab_size=256), "vocab_size: 256 in the head, 512 in"),
        (dict(num_hidden_layers=2), "num_hidden_layers: 2 is not supported"),
        (dict(draft_vocab_size=600), "draft_vocab_size: must be a whole number from 1 to 512"),
        (dict(intermediate_size=97), "mlp.up_proj.weight is"),
        (dict(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 9]}), "not all up to 6"),
        (dict(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 1, 3]}), "that rise"),
        (dict(eagle_config=None, transformer_layer_config=3), "must be an object"),
        (dict(eagle_config=dict(norm_before_fc=True)), "norm_before_fc: True is not supported"),
        (dict(norm_output=True), "norm_output: True is not supported"),
        (dict(layer_types=["sliding_attention"]), "sliding_attention is not supported"),
    ],
)
def test_a_head_of_another_kind_is_refused(model, tmp_path, fields, fault):
    folder = write_head(tmp_path, head_config(MODEL) | fields, WEIGHTS)
    with pytest.raises(CheckpointError, match=fault):
        drafting(model, folder)


def test_layers_are_named_by_what_comes_out_where_the_first_is_1():
    read = lambda *layers: (
        eagle_config(
            head_config(MODEL, eagle_config=None, eagle_aux_hidden_state_layer_ids=[*layers])
        ).captured
    )
    assert read(1, 17, 32) == (2, 18, 33)
    assert read(2, 18, 33) == (2, 18, 33)
    assert read() is None


def test_a_head_of_the_authors_is_one_by_its_draft_vocabulary():
    assert eagle_config(head_config(MODEL, architectures=["LlamaForCausalLM"]))


def test_tensors_that_are_not_known_are_refused(model, tmp_path):
    more = WEIGHTS | {"midlayer.self_attn.q_norm.weight": np.ones(16, np.float32)}
    with pytest.raises(CheckpointError, match=r"q_norm\.weight is not known"):
        drafting(model, write_head(tmp_path, head_config(MODEL), more))


def test_what_is_no_folder_of_a_head_is_refused(model, tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json, so it is no draft head"):
        drafting(model, tmp_path)


def test_ids_past_the_vocabulary_are_refused(model, tmp_path):
    wrong = WEIGHTS | {"d2t": WEIGHTS["d2t"] + 400}
    with pytest.raises(CheckpointError, match="d2t has ids that are not below 512"):
        drafting(model, write_head(tmp_path, head_config(MODEL), wrong))


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (dict(draft_context=128, draft_quantization="int8"), "draft heads are not quantised"),
        (dict(draft_revision="main"), "revision"),
    ],
)
def test_settings_that_do_not_go_with_a_head_are_refused(model, head, settings, fault):
    with pytest.raises((ConfigError, CheckpointError), match=fault):
        drafting(model, head, **settings)
