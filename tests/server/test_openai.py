"""The OpenAI protocol over an engine whose answers are known: what is asked, what comes back, what
is refused."""

import json
import statistics
import threading
import time
import urllib.parse

import httpx
import pytest

from jaxserve.api.events import Logprobs
from jaxserve.api.request import Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.server.generation.token_writer import TokenWriter
from jaxserve.server.openai.completion_logprobs import CompletionLogprobs
from jaxserve.server.supervisor import Background
from jaxserve.settings.options import make
from jaxserve.settings.schema import EngineConfig, ServerConfig
from jaxserve.text.chat_template import ChatTemplate
from tests.server.fakes import EOS, MAX_LEN, FakeReplica, FakeTokenizer, expected
from tests.server.http_client import events, post
from tests.waiting import SOON, eventually

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


def text(ids):
    return bytes(ids).decode()


def test_a_completion_whole_and_streamed_is_the_same(http):
    client = http()
    body = {"model": "fake", "prompt": "hello", "max_tokens": 6, "temperature": 0}
    whole = post(client, "/v1/completions", body).json()
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text(expected(b"hello", 6)), "length")
    assert whole["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 6,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    chunks, last = events(
        client, "/v1/completions", {**body, "stream_options": {"include_usage": True}}
    )
    assert (
        last == "[DONE]" and chunks[-1]["usage"] == whole["usage"] and chunks[-1]["choices"] == []
    )
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == choice["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]][-1] == "length"
    assert (
        len({chunk["id"] for chunk in chunks}) == 1
        and chunks[0]["object"] == whole["object"] == "text_completion"
    )


def test_many_prompts_and_completions_have_indexes_in_order(http):
    body = {"prompt": ["hi", "you"], "n": 2, "max_tokens": 3}
    client = http()
    found = {c["index"]: c["text"] for c in post(client, "/v1/completions", body).json()["choices"]}
    wanted = {
        0: expected(b"hi", 3, 0),
        1: expected(b"hi", 3, 1),
        2: expected(b"you", 3, 0),
        3: expected(b"you", 3, 1),
    }
    assert found == {index: text(ids) for index, ids in wanted.items()}
    chunks, _ = events(
        client, "/v1/completions", {**body, "stream_options": {"include_usage": True}}
    )
    streamed = dict.fromkeys(found, "")
    for chunk in chunks:
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == found
    assert (
        chunks[-1]["usage"]["prompt_tokens"] == 5 and chunks[-1]["usage"]["completion_tokens"] == 12
    )


@pytest.mark.parametrize("prompt", [[104, 105], [[104, 105]], "hi", ["hi"]])
def test_prompts_are_texts_or_ids(asked, prompt):
    (choice,) = post(asked, "/v1/completions", {"prompt": prompt, "max_tokens": 2}).json()[
        "choices"
    ]
    assert choice["text"] == text(expected(b"hi", 2))


def test_echo_puts_the_prompt_before_the_text_with_its_log_probabilities(http):
    client = http()
    (choice,) = post(
        client, "/v1/completions", {"prompt": "hi", "max_tokens": 2, "echo": True, "logprobs": 1}
    ).json()["choices"]
    made = text(expected(b"hi", 2))
    assert choice["text"] == "hi" + made
    assert choice["logprobs"]["tokens"] == [*"hi", *made] and choice["logprobs"]["text_offset"] == [
        0,
        1,
        2,
        3,
    ]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -0.5, -0.515625]
    chunks, _ = events(
        client, "/v1/completions", {"prompt": [104, 105], "max_tokens": 2, "echo": True}
    )
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hi" + made


@pytest.mark.parametrize("prompt", ["hey", [104, 105], ["hey", "x"], [[104, 105, 106], [120]]])
def test_prompts_are_scored_without_an_output(http, prompt):
    client = http()
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1, "n": 2}
    answer = post(client, "/v1/completions", body).json()
    prompts = [[*p.encode()] if isinstance(p, str) else p for p in prompt]
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompts = [[*prompt.encode()] if isinstance(prompt, str) else prompt]
    for choice in answer["choices"]:
        ids = prompts[choice["index"] // 2]
        assert (choice["text"], choice["finish_reason"]) == (text(ids), "length")
        assert choice["logprobs"]["tokens"] == [*text(ids)]
        assert choice["logprobs"]["token_logprobs"] == [None, *[-1.0] * (len(ids) - 1)]
        assert choice["logprobs"]["text_offset"] == [*range(len(ids))]
    total = sum(map(len, prompts))
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["total_tokens"] == total
    chunks, _ = events(client, "/v1/completions", {"prompt": "hey", "max_tokens": 0})
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [""]
    assert post(client, "/v1/chat/completions", {**CHAT, "max_tokens": 0}).status_code == 400


def test_offsets_are_places_in_the_text_however_tokens_are_written(http):
    client = http(script=[*"aé🚀b END".encode()])
    body = {"prompt": "é!", "max_tokens": 20, "stop": " END", "logprobs": 0, "echo": True}
    choices = [
        post(client, "/v1/completions", {**body, "return_tokens_as_token_ids": as_ids}).json()[
            "choices"
        ][0]
        for as_ids in (False, True)
    ]
    assert [choice["text"] for choice in choices] == ["é!aé🚀b"] * 2
    offsets = [choice["logprobs"]["text_offset"] for choice in choices]
    assert offsets == [[0, 0, 1, 2, 3, 3, 4, 4, 4, 4, 5, 6, 6, 6, 6]] * 2
    tokens = choices[0]["logprobs"]["tokens"]
    assert tokens[:4] == ["bytes:\\xc3", "bytes:\\xa9", "!", "a"]
    assert [next(iter(top)) for top in choices[0]["logprobs"]["top_logprobs"][1:]] == tokens[1:]


def test_of_tokens_with_one_text_the_chosen_or_else_the_likeliest_is_shown():
    names = {1: b"a", 2: b"a", 3: b"b", 4: b"b"}

    class Names(FakeTokenizer):
        def piece(self, id):
            return names[id]

    value = Logprobs(-3.0, ((3, -0.5), (1, -1.0), (4, -2.0), (2, -3.0)))
    by_text = CompletionLogprobs(TokenWriter(Names())).write([2], [value], [0])
    assert by_text["top_logprobs"] == [{"a": -3.0, "b": -0.5}]
    by_id = CompletionLogprobs(TokenWriter(Names(), as_ids=True)).write([2], [value], [0])
    assert by_id["top_logprobs"] == [
        {f"token_id:{id}": logprob for id, logprob in ((2, -3.0), *value.top[:3])}
    ]


def test_a_chat_whole_and_streamed_is_the_same(http):
    client = http()
    made = expected(b"<user>hi", 5)
    whole = post(
        client, "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1}
    ).json()
    (choice,) = whole["choices"]
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == text(made)
    assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[id] for id in made]
    chunks, last = events(client, "/v1/chat/completions", CHAT)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""} and last == "[DONE]"
    assert "".join(delta.get("content", "") for delta in deltas) == text(made)
    assert (
        chunks[-1]["choices"][0]["finish_reason"] == "length"
        and chunks[0]["object"] == "chat.completion.chunk"
    )


@pytest.mark.parametrize("field, value", [("top_logprobs", 21), ("max_completion_tokens", 0)])
def test_a_value_out_of_range_is_called_as_in_the_body(asked, field, value):
    answer = post(asked, "/v1/chat/completions", {**CHAT, "logprobs": True, field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_parts_of_text_are_a_text_and_other_parts_are_refused(http):
    client = http()
    parts = [{"type": "text", "text": "hi"}]
    answer = post(
        client, "/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": parts}]}
    )
    assert answer.json()["choices"][0]["message"]["content"] == text(expected(b"<user>hi", 5))
    answer = post(
        client,
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": [*parts, {"type": "image_url"}]}]},
    )
    assert answer.status_code == 400 and "not text" in answer.json()["error"]["message"]


def test_stop_strings_end_the_text(http):
    client = http(script=b"some words END more", step_seconds=0.001)
    answer = post(client, "/v1/chat/completions", {**CHAT, "max_tokens": 100, "stop": "END"}).json()
    assert (
        answer["choices"][0]["message"]["content"] == "some words "
        and answer["choices"][0]["finish_reason"] == "stop"
    )


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    "script,content,calls",
    [
        (CALL, None, ["add"]),
        ("Well: " + CALL, "Well: ", ["add"]),
        (CALL + CALL, None, ["add", "add"]),
        ("<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
        ("a < b", "a < b", []),
    ],
)
def test_calls_are_told_from_text(http, script, content, calls):
    client = http(script=[*script.encode(), EOS])
    body = {**CHAT, "max_tokens": 500, "tools": TOOLS}
    (choice,) = post(client, "/v1/chat/completions", body).json()["choices"]
    found = choice["message"].get("tool_calls", [])
    assert (
        choice["message"]["content"] == content
        and [call["function"]["name"] for call in found] == calls
    )
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    assert all(json.loads(call["function"]["arguments"]) == {"a": 1} for call in found)
    chunks, _ = events(client, "/v1/chat/completions", body)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    streamed = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert "".join(delta.get("content") or "" for delta in deltas) == (content or "")
    begun = [call for call in streamed if "name" in call["function"]]
    assert [(call["index"], call["function"]["name"]) for call in begun] == list(enumerate(calls))
    for number in range(len(calls)):
        pieces = [call["function"]["arguments"] for call in streamed if call["index"] == number]
        assert json.loads("".join(pieces)) == {"a": 1} and len(pieces) >= 2
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


@pytest.mark.parametrize(("field", "beyond"), [("temperature", 100.5), ("n", 129), ("priority", 9)])
def test_the_schema_tells_the_limits_that_are_checked(http, field, beyond):
    client = http(script=[EOS])
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    limit = schemas["ChatRequest"]["properties"][field]["maximum"]
    assert post(client, "/v1/chat/completions", {**CHAT, field: limit}).status_code == 200
    assert limit < beyond
    assert post(client, "/v1/chat/completions", {**CHAT, field: beyond}).status_code == 400


class Thinker(FakeTokenizer):
    """A tokenizer of a model whose prompts end within reasoning."""

    template = ChatTemplate("{{ messages[0].content }}{{ '<think>\\n' }}", {})


def test_reasoning_is_apart_from_the_answer(http):
    script = [*b"Hm.</think>\n\nHi", EOS]
    client = http(script=script, tokenizer=Thinker)
    body = {**CHAT, "max_tokens": 500}
    answer = post(client, "/v1/chat/completions", body).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Hi")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    streamed = {**body, "stream_options": {"include_usage": True}}
    (*chunks, last), _ = events(client, "/v1/chat/completions", streamed)
    assert last["usage"] == answer["usage"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "Hi"
    without = {**body, "include_reasoning": False}
    message = post(client, "/v1/chat/completions", without).json()["choices"][0]["message"]
    assert "reasoning_content" not in message and message["content"] == "Hi"


@pytest.mark.parametrize(
    ("says", "tokens"),
    [
        (b"k</think>Hm. k", 1),
        ("Hé.</think>Hi".encode(), 4),
        ("Hm. é".encode()[:-1], 4),  # a character that was cut off has no token
        (b"</think>Hi", 0),
    ],
)
def test_tokens_of_reasoning_are_counted_for_each_choice(http, says, tokens):
    client = http(script=[*says, EOS], tokenizer=Thinker)
    body = {**CHAT, "max_tokens": 500, "n": 2}
    for asked in (body, {**body, "include_reasoning": False}):
        usage = post(client, "/v1/chat/completions", asked).json()["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * tokens}
    client = http(script=[*says, EOS], tokenizer=Thinker, reasoning_parser="none")
    usage = post(client, "/v1/chat/completions", body).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_reasoning_is_part_of_the_answer_where_that_is_asked_for(http):
    script = [*b"Hm.</think>Hi", EOS]
    client = http(script=script, tokenizer=Thinker, reasoning_parser="none")
    answer = post(client, "/v1/chat/completions", {**CHAT, "max_tokens": 500}).json()
    assert answer["choices"][0]["message"]["content"] == "Hm.</think>Hi"


def test_calls_are_read_as_the_server_is_told(http):
    script = [*b"[add(a=1)]", EOS]
    client = http(script=script, tool_call_parser="pythonic")
    answer = post(client, "/v1/chat/completions", {**CHAT, "max_tokens": 500, "tools": TOOLS})
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"max_tokens": 1}, "length"),
        ({"max_tokens": 3, "n": 2}, "length"),
        ({"max_tokens": 9, "stop": "c"}, "stop"),
        ({"max_tokens": 9, "stop": ["cx", "d"], "n": 2}, "stop"),
    ],
)
def test_the_last_tokens_chunk_says_how_it_ended(http, fields, reason):
    client = http(step_seconds=0.01, script=b"abcdef")
    asked = {**fields, "return_token_ids": True}
    for path, body in (("completions", {"prompt": "x"}), ("chat/completions", CHAT)):
        chunks, _ = events(client, f"/v1/{path}", {**body, **asked})
        choices = [chunk["choices"][0] for chunk in chunks]
        for index in range(fields.get("n", 1)):
            mine = [one for one in choices if one["index"] == index and one.get("token_ids")]
            assert [one["finish_reason"] for one in mine[:-1]] == [None] * (len(mine) - 1)
            assert mine[-1]["finish_reason"] == reason
        assert sum(one["finish_reason"] is not None for one in choices) == fields.get("n", 1)


def test_calls_of_strict_tools_are_held_to_their_schemas_also_where_none_is_forced(http):
    client = http(script=[*CALL.encode(), EOS])
    for strict in (True, False):
        tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": strict}}]
        answer = post(client, "/v1/chat/completions", {**CHAT, "max_tokens": 200, "tools": tools})
        assert answer.json()["choices"][0]["message"]["tool_calls"]
    (guide,) = client.engine.guides_seen  # of the first
    assert guide.spec.kind == "calls"


def test_one_call_is_enough_for_who_wants_no_parallel_calls(http):
    client = http(script=[*(CALL + CALL).encode(), EOS])
    answer = post(
        client,
        "/v1/chat/completions",
        {**CHAT, "max_tokens": 500, "tools": TOOLS, "parallel_tool_calls": False},
    )
    assert len(answer.json()["choices"][0]["message"]["tool_calls"]) == 1


def test_objectives_come_from_the_body_or_from_headers(http):
    engine = FakeReplica()
    engine.config = make(EngineConfig, {"classes": "chat:ttft=0.5"})
    client = http(engine)
    seen = engine.submitted
    post(
        client,
        "/v1/completions",
        {
            "prompt": "x",
            "ttft_ms": 500,
            "slo_class": "chat",
            "priority": -1,
            "cache_salt": "s",
            "seed": 3,
        },
    )
    post(
        client,
        "/v1/completions",
        {"prompt": "x", "deadline_ms": 60_000},
        **{"x-llm-d-slo-ttft-ms": "1500", "x-llm-d-slo-tpot-ms": "20", "x-request-id": "mine"},
    )
    assert [request.slo for request in seen] == [Slo(0.5, None, "chat"), Slo(1.5, 0.02, None)]
    assert (seen[0].priority, seen[0].cache_salt, seen[0].sampling.seed) == (-1, "s", 3)
    assert seen[1].id == "mine" and 59 < seen[1].deadline - seen[1].arrival <= 60


def test_retention_is_as_the_body_says_in_our_words_or_in_openais(http):
    client = http()
    seen = client.engine.submitted
    asked = {
        "cache_retention": [None, "normal", "ephemeral", 1, 86_400],
        "prompt_cache_retention": ["in_memory", "24h"],
    }
    for name, values in asked.items():
        for value in values:
            for path, body in (("completions", {"prompt": "x"}), ("chat/completions", CHAT)):
                assert post(client, f"/v1/{path}", {**body, name: value}).status_code == 200
    assert [request.cache_retention for request in seen[::2]] == [0, 0, -1, 1, 86_400, 0, 86_400]
    assert [each.cache_retention for each in seen[::2]] == [
        each.cache_retention for each in seen[1::2]
    ]
    both = {"prompt": "x", "cache_retention": 60, "prompt_cache_retention": "24h"}
    assert post(client, "/v1/completions", both).status_code == 200
    assert seen[-1].cache_retention == 60


def test_what_is_left_out_has_the_protocols_default_and_null_is_left_out(http):
    client = http()
    post(client, "/v1/completions", {"prompt": "x"})
    post(
        client,
        "/v1/completions",
        {
            "prompt": "x",
            "temperature": None,
            "top_p": None,
            "stop": None,
            "logit_bias": None,
            "n": None,
        },
    )
    seen = [request.sampling for request in client.engine.submitted]
    assert seen == [SamplingParams(max_tokens=16)] * 2


BAD = [
    ("temperature", -1),
    ("top_p", 0),
    ("top_p", 1.5),
    ("min_p", 2),
    ("top_k", -2),
    ("top_k", 2**40),
    ("repetition_penalty", 0),
    ("presence_penalty", 3),
    ("n", 0),
    ("n", 10**9),
    ("max_tokens", -5),
    ("max_tokens", 10**30),
    ("min_tokens", 10**6),
    ("logprobs", 10**9),
    ("logprobs", -1),
    ("stop", ["x"] * 10**5),
    ("stop", [""]),
    ("stop", [1]),
    ("stop_token_ids", [5] * 10**5),
    ("stop_token_ids", [257]),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"257": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {str(i): 1 for i in range(10**5)}),
    ("seed", 2**70),
    ("seed", "x"),
    ("ttft_ms", -1),
    ("deadline_ms", 0),
    ("deadline_ms", 5e-324),
    ("slo_class", "nope"),
    ("priority", 99),
    ("cache_salt", "x" * 2000),
    ("cache_retention", "for_ever"),
    ("cache_retention", 0),
    ("cache_retention", -1),
    ("cache_retention", 86_401),
    ("cache_retention", True),
    ("prompt_cache_retention", "1h"),
    ("request_id", "x" * 300),
    ("best_of", 0),
    ("suffix", "x"),
    ("stream_options", {}),
    ("model", 5),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", {}),
    ("prompt", None),
    ("prompt", ["x"] * 1000),
    ("prompt", [257]),
    ("prompt", [-1]),
    ("prompt", [1, 2**70]),
    ("prompt", [1] * 4096),
    ("prompt", "x" * 4096),
    ("prompt", [1.5]),
    ("prompt", ["x", [1]]),
    ("prompt", "x" * 10**6),
]


def test_bad_values_are_refused_by_name_and_nothing_is_computed(http):
    client = http()
    for field, value in BAD:
        body = {"prompt": "x", field: value}
        answer = post(client, "/v1/completions", json.dumps(body))
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["type"] == "invalid_request_error", (
            field,
            str(value)[:50],
            error,
        )
        named = error["param"] or ""
        assert field in named or named == "slo.class_name", (
            field,
            str(value)[:50],
            error,
        )
    assert client.engine.prefill_steps == 0 and not client.served.server.server.frontend.streams


def test_unknown_fields_have_no_effect_and_are_told_of(http, caplog):
    client = http()
    plain = post(client, "/v1/completions", {"prompt": "x"})
    assert "x-jaxserve-ignored" not in plain.headers
    fields = {"unheard_of": 1, "null": None, "x\r\ny": [1], "structured_outputs": {"other": 2}}
    for _ in range(2):
        answer = post(client, "/v1/completions", {"prompt": "x", **fields})
        assert answer.status_code == 200
        ignored = answer.headers["x-jaxserve-ignored"]
        assert ignored == "unheard_of, x%0D%0Ay, structured_outputs.other"
    told = [record for record in caplog.records if "has no effect" in record.getMessage()]
    assert len(told) == 3
    streamed = post(client, "/v1/chat/completions", {**CHAT, "stream": True, "unheard_of": 1})
    assert streamed.headers["x-jaxserve-ignored"] == "unheard_of"
    many = {f"field{number}": 1 for number in range(200)}
    answer = post(client, "/v1/completions", {"prompt": "x", **many})
    assert answer.headers["x-jaxserve-ignored"].count(",") == 15
    answer = post(client, "/v1/completions", {"prompt": "x", " a": 1, "": 1})
    assert (answer.status_code, answer.headers["x-jaxserve-ignored"]) == (200, "a,")
    tool = {"type": "function", "function": {"name": "f", "secret": "s"}, "cache_control": {}}
    answer = post(client, "/v1/chat/completions", {**CHAT, "tools": [tool]})
    assert answer.headers["x-jaxserve-ignored"] == "tools.cache_control, tools.function.secret"


def test_unknown_fields_are_refused_where_that_is_asked_for(http):
    client = http(strict_fields=True)
    for fields, named in (
        ({"unheard_of": 1}, "unheard_of"),
        ({"structured_outputs": {"other": 2}}, "structured_outputs.other"),
    ):
        answer = post(client, "/v1/completions", {"prompt": "x", **fields})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == named
    assert client.engine.prefill_steps == 0
    assert post(client, "/v1/completions", {"prompt": "x", "null": None}).status_code == 200


def test_the_usage_so_far_is_in_every_chunk_where_that_is_asked_for(http):
    client = http()
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"stream": True, "stream_options": options, "max_tokens": 5}
    for path, body in (("completions", {"prompt": "xyz"}), ("chat/completions", CHAT)):
        streamed = post(client, f"/v1/{path}", {**body, **asked}).text
        chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line[6:7] == "{"]
        usages = [chunk["usage"] for chunk in chunks]
        done = [usage["completion_tokens"] for usage in usages]
        assert done == sorted(done) and done[-1] == 5
        assert len({usage["prompt_tokens"] for usage in usages}) == 1
        assert all(
            usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            for usage in usages
        )


def test_token_ids_are_in_the_answer_where_that_is_asked_for(http):
    client = http()
    asked = {"return_token_ids": True, "max_tokens": 4}
    whole = post(client, "/v1/completions", {"prompt": [5, 6, 7], **asked}).json()["choices"][0]
    assert whole["prompt_token_ids"] == [5, 6, 7] and len(whole["token_ids"]) == 4
    chat = post(client, "/v1/chat/completions", {**CHAT, **asked}).json()
    assert chat["prompt_token_ids"] and len(chat["choices"][0]["token_ids"]) == 4
    for path, body in (("completions", {"prompt": [5, 6, 7]}), ("chat/completions", CHAT)):
        streamed = post(client, f"/v1/{path}", {**body, **asked, "stream": True}).text
        chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line[6:7] == "{"]
        ids = [id for chunk in chunks for id in chunk["choices"][0].get("token_ids", [])]
        assert ids == whole["token_ids"] or path != "completions"
        assert len(ids) == 4
    asked = {"return_tokens_as_token_ids": True, "logprobs": 1, "max_tokens": 2}
    logprobs = post(client, "/v1/completions", {"prompt": [5], **asked}).json()["choices"][0]
    assert all(token.startswith("token_id:") for token in logprobs["logprobs"]["tokens"])


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(http):
    client = http()
    for body in ({"prompt": [1] * 4096}, {"prompt": "x" * 4096}):
        error = post(client, "/v1/completions", body).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is" in error["message"]
        assert "prompt is too long: 4096 tokens > " in error["message"]  # Claude Code reads both


def test_fields_that_ask_for_nothing_are_taken(http):
    client = http()
    nothing = {
        "functions": [],
        "modalities": ["text"],
        "chat_template": None,
        "top_logprobs": 0,
        "prediction": None,
        "tool_choice": "none",
        "logit_bias": {},
        "stop": [],
        "n": 1,
    }
    answer = post(client, "/v1/chat/completions", {**CHAT, **nothing})
    assert answer.status_code == 200 and "x-jaxserve-ignored" not in answer.headers
    answer = post(client, "/v1/completions", {"prompt": "x", "echo": False, "best_of": 1})
    assert answer.status_code == 200


def test_the_best_of_several_completions_are_shown(http):
    client = http()
    asked = {"prompt": ["a", "b"], "max_tokens": 4, "temperature": 1, "seed": 5, "best_of": 5}
    every = post(client, "/v1/completions", {**asked, "n": 5, "logprobs": 0}).json()["choices"]
    means = {each["index"]: statistics.mean(each["logprobs"]["token_logprobs"]) for each in every}
    answer = post(client, "/v1/completions", {**asked, "n": 2}).json()
    best = [
        every[index]["text"]
        for prompt in (range(5), range(5, 10))
        for index in sorted(prompt, key=means.get, reverse=True)[:2]
    ]
    assert [each["text"] for each in answer["choices"]] == best
    assert [each["index"] for each in answer["choices"]] == [0, 1, 2, 3]
    assert all(each["logprobs"] is None for each in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 2 * 5 * 4
    for wrong in ({"best_of": 2, "n": 3}, {"best_of": 2, "stream": True}, {"best_of": 129}):
        refused = post(client, "/v1/completions", {"prompt": "a", **wrong})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "best_of"
    refused = post(client, "/v1/completions", {**asked, "n": 0})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"


def test_the_effort_of_reasoning_is_a_variable_of_the_template(http):
    client = http()
    answer = post(client, "/v1/chat/completions", {**CHAT, "reasoning_effort": "low"})
    assert answer.status_code == 200 and "x-jaxserve-ignored" not in answer.headers


CHAT_BAD = [
    ("messages", []),
    ("messages", "x"),
    ("messages", [1]),
    ("messages", None),
    ("messages", [{"role": "user"}] * 10_001),
    ("tools", [{}]),
    ("tools", TOOLS * 1025),
    ("tool_choice", "required"),
    ("tool_choice", "x"),
    ("tool_choice", {"type": "function", "function": {"name": "nope"}}),
    ("top_logprobs", 3),
    ("chat_template", "{{ 1 }}"),
    ("functions", [{"name": "no name"}]),
    ("function_call", "x"),
    ("modalities", ["audio"]),
    ("logprobs", 5),
]


@pytest.mark.parametrize("field,value", CHAT_BAD)
def test_bad_chats_are_refused_by_name(asked, field, value):
    answer = post(asked, "/v1/chat/completions", {**CHAT, field: value})
    assert answer.status_code == 400 and field in answer.json()["error"]["param"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"prompt": "x',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"\x80\x04K\x01.",
    ],
)
def test_what_is_no_json_object_is_refused(asked, body):
    answer = post(asked, "/v1/completions", body)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_other_routes_and_methods_and_models_are_told(http):
    client = http()
    assert (
        client.get("/nope").status_code == 404
        and client.get("/nope").json()["error"]["code"] == "not_found"
    )
    assert (
        client.get("/v1/completions").status_code == 405
        and client.get("/v1/completions").headers["allow"] == "POST"
    )
    for name in ("other", "../../etc/passwd", "x\n" * 10, "file:///etc/passwd"):
        answer = post(client, "/v1/completions", {"prompt": "x", "model": name})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
    assert client.get("/v1/models").json()["data"][0]["id"] == client.engine.config.source.model
    assert client.get("/v1/models/nope").status_code == 404
    architecture = client.engine.info.model
    assert client.get(f"/v1/models/{architecture}").status_code == 200
    for kind in (
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {},
    ):
        answer = client.post("/v1/completions", content='{"prompt": "x"}', headers=kind)
        assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-type")


def test_a_full_queue_is_429_with_when_to_come_again(http):
    engine = FakeReplica(max_queue=0)
    answer = post(http(engine), "/v1/completions", {"prompt": "x"})
    assert (
        answer.status_code == 429
        and int(answer.headers["retry-after"]) >= 1
        and answer.headers["jaxserve-reject-reason"] == "queue"
    )
    assert engine.prefill_steps == 0


@pytest.mark.parametrize("id", ["\u0100", "a\r\nset-cookie: x=1", "\0", "%41", "\U0001f600" * 50])
def test_an_id_of_any_characters_comes_back_in_a_header_that_it_cannot_leave(asked, id):
    answer = post(asked, "/v1/completions", {"prompt": "x", "request_id": id})
    assert (
        answer.status_code == 200
        and answer.json()["id"] == id
        and "set-cookie" not in answer.headers
    )
    assert urllib.parse.unquote(answer.headers["x-request-id"])[:50] == id[:50]


def test_a_deadline_is_504_and_in_a_stream_an_error_event(http):
    client = http(step_seconds=0.01)
    body = {"prompt": "x", "deadline_ms": 100, "max_tokens": 1000}
    assert post(client, "/v1/completions", body).status_code == 504
    _, last = events(client, "/v1/completions", body)
    assert json.loads(last)["error"]["code"] == "deadline_exceeded"


def test_an_engine_that_dies_is_an_error_event_and_then_503(http):
    engine = FakeReplica(step_seconds=0.01)
    client = http(engine)
    with client.stream(
        "POST", "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 1000}
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        engine.die()
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    eventually(lambda: client.get("/health").status_code == 503)
    assert client.get("/ready").status_code == 503
    assert post(client, "/v1/completions", {"prompt": "x"}).status_code == 503


def test_a_step_that_hangs_ends_streams_and_health_until_it_is_over(http):
    engine = FakeReplica(step_seconds=0.01)
    client = http(engine)
    with client.stream(
        "POST",
        "/v1/completions",
        json={"prompt": "x", "stream": True, "max_tokens": 4000, "ignore_eos": True},
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        engine.overdue_seconds = 5.0
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
    assert client.get("/health").status_code == 503 and client.get("/ready").status_code == 503
    refused = post(client, "/v1/completions", {"prompt": "x"})
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    assert not client.served.client.healthy()
    engine.overdue_seconds = None
    eventually(lambda: client.get("/health").status_code == 200)
    assert (
        post(client, "/v1/completions", {"prompt": "x"}).status_code == 200
        and client.served.client.healthy()
    )


def test_a_fault_of_ours_tells_nothing_of_itself(http, caplog):
    engine = FakeReplica()
    engine.fault = ZeroDivisionError("secret detail")
    answer = post(http(engine), "/v1/completions", {"prompt": "x"})
    assert (
        answer.status_code == 500
        and "secret" not in answer.text
        and answer.json()["error"]["type"] == "server_error"
    )
    eventually(lambda: "secret detail" in caplog.text)


class Prompted(FakeTokenizer):
    """A tokenizer of a model whose template shows tools, a variable and the answer's beginning."""

    template = ChatTemplate(
        "{{ tools[0].function.name if tools }}{{ mood }}<{{ messages[0].content }}>"
        "{{ 'A:' if add_generation_prompt }}",
        {},
    )


def test_a_chat_is_tokenized_as_it_would_be_served(http):
    client = http(script=[EOS], tokenizer=Prompted)

    def rendered(**fields):
        answer = post(client, "/tokenize", {"messages": CHAT["messages"], **fields}).json()
        return bytes(answer["tokens"]).decode()

    assert rendered() == "<hi>A:"
    assert rendered(add_generation_prompt=False) == "<hi>"
    assert rendered(tools=TOOLS, chat_template_kwargs={"mood": "!"}) == "add!<hi>A:"
    assert rendered(continue_final_message=True, add_generation_prompt=False) == "<hi"


def test_all_keys_of_a_bias_that_are_no_token_ids_are_told(http):
    answer = post(http(), "/v1/chat/completions", {**CHAT, "logit_bias": {"a": 1, "5": 1, "b": 2}})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith("logit_bias: no token ids: 'a', 'b'")


def test_tokens_there_and_back(http):
    client = http()
    answer = post(client, "/tokenize", {"prompt": "h\u00e9", "return_token_strs": True}).json()
    assert (
        answer["tokens"] == list("h\u00e9".encode())
        and answer["count"] == 3
        and answer["max_model_len"] == 4096
    )
    assert post(client, "/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "h\u00e9"}
    assert post(client, "/tokenize", {"messages": CHAT["messages"]}).json()["tokens"] == list(
        b"<user>hi"
    )
    for body in ({}, {"prompt": "x", "messages": []}):
        assert post(client, "/tokenize", body).status_code == 400
    for tokens in ([257], [-1], "x", [1.5], [True], None, [2**70]):
        assert post(client, "/detokenize", {"tokens": tokens}).status_code == 400


def test_names_of_special_tokens_are_tokens_also_where_none_are_added(http):
    class Ended(FakeTokenizer):
        def encode(self, text, special=True, added=True):
            ends = [EOS] if special and text == "<end>" else list(text.encode())
            return [1, *ends] if added else ends

    client = http(tokenizer=Ended)
    for added, ids in ((False, [EOS]), (True, [1, EOS])):
        body = {"prompt": "<end>", "add_special_tokens": added}
        assert post(client, "/tokenize", body).json()["tokens"] == ids
        body = {"input": "<end>", "add_special_tokens": added}
        assert post(client, "/v1/embeddings", body).json()["usage"]["prompt_tokens"] == len(ids)


def test_readiness_runs_a_real_token_only_where_none_came_lately(http):
    engine = FakeReplica()
    submit = engine.submit
    probes = []
    engine.submit = lambda request, sink: (probes.append(request.probe), submit(request, sink))
    client = http(engine)
    assert client.get("/ready").status_code == 200 and engine.prefill_steps == 1
    for _ in range(5):
        assert client.get("/ready").status_code == 200
    assert engine.prefill_steps == 1
    post(client, "/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert probes == [True, False], "the server's own request is no traffic"


def test_an_engine_that_hangs_is_alive_but_not_ready(http, monkeypatch):
    monkeypatch.setattr("jaxserve.server.readiness.PATIENCE_SECONDS", 0.3)
    engine = FakeReplica()
    engine.paused = True
    client = http(engine)
    assert client.get("/ready").status_code == 503 and not engine.requests
    engine.paused = False
    monkeypatch.setattr("jaxserve.server.readiness.PATIENCE_SECONDS", SOON)
    assert client.get("/ready").status_code == 200


def test_a_model_without_tokenizer_takes_ids_and_gives_their_names(http):
    client = http(tokenizer=None)
    (choice,) = post(
        client, "/v1/completions", {"prompt": [104, 105], "max_tokens": 2, "logprobs": 0}
    ).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{id}" for id in expected(b"hi", 2)]
    for body in ({"prompt": "hi"}, {"prompt": [1], "stop": "x"}):
        assert post(client, "/v1/completions", body).status_code == 400
    assert post(client, "/v1/chat/completions", CHAT).status_code == 400


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "field,value,kind",
    [
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            "json_schema",
        ),
        ("response_format", {"type": "json_object"}, "json_object"),
        ("structured_outputs", {"regex": "a+"}, "regex"),
        ("structured_outputs", {"choice": ["a", "b"]}, "choice"),
        ("structured_outputs", {"grammar": 'start: "a"'}, "grammar"),
        ("structured_outputs", {"json": SCHEMA}, "json_schema"),
        ("guided_json", SCHEMA, "json_schema"),
        ("guided_json", json.dumps(SCHEMA), "json_schema"),
        ("guided_regex", "a+", "regex"),
        ("guided_choice", ["a", "b"], "choice"),
        ("guided_grammar", 'start: "a"', "grammar"),
        ("response_format", {"type": "json_object", "schema": SCHEMA}, "json_schema"),
        ("response_format", {"type": "json_schema", "schema": SCHEMA}, "json_schema"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}, "json_schema"),
        ("response_format", {"type": "text"}, None),
    ],
)
def test_what_outputs_must_look_like_reaches_the_engine(asked, monkeypatch, field, value, kind):
    seen = []
    guides = asked.served.server.server.frontend.guides
    submit = guides.submit
    monkeypatch.setattr(
        guides, "submit", lambda spec, name: (seen.append((spec.kind, name)), submit(spec, name))[1]
    )
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)):
        assert post(asked, path, {**body, field: value}).status_code == 200
    assert len(seen) == (0 if kind is None else 2) and all(
        found == kind and name.startswith(field) for found, name in seen
    )


DEEP = json.loads('{"items":' * 100 + "{}" + "}" * 100)


@pytest.mark.parametrize(
    "field,value",
    [
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "xml"}),
        ("response_format", 5),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": DEEP}}),
        (
            "response_format",
            {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"enum": ["x" * 99] * 10_000}},
            },
        ),
        ("structured_outputs", {"regex": "(("}),
        ("structured_outputs", {"regex": "((a{1000}){1000}){1000}"}),
        ("structured_outputs", {"choice": []}),
        ("structured_outputs", {"grammar": "start: nothing"}),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("structured_outputs", {"json": "not a schema"}),
        ("structured_outputs", {"json": {"uniqueItems": True}}),
        ("guided_json", {"type": "array", "items": {"$ref": "#"}, "minItems": 1}),
        ("guided_grammar", "start: /a/ start"),
        ("guided_regex", "(?=a)b"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_name(asked, field, value):
    engine = asked.served.engine
    computed = engine.prefill_steps
    answer = post(asked, "/v1/completions", {"prompt": "x", field: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(field), (
        answer.text
    )
    assert engine.prefill_steps == computed
    assert post(asked, "/v1/completions", {"prompt": "x"}).status_code == 200


def test_a_forced_call_is_the_only_output_there_can_be(http, monkeypatch):
    client = http(script=[*b'{"name": "add", "arguments": {"a": 1}}', EOS])
    seen = []
    guides = client.served.server.server.frontend.guides
    submit = guides.submit
    monkeypatch.setattr(
        guides,
        "submit",
        lambda spec, name: (seen.append(json.loads(spec.text)), submit(spec, name))[1],
    )
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        (found,) = post(
            client,
            "/v1/chat/completions",
            {**CHAT, "max_tokens": 99, "tools": TOOLS, "tool_choice": choice},
        ).json()["choices"]
        assert [call["function"] for call in found["message"]["tool_calls"]] == [
            {"name": "add", "arguments": '{"a": 1}'}
        ]
        assert found["message"]["content"] is None and found["finish_reason"] == "tool_calls"
    assert [call["name"] for call in seen[0]["calls"]] == ["add"] and len(seen) == 2
    forced = {**CHAT, "max_tokens": 99, "tools": TOOLS, "tool_choice": "required"}
    beside = {**forced, "response_format": {"type": "json_object"}}
    (found,) = post(client, "/v1/chat/completions", beside).json()["choices"]
    assert found["finish_reason"] == "tool_calls" and seen[2] == seen[0]
    for field, value in (("structured_outputs", {"json_object": True}), ("guided_regex", "a")):
        answer = post(client, "/v1/chat/completions", {**forced, field: value})
        assert answer.status_code == 400


@pytest.mark.parametrize(
    "field,value",
    [
        ("messages", [1] * 300_000),
        ("messages", [{"role": "user", "content": [{}] * 100_000}]),
        ("tools", [{}] * 300_000),
        ("metadata", {str(i): 1 for i in range(50_000)}),
    ],
)
def test_a_small_body_of_many_values_is_refused_without_work(asked, field, value):
    used = []
    for _ in range(3):  # the least counts: other threads of this process work as well
        began = time.process_time()  # the server is in this process
        answer = post(asked, "/v1/chat/completions", {**CHAT, field: value})
        assert answer.status_code == 400
        assert field in answer.json()["error"]["param"]
        used.append(time.process_time() - began)
        if used[-1] < 2:
            return
    raise AssertionError(used)


def test_texts_of_tools_and_of_calls_count_as_part_of_the_prompt(http):
    client = http()
    tool = {"type": "function", "function": {"name": "f", "description": "x " * 400_000}}
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": json.dumps({"a": "x " * 400_000})},
    }
    for body in (
        {**CHAT, "tools": [tool]},
        {**CHAT, "messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]},
    ):
        answer = post(client, "/v1/chat/completions", body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    "body",
    [
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"$defs": 5}}}],
            "tool_choice": "required",
        },
        {"messages": [{"role": "assistant", "content": "", "tool_calls": 5}]},
    ],
)
def test_what_looks_like_tools_but_is_not_is_no_fault_of_ours(asked, body):
    assert post(asked, "/v1/chat/completions", {**CHAT, **body}).status_code in (200, 400)


def test_offsets_are_those_of_tokens_though_their_text_is_held_back(http):
    client = http(script=b"abEabEx", step_seconds=0.01)
    body = {"prompt": "x", "max_tokens": 7, "logprobs": 0, "stop": "END"}
    whole = post(client, "/v1/completions", body).json()["choices"][0]["logprobs"]["text_offset"]
    chunks, _ = events(client, "/v1/completions", body)
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert (
        [at for found in logprobs if found for at in found["text_offset"]]
        == whole
        == list(range(7))
    )


@pytest.mark.parametrize(
    "path, prompt",
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_tokens_without_text_are_told_when_they_come(http, path, prompt):
    client = http(script=[EOS] * 8, step_seconds=0.25)
    chunks, _ = events(client, path, {**prompt, "max_tokens": 8, "ignore_eos": True})
    # special tokens have none; those that come while others have the cores share a chunk
    assert len(chunks) > 3


def test_before_there_is_an_engine_nobody_is_told_of_a_fault_of_ours():
    go = threading.Event()
    with Background(
        ServerConfig(grpc_port=0, port=0),
        lambda: (go.wait(200), FakeReplica(), FakeTokenizer())[1:],
    ) as server:
        try:
            for path, body in (
                ("completions", {"prompt": "x"}),
                ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ):
                answer = httpx.post(f"{server.url}/v1/{path}", json=body)
                assert answer.status_code == 503 and "retry-after" in answer.headers, answer.text
        finally:
            go.set()


def test_null_is_as_if_a_field_were_absent(http):
    client = http()
    for name in (
        "echo",
        "n",
        "stop",
        "logprobs",
        "stream",
        "stream_options",
        "bypass_prefix_cache",
        "best_of",
        "suffix",
        "seed",
        "user",
    ):
        assert post(client, "/v1/completions", {"prompt": "x", name: None}).status_code == 200, name
    streamed = post(
        client,
        "/v1/completions",
        {"prompt": "x", "stream": True, "stream_options": {"include_usage": None}},
    )
    assert streamed.status_code == 200 and "usage" not in streamed.text


def test_a_prompt_may_be_cut_to_its_end(http):
    client = http()
    for count in (3, -1):
        asked = {"prompt": "abcdefgh", "max_tokens": 3, "truncate_prompt_tokens": count}
        answer = post(client, "/v1/completions", asked).json()
        rest = b"abcdefgh"[-3:] if count == 3 else b"abcdefgh"
        assert answer["choices"][0]["text"] == text(expected(rest, 3))
        assert answer["usage"]["prompt_tokens"] == len(rest)
    for count in (0, -2, MAX_LEN):
        asked = {"prompt": "abcdefgh", "truncate_prompt_tokens": count}
        answer = post(client, "/v1/completions", asked)
        assert answer.status_code == 400 and "truncate_prompt_tokens" in answer.text


def test_the_last_message_may_be_continued_and_the_prompt_may_end_before_an_answer(http):
    class Named(FakeTokenizer):
        template = ChatTemplate(
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}",
            {},
        )

    client = http(tokenizer=Named)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is "}]
    for fields, prompt in (
        ({"continue_final_message": True}, "<user>hi</><assistant>It is "),
        ({"add_generation_prompt": False}, "<user>hi</><assistant>It is </>"),
        ({}, "<user>hi</><assistant>It is </><assistant>"),
    ):
        body = {"messages": messages, "max_tokens": 4, **fields}
        rendered = post(client, "/v1/chat/completions/render", body).json()["token_ids"]
        assert bytes(rendered).decode() == prompt
    empty = {"messages": [{"role": "user", "content": " "}], "continue_final_message": True}
    answer = post(client, "/v1/chat/completions", empty)
    assert answer.json()["error"]["param"] == "continue_final_message"


def test_log_probabilities_of_prompts_come_as_vllm_writes_them(http):
    client = http()
    asked = {"prompt": "abc", "max_tokens": 1, "prompt_logprobs": 1}
    (choice,) = post(client, "/v1/completions", asked).json()["choices"]
    first, second, third = choice["prompt_logprobs"]
    assert first is None and set(second) >= {str(ord("b"))} and len(third) in (1, 2)
    assert second[str(ord("b"))]["decoded_token"] == "b"
    chat = post(client, "/v1/chat/completions", {**CHAT, "prompt_logprobs": 0}).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    answer = post(client, "/v1/completions", {**asked, "stream": True})
    assert answer.json()["error"]["param"] == "prompt_logprobs"


def test_only_allowed_tools_are_told_of(http):
    client = http(script=[*b'{"name": "sub", "arguments": {}}', EOS])
    tools = [*TOOLS, {"type": "function", "function": {"name": "sub"}}]
    named = [{"type": "function", "function": {"name": "sub"}}]

    def body(mode, tools_named):
        allowed = {"mode": mode, "tools": tools_named}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        return {**CHAT, "max_tokens": 100, "tools": tools, "tool_choice": choice}

    shown = post(client, "/v1/chat/completions/render", body("auto", named)).json()["token_ids"]
    assert b'"sub"' in bytes(shown) and b'"add"' not in bytes(shown)
    answer = post(client, "/v1/chat/completions", body("required", named)).json()
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "sub"
    unknown = [{"type": "function", "function": {"name": "mul"}}]
    answer = post(client, "/v1/chat/completions", body("auto", unknown))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("ttft, verdict", [(60_000, True), (1, False)])
def test_each_choice_says_whether_it_was_in_time(http, ttft, verdict):
    client = http(FakeReplica(step_seconds=0.01))
    body = {"n": 2, "max_tokens": 3, "ttft_ms": ttft}
    for path, asked in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": CHAT["messages"]}),
    ):
        answer = post(client, path, {**body, **asked}).json()
        assert [choice["in_time"] for choice in answer["choices"]] == [verdict] * 2
        chunks, _ = events(client, path, {**body, **asked})
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        said = [choice["in_time"] for choice in choices if choice["finish_reason"]]
        assert said == [verdict] * 2


def test_what_ended_a_choice_is_told(http):
    client = http(script=[*b"one two", EOS])
    body = {"prompt": "x", "max_tokens": 50}
    for stop, reason in ((["two"], "two"), ([], None)):
        (choice,) = post(client, "/v1/completions", {**body, "stop": stop}).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
        chunks, _ = events(client, "/v1/completions", {**body, "stop": stop})
        assert chunks[-1]["choices"][0]["stop_reason"] == reason
    asked = {**body, "stop_token_ids": [ord("t")], "stop": ""}
    (choice,) = post(client, "/v1/completions", asked).json()["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("one ", ord("t"))


def test_the_load_is_told_to_routers_that_ask(http):
    client = http()
    for form in ("text", "JSON"):
        headers = {"endpoint-load-metrics-format": form}
        answer = post(client, "/v1/completions", {"prompt": "x"}, **headers)
        told = answer.headers["endpoint-load-metrics"]
        assert told.startswith(form.upper()) and "kv_cache_usage_perc" in told
    answer = post(
        client, "/v1/completions", {"prompt": "x"}, **{"endpoint-load-metrics-format": "x"}
    )
    assert answer.status_code == 400


def test_an_unknown_model_has_the_code_that_clients_know(http):
    answer = post(http(), "/v1/completions", {"prompt": "x", "model": "gpt-5"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_a_field_of_several_types_is_named_alone(http):
    client = http()
    for fields, name, words in (
        ({"tool_choice": {"type": "x"}}, "tool_choice", ""),
        ({"stop": 5}, "stop", ""),
        ({"modalities": ["audio"]}, "modalities", "only text is generated"),
    ):
        error = post(client, "/v1/chat/completions", {**CHAT, **fields}).json()["error"]
        assert error["param"] == name and words in error["message"]


def test_probes_may_ask_for_the_head_alone(http):
    client = http()
    assert client.head("/health").status_code == client.head("/ready").status_code == 200


def test_pages_of_allowed_origins_may_send_requests(http):
    page = "https://chat.example"
    asks = {"origin": page, "access-control-request-method": "POST"}
    for origins in ((page,), ("*",)):
        client = http(allowed_origins=origins, api_key=("secret",))
        asked = client.options("/v1/completions", headers=asks)
        assert asked.status_code == 200 and asked.headers["access-control-allow-origin"]
        key = {"authorization": "Bearer secret", "sec-fetch-site": "cross-site"}
        answer = post(client, "/v1/completions", {"prompt": "x"}, origin=page, **key)
        assert answer.status_code == 200
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        answer = post(client, "/v1/completions", {"prompt": "x"}, origin=page)
        assert answer.status_code == 401
    other = {"origin": "https://evil.example", **asks, "authorization": "Bearer secret"}
    client = http(allowed_origins=(page,), api_key=("secret",))
    other["origin"] = "https://evil.example"
    assert (
        "access-control-allow-origin"
        not in client.options("/v1/completions", headers=other).headers
    )
    assert post(client, "/v1/completions", {"prompt": "x"}, **other).status_code == 403
