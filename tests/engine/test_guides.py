"""Guided sequences in a real engine: always valid, exactly the model's best among what is allowed,
and no concern of anyone beside them."""

from __future__ import annotations

import dataclasses
import json
import re

import jsonschema_rs
import numpy as np
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.engine.engine import Engine
from jaxserve.text.structured_output import Guided, Guides
from tests.engine.harness import Runner, assert_empty, engine, fresh, shared
from tests.text.vocabulary import EOS, tokenizer
from tests.weights import models

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["a", "b", "c"],
    "properties": {
        "a": {"type": "integer", "minimum": -99, "maximum": 999},
        "b": {"enum": ["ab", "true", 12]},
        "c": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
    },
}
REGEX = "([ab]{3}|é)c+d?"
CHOICES = ("yes", "no", "abc", "abcd")
SPECS = [
    Guided("json_schema", json.dumps(SCHEMA)),
    Guided("regex", REGEX),
    Guided("choice", choices=CHOICES),
    Guided("json_object"),
]
# 3 ranks: 510 are dealt
THREE = dataclasses.replace(
    models.TINY, name="three", heads=6, kv_heads=3, d_model=96, d_ff=132, vocab=509
)


@pytest.fixture(scope="module")
def alone() -> Engine:
    return shared()


@pytest.fixture(
    scope="module", params=[pytest.param("tp=3", marks=pytest.mark.matrix), "spp=2,tp=2"]
)
def split(request, tmp_path_factory) -> Engine:
    if request.param != "tp=3":
        return shared(request.param)
    values = {name: 0.1 * value for name, value in models.tensors(THREE).items()}
    return engine(
        models.write_folder(tmp_path_factory.mktemp("three"), THREE, values), request.param, seqs=4
    )


def guides(engine: Engine) -> Guides:
    return Guides(tokenizer(), engine.info.vocab, engine.info.eos_ids)


def prompt(seed: int, size: int = 5) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, size).tolist()


def submit(runner: Runner, spec: Guided | None, number: int, **fields) -> str:
    """One of some prompts."""
    guide = None if spec is None else guides(runner.engine).compile(spec)
    return runner.submit(prompt(number), rest={"guide": guide}, **{"max_tokens": 120, **fields})


def check(spec: Guided, completion) -> None:
    """Valid, or cut off by the limit while it might still have become so."""
    ids = [id for id in completion.ids if id != EOS]
    text = tokenizer().decode(ids)
    if completion.finished.reason == "length":
        assert len(completion.ids) == completion.finished.usage.completion
        return
    assert completion.finished.reason == "stop" and completion.finished.error is None
    match spec.kind:
        case "json_schema":
            assert jsonschema_rs.validator_for(SCHEMA).is_valid(json.loads(text)), text
        case "json_object":
            assert isinstance(json.loads(text), dict)
        case "regex":
            assert re.fullmatch(REGEX, text), text
        case "choice":
            assert text in CHOICES


@pytest.mark.parametrize(
    "lookahead", [*(pytest.param(ahead, marks=pytest.mark.matrix) for ahead in (0, 1)), 3]
)
def test_random_completions_are_valid_and_do_not_depend_on_how_far_the_engine_runs_ahead(
    alone, lookahead
):
    said = []
    for ahead in (lookahead, 1):
        alone.config = dataclasses.replace(alone.config, lookahead=ahead)
        runner = Runner(alone)
        ids = [
            submit(
                runner,
                spec,
                seed,
                temperature=1 + seed % 3,
                seed=seed,
                top_p=(1, 0.9)[seed % 2],
                logprobs=(None, 2)[seed % 2],
                n=1 + seed % 3,
            )
            for seed in range(3)
            for spec in SPECS
        ]
        runner.run()
        done = [
            runner.completion(id, index)
            for number, id in enumerate(ids)
            for index in range(1 + number // 4 % 3)
        ]
        said.append([completion.ids for completion in done])
        for number, id in enumerate(ids):
            for index in range(1 + number // 4 % 3):
                check(SPECS[number % 4], runner.completion(id, index))
        ended = sum(completion.finished.reason == "stop" for completion in done)
        assert ended > len(done) / 2, "most are short enough to be checked whole"
        assert_empty(alone)
    assert said[0] == said[1]


def test_random_completions_are_valid_on_every_mesh(split):
    runner = Runner(split)
    ids = [
        submit(runner, spec, seed, temperature=2, seed=seed) for seed in range(3) for spec in SPECS
    ]
    plain = [
        submit(runner, None, seed, temperature=seed % 2, seed=seed, max_tokens=20, ignore_eos=True)
        for seed in range(2)
    ]
    runner.run()
    for number, id in enumerate(ids):
        check(SPECS[number % 4], runner.completion(id))
    apart = Runner(split)
    beside = [
        submit(apart, None, seed, temperature=seed % 2, seed=seed, max_tokens=20, ignore_eos=True)
        for seed in range(2)
    ]
    apart.run()
    assert [runner.ids(id) for id in plain] == [apart.ids(id) for id in beside]
    assert_empty(split)


def best_allowed(engine: Engine, spec: Guided, seed: int, most: int) -> list[int]:
    """The greedy completion, token by token: an unguided request of one token each time, what the
    guide rules out made unlikely."""
    matcher = guides(engine).compile(spec).matcher()
    ids = []
    vocab = engine.info.vocab
    while not matcher.done and len(ids) < most:
        row = np.zeros(-(-vocab // 32), np.int32)
        matcher.fill(row)
        may = np.unpackbits(row.view(np.uint8), bitorder="little")[:vocab]
        runner = Runner(engine)
        id = runner.submit(
            prompt(seed) + ids,
            max_tokens=1,
            logit_bias=dict.fromkeys(np.flatnonzero(may == 0).tolist(), -100),
        )
        runner.run()
        ids += runner.ids(id)
        matcher.push(ids[-1])
    return ids


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_greedy_takes_the_best_of_what_is_allowed(alone, spec):
    runner = Runner(alone)
    id = submit(runner, spec, 3, max_tokens=15)
    beside = [submit(runner, other, 9, temperature=1, seed=1) for other in (*SPECS, None)]
    runner.run()
    assert runner.ids(id) == best_allowed(alone, spec, 3, 15) and beside


def test_greedy_is_exact_on_every_mesh(split):
    runner = Runner(split)
    id = submit(runner, SPECS[1], 4, max_tokens=12)
    runner.run()
    assert runner.ids(id) == best_allowed(split, SPECS[1], 4, 12)


def test_those_beside_guided_sequences_say_what_they_say_alone(alone):
    fields = [
        dict(),
        dict(temperature=1.0, seed=3),
        dict(temperature=0.7, seed=4, logprobs=2),
        dict(frequency_penalty=0.5),
    ]
    together = Runner(alone)
    apart = Runner(alone)
    plain = [
        submit(together, None, seed, ignore_eos=True, max_tokens=40, **more)
        for seed, more in enumerate(fields)
    ]
    for seed, spec in enumerate(SPECS):
        submit(together, spec, seed, temperature=1, seed=seed)
    together.run()
    same = [
        submit(apart, None, seed, ignore_eos=True, max_tokens=40, **more)
        for seed, more in enumerate(fields)
    ]
    apart.run()
    assert [together.ids(id) for id in plain] == [apart.ids(id) for id in same]
    tops = (
        dict(runner.completion(id).logprobs[5].top)
        for runner, id in ((together, plain[2]), (apart, same[2]))
    )
    assert next(tops) == pytest.approx(next(tops))


def test_logprobs_are_those_of_the_model_before_the_mask(alone):
    runner = Runner(alone)
    id = submit(runner, Guided("choice", choices=("abc",)), 7, logprobs=20, prompt_logprobs=0)
    free = submit(runner, None, 7, max_tokens=1, logprobs=20)
    runner.run()
    first = runner.completion(id).logprobs[0]
    other = runner.completion(free).logprobs[0]
    assert [token for token, _ in first.top] == [
        token for token, _ in other.top
    ] and first.chosen < -0.1
    assert [p for _, p in first.top] == pytest.approx([p for _, p in other.top], abs=1e-5)


def test_a_guide_ends_a_completion_where_end_tokens_do_not(alone):
    runner = Runner(alone)
    one = submit(runner, Guided("regex", "abc"), 1, ignore_eos=True)
    two = submit(runner, Guided("regex", "(ab){2}d?"), 1, ignore_eos=True, temperature=1, seed=1)
    three = submit(
        runner,
        Guided("regex", "[a-z]{50}"),
        1,
        stop_token_ids=tokenizer().encode("c", special=False),
        temperature=1,
        seed=0,
        logit_bias={tokenizer().encode("c", special=False)[0]: 8},
    )
    runner.run()
    assert (
        tokenizer().decode(runner.ids(one)) == "abc"
        and runner.completion(one).finished.reason == "stop"
    )
    assert (
        tokenizer().decode(runner.ids(two)) in ("abab", "ababd")
        and runner.completion(two).finished.reason == "stop"
    )
    assert (
        runner.ids(three)[-1] == tokenizer().encode("c", special=False)[0]
        and runner.completion(three).finished.reason == "stop"
    )


class Faulty:
    """A guide whose matchers fail at a token, or at a mask, of one completion."""

    def __init__(self, where: str, at: int):
        self.where = where
        self.left = at
        self.done = False

    def matcher(self) -> Faulty:
        return Faulty(self.where, self.left)

    def fill(self, row: np.ndarray) -> None:
        self._fail("fill")

    def push(self, token: int) -> None:
        self._fail("push")

    def _fail(self, where: str) -> None:
        self.left -= where == self.where
        if self.left < 0:
            raise RequestError("guided", "is too complex to follow")


@pytest.mark.parametrize("where", ["fill", "push"])
@pytest.mark.parametrize("at", [0, 3])
def test_a_guide_that_fails_ends_its_request_and_no_other(alone, where, at):
    runner = Runner(alone)
    bad = runner.submit(
        prompt(1),
        rest={"guide": Faulty(where, at)},
        max_tokens=50,
        ignore_eos=True,
        n=2,
        temperature=1,
        seed=1,
    )
    good = submit(runner, SPECS[1], 2, max_tokens=30)
    plain = submit(runner, None, 3, max_tokens=30, ignore_eos=True)
    runner.run()
    for index in range(2):
        ended = runner.completion(bad, index)
        assert (
            ended.finished.reason == "error"
            and ended.finished.error.field == "guided"
            and len(ended.ids) == at + (where == "push")
        )
    assert alone.alive and len(runner.ids(plain)) == 30
    check(SPECS[1], runner.completion(good))
    assert_empty(alone)


def test_cancelled_guided_requests_leave_nothing_behind(alone):
    runner = Runner(alone)
    for turns in (0, 1, 3, 6, 11):
        ids = [submit(runner, spec, turns, temperature=1, seed=1) for spec in SPECS]
        for _ in range(turns):
            alone.step()
        for id in ids:
            alone.cancel(id)
        again = submit(runner, SPECS[2], turns)
        runner.run()
        check(SPECS[2], runner.completion(again))
        assert_empty(alone)


def test_sequences_that_wait_again_go_on_where_they_were(alone):
    fields = dict(temperature=1.0, max_tokens=60, ignore_eos=True)
    spec = Guided("regex", "([a-d]{1,9} ){300}")
    said = []
    # the small one takes the place of the other
    for pages in (None, 8):
        real = alone if pages is None else fresh(alone, "grow", pages=pages)
        runner = Runner(real)
        ids = [
            submit(runner, spec if seed else None, seed, seed=seed, **fields) for seed in range(4)
        ]
        runner.run()
        said.append([runner.ids(id) for id in ids])
        assert all(re.fullmatch("[a-d ]+", tokenizer().decode(ids)) for ids in said[-1][1:])
        assert_empty(real)
    assert said[0] == said[1]
