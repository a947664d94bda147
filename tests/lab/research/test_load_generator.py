"""The load generator: what is sent and when, and the arithmetic of its figures."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.lab.research.generator import Sent, play
from jaxserve.lab.research.load import Load
from jaxserve.lab.research.prompts import prompt_ids, requests_of, warm_up_of
from jaxserve.lab.research.served_figures import figures, interval, intervals, parsed_goodput
from jaxserve.lab.research.transports import Ended, Served
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.settings.schema import ConfigError

VOCAB = 5000
TRACE = [  # conversation 0 goes on in the second and the fourth; the last shares one block
    ("0", 1100, [0, 1, 2]),
    ("1000", 1700, [0, 1, 3, 4]),
    ("2000", 512, [5]),
    ("3000", 2600, [0, 1, 3, 6, 7, 8]),
    ("9000", 513, [0, 9]),
]


async def no_text(text):
    raise AssertionError("no text is encoded")


def made(load, seed=(0, 0), longest=None, encode=no_text):
    return asyncio.run(requests_of(load, seed, VOCAB, longest, encode))


@pytest.fixture
def trace(tmp_path):
    file = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": int(at), "input_length": length, "output_length": 40, "hash_ids": ids}
        for at, length, ids in TRACE
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


@pytest.fixture
def sharegpt(tmp_path):
    file = tmp_path / "sharegpt.json"
    talks = [
        [("human", f"question {number} of several"), ("gpt", "answer " * (number + 1))]
        for number in range(8)
    ]
    talks += [[("gpt", "begins with the answer"), ("human", "x")], [("human", "alone")]]
    talks += [[("human", "x"), ("gpt", "after a prompt that is too short")]]
    rows = [
        {"id": str(n), "conversations": [{"from": who, "value": said} for who, said in talk]}
        for n, talk in enumerate(talks)
    ]
    file.write_text(json.dumps(rows))
    return str(file)


# --- prompts


def test_prompts_are_determined_by_the_seed():
    load = Load(prompt="10:50", prefix=20, groups=3, qps=5.0, requests=30)
    first, again, other = (made(load, seed)[1] for seed in ((1, 0), (1, 0), (2, 0)))
    assert all(map(np.array_equal, first, again))
    assert not any(map(np.array_equal, first, other))
    assert all(prompt.min() >= 0 and prompt.max() < VOCAB for prompt in first)


def test_prompts_of_a_group_begin_alike_and_go_on_differently():
    arrivals, prompts = made(Load(prompt="40", prefix=100, groups=3, qps=5.0, requests=30))
    assert {len(prompt) for prompt in prompts} == {140}
    begins = {prompt[:100].tobytes() for prompt in prompts}
    assert len(begins) == 3 and len({arrival.blocks for arrival in arrivals}) == 3
    assert len({prompt[100:].tobytes() for prompt in prompts}) == 30


@pytest.mark.parametrize("scale", [1, 1 / 2, 1 / 16, 1 / 32, 0.3, 1 / 100])
def test_prompts_of_a_trace_share_exactly_the_blocks_that_their_hash_ids_share(trace, scale):
    block = max(1, round(512 * scale))
    arrivals, prompts = made(Load(workload=trace, length_scale=scale))
    for (_, _, ids), arrival, prompt in zip(TRACE, arrivals, prompts):
        assert arrival.block == block and len(prompt) == arrival.prompt
        assert -(-len(prompt) // block) == len(ids)
        assert arrival.output == max(1, round(40 * scale))
    for (_, _, ids), prompt in zip(TRACE, prompts):
        for (_, _, others), other in zip(TRACE, prompts):
            alike = next((n for n, (a, b) in enumerate(zip(ids, others)) if a != b), len(ids))
            assert np.array_equal(prompt[: alike * block], other[: alike * block])
            if alike < min(len(ids), len(others)):
                rest = slice(alike * block, (alike + 1) * block)
                assert prompt[rest].tolist() != other[rest].tolist()


def test_a_trace_is_replayed_at_its_times_scaled_or_as_a_process_says(trace):
    times = lambda **how: [arrival.time for arrival in Load(workload=trace, **how).schedule()]
    assert times() == pytest.approx([0, 1, 2, 3, 9])
    assert times(time_scale=0.1) == pytest.approx([0, 0.1, 0.2, 0.3, 0.9])
    assert times(qps=2.0) == pytest.approx([0, 2 / 9, 4 / 9, 6 / 9, 2])
    assert times(arrivals="constant", qps=2.0) == pytest.approx([0, 0.5, 1, 1.5, 2])


def test_conversations_are_asked_with_their_own_lengths(sharegpt):
    async def encode(text):
        return list(text.encode())

    load = Load(workload=sharegpt, qps=4.0, requests=8)
    arrivals, prompts = made(load, encode=encode)
    told = {bytes(prompt.tolist()).decode(): each for prompt, each in zip(prompts, arrivals)}
    assert set(told) == {f"question {number} of several" for number in range(8)}
    assert told["question 2 of several"].output == len("answer " * 3)
    assert arrivals[0].time > 0 and arrivals == sorted(arrivals, key=lambda each: each.time)
    assert [list(p) for p in made(load, encode=encode)[1]] == [list(p) for p in prompts]
    short = made(Load(workload=sharegpt, qps=4.0, requests=2), longest=36, encode=encode)[0]
    assert {each.output for each in short} == {7, 14}
    with pytest.raises(ConfigError, match=r"requests: 9: .* has 8 conversations"):
        made(Load(workload=sharegpt, qps=4.0, requests=9), encode=encode)


def test_warming_up_shares_no_prompt_with_the_run(trace):
    arrivals, prompts = made(Load(workload=trace))
    own, warm = warm_up_of(arrivals, 2, VOCAB, (0, 0))
    assert [each.prompt for each in own] == [each.prompt for each in arrivals[:2]]
    assert not {p[:16].tobytes() for p in warm} & {p[:16].tobytes() for p in prompts}


@pytest.mark.parametrize(
    "given, field, said",
    [
        ({}, "qps", "either qps or concurrency"),
        ({"qps": 1.0, "concurrency": 2}, "qps", "either qps or concurrency"),
        ({"arrivals": "gamma", "concurrency": 2}, "arrivals", "concurrency"),
        ({"arrivals": "trace", "qps": 1.0}, "arrivals", "file with times"),
        ({"burstiness": 0.5, "qps": 1.0}, "burstiness", "arrivals=gamma"),
        ({"time_scale": 0.5, "qps": 1.0}, "time_scale", "own times"),
        ({"workload": "poisson:mix=sharegpt", "prefix": 3, "qps": 1.0}, "prefix", "workload"),
        ({"prompt": "9:3", "qps": 1.0}, "workload", "prompt: 9 to 3 is no range"),
        ({"arrivals": "never", "qps": 1.0}, "arrivals", "is not one of"),
    ],
)
def test_loads_that_cannot_be_are_refused(given, field, said):
    with pytest.raises(ConfigError, match=said) as caught:
        Load(**given).schedule()
    assert caught.value.field == field


def test_prompts_that_the_model_cannot_take_are_refused_before_the_run(trace):
    with pytest.raises(ConfigError, match=r"2600 . 40 tokens; the model's limit is 2000"):
        made(Load(workload=trace), longest=2000)


# --- sending


class FakeTransport:
    """Answers with the asked number of events, `pause` seconds apart, once `together` requests run;
    notes what runs at once."""

    served = Served("fake", "fake", VOCAB, None)

    def __init__(self, pause=0.0, refuse=(), together=1):
        self._together = together
        self._all = asyncio.Event()
        self._pause = pause
        self._refuse = refuse
        self._running = 0
        self.at_once = []
        self.outputs = []

    def prepare(self, prompt, output):
        return output

    async def send(self, output, heard):
        self.outputs.append(output)
        if output in self._refuse:
            raise RequestError("queue", "is full", "RESOURCE_EXHAUSTED")
        self._running += 1
        self.at_once.append(self._running)
        if self._running == self._together:
            self._all.set()
        await self._all.wait()
        for _ in range(output):
            await asyncio.sleep(self._pause)
            heard()
        self._running -= 1
        return Ended("length", output, 3)


def played(transport, times, **how):
    arrivals = [Arrival(at, 5, number + 1) for number, at in enumerate(times)]
    prompts = [prompt_ids(each, number, VOCAB) for number, each in enumerate(arrivals)]
    return asyncio.run(play(transport, arrivals, prompts, **{"timeout": 30.0, **how}))


def test_a_closed_loop_keeps_as_many_requests_running_as_it_is_told():
    transport = FakeTransport(pause=0.001)
    sent = played(transport, [0.0] * 12, concurrency=3)
    assert max(transport.at_once) == 3 and transport.outputs == list(range(1, 13))
    assert all(each.planned <= each.sent <= each.first <= each.last for each in sent)
    assert [each.tokens for each in sent] == [len(each.gaps) + 1 for each in sent]


def test_an_open_loop_waits_for_no_answer_and_counts_from_the_planned_moment():
    transport = FakeTransport(together=3)
    sent = played(transport, [0.0, 0.01, 0.02])
    assert transport.at_once == [1, 2, 3]
    assert [each.planned for each in sent] == [0.0, 0.01, 0.02]
    assert all(each.sent >= each.planned for each in sent)


def test_what_has_no_answer_has_the_reason():
    sent = played(FakeTransport(pause=0.001, refuse={2}), [0.0] * 3)
    assert [each.status for each in sent] == ["OK", "RESOURCE_EXHAUSTED", "OK"]
    late = played(FakeTransport(pause=60), [0.0], timeout=0.01)
    assert late[0].status == "DEADLINE_EXCEEDED" and "0.01 s" in late[0].error


# --- figures

ANSWERED = Sent(1.0, 10, 5, sent=1.5, first=2.0, last=4.0, gaps=[0.5] * 4, tokens=5, cached=4)
SLOW = Sent(2.0, 30, 3, sent=2.0, first=7.0, last=9.0, gaps=[2.0], tokens=3, cached=26)
REFUSED = Sent(1.0, 10, 5, sent=1.0, status="RESOURCE_EXHAUSTED", error="queue: is full")


def test_figures_count_from_the_planned_moment():
    found = figures([ANSWERED, SLOW, REFUSED], {})
    assert found["ttft"]["p50"] == (1 + 5) / 2 and found["ttft"]["max"] == 5
    assert found["tpot"]["mean"] == (0.5 + 1.0) / 2 and found["tpot"]["count"] == 2
    assert found["itl"]["count"] == 5 and found["itl"]["p50"] == 0.5
    assert found["e2e"]["p90"] == pytest.approx(3 + 0.9 * 4)
    assert found["lag"]["count"] == 3 and found["lag"]["max"] == 0.5
    assert (found["requests"], found["done"], found["span"]) == (3, 2, 8.0)
    assert found["output_tokens_per_s"] == 1 and found["total_tokens_per_s"] == 6
    assert found["prefix_hit_rate"] == 30 / 40
    assert found["refused"] == {"RESOURCE_EXHAUSTED: queue: is full": 1} and not found["failed"]
    assert found["goodput_per_s"] is None


@pytest.mark.parametrize(
    "objectives, good",
    [
        ("ttft:1", 1),
        ("ttft:5,tpot:1", 2),
        ("tpot:0.4", 0),
        ("ttft:1,e2e:2.9", 0),
        ("tbt:0.5", 1),
    ],
)
def test_goodput_counts_what_meets_all_objectives(objectives, good):
    found = figures([ANSWERED, SLOW, REFUSED], parsed_goodput(objectives))
    assert found["goodput_per_s"] == good / 8 and found["goodput_share"] == good / 3
    tokens = {0: 0, 1: 5, 2: 8}[good]
    assert found["goodput_tokens_per_s"] == tokens / 8


def test_without_objectives_in_time_is_what_the_server_says():
    said = dataclasses.replace(ANSWERED, in_time=False), dataclasses.replace(SLOW, in_time=True)
    found = figures([*said, REFUSED], {})
    assert found["goodput_share"] == 1 / 3
    assert (found["goodput_per_s"], found["goodput_tokens_per_s"]) == (1 / 8, 3 / 8)
    assert figures([*said, REFUSED], {"ttft": 1.0})["goodput_tokens_per_s"] == 5 / 8


@pytest.mark.parametrize("text", ["ttft", "ttft:0", "latency:1", "ttft:1,ttft:2", "tpot:inf"])
def test_objectives_that_cannot_be_are_refused(text):
    with pytest.raises(ConfigError, match="goodput"):
        parsed_goodput(text)


def test_figures_of_nothing_are_zero():
    found = figures([REFUSED], {"ttft": 1.0})
    assert found["output_tokens_per_s"] == found["goodput_per_s"] == found["span"] == 0
    assert found["ttft"] == {"count": 0} and found["prefix_hit_rate"] is None


def test_intervals_are_students():
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2 and half == pytest.approx(4.302653 / 3**0.5)  # t(2) at 97.5 %
    assert interval([5.0])[1] == float("inf")


def test_intervals_are_of_what_all_repeats_have():
    runs = [figures([ANSWERED, SLOW], {}), figures([ANSWERED], {})]
    found = intervals(runs)
    assert found["ttft.p50"][0] == (3 + 1) / 2
    assert "goodput_per_s" not in found and "prefix_hit_rate" in found
