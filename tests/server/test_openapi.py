"""The OpenAPI document and the server agree on which bodies are valid."""

import jsonschema_rs
import pytest

from tests.server.http_client import post

TALK = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = {**TALK, "max_tokens": 2}
TEXT = {"prompt": "hi", "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "look"}}
CLIENT_TOOL = {"name": "look", "input_schema": {"type": "object"}}
FORM = {"type": "json_schema"}
RESPONSE_TOOL = {"type": "function", "name": "look"}
LOOK = {"type": "tool", "name": "look"}
JSON = {"type": "json_object"}
NULL = {"type": "null"}
LOGPROBS = "message.output_text.logprobs"
CHATS = "/v1/chat/completions"
TEXTS = "/v1/completions"
BODIES = [  # path, body, whether it is valid
    (CHATS, {**CHAT, "stream": 0}, False),
    (CHATS, {**CHAT, "logprobs": "true"}, False),
    (CHATS, {**CHAT, "max_tokens": True}, False),
    (CHATS, {**CHAT, "max_tokens": "2"}, False),
    (CHATS, {**CHAT, "max_tokens": 2.0}, True),
    (CHATS, {**CHAT, "max_tokens": 2.5}, False),
    (CHATS, {**CHAT, "temperature": "1"}, False),
    (CHATS, {**CHAT, "temperature": 1}, True),
    (CHATS, {**CHAT, "logit_bias": {"7": True}}, False),
    (CHATS, {**CHAT, "cache_retention": True}, False),
    (CHATS, {**CHAT, "top_logprobs": 2}, False),
    (CHATS, {**CHAT, "top_logprobs": 2, "logprobs": True}, True),
    (CHATS, {**CHAT, "top_logprobs": 0, "logprobs": None}, True),
    (CHATS, {**CHAT, "max_completion_tokens": 2, "max_tokens": 0}, False),
    (CHATS, {**CHAT, "stream_options": {}}, False),
    (CHATS, {**CHAT, "stream_options": None}, True),
    (CHATS, {**CHAT, "tool_choice": "required"}, False),
    (CHATS, {**CHAT, "tool_choice": "required", "tools": []}, False),
    (CHATS, {**CHAT, "tool_choice": "auto"}, True),
    (CHATS, {**CHAT, "tool_choice": {"type": "auto"}}, True),
    (CHATS, {**CHAT, "tool_choice": {"type": "auto", "x": 1}, "tools": [TOOL]}, True),
    (CHATS, {**CHAT, "tool_choice": {"type": "any"}}, False),
    (CHATS, {**CHAT, "tool_choice": "any", "tools": [TOOL]}, True),
    (CHATS, {**CHAT, "tool_choice": "none", "tools": [TOOL]}, True),
    (CHATS, {**CHAT, "tool_choice": {"type": "web_search"}, "tools": [TOOL]}, False),
    (CHATS, {**CHAT, "tool_choice": TOOL, "tools": [TOOL], "guided_regex": "a"}, False),
    (CHATS, {**CHAT, "tool_choice": TOOL, "tools": [TOOL], "response_format": JSON}, True),
    (CHATS, {**CHAT, "tools": [{**TOOL, "type": None}]}, True),
    (CHATS, {**CHAT, "tools": [{"type": "function"}]}, False),
    (CHATS, {**CHAT, "tools": [{"function": None}]}, False),
    (CHATS, {**CHAT, "response_format": FORM}, False),
    (CHATS, {**CHAT, "response_format": {**FORM, "json_schema": None}}, False),
    (CHATS, {**CHAT, "response_format": {**FORM, "schema": NULL}}, True),
    (CHATS, {**CHAT, "response_format": {**FORM, "schema": False}}, False),
    (CHATS, {**CHAT, "response_format": {**FORM, "schema": 1}}, False),
    (CHATS, {**CHAT, "response_format": {"type": "json_object", "json_schema": {}}}, True),
    (CHATS, {**CHAT, "structured_outputs": {"choice": []}}, False),
    (CHATS, {**CHAT, "structured_outputs": {"json": False}}, False),
    (CHATS, {**CHAT, "guided_choice": ["a"] * 1025}, False),
    (TEXTS, {**TEXT, "guided_choice": ["a"], "guided_regex": "a"}, False),
    (TEXTS, {**TEXT, "guided_choice": ["a"], "guided_regex": None}, True),
    (TEXTS, {**TEXT, "guided_choice": ["a"], "response_format": JSON}, False),
    (TEXTS, {**TEXT, "guided_choice": ["a"], "response_format": {"type": "text"}}, True),
    (TEXTS, {**TEXT, "guided_choice": ["a"], "structured_outputs": {"json": True}}, False),
    (TEXTS, {**TEXT, "guided_choice": ["a"], "structured_outputs": {"json_object": False}}, True),
    (CHATS, {**CHAT, "structured_outputs": {"regex": "a", "json_object": True}}, False),
    (CHATS, {**CHAT, "structured_outputs": {"regex": "a", "json_object": False}}, True),
    (CHATS, {**CHAT, "messages": [{"role": "user"}]}, False),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": None}]}, False),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": [{"text": "hi"}]}]}, True),
    (CHATS, {**CHAT, "messages": [*CHAT["messages"], {"role": "assistant"}]}, True),
    (TEXTS, {**TEXT, "prompt": [[]]}, False),
    (TEXTS, {**TEXT, "prompt": [[1, 2.0], [3]]}, True),
    (TEXTS, {**TEXT, "prompt": [1, 2.5]}, False),
    (TEXTS, {**TEXT, "prompt": [[1], [-1]]}, False),
    (TEXTS, {**TEXT, "best_of": 129}, False),
    (TEXTS, {**TEXT, "prompt": ["a", "b"], "request_id": "x" * 257}, False),
    (TEXTS, {**TEXT, "stream_options": {}}, False),
    (TEXTS, {**TEXT, "prompt_logprobs": 1, "stream": True}, False),
    (TEXTS, {**TEXT, "prompt_logprobs": 1, "stream": False}, True),
    (TEXTS, {**TEXT, "cache_retention": 60, "prompt_cache_retention": "24h"}, True),
    ("/v1/responses", {"input": "hi", "background": 0}, False),
    ("/v1/responses", {"input": "hi", "background": False}, True),
    ("/v1/responses", {"input": "hi", "top_logprobs": 1}, False),
    (
        "/v1/responses",
        {"input": "hi", "tool_choice": {"type": "x"}, "tools": [RESPONSE_TOOL]},
        False,
    ),
    ("/v1/responses", {"input": "", "tool_choice": {"type": "none", "x": 1}}, True),
    ("/v1/responses", {"input": []}, False),
    ("/v1/responses", {"input": [{"role": "nurse", "content": "hi"}]}, False),
    ("/v1/responses", {"input": [{"role": "user"}]}, False),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "x"}]}]}, False),
    ("/v1/responses", {"input": [{"type": "x"}, {"role": "user", "content": "hi"}]}, True),
    ("/v1/responses", {"input": [], "instructions": ""}, False),
    ("/v1/responses", {"input": [], "instructions": "hi"}, True),
    ("/v1/responses", {"input": "hi", "tools": [{"type": "custom"}]}, False),
    ("/v1/responses", {"input": "hi", "tools": [{"name": "f"}]}, True),
    ("/v1/responses", {"input": "hi", "tools": [{"name": "f g"}]}, False),
    ("/v1/responses", {"input": "hi", "tools": [{}]}, False),
    ("/v1/responses", {"input": "hi", "tools": [{"type": "web_search"}]}, True),
    ("/v1/responses", {"input": "hi", "top_logprobs": 1, "include": [LOGPROBS]}, True),
    ("/v1/responses", {"input": "hi", "text": {"format": {**FORM, "schema": None}}}, False),
    ("/v1/responses", {"input": "hi", "text": {"format": {**FORM, "schema": NULL}}}, True),
    ("/v1/messages", {**CHAT, "tools": [{"input_schema": {}}]}, False),
    ("/v1/messages", {**CHAT, "tools": [{"type": "bash_20250124"}, CLIENT_TOOL]}, True),
    ("/v1/messages", {**CHAT, "tool_choice": {"type": "any"}}, False),
    ("/v1/messages", {**CHAT, "tool_choice": {"type": "auto"}}, True),
    ("/v1/messages", {**CHAT, "tool_choice": {"type": "tool"}, "tools": [CLIENT_TOOL]}, False),
    (
        "/v1/messages",
        {**CHAT, "tool_choice": {**LOOK, "name": None}, "tools": [CLIENT_TOOL]},
        False,
    ),
    ("/v1/messages", {**CHAT, "tool_choice": LOOK, "tools": [CLIENT_TOOL]}, True),
    ("/v1/messages/count_tokens", {**TALK, "tool_choice": {"type": "any"}, "tools": []}, False),
    ("/v1/messages/count_tokens", {**TALK, "output_format": {**FORM, "schema": False}}, False),
    ("/v1/embeddings", {"input": "hi", "normalize": 0}, False),
    ("/tokenize", {"prompt": "hi", "add_special_tokens": 1}, False),
    ("/v1/embeddings", {"input": [1.0]}, True),
    ("/detokenize", {"tokens": [1.0]}, True),
    ("/detokenize", {"tokens": [1], "skip_special_tokens": "yes"}, False),
]
RENDERED = [
    (f"{path}/render", body, valid) for path, body, valid in BODIES if path in (CHATS, TEXTS)
]


@pytest.fixture(scope="module")
def document(asked):
    return asked.get("/openapi.json").json()


@pytest.mark.parametrize("path, body, valid", BODIES + RENDERED)
def test_a_body_is_taken_where_the_document_allows_it(path, body, valid, asked, document):
    content = document["paths"][path]["post"]["requestBody"]["content"]
    schema = {**content["application/json"]["schema"], "components": document["components"]}
    answer = post(asked, path, body)
    assert jsonschema_rs.is_valid(schema, body) == valid
    assert answer.status_code == (200 if valid else 400), answer.text


@pytest.mark.parametrize(
    "path, fields",
    [
        (TEXTS, {"prompt": ["a", "b"], "max_tokens": 1}),
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
    ],
)
def test_a_request_of_several_prompts_may_have_the_longest_id(path, fields, asked, document):
    schema = document["components"]["schemas"]["RerankRequest"]["properties"]["request_id"]
    assert post(asked, path, {**fields, "request_id": "x" * schema["maxLength"]}).status_code == 200
