"""Proposed tokens change how long a completion takes, and nothing of what it says: on every mesh,
with every way to sample, right ones, wrong ones and those of the lookup alike."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxserve.costs.coefficients import Costs
from jaxserve.drafts.drafter import EachAlone
from jaxserve.drafts.lookup import Proposal
from jaxserve.engine.engine import Engine
from jaxserve.lanes.choice import DECODE_CHOICES
from jaxserve.scheduling.events import DraftsChecked, StepRead
from jaxserve.text.structured_output import Guided, Guides
from tests.engine.harness import SHARED, Runner, assert_empty, engine, fresh
from tests.text.vocabulary import tokenizer

MESHES = ["", "spp=2,kvp=2,tp=2"]
EVERY_MESH = ["tp=2", "kvp=2", "spp=2", "kvp=4", "kvp=8", "spp=2,tp=2", "kvp=2,tp=2", "spp=2,kvp=2"]
WRONG = 0.25  # share of proposed tokens
FREE_ROWS = Costs(layers=1, launch=0.01, linear_token=1e-6)
SAMPLING = {
    "greedy": {},
    "drawn": dict(temperature=1.3, top_p=0.95, seed=7),
    "penalties": dict(
        temperature=0.8,
        seed=3,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        logit_bias={5: 1.0},
        min_tokens=25,
        stop_token_ids=[5, 6, 7, 8, 9, 10],
    ),
    "logprobs": dict(logprobs=3, temperature=0.7, seed=1, frequency_penalty=1.0),
    "several": dict(n=3, temperature=1.1, seed=5),
}


class Seer:
    """Proposes what a completion said without proposals, with some tokens of it changed."""

    def __init__(self, said: dict[tuple[int, ...], list[list[int]]], prompt, output: list[int]):
        self._said = said[tuple(prompt.tolist())]
        self._output = output
        self._random = np.random.default_rng(len(prompt))

    def propose(self, count: int) -> Proposal:
        known = len(self._output)
        (*_, right) = (said for said in self._said if said[:known] == self._output)
        tokens = np.array(right[known : known + count], np.int32)
        tokens[self._random.random(len(tokens)) < WRONG] += 1
        return Proposal(tokens, 1)


def with_drafts(real: Engine, placement: str = "grow", said=None, **settings) -> Engine:
    """Returns a new engine on the same devices that proposes tokens: a `Seer` of what was `said`
    does, or the lookup."""
    new = fresh(real, placement, **settings)
    drafting = new.scheduler.packer.drafting
    assert drafting is not None
    if said is not None:
        drafting.drafter = EachAlone(1, lambda prompt, output: Seer(said, prompt, output))
    return new


def checked(real: Engine) -> list[bool]:
    """Records of each proposed token from now on whether it was right."""
    right: list[bool] = []
    real.bus.subscribe(DraftsChecked, lambda event: right.extend(event.right.tolist()))
    return right


def prompts(count: int = 5) -> list[list[int]]:
    random = np.random.default_rng(count)
    return [random.integers(3, 500, size).tolist() for size in (3, 17, 40, 64, 90)[:count]]


def run(real: Engine, every: list[list[int]], fields: dict, chunks=()) -> list[list]:
    """Completions of all prompts, each with the indices that it asked for."""
    runner = Runner(real)
    ids = [
        runner.submit(prompt, **{"max_tokens": 40, "ignore_eos": True, **fields})
        for prompt in every
    ]
    runner.run(chunks)
    assert_empty(real)
    return [[runner.completion(id, index) for index in range(fields.get("n", 1))] for id in ids]


def ids_of(completions: list[list]) -> list[list[list[int]]]:
    return [[one.ids for one in of_prompt] for of_prompt in completions]


def assert_same(drafted: list[list], plain: list[list]) -> None:
    """Asserts that completions have the same tokens, ends and log-probabilities."""
    assert ids_of(drafted) == ids_of(plain)
    for before, after in zip(itertools.chain(*plain), itertools.chain(*drafted)):
        assert before.finished.reason == after.finished.reason
        for one, other in zip(before.logprobs, after.logprobs):
            assert (one is None) == (other is None)
            if one is not None:
                assert one.chosen == pytest.approx(other.chosen, abs=1e-4)


@pytest.fixture(
    scope="module",
    params=[*MESHES, *(pytest.param(m, marks=pytest.mark.matrix) for m in EVERY_MESH)],
)
def real(request) -> Engine:
    return engine(mesh=request.param, **SHARED, drafts="ngram", draft_tokens=5)


@pytest.mark.parametrize("exchange", sorted(set(DECODE_CHOICES) - {"auto"}))
def test_spread_decodes_say_the_same_by_every_exchange(exchange):
    """Also by visits, where keys and values are written once all was read."""
    real = engine(mesh="kvp=2", **SHARED, drafts="ngram", decode_exchange=exchange)
    every = prompts(4)
    plain = run(fresh(real, "random", drafts="none"), every, dict(logprobs=1))
    new = with_drafts(real, "random", dict(zip(map(tuple, every), ids_of(plain))))
    right = checked(new)
    assert_same(run(new, every, dict(logprobs=1)), plain)
    assert sum(right) > 40


@pytest.mark.parametrize("kind", SAMPLING)
def test_completions_are_those_without_proposals(real, kind):
    every = prompts()
    placement = "random" if real.config.mesh.kvp > 1 else "grow"
    plain = run(fresh(real, placement, drafts="none"), every, SAMPLING[kind])
    said = dict(zip(map(tuple, every), ids_of(plain)))
    new = with_drafts(real, placement, said)
    right = checked(new)
    drafted = run(new, every, SAMPLING[kind], chunks=(7, 32))
    assert_same(drafted, plain)
    assert sum(right) > 40 and not all(right)


def test_guided_completions_are_those_without_proposals(real):
    """Also where proposed tokens are not allowed, and where the guide's end is among them."""
    placement = "random" if real.config.mesh.kvp > 1 else "grow"
    guides = Guides(tokenizer(), real.info.vocab, real.info.eos_ids)
    specs = [
        Guided("regex", "(ab|cd){6,9}e"),
        Guided("json_object"),
        Guided("choice", choices=("abcdabcd", "abcdx")),
    ]
    every = prompts(len(specs))

    def ask(engine: Engine) -> list[list]:
        runner = Runner(engine)
        ids = [
            runner.submit(
                prompt, rest={"guide": guides.compile(spec)}, max_tokens=40, temperature=1, seed=2
            )
            for prompt, spec in zip(every, specs)
        ]
        runner.run()
        assert_empty(engine)
        return [[runner.completion(id)] for id in ids]

    plain = ask(fresh(real, placement, drafts="none"))
    new = with_drafts(real, placement, dict(zip(map(tuple, every), ids_of(plain))))
    right = checked(new)
    assert ids_of(ask(new)) == ids_of(plain)
    assert sum(right) > 10 and not all(right)
    guides.close()


def test_a_completion_that_repeats_itself_takes_fewer_steps(real):
    """A model of few words soon goes round in circles, which the lookup sees."""
    every = prompts(2)
    fields = dict(max_tokens=120)
    steps = []
    said = []
    for drafts in ("none", "ngram"):
        new = fresh(real, "grow", drafts=drafts)
        seen: list = []
        new.bus.subscribe(StepRead, seen.append)
        said.append(ids_of(run(new, every, fields)))
        steps.append(len(seen))
    assert said[0] == said[1]
    assert steps[1] < 0.7 * steps[0]


def test_cancelled_requests_leave_nothing_while_tokens_are_proposed(real):
    every = prompts()
    new = with_drafts(real, "grow")
    runner = Runner(new)
    ids = [runner.submit(prompt, max_tokens=100, ignore_eos=True) for prompt in every]
    for number, id in enumerate(ids):
        while len(runner.events[id]) < 8 + number:
            new.step()
            new.scheduler.check()
        new.cancel(id)
    runner.run()
    assert_empty(new)


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["", "spp=2,kvp=2,tp=3"])
def test_the_real_model_says_what_the_reference_says(mesh, golden, smollm2_gguf):
    """With the lookup's proposals, of which some are right and some are wrong."""
    cases = [case for case in golden["cases"] if len(case["prompt_ids"]) <= 2000]
    real = engine(smollm2_gguf, mesh, chunk=64, seqs=4, pages=640, max_len=4096, drafts="ngram")
    new = fresh(real, "random" if real.config.mesh.kvp > 1 else "grow")
    right = checked(new)
    runner = Runner(new)
    ids = [
        runner.submit(case["prompt_ids"], max_tokens=len(case["output_ids"]), ignore_eos=True)
        for case in cases
    ]
    runner.run((64,))
    for id, case in zip(ids, cases):
        assert runner.ids(id) == case["output_ids"], f"prompt of {len(case['prompt_ids'])}"
    assert any(right) and not all(right)
    assert_empty(new)


class Likeliest:
    """Proposes what follows an output most likely. odds: probability of each whole output. out:
    grows."""

    def __init__(self, odds: dict[tuple[int, ...], float], out: list[int]):
        self._odds = odds
        self._out = out

    def propose(self, count: int) -> Proposal:
        said = tuple(self._out)
        begun = [whole for whole in self._odds if whole[: len(said)] == said]
        tokens = max(begun, key=self._odds.__getitem__)[len(said) :][:count]
        return Proposal(np.array(tokens, np.int32), 1)


@pytest.mark.parametrize("draws", [2_000, pytest.param(440_000, marks=pytest.mark.matrix)])
def test_draws_behind_proposed_tokens_follow_the_models_distribution(draws):
    """Tokens are drawn of two only, so that all that four of them can be come often; how often
    each does is what the model's own probabilities say. About one draw in four checks a token that
    was proposed: 10^5 of the most."""
    pair = (40, 300)
    length = 4
    real = engine(**SHARED | {"seqs": 64}, drafts="ngram", draft_tokens=3)
    prompt = prompts(3)[2]
    at_once = 16  # sequences, so that there are rows for proposed tokens
    # one is likelier, or proposals would be right too seldom to be made at all
    bias = {pair[0]: 100.0, pair[1]: 98.0}
    outcomes = list(itertools.product(pair, repeat=length))
    expected = {said: probability(fresh(real, "grow"), prompt, said, bias) for said in outcomes}
    assert sum(expected.values()) == pytest.approx(1, abs=1e-4)
    new = with_drafts(real)
    new.scheduler.packer.drafting.drafter = EachAlone(
        1, lambda prompt, out: Likeliest(expected, out)
    )
    right = checked(new)
    runner = Runner(new)
    counts = dict.fromkeys(outcomes, 0)
    for first in range(0, draws // length, at_once):
        ids = [
            runner.submit(
                prompt,
                max_tokens=length,
                ignore_eos=True,
                temperature=1,
                seed=first + i,
                logit_bias=bias,
            )
            for i in range(min(at_once, draws // length - first))
        ]
        runner.run()
        for id in ids:
            counts[tuple(runner.completion(id).ids)] += 1
    total = draws // length
    assert sum(counts.values()) == total
    squares = [(counts[said] - p * total) ** 2 / (p * total) for said, p in expected.items()]
    degrees = len(outcomes) - 1
    assert sum(squares) < degrees + 5 * np.sqrt(2 * degrees)
    assert total / 2 < sum(right) < len(right)


def probability(real: Engine, prompt: list[int], said: tuple[int, ...], bias: dict) -> float:
    """Returns the probability of tokens behind a prompt, where each is one of those with a bias
    that lifts them above all others, as the engine scores prompts that end in each."""
    runner = Runner(real)
    result = 1.0
    for at, token in enumerate(said):
        before = [*prompt, *said[:at]]
        ids = [runner.submit([*before, one], max_tokens=1, prompt_logprobs=0) for one in bias]
        runner.run()
        scores = [runner.completion(id).finished.prompt_logprobs[-1].chosen for id in ids]
        lifted = np.array(scores) + list(bias.values())
        odds = dict(zip(bias, np.exp(lifted - lifted.max())))
        result *= odds[token] / sum(odds.values())
    return result
