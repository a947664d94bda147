"""Embeddings, reranking and scores over HTTP, of an engine whose embeddings are known."""

import base64
import http.client
import json
import time

import httpx
import numpy as np
import openai
import pytest

from tests.server.fakes import EMBEDDING, MAX_LEN, FakeReplica, embedding
from tests.server.keyed import TWO, bearer, sha
from tests.waiting import SOON, eventually


def unit(text: str | list[int]) -> np.ndarray:
    vector = embedding(list(text.encode()) if isinstance(text, str) else text)
    return vector / np.linalg.norm(vector)


def vectors(answer: httpx.Response) -> list[list[float]]:
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    assert {one["object"] for one in data} == {"embedding"}
    return [one["embedding"] for one in data]


def embed(client: httpx.Client, given, **fields) -> httpx.Response:
    return client.post("/v1/embeddings", json={"input": given, **fields})


@pytest.mark.parametrize(
    "given, inputs",
    [
        ("hello", ["hello"]),
        (["hello"], ["hello"]),
        (["one", "two", "three"], ["one", "two", "three"]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_each_input_has_its_vector_of_length_one(asked, given, inputs):
    answer = embed(asked, given)
    for got, one in zip(vectors(answer), inputs, strict=True):
        np.testing.assert_allclose(got, unit(one), rtol=1e-6)
    body = answer.json()
    assert body["object"] == "list" and body["model"]
    tokens = sum(len(one) for one in inputs)
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == tokens
    assert body["id"] == answer.headers["x-request-id"]


def test_base64_is_the_same_numbers(asked):
    (as_floats,) = vectors(embed(asked, "hello"))
    (as_text,) = vectors(embed(asked, "hello", encoding_format="base64"))
    assert np.frombuffer(base64.b64decode(as_text), "<f4").tolist() == as_floats


def test_dimensions_cut_before_the_length_is_made_one(asked):
    (got,) = vectors(embed(asked, "hello", dimensions=3))
    cut = embedding(list(b"hello"))[:3]
    np.testing.assert_allclose(got, cut / np.linalg.norm(cut), rtol=1e-6)
    (got,) = vectors(embed(asked, "hello", dimensions=3, normalize=False))
    assert got == cut.tolist()


def test_the_end_of_an_input_can_be_asked_for(asked):
    (got,) = vectors(embed(asked, "abcdef", truncate_prompt_tokens=2))
    np.testing.assert_allclose(got, unit("ef"), rtol=1e-6)


def test_fields_of_the_request_reach_the_engine(serve):
    engine = FakeReplica()
    seen = []
    submit = engine.submit
    engine.submit = lambda request, sink: (seen.append(request), submit(request, sink))
    with httpx.Client(base_url=serve(engine).server.url, timeout=SOON) as client:
        embed(client, ["a", "b"], priority=-2, cache_salt="s", request_id="mine", user="u")
    assert [request.id for request in seen] == ["mine-0", "mine-1"]
    assert all(request.embed and request.priority == -2 for request in seen)
    assert {request.cache_salt for request in seen} == {"s"}


@pytest.mark.parametrize(
    "fields, param, said",
    [
        ({}, "input", "required"),
        ({"input": ""}, "input", "is empty"),
        ({"input": []}, "input", "is empty"),
        ({"input": 5}, "input", "must be a text"),
        ({"input": ["a", ""]}, "input.1", "is empty"),
        ({"input": ["a", [5]]}, "input", "mixes"),
        ({"input": [5, "a"]}, "input", "flat list of integers"),
        ({"input": [[5], [10**6]]}, "input.1", "is not in 0 to"),
        ({"input": ["a", "b" * MAX_LEN]}, "input.1", f"> {MAX_LEN - 1}"),
        ({"input": ["a"] * 2049}, "input", "limit is 2048"),
        ({"input": "a", "dimensions": 0}, "dimensions", f"1 to {EMBEDDING}"),
        ({"input": "a", "dimensions": EMBEDDING + 1}, "dimensions", f"1 to {EMBEDDING}"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float"),
        ({"input": "a", "priority": 9}, "priority", "-8 to 8"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "1 to"),
    ],
)
def test_what_is_wrong_is_named_with_its_limit(asked, fields, param, said):
    answer = asked.post("/v1/embeddings", json=fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and said in error["message"].lower()


def test_an_unknown_model_is_404_and_an_unknown_field_is_told_of(asked):
    assert embed(asked, "a", model="other").status_code == 404
    answer = embed(asked, "a", task="retrieval")
    assert answer.headers["x-jaxserve-ignored"] == "task"


def test_many_inputs_do_not_fill_the_queue(serve):
    with httpx.Client(base_url=serve(FakeReplica(max_queue=64)).server.url, timeout=SOON) as client:
        texts = [f"text {number}" for number in range(300)]
        for got, text in zip(vectors(embed(client, texts)), texts, strict=True):
            np.testing.assert_allclose(got, unit(text), rtol=1e-6)


def test_a_mistake_in_one_input_ends_the_others(serve):
    engine = FakeReplica(step_seconds=0.05, chunk=1)
    with httpx.Client(base_url=serve(engine).server.url, timeout=SOON) as client:
        answer = embed(client, ["a long text", "another one", ""])
    assert answer.json()["error"]["param"] == "input.2"
    eventually(lambda: not engine.requests)


def test_who_goes_away_has_all_inputs_cancelled(serve):
    engine = FakeReplica(step_seconds=0.05, chunk=1)
    served = serve(engine)
    caller = http.client.HTTPConnection("127.0.0.1", served.server.server.ports["http"])
    body = json.dumps({"input": ["a long text " * 50] * 100})
    caller.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
    eventually(lambda: len(engine.requests) == 64)
    caller.close()
    eventually(lambda: not engine.requests)
    taken = len(engine.cancelled)
    time.sleep(0.2)
    assert taken == len(engine.cancelled) == 64, "none is begun after the caller is gone"


def test_a_key_that_may_run_few_requests_may_send_many_inputs(serve, key_file):
    url = serve(FakeReplica(step_seconds=0.005), api_keys=key_file(TWO)).server.url
    with httpx.Client(
        base_url=url, headers={"authorization": bearer("a-key")}, timeout=SOON
    ) as client:
        assert len(vectors(embed(client, ["a", "b", "c", "d", "e"]))) == 5
    assert httpx.post(f"{url}/v1/embeddings", json={"input": "a"}, timeout=SOON).status_code == 401


def test_each_input_is_a_request_of_its_key(serve, key_file):
    keys = f"keys: [{{name: a, sha256: {sha('k')}, limits: {{requests_per_minute: 3}}}}]"
    url = serve(api_keys=key_file(keys)).server.url
    with httpx.Client(base_url=url, headers={"authorization": bearer("k")}, timeout=SOON) as client:
        assert embed(client, ["a", "b"]).status_code == 200
        refused = embed(client, ["a", "b"])
        assert refused.status_code == 429 and "retry-after" in refused.headers


def test_the_official_client_gets_the_same_vectors(common):
    """It asks for base64 by itself."""
    base = f"{common.server.url}/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=60) as client:
        made = client.embeddings.create(model="", input=["hello", "you"], dimensions=4)
        plain = client.embeddings.create(
            model="", input=["hello", "you"], dimensions=4, encoding_format="float"
        )
    assert [one.embedding for one in made.data] == [one.embedding for one in plain.data]
    assert len(made.data[0].embedding) == 4 and made.usage.total_tokens == 8


# --- reranking


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_in_the_order_of_their_cosines(asked, path):
    documents = ["zzzz", "hello", {"text": "hell"}, "help me"]
    texts = ["zzzz", "hello", "hell", "help me"]
    answer = asked.post(path, json={"query": "hello", "documents": documents})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    scores = [float(unit("hello") @ unit(text)) for text in texts]
    order = sorted(range(4), key=lambda number: -scores[number])
    assert [one["index"] for one in body["results"]] == order
    for one in body["results"]:
        assert one["relevance_score"] == pytest.approx(scores[one["index"]], abs=1e-6)
        assert one["document"] == {"text": texts[one["index"]]}
    assert body["results"][0]["relevance_score"] == pytest.approx(1.0)
    assert body["usage"]["total_tokens"] == len("hello") + sum(map(len, texts))


def test_only_the_most_similar_and_no_documents_can_be_asked_for(asked):
    body = {"query": "a", "documents": ["b", "a", "c"], "top_n": 1, "return_documents": False}
    (best,) = asked.post("/v1/rerank", json=body).json()["results"]
    assert best["index"] == 1 and set(best) == {"index", "relevance_score"}
    many = asked.post("/v1/rerank", json={**body, "top_n": 100}).json()["results"]
    assert len(many) == 3


@pytest.mark.parametrize(
    "fields, param, said",
    [
        ({"documents": ["a"]}, "query", "required"),
        ({"query": "a"}, "documents", "required"),
        ({"query": "a", "documents": []}, "documents", "is empty"),
        ({"query": "", "documents": ["a"]}, "query", "is empty"),
        ({"query": "a", "documents": ["a", ""]}, "documents.1", "is empty"),
        ({"query": "a", "documents": ["a", 5]}, "documents.1", "string"),
        ({"query": "a", "documents": ["a"] * 2049}, "documents", "limit is 2048"),
        ({"query": "a", "documents": ["a"], "top_n": 0}, "top_n", "1 to"),
        ({"query": "b" * MAX_LEN, "documents": ["a"]}, "query", f"> {MAX_LEN - 1}"),
    ],
)
def test_what_is_wrong_in_a_reranking_is_named(asked, fields, param, said):
    answer = asked.post("/v1/rerank", json=fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and said in error["message"].lower(), json.dumps(error)


# --- scores


@pytest.mark.parametrize(
    "first, second, pairs",
    [
        ("ab", "ac", [("ab", "ac")]),
        ("ab", ["ac", "zz"], [("ab", "ac"), ("ab", "zz")]),
        (["ab", "x"], ["ac", "zz"], [("ab", "ac"), ("x", "zz")]),
    ],
)
def test_pairs_have_scores(asked, first, second, pairs):
    answer = asked.post("/score", json={"text_1": first, "text_2": second})
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [one["index"] for one in data] == list(range(len(pairs)))
    scores = [float(unit(a) @ unit(b)) for a, b in pairs]
    assert [one["score"] for one in data] == pytest.approx(scores, abs=1e-6)


def test_lists_of_pairs_must_be_of_one_length(asked):
    answer = asked.post("/score", json={"text_1": ["a", "b"], "text_2": ["a"]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "text_2"
