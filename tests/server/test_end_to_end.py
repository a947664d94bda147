"""The real engine with a tiny random model behind gRPC: the same tokens as offline, and nothing
left behind."""

import pytest

from jaxserve import LLM
from jaxserve.api.errors import RequestError
from jaxserve.api.sampling import SamplingParams
from jaxserve.llm import open_engine
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.client import Client
from jaxserve.server.supervisor import Background
from jaxserve.settings.options import make
from jaxserve.settings.schema import EngineConfig, ServerConfig
from tests.waiting import eventually

SETTINGS = {
    "model": "random:tiny",
    "max_model_len": 256,
    "chunk_tokens": 16,
    "max_seqs": 4,
    "pages": 80,
    "max_queue": 64,
    "classes": "chat:ttft=0.5,tpot=0.05;batch:ttft=600",
}
PROMPTS = [[i + 3, *range(5, 5 + 7 * i)] for i in range(1, 9)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def offline():
    with LLM(**SETTINGS, progress=False) as llm:
        return llm.generate(PROMPTS, GREEDY)


@pytest.fixture(scope="module")
def client():
    config = make(EngineConfig, SETTINGS)
    with Background(
        ServerConfig(grpc_port=0, port=0),
        lambda: open_engine(config, progress=False, warm_up=False),
    ) as server:
        server.wait_ready()
        with Client(server.target) as client:
            yield client


def idle(client):
    eventually(lambda: not (load := client.load()).running and not load.waiting)
    load = client.load()
    return load.pages_free + load.pages_cached


def test_the_server_gives_the_tokens_of_offline_use(client, offline):
    for prompt, wanted in zip(PROMPTS, offline):
        (completion,) = client.complete(prompt, GREEDY)
        assert completion.ids == wanted.ids and completion.reason == wanted.reason == "length"
        assert [p.top[0][0] for p in completion.logprobs] == completion.ids
        assert [p.chosen for p in completion.logprobs] == pytest.approx(
            [p.chosen for p in wanted.logprobs], abs=1e-4
        )


def test_a_request_of_a_class_gives_the_same_tokens_and_hears_no_seconds_that_nobody_measured(
    client, offline
):
    for name, prompt, wanted in zip(("chat", "batch"), PROMPTS, offline):
        accepted, *_, finished = client.generate(prompt, GREEDY, slo=pb.Slo(class_name=name))
        assert accepted.predicted_ttft == 0 and finished.usage.completion == 12
        assert client.complete(prompt, GREEDY, slo=pb.Slo(class_name=name))[0].ids == wanted.ids
    with pytest.raises(RequestError, match="known are chat, batch"):
        client.complete(PROMPTS[0], GREEDY, slo=pb.Slo(class_name="other"))


def test_cancelled_requests_leave_every_page(client):
    before = idle(client)
    for i in range(40):
        outputs = client.generate(PROMPTS[i % 8], SamplingParams(max_tokens=200, ignore_eos=True))
        for _ in range(i % 5):
            next(outputs)
        outputs.close()
    assert idle(client) == before == client.load().pages_total


def test_what_can_never_fit_is_refused_and_the_rest_goes_on(client):
    with pytest.raises(RequestError) as error:
        client.complete([1] * 256, GREEDY)
    assert error.value.status == "INVALID_ARGUMENT" and "255" in str(error.value)
    assert client.complete(PROMPTS[0], GREEDY)


def test_a_deadline_ends_a_running_request(client):
    with pytest.raises(RequestError) as error:
        client.complete(PROMPTS[0], SamplingParams(max_tokens=240, ignore_eos=True), timeout=0.05)
    assert error.value.status == "DEADLINE_EXCEEDED"
    assert idle(client) == client.load().pages_total
