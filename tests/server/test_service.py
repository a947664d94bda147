import pytest

from jaxserve.api.events import Accepted, Finished, Progress
from jaxserve.api.request import Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.client import ServerError
from jaxserve.server.grpc.proto import event_message, output_of
from jaxserve.settings.options import make
from jaxserve.settings.schema import EngineConfig
from jaxserve.text.output import Delta
from tests.server.fakes import EOS, FakeReplica, embedding, expected

GREEDY = {"temperature": 0, "max_tokens": 5}


def test_a_text_prompt_is_answered_with_events_in_order(serve):
    outputs = list(serve().client.generate("hello", SamplingParams.make(**GREEDY)))
    assert outputs[0] == Accepted(0) and isinstance(outputs[-1], Finished)
    kinds = [type(o) for o in outputs]
    assert kinds == sorted(kinds, key=[Accepted, Progress, Delta, Finished].index)
    assert [id for o in outputs if isinstance(o, Delta) for id in o.ids] == expected(b"hello", 5)
    assert outputs[-1].usage.prompt == 5 and outputs[-1].usage.completion == 5


@pytest.mark.parametrize("prompt", ["hi", [104, 105], [{"role": "user", "content": "hi"}]])
def test_text_ids_and_chats_are_prompts(serve, prompt):
    ids = b"<user>hi" if isinstance(prompt[0], dict) else b"hi"
    (completion,) = serve().client.complete(prompt, SamplingParams.make(**GREEDY))
    assert completion.ids == expected(ids, 5) and completion.text == bytes(completion.ids).decode()
    assert completion.reason == "length"


def test_n_completions_with_logprobs(serve):
    first, second = serve().client.complete(
        "hi", SamplingParams.make(n=2, logprobs=1, prompt_logprobs=0, **GREEDY)
    )
    assert (first.ids, second.ids) == (expected(b"hi", 5, 0), expected(b"hi", 5, 1))
    assert [p.top[0][0] for p in second.logprobs] == second.ids
    assert first.prompt_logprobs[0] is None and first.prompt_logprobs[1].chosen == -1.0


def test_a_prompt_is_embedded(serve):
    (completion,) = serve().client.complete("hello", embed=True)
    assert completion.embedding.tolist() == embedding(list(b"hello")).tolist()
    assert not completion.ids and completion.reason == "stop"


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt_logprobs": 0}])
def test_what_asks_for_more_than_an_embedding_is_refused(serve, fields):
    with pytest.raises(ServerError, match="cannot be given where a prompt is embedded"):
        serve().client.complete("hello", SamplingParams.make(**fields), embed=True)


def test_a_stop_string_ends_the_text_and_the_engine(serve):
    served = serve(FakeReplica(step_seconds=0.002, script=b"some words END more words and so on"))
    (completion,) = served.client.complete(
        "hi", SamplingParams.make(stop="END", max_tokens=4000), request_id="r"
    )
    assert completion.text == "some words " and completion.reason == "stop"
    assert bytes(completion.ids) == b"some words END" and completion.usage.completion == 14
    assert served.engine.stopped == [("r", 0)] and not served.engine.requests


def test_an_end_token_is_an_id_but_no_text(serve):
    (completion,) = serve(FakeReplica(script=[*b"bye", EOS])).client.complete("hi")
    assert (completion.text, completion.ids, completion.reason) == ("bye", [*b"bye", EOS], "stop")


def test_ids_only_and_models_without_tokenizer_send_no_text(serve):
    served = serve(tokenizer=None)
    (completion,) = served.client.complete(b"hi", SamplingParams.make(**GREEDY))
    assert completion.ids == expected(b"hi", 5) and completion.text == ""
    with pytest.raises(ServerError, match="no tokenizer") as error:
        served.client.complete("hi")
    assert error.value.status == "FAILED_PRECONDITION"
    (completion,) = serve().client.complete("hi", SamplingParams.make(**GREEDY), ids_only=True)
    assert completion.text == "" and len(completion.ids) == 5


def test_tokenize_and_detokenize(serve):
    client = serve().client
    assert client.tokenize("hé") == list("hé".encode())
    assert client.tokenize([{"role": "user", "content": "x"}]) == list(b"<user>x")
    assert client.tokenize("x" * 10_000) == [120] * 10_000
    assert client.detokenize("hé".encode()) == "hé"
    with pytest.raises(ServerError, match="id 257"):
        client.detokenize([257])


def test_the_server_tells_about_itself(serve):
    client = serve().client
    info = client.server_info()
    model = client.model_info()
    assert (info.state, info.mesh.spp, info.details["devices"]) == ("serving", 1, "1")
    assert (model.vocab, model.max_len, list(model.eos_ids), model.has_tokenizer) == (
        257,
        4096,
        [EOS],
        True,
    )
    assert client.load().pages_total == 10


def test_the_server_tells_its_classes_and_a_request_keeps_its_own_with_its_objectives(serve):
    engine = FakeReplica()
    seen = []
    engine.config = make(EngineConfig, {"classes": "chat:ttft=0.5;batch:ttft=600"})
    served = serve(engine)
    submit = engine.submit
    engine.submit = lambda request, sink: (seen.append(request.slo), submit(request, sink))
    assert list(served.client.server_info().classes) == ["chat", "batch"]
    for slo in (
        pb.Slo(class_name="batch", ttft_ms=1500),
        pb.Slo(class_name="chat", tbt_ms=20),
        pb.Slo(),
    ):
        served.client.complete("hi", SamplingParams.make(**GREEDY), slo=slo)
    assert seen == [Slo(1.5, None, "batch"), Slo(None, 0.02, "chat"), Slo()]


def test_the_predicted_time_to_the_first_token_survives_the_wire():
    message = event_message("r", 7, Accepted(3, 1.25))
    assert (
        message.accepted.request_id,
        message.accepted.prompt_tokens,
        message.accepted.predicted_ttft,
    ) == ("r", 7, 1.25)
    assert output_of(message) == Accepted(3, 1.25)


def test_silence_is_broken_by_progress(serve):
    engine = FakeReplica()
    engine.paused = True
    served = serve(engine, progress_interval=0.2)
    outputs = served.client.generate("hello")
    assert next(outputs) == Accepted(0)
    assert [next(outputs) for _ in range(3)] == [Progress(0, 0, 5)] * 3
    outputs.close()
