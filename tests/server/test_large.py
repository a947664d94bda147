"""What is large is refused, or worked on beside the event loop: others are answered meanwhile."""

import concurrent.futures
import gc
import json
import threading
import time
import tracemalloc

import httpx
import numpy as np
import pydantic
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.api.errors import RequestError
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.server import frontend
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.client import Client, ServerError
from jaxserve.server.generation.chat import ChatRequest
from jaxserve.server.generation.responding import INLINE_TOKENS
from jaxserve.server.json_body import PARSE_IN_THREAD_BYTES, dump_pieces, parse
from jaxserve.server.openai.completions import CompletionRequest
from jaxserve.server.prompts import Chat, prompt_cost, to_array
from jaxserve.server.tokenization import TokenizeRequest
from jaxserve.text import Tokenizer
from jaxserve.text.structured_output import Guided, guides
from jaxserve.text.structured_output.sandbox import Sandbox
from tests.server.fakes import MAX_LEN, FakeTokenizer
from tests.text.vocabulary import tokenizer as small_tokenizer
from tests.waiting import SOON, eventually, tried

LONG = [ord("x")] * MAX_LEN  # enough to be worked on beside the event loop
CROWD = 40  # more than there are threads


@pytest.mark.parametrize(
    "ids", [[1] * 2000 + ["x" * 100_000], [[1]], [1, [1]], [1.5], [True], [None], [2**70]]
)
def test_what_are_no_ids_takes_no_memory(ids):
    tracemalloc.start()
    try:
        with pytest.raises(RequestError) as error:
            to_array("prompt", ids)
        assert error.value.field == "prompt" and tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


def test_ids_of_a_list_are_read_as_they_are():
    assert (
        to_array("ids", [0, -1, 2**63 - 1]).tolist() == [0, -1, 2**63 - 1]
        and to_array("ids", []).tolist() == []
    )
    assert to_array("ids", pb.TokenIds(ids=range(200_000)).ids).tolist() == list(range(200_000))


def test_so_many_ids_become_text_and_no_more(serve):
    served = serve()
    most = [ord("x")] * frontend.MAX_DETOKENIZED_IDS
    assert served.client.detokenize(most) == "x" * len(most)
    assert httpx.post(
        f"{served.server.url}/detokenize", json={"tokens": LONG}, timeout=SOON
    ).json() == {"prompt": "x" * MAX_LEN}
    code, details = served.status_of("Inference/Detokenize", pb.DetokenizeRequest(ids=[*most, 1]))
    assert (
        code.name == "INVALID_ARGUMENT" and details.startswith("ids:") and str(len(most)) in details
    )
    answer = httpx.post(
        f"{served.server.url}/detokenize", json={"tokens": [*most, 1]}, timeout=SOON
    )
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tokens"


@pytest.mark.parametrize("count", [3, INLINE_TOKENS + 5])
def test_short_and_long_texts_are_tokenized_alike(serve, count):
    text = "é" * (count // 2)
    body = httpx.post(
        f"{serve().server.url}/tokenize",
        json={"prompt": text, "return_token_strs": True},
        timeout=SOON,
    ).json()
    assert body == {
        "count": len(text.encode()),
        "max_model_len": MAX_LEN,
        "tokens": list(text.encode()),
        "token_strs": ["\ufffd"] * len(text.encode()),
    }


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
)
values = st.recursive(
    scalars | st.lists(scalars, max_size=3).map(lambda some: some * 300),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(values)
def test_json_in_pieces_is_the_same_json(value):
    assert json.loads(b"".join(dump_pieces(value))) == value


def test_of_thousands_of_faults_the_first_is_looked_for():
    wrong = {
        "prompt": "x",
        "stop": [1] * 1000,
        "stop_token_ids": ["a"] * 1000,
        "structured_outputs": {"choice": [1] * 1000},
    }
    for kind, body in (
        (CompletionRequest, wrong),
        (ChatRequest, {"messages": [1] * 1000, "tools": [1] * 1000}),
        (TokenizeRequest, {"messages": [1] * 1000}),
    ):
        with pytest.raises(pydantic.ValidationError) as error:
            kind.model_validate(body)
        assert error.value.error_count() < 10


def test_all_values_of_messages_count():
    assert prompt_cost(Chat([{"role": "user", "content": "x", "more": [1] * 5000}])) > 5000


names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5)
bodies = st.dictionaries(
    names,
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(names, inner, max_size=5),
    ),
    max_size=5,
)


@settings(deadline=None)
@given(bodies, st.booleans())
def test_bodies_are_read_as_json_says(body, ascii):
    written = json.dumps(body, ensure_ascii=ascii).encode()
    for blanks in (0, PARSE_IN_THREAD_BYTES):
        read = parse(written + b" " * blanks)
        # 1, 1.0 and True are equal, and not the same
        assert read == body and json.dumps(read) == json.dumps(body)


@pytest.mark.parametrize(
    "body,said",
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"a": {"b\\u0000": 1}}', "holds a NUL"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' is given more than once"),
        (b'{"a": [{"role": 1, "\\u0072ole": 2}]}', "'role' is given more than once"),
        (b'{"a": [1, -Infinity]}', "not JSON"),
        (b'{"a": {"b": NaN}}', "not JSON"),
        (b'{"a": 1e309}', "not JSON"),
        (b'{"a": ' + b"7" * 400 + b"}", "not JSON"),
        (b'{"a": 1}{"a": 1}', "not JSON"),
        ('{"a": 1}'.encode("utf-16"), "not JSON"),
        (b"1", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "not JSON"),
        (b'{"a": ' + b"[" * 129 + b"1" + b"]" * 129 + b"}", "a: is nested deeper than 128"),
        (
            b'{"a": {' + b",".join(b'"%d": 1' % i for i in range(4097)) + b"}}",
            "a: has an object of more than 4096 names",
        ),
        (
            b"{" + b",".join(b'"%d": 1' % i for i in range(257)) + b"}",
            "257 fields; the limit is 256",
        ),
        (b'{"a": [' + b"[]," * 2**16 + b"1]}", "a: has more than 65536 values"),
        (b'{"a": [' + b"1," * 2**16 + b"1]}", "a: has more than 65536 values"),
        (b'{"prompt": [' + b"[]," * 2**16 + b"[]]}", "prompt: has more than 65536 values"),
    ],
)
def test_bodies_beyond_a_limit_are_refused(body, said):
    for blanks in (0, PARSE_IN_THREAD_BYTES):
        with pytest.raises(RequestError, match=said):
            parse(body + b" " * blanks)


def test_a_byte_order_mark_is_skipped():
    for blanks in (0, PARSE_IN_THREAD_BYTES):
        assert parse(b'\xef\xbb\xbf {"b": [null]}' + b" " * blanks) == {"b": [None]}


def test_halves_of_characters_in_json_are_replaced():
    body = rb'{"a": "x\ud83d", "b": ["\ud83d\ude00", "\\ud83d"], "c": "\udc00\n\ud83d\ud83d\ude00"}'
    assert parse(body) == {
        "a": "x\ufffd",
        "b": ["\U0001f600", "\\ud83d"],
        "c": "\ufffd\n\ufffd\U0001f600",
    }
    with pytest.raises(RequestError, match="not JSON"):
        parse(rb'{"a": "\ud83d\q"}')


def test_integers_beyond_64_bits_become_floats_and_nothing_else_does():
    body = {
        "in": [2**63, 2**64 - 1, -(2**63), 1234567890123456789],
        "beyond": [2**64, -(2**63) - 1, 10**40, {"deep": 98765432109876543210}],
        'text "98765432109876543210" \\': '\\"98765432109876543210,\\\\',
        "fractions": [0.9876543210987654321098, 98765432109876543210.5, 1e-5],
    }
    written = json.dumps(body).replace("1e-05", "1e-0000000000000000000005")
    floats = [float(2**64), -float(2**63), 1e40, {"deep": 98765432109876543210.0}]
    for blanks in (0, PARSE_IN_THREAD_BYTES):
        read = parse(written.encode() + b" " * blanks)
        assert json.dumps(read) == json.dumps({**body, "beyond": floats})


def test_ids_of_any_number_are_read():
    ids = list(range(200_000))
    assert parse(json.dumps({"prompt": ids}).encode()) == {"prompt": ids}
    assert parse(json.dumps({"tokens": [ids, ids]}).encode()) == {"tokens": [ids, ids]}


@tried(3)
def test_lists_by_the_million_are_counted_before_they_are_made():
    body = b'{"x": [' + b"[]," * 2**22 + b"1]}"

    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            parse(body)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(body), "4 bytes here are a list of 56"
    finally:
        tracemalloc.stop()


def test_log_probabilities_of_a_prompt_have_a_limit_together():
    def make(tokens, n):
        return Request.make(
            "r",
            np.ones(tokens, np.int32),
            SamplingParams(prompt_logprobs=1, max_tokens=1, n=n),
            vocab=10,
            max_len=2**20,
        )

    assert len(make(2**19, 1).prompt) == 2**19 and len(make(2**12, 128).prompt) == 2**12
    for tokens, n in ((2**19 + 1, 1), (2**12 + 1, 128)):
        with pytest.raises(RequestError, match=r"prompt_logprobs: .*1048576"):
            make(tokens, n)


def test_echoes_of_all_prompts_have_a_limit_together(serve):
    url = serve().server.url
    for body in (
        {"prompt": [[1] * 400] * 128, "logprobs": 20},
        {"prompt": [[1] * 2100] * 4, "n": 128},
    ):
        answer = httpx.post(
            f"{url}/v1/completions", json={**body, "echo": True, "max_tokens": 1}, timeout=60
        )
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "echo"


def watched(work) -> tuple[float, float]:
    """Seconds that some work takes on another thread, and how long this one had to wait for the
    interpreter at most. The garbage collector leaves what was there before alone, as in a
    server."""
    thread = threading.Thread(target=work)
    longest = 0.0
    gc.collect()
    gc.freeze()
    began = last = time.monotonic()
    thread.start()
    while thread.is_alive():
        now = time.monotonic()
        last, longest = now, max(longest, now - last)
    gc.unfreeze()
    return last - began, longest


@tried(3)
def test_text_becomes_ids_while_other_threads_run():
    text = "the quick brown fox, é " * 20_000
    for encode in (
        lambda: small_tokenizer().encode(text),
        lambda: small_tokenizer().encode(text, special=False),
    ):
        took, longest = watched(encode)
        assert longest < max(0.5 * took, 0.05), (longest, took)


def test_ids_of_a_batch_are_those_of_the_text():
    tokenizer: Tokenizer = small_tokenizer()
    library = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    for text in ("", "x", "word é 😀\n" * 50):
        assert tokenizer.encode(text) == library.encode(text).ids
        assert (
            tokenizer.encode(text, special=False)
            == library.encode(text, add_special_tokens=False).ids
        )


def test_half_a_character_is_refused_by_name(serve):
    function = {"name": "f", "arguments": '{"x": "\\ud83d"}'}
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }

    class Telling(FakeTokenizer):
        def chat(self, messages, **rest):
            return self.encode(
                json.dumps(
                    json.loads(messages[0]["tool_calls"][0]["function"]["arguments"]),
                    ensure_ascii=False,
                )
            )

    for special in (True, False):
        with pytest.raises(UnicodeEncodeError):
            small_tokenizer().encode("a \ud83d", special=special)
    answer = httpx.post(
        f"{serve(tokenizer=Telling).server.url}/v1/chat/completions",
        json={"messages": [call]},
        timeout=SOON,
    )
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"
    assert b"".join(dump_pieces({"arguments": "\ud83d"})) == b'{"arguments":"?"}'


def test_guides_that_take_long_hold_up_none_without_and_no_crowd_waits_for_them(serve, monkeypatch):
    served = serve()
    go = threading.Event()
    error_of = Sandbox.error_of
    monkeypatch.setattr(guides, "QUEUE_SECONDS", 0.2)
    monkeypatch.setattr(
        Sandbox, "error_of", lambda *arguments: (go.wait(200), error_of(*arguments))[1]
    )

    def ask(_):
        with Client(served.target) as client:
            try:
                return client.complete(
                    "x", SamplingParams(max_tokens=2), guided=Guided("regex", "[a-z]+")
                )[0].reason
            except ServerError as error:
                return error.status

    with concurrent.futures.ThreadPoolExecutor(CROWD) as pool:
        crowd = [pool.submit(ask, number) for number in range(CROWD)]
        waiting = served.server.server.frontend.guides._threads._work_queue
        eventually(lambda: waiting.qsize() == CROWD - guides.COMPILE_THREADS)
        time.sleep(2 * guides.QUEUE_SECONDS)
        try:
            assert served.client.detokenize(LONG) == "x" * MAX_LEN
            assert not any(one.done() for one in crowd)
        finally:
            go.set()
        reasons = [one.result() for one in crowd]
    assert (
        set(reasons) == {"length", "RESOURCE_EXHAUSTED"}
        and reasons.count("length") == guides.COMPILE_THREADS
    )


def test_questions_to_a_busy_engine_hold_up_no_prompt(serve):
    served = serve()
    go = threading.Event()
    load = served.engine.load
    served.engine.load = lambda: (go.wait(200), load())[1]
    with concurrent.futures.ThreadPoolExecutor(CROWD) as pool:
        asked = [pool.submit(served.client.load) for _ in range(CROWD)]
        time.sleep(0.5)
        try:
            assert served.client.detokenize(LONG) == "x" * MAX_LEN
            assert not any(one.done() for one in asked)
        finally:
            go.set()
        assert all(one.result().running == 0 for one in asked)
