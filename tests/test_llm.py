import dataclasses

import numpy as np
import pytest

import jaxserve
from jaxserve import llm
from jaxserve.api.errors import RequestError
from jaxserve.api.sampling import SamplingParams
from jaxserve.text.structured_output import Guided
from tests.engine.harness import shared
from tests.server.fakes import FakeReplica, FakeTokenizer, expected
from tests.text.vocabulary import tokenizer
from tests.waiting import eventually

GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture
def offline(monkeypatch):
    def make(engine=None, tokenizer=FakeTokenizer, **settings):
        engine = engine or FakeReplica()
        monkeypatch.setattr(
            llm,
            "open_engine",
            lambda config, progress, warm_up: (engine, tokenizer and tokenizer()),
        )
        return jaxserve.LLM(**settings)

    return make


@pytest.mark.parametrize(
    "prompt, ids",
    [
        ("hi", b"hi"),
        ([104, 105], b"hi"),
        (np.array([104, 105]), b"hi"),
        ([{"role": "user", "content": "hi"}], b"<user>hi"),
    ],
)
def test_one_prompt_of_any_kind(offline, prompt, ids):
    with offline() as model:
        (completion,) = model.generate(prompt, GREEDY)
    assert completion.prompt_ids == list(ids) and completion.ids == expected(ids, 4)
    assert completion.text == bytes(completion.ids).decode() and completion.reason == "length"


def test_completions_come_in_the_order_of_the_prompts(offline):
    prompts = [bytes([97 + i]).decode() * (1 + i % 3) for i in range(20)]
    sampling = [SamplingParams(max_tokens=20 - i, n=1 + i % 2) for i in range(20)]
    with offline(FakeReplica(chunk=1)) as model:
        completions = model.generate(prompts, sampling)
    wanted = [(list(p.encode()), i) for p, s in zip(prompts, sampling) for i in range(s.n)]
    assert [(c.prompt_ids, c.index) for c in completions] == wanted
    assert [c.ids for c in completions if c.index == 0] == [
        expected(p.encode(), s.max_tokens) for p, s in zip(prompts, sampling)
    ]


def test_more_prompts_than_the_queue_holds(offline):
    engine = FakeReplica(max_queue=3)
    engine.config = llm.make(llm.EngineConfig, {"max_queue": 3})
    with offline(engine) as model:
        assert len(model.generate([f"{i}" for i in range(30)], GREEDY)) == 30


def test_each_completion_says_whether_it_was_in_time(offline):
    with offline() as model:
        assert [one.in_time for one in model.generate(["a", "b"], GREEDY)] == [True, True]


def test_stop_strings_cut_the_text_and_stop_the_engine(offline):
    with offline(FakeReplica(script=b"one END two")) as model:
        (completion,) = model.generate("x", SamplingParams(stop=("END",), max_tokens=4000))
    assert (completion.text, completion.reason) == ("one ", "stop") and bytes(
        completion.ids
    ) == b"one END"


def test_a_fault_in_one_prompt_stops_all_before_they_start(offline):
    with offline() as model, pytest.raises(RequestError, match="is empty"):
        model.generate(["fine", ""])
    with offline() as model, pytest.raises(RequestError, match="temperature"):
        model.generate(["fine", "too"], SamplingParams(temperature=-1))
    assert model.engine.prefill_steps == 0


def test_classes_are_for_all_prompts_or_one_for_each(offline):
    engine = FakeReplica()
    seen = []
    engine.config = llm.make(llm.EngineConfig, {"classes": "chat:ttft=0.5;batch:ttft=600"})
    submit = engine.submit
    engine.submit = lambda request, sink: (
        seen.append(request.slo.class_name),
        submit(request, sink),
    )
    with offline(engine) as model:
        model.generate(["a", "b"], GREEDY, class_name="chat")
        model.generate(["a", "b"], GREEDY, class_name=["batch", None])
        with pytest.raises(RequestError, match="class_name: has 1 entries for 2 prompts"):
            model.generate(["a", "b"], GREEDY, class_name=["chat"])
        with pytest.raises(RequestError, match=r"slo.class_name: 'x' is not a class") as error:
            model.generate(["a", "b"], GREEDY, class_name=["chat", "x"])
    assert (error.value.number, error.value.field) == (1, "slo.class_name") and seen == [
        "chat",
        "chat",
        "batch",
        None,
    ]


def test_watch_sees_the_text_as_it_comes(offline):
    seen = ["", ""]
    with offline() as model:
        completions = model.generate(
            ["a", "b"], GREEDY, watch=lambda i, delta: seen.__setitem__(i, seen[i] + delta.text)
        )
    assert seen == [c.text for c in completions]


def test_an_engine_that_dies_is_an_error_and_ctrl_c_leaves_nothing_running(offline):
    engine = FakeReplica(step_seconds=0.002)
    with offline(engine) as model:

        def interrupt(number, delta):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            model.generate(["a", "b"], SamplingParams(max_tokens=4000), watch=interrupt)
        eventually(lambda: not engine.requests)
        assert len(engine.cancelled) == 2
        with pytest.raises(RequestError, match="stopped"):
            model.generate("a", SamplingParams(max_tokens=4000), watch=lambda *_: engine.die())


def test_without_a_tokenizer_only_ids_are_prompts(offline):
    with offline(tokenizer=None) as model:
        assert model.generate([1, 2], GREEDY)[0].text == ""
        with pytest.raises(RequestError, match="no tokenizer"):
            model.generate("text")


def test_guided_completions_obey_each_its_own_guide(offline):
    with offline(shared(), tokenizer) as llm:
        said = llm.generate(
            ["a", "b", "c"],
            SamplingParams(max_tokens=9),
            guided=[Guided("choice", choices=("yes", "no")), None, Guided("regex", "ab{3}")],
        )
    assert said[0].text in ("yes", "no") and said[2].text == "abbb"


def test_a_guide_that_is_wrong_is_the_fault_of_its_prompt(offline):
    with offline() as llm, pytest.raises(RequestError, match="limit is 65536") as fault:
        llm.generate(["a", "b"], guided=[None, Guided("regex", "a" * 70_000)])
    assert fault.value.number == 1 and fault.value.field == "regex"


def test_without_sampling_the_model_recommends_it(offline):
    engine = FakeReplica()
    recommended = (("temperature", 0.5), ("max_tokens", 3))
    engine.model = dataclasses.replace(engine.model, sampling=recommended)
    with offline(engine) as model:
        (completion,) = model.generate("hi")
        assert model.get_default_sampling_params() == SamplingParams(temperature=0.5, max_tokens=3)
        assert len(completion.ids) == 3
        (completion,) = model.generate("hi", SamplingParams(max_tokens=4))
    assert [request.sampling.temperature for request in engine.submitted] == [0.5, 1.0]
