import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.api.events import Accepted, Finished, Logprobs, Progress, Timing, Token, Usage
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.text.output import Delta, NoText, OutputProcessor, StopStrings
from tests.examples import examples
from tests.server.fakes import EOS, ByteDetokenizer

TIMING = Timing(0.0, 0.1, 0.2)


def answer(stopped=None, detokenizer=ByteDetokenizer, **sampling):
    request = Request("r", np.arange(3, dtype=np.int32), SamplingParams.make(**sampling))
    return OutputProcessor(
        request, (EOS,), detokenizer, (stopped if stopped is not None else []).append
    )


def finished(index=0, reason="length", count=0):
    return Finished(index, reason, Usage(3, 0, count), TIMING)


def tokens(text, index=0):
    return [Token(index, byte) for byte in text.encode()]


def text_of(outputs, index=0):
    return "".join(o.text for o in outputs if isinstance(o, Delta) and o.index == index)


def ids_of(outputs, index=0):
    return [i for o in outputs if isinstance(o, Delta) and o.index == index for i in o.ids]


def cut(text, stops):
    """The meaning of stop strings, in one line: text before the match that ends first, the longest
    one where several end there."""
    ends = [
        (end, -len(s))
        for s in stops
        for end in range(len(s), len(text) + 1)
        if text.endswith(s, 0, end)
    ]
    return text if not ends else text[: min(ends)[0] + min(ends)[1]]


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.randoms(),
)
def test_stop_strings_cut_the_same_however_the_text_is_split(text, stops, random):
    finder = StopStrings(stops)
    shown = ""
    at = 0
    while at < len(text):
        size = random.randint(1, 6)
        shown += finder.push(text[at : at + size])
        assert cut(text, stops).startswith(shown)
        at += size
    found = finder.found
    assert shown + finder.flush() == cut(text, stops)
    assert bool(found) == any(s in text for s in stops)
    assert not found or (found in stops and found in text)


@settings(max_examples=examples(60))
@given(
    st.text("aé🙂 b", max_size=20),
    st.lists(st.text("aé🙂 b", min_size=1, max_size=3), max_size=3),
    st.integers(1, 7),
)
def test_streamed_text_is_the_full_decode_up_to_the_stop_string(text, stops, size):
    stopped = []
    outputs = []
    whole = answer(stopped, stop=stops)
    events = [*tokens(text), finished()]
    for at in range(0, len(events), size):
        outputs += whole.feed(events[at : at + size])
    assert text_of(outputs) == cut(text, stops)
    assert stopped == ([0] if any(s in text for s in stops) else [])
    assert outputs[-1].reason == ("stop" if stopped else "length")
    assert outputs[-1].usage.completion == len(ids_of(outputs)) and whole.unfinished == 0


def test_tokens_after_a_stop_string_are_dropped_and_not_counted():
    whole = answer(stop="END")
    outputs = (
        whole.feed(tokens("one EN"))
        + whole.feed(tokens("D two"))
        + whole.feed([finished(reason="cancelled", count=11)])
    )
    assert text_of(outputs) == "one "
    assert bytes(ids_of(outputs)) == b"one END"
    assert outputs[-1].reason == "stop" and outputs[-1].usage.completion == 7


def test_text_that_might_begin_a_stop_string_comes_out_when_it_does_not():
    whole = answer(stop="END")
    assert text_of(whole.feed(tokens("one E"))) == "one "
    assert text_of(whole.feed(tokens("N"))) == ""
    assert text_of(whole.feed(tokens("T"))) == "ENT"
    assert text_of(whole.feed([*tokens("EN"), finished()])) == "EN"


def test_half_a_character_waits_for_its_other_half():
    whole = answer()
    first, last = "é".encode()
    assert text_of(whole.feed([Token(0, first)])) == ""
    assert text_of(whole.feed([Token(0, last)])) == "é"


@pytest.mark.parametrize("end", [EOS, ord("!")])
def test_the_token_that_ends_a_completion_is_an_id_but_no_text(end):
    outputs = answer(stop_token_ids=[ord("!")]).feed(
        [*tokens("hi"), Token(0, end), finished(reason="stop")]
    )
    assert text_of(outputs) == "hi" and ids_of(outputs) == [*b"hi", end]


def test_a_stop_id_that_did_not_end_the_completion_is_text():
    outputs = answer(stop_token_ids=[ord("!")], min_tokens=4).feed(
        [*tokens("h!i!"), finished(reason="length")]
    )
    assert text_of(outputs) == "h!i!"


def test_stop_strings_before_min_tokens_do_not_match():
    outputs = answer(stop="a", min_tokens=3).feed([*tokens("aabba"), finished()])
    assert text_of(outputs) == "aabb" and outputs[-1].reason == "stop"


def test_completions_are_kept_apart_and_stop_one_by_one():
    stopped = []
    whole = answer(stopped, n=2, stop="x")
    outputs = whole.feed([*tokens("ab", 0), *tokens("cx", 1), *tokens("d", 0)])
    assert {output.index for output in outputs} == {0}, "the last tokens wait for the end"
    outputs += whole.feed([finished(1)])
    assert (text_of(outputs, 0), text_of(outputs, 1), stopped) == ("abd", "c", [1])
    assert [o.index for o in outputs] == [0, 0, 1, 1]
    whole.feed([finished(0)])
    assert whole.unfinished == 0


def test_other_events_pass_in_order_and_logprobs_stay_with_their_tokens():
    logprobs = [Logprobs(-1.0), Logprobs(-2.0)]
    events = [
        Accepted(0),
        Progress(0, 3, 3),
        Token(0, 97, logprobs[0]),
        Token(0, 98, logprobs[1]),
        finished(),
    ]
    outputs = answer(logprobs=0).feed(events)
    assert outputs[:2] == events[:2]
    assert outputs[2] == Delta(0, [97, 98], "ab", logprobs)


def test_ids_only_gives_no_text():
    assert answer(detokenizer=NoText).feed(tokens("ab")) == [Delta(0, [97, 98], "", [])]
