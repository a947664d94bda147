"""What the model's makers recommend is what requests of every protocol have unless they say
otherwise."""

import dataclasses

import pytest

from jaxserve.api.sampling import SamplingParams
from jaxserve.server import jaxserve_pb2 as pb
from tests.server.fakes import FakeModel, FakeReplica
from tests.server.http_client import HttpClient, post

RECOMMENDED = {
    "temperature": 0.5,
    "top_k": 30,
    "top_p": 0.75,
    "min_p": 0.125,
    "repetition_penalty": 1.25,
    "max_tokens": 3,
}
STATED = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 5}
MESSAGES = [{"role": "user", "content": "hi"}]
HTTP = {  # route -> (body, its name of max_tokens)
    "/v1/completions": ({"prompt": "hi"}, "max_tokens"),
    "/v1/chat/completions": ({"messages": MESSAGES}, "max_completion_tokens"),
    "/v1/responses": ({"input": "hi"}, "max_output_tokens"),
}


@pytest.fixture
def served(serve):
    replica = FakeReplica()
    replica.model = dataclasses.replace(FakeModel(), sampling=tuple(RECOMMENDED.items()))
    return serve(replica)


def sampled(served):
    """The parameters of the newest request that have defaults."""
    sampling = served.engine.submitted[-1].sampling
    return {name: getattr(sampling, name) for name in RECOMMENDED}


@pytest.mark.parametrize("path", HTTP)
def test_http_requests_state_what_they_want_otherwise(path, served):
    body, limit = HTTP[path]
    with HttpClient(served) as client:
        assert post(client, path, body).status_code == 200
        assert sampled(served) == RECOMMENDED
        stated = {**body, "temperature": 0, "top_p": 1, limit: 5}
        assert post(client, path, stated).status_code == 200
    assert sampled(served) == {**RECOMMENDED, **STATED}


def test_messages_state_what_they_want_otherwise(served):
    with HttpClient(served) as client:
        post(client, "/v1/messages", {"messages": MESSAGES, "max_tokens": 5})
        assert sampled(served) == {**RECOMMENDED, "max_tokens": 5}
        post(client, "/v1/messages", {"messages": MESSAGES, "max_tokens": 5, "top_k": 1})
    assert sampled(served) == {**RECOMMENDED, "max_tokens": 5, "top_k": 1}


def test_grpc_requests_have_the_defaults_for_fields_that_are_not_set(served):
    def ask(**fields):
        message = pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(**fields))
        assert served.status_of("Inference/Generate", message)[0].name == "OK"
        return sampled(served)

    assert ask() == RECOMMENDED
    assert ask(temperature=0.0, top_p=1.0, max_tokens=5) == {**RECOMMENDED, **STATED}


def test_the_client_sends_its_parameters_whole_or_none(served):
    served.client.complete("hi")
    assert sampled(served) == RECOMMENDED
    plain = SamplingParams(max_tokens=4)
    served.client.complete("hi", plain)
    assert sampled(served) == {name: getattr(plain, name) for name in RECOMMENDED}
