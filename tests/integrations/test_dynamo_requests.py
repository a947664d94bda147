from __future__ import annotations

import pytest

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Accepted, Finished, Logprobs, Progress, Timing, Token, Usage
from jaxserve.integrations.dynamo_requests import chunks_of, request_of
from tests.server.fakes import EOS, MAX_LEN, FakeReplica

INFO = FakeReplica().info


def translated(**fields):
    return request_of({"token_ids": [1, 2, 3], **fields}, "one", INFO, 5.0)


def test_a_bare_request_generates_until_its_end():
    request = translated()
    assert request.prompt.tolist() == [1, 2, 3] and request.arrival == 5.0
    assert request.sampling.max_tokens == MAX_LEN - 3


def test_options_arrive_and_none_means_the_default():
    request = translated(
        sampling_options={"temperature": 0.5, "top_k": -1, "top_p": None, "seed": 7, "n": 2},
        stop_conditions={
            "max_tokens": 9,
            "min_tokens": 2,
            "stop": ["x"],
            "stop_token_ids_hidden": [EOS, 40],
        },
        output_options={"logprobs": 3},
    ).sampling
    assert (request.temperature, request.top_k, request.top_p, request.seed) == (0.5, 0, 1.0, 7)
    assert (request.n, request.max_tokens, request.min_tokens, request.logprobs) == (2, 9, 2, 3)
    assert request.stop_token_ids == (40,) and request.stop == ()


@pytest.mark.parametrize(
    "field, given",
    [
        ("sampling_options.guided_decoding", {"sampling_options": {"guided_decoding": {"a": 1}}}),
        ("prefill_result", {"prefill_result": {"disaggregated_params": {}}}),
        ("multi_modal_data", {"multi_modal_data": {"image_url": ["x"]}}),
        ("temperature", {"sampling_options": {"temperature": -1}}),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(field, given):
    with pytest.raises(RequestError) as found:
        translated(**given)
    assert found.value.field == field


def test_events_become_chunks_and_progress_none():
    logprobs = Logprobs(-0.5, ((7, -0.5), (8, -1.5)))
    end = Finished(1, "length", Usage(10, 4, 2), Timing(0.0, 0.1, 0.2))
    events = [Accepted(0), Progress(0, 1, 2), Token(0, 7, logprobs), Token(1, 8), end]
    first, second, last = chunks_of(events, chr)
    assert first["token_ids"] == [7] and first["log_probs"] == [-0.5]
    tops = first["top_logprobs"][0]
    assert [(top["token_id"], top["token"]) for top in tops] == [(7, chr(7)), (8, chr(8))]
    assert second == {"token_ids": [8], "index": 1}
    assert (last["finish_reason"], last["index"], last["token_ids"]) == ("length", 1, [])
    usage = last["completion_usage"]
    assert usage["total_tokens"] == 12 and usage["prompt_tokens_details"] == {"cached_tokens": 4}


def test_a_completion_that_failed_raises_why():
    error = RequestError("", "the engine was closed", "UNAVAILABLE")
    end = Finished(0, "error", Usage(1, 0, 0), Timing(0.0, 0.0, 0.0), error=error)
    with pytest.raises(RequestError, match="was closed"):
        list(chunks_of([end], chr))
