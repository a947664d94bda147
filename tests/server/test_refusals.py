"""What is refused, and with which status; nothing refused reaches the engine."""

import concurrent.futures
import random
import socket
import time

import grpc
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.api.sampling import SamplingParams
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.client import Client, ServerError
from jaxserve.server.grpc.handlers import parse
from jaxserve.settings.options import make
from jaxserve.settings.schema import EngineConfig
from tests.server.fakes import MAX_LEN, VOCAB, FakeReplica, FakeTokenizer, expected

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NAN = float("nan")
INF = float("inf")


def ids(*tokens):
    return pb.TokenIds(ids=tokens)


BAD_SAMPLING = [
    ("temperature", NAN),
    ("temperature", INF),
    ("temperature", -1),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_p", NAN),
    ("min_p", -0.1),
    ("min_p", 2),
    ("top_k", -2),
    ("top_k", 2**40),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("presence_penalty", 3),
    ("frequency_penalty", -INF),
    ("n", 0),
    ("n", -1),
    ("n", 10**9),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", 2**40),
    ("min_tokens", -1),
    ("min_tokens", 10**6),
    ("logprobs", 10**9),
    ("logprobs", -1),
    ("prompt_logprobs", 21),
    ("stop", ["x"] * 10**5),
    ("stop", [""]),
    ("stop", ["x" * 10**5]),
    ("stop_token_ids", list(range(200)) * 500),
    ("stop_token_ids", [VOCAB]),
    ("stop_token_ids", [-1]),
    ("logit_bias", {1: NAN}),
    ("logit_bias", {1: 101.0}),
    ("logit_bias", {VOCAB: 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", dict.fromkeys(range(10**5), 1.0)),
]
BAD_REQUESTS = [
    ("prompt", {}),
    ("prompt", {"text": ""}),
    ("prompt", {"token_ids": ids()}),
    ("prompt", {"token_ids": ids(VOCAB)}),
    ("prompt", {"token_ids": ids(-1)}),
    ("prompt", {"token_ids": ids(1, 2**31 - 1)}),
    ("prompt", {"token_ids": ids(*[1] * MAX_LEN)}),
    ("prompt", {"text": "x" * MAX_LEN}),
    ("prompt", {"text": "x" * 10**7}),
    ("messages", {"chat": pb.Chat()}),
    ("messages", {"chat": pb.Chat(messages=[pb.Chat.Message(role="user")] * 10_001)}),
    ("request_id", {"text": "x", "request_id": "x" * 300}),
    ("slo.ttft_ms", {"text": "x", "slo": pb.Slo(ttft_ms=-1)}),
    ("slo.tbt_ms", {"text": "x", "slo": pb.Slo(tbt_ms=NAN)}),
    ("slo.class_name", {"text": "x", "slo": pb.Slo(class_name="chat")}),
    ("slo.class_name", {"text": "x", "slo": pb.Slo(class_name="x" * 10**6)}),
    ("cache_salt", {"text": "x", "kv": pb.KvOptions(cache_salt="x" * 2000)}),
    ("cache_retention", {"text": "x", "kv": pb.KvOptions(cache_retention=-2)}),
    ("cache_retention", {"text": "x", "kv": pb.KvOptions(cache_retention=86_401)}),
    ("stop", {"text": "x", "ids_only": True, "sampling": pb.SamplingParams(stop=["x"])}),
]


def test_bad_values_are_refused_by_name_and_quickly(serve):
    served = serve()
    for field, value in BAD_SAMPLING:
        message = pb.GenerateRequest(token_ids=ids(1), sampling=pb.SamplingParams(**{field: value}))
        began = time.process_time()  # the server is in this process
        code, details = served.status_of("Inference/Generate", message)
        assert (code, details.split(":")[0]) == (INVALID, field), (field, str(value)[:50], details)
        assert time.process_time() - began < 2
    for field, fields in BAD_REQUESTS:
        code, details = served.status_of("Inference/Generate", pb.GenerateRequest(**fields))
        assert (code, details.split(":")[0]) == (INVALID, field), (fields.keys(), details)
    assert served.engine.prefill_steps == 0
    assert served.client.complete("x", SamplingParams(max_tokens=2))[0].reason == "length"


def test_the_field_at_fault_is_in_the_metadata(serve):
    with pytest.raises(ServerError, match="top_p") as error:
        serve().client.complete("x", SamplingParams(top_p=7))
    assert (error.value.field, error.value.status) == ("top_p", "INVALID_ARGUMENT")


def test_a_class_that_the_server_does_not_have_is_refused_with_those_that_it_has_and_leaves_nothing(
    serve,
):
    engine = FakeReplica()
    engine.config = make(EngineConfig, {"classes": "chat:ttft=0.5;batch:ttft=600"})
    served = serve(engine)
    for name in ("Chat", "chat ", "secret", "\n\0\u20ac"):
        with pytest.raises(ServerError) as error:
            served.client.complete("x", request_id="r", slo=pb.Slo(class_name=name))
        assert (error.value.field, error.value.status) == ("slo.class_name", "INVALID_ARGUMENT")
        assert (
            str(error.value)
            == f"slo.class_name: {name!r} is not a class of requests here; known are chat, batch"
        )
    assert (
        not engine.requests
        and not served.server.server.frontend.streams
        and engine.prefill_steps == 0
    )
    for name in ("chat", "batch", ""):
        assert served.client.complete(
            "x", SamplingParams(max_tokens=1), request_id="r", slo=pb.Slo(class_name=name)
        )


def test_unset_sampling_takes_the_defaults_not_zero(serve):
    served = serve()
    served.client.complete("x", request_id="r", ids_only=True)
    seen = []
    submit, served.engine.submit = (
        served.engine.submit,
        lambda request, sink: (seen.append(request), submit(request, sink)),
    )
    served.client.complete("x")
    assert seen[0].sampling == SamplingParams()


@pytest.mark.parametrize(
    "data", [b"\xf8\x07\x01", b"\x22\x01x\x32\x03\xf8\x07\x01", b"\x2a\x05\x0a\x03\xf8\x07\x01"]
)
def test_unknown_fields_are_refused_by_number_however_deep(common, data):
    code, details = common.status_of("Inference/Generate", data)
    assert code == INVALID and "unknown field number 127" in details


@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateRequest(),
        pb.GenerateRequest(token_ids=ids(*range(200_000))),
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.Chat.Message(role="user")] * 10**5)),
    ],
)
def test_millions_of_unknown_fields_are_refused_at_once(message):
    data = message.SerializeToString()
    unknown = b"\xf8\x07\1" * (8 << 20)
    began = time.process_time()
    refused = parse(pb.GenerateRequest, 1 << 30, data + unknown)
    assert isinstance(refused, RequestError) and "unknown fields" in str(refused)
    assert parse(pb.GenerateRequest, 1 << 30, data) == message
    assert time.process_time() - began < 2


def test_a_large_message_written_at_greater_length_is_as_good():
    numbers = range(150_000)
    # each with its own tag
    inner = b"".join(b"\x08" + bytes([n & 127 | 128, n >> 7 & 127 | 128, n >> 14]) for n in numbers)
    field = pb.GenerateRequest.DESCRIPTOR.fields_by_name["token_ids"].number << 3 | 2
    outer = pb.GenerateRequest(text="x" * len(inner)).SerializeToString()
    data = bytes([field]) + outer[1 : -len(inner)] + inner
    assert list(parse(pb.GenerateRequest, 1 << 30, data).token_ids.ids) == list(numbers)


def test_large_control_messages_are_refused(serve):
    message = pb.AbortRequest(request_id="x" * (1 << 20))
    assert serve().status_of("Control/Abort", message)[0] == INVALID


def test_messages_beyond_the_limit_are_refused(serve):
    served = serve(max_message_mib=1)
    assert (
        served.status_of("Inference/Generate", pb.GenerateRequest(text="x" * (2 << 20)))[0]
        == grpc.StatusCode.RESOURCE_EXHAUSTED
    )
    assert served.client.complete("x", SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    "method, message, code",
    [
        (
            "Inference/Generate",
            pb.GenerateRequest(text="x", model="other"),
            grpc.StatusCode.NOT_FOUND,
        ),
        ("Control/Abort", pb.AbortRequest(request_id="nobody"), grpc.StatusCode.NOT_FOUND),
        ("Control/Abort", pb.AbortRequest(), INVALID),
        ("Inference/Tokenize", pb.TokenizeRequest(), INVALID),
        ("Inference/Detokenize", pb.DetokenizeRequest(ids=[-1]), INVALID),
        ("Inference/Nothing", pb.GetLoadRequest(), grpc.StatusCode.UNIMPLEMENTED),
    ],
)
def test_other_calls_are_refused_with_their_status(serve, method, message, code):
    assert serve().status_of(method, message)[0] == code


def test_a_full_queue_says_when_to_come_again(serve):
    engine = FakeReplica(max_queue=1)
    engine.paused = True
    served = serve(engine)
    first = served.client.generate("x")
    next(first)
    with pytest.raises(ServerError) as error:
        served.client.complete("y")
    assert (error.value.status, error.value.reason, error.value.retry_after) == (
        "RESOURCE_EXHAUSTED",
        "queue",
        1.0,
    )
    first.close()


def test_requests_of_one_id_at_once_are_all_answered(serve):
    engine = FakeReplica(step_seconds=0.001)
    engine.paused = True
    served = serve(engine)
    prompts = [str(number) for number in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        calls = [
            pool.submit(
                served.client.complete, prompt, SamplingParams(max_tokens=3), request_id="same"
            )
            for prompt in prompts
        ]
        time.sleep(0.3)
        engine.paused = False
    for prompt, call in zip(prompts, calls):
        assert call.result()[0].ids == expected(prompt.encode(), 3)


def test_faults_of_ours_are_internal_and_tell_no_secrets(serve):
    served = serve()
    served.engine.fault = ZeroDivisionError("secret of line 17")
    with pytest.raises(ServerError) as error:
        served.client.complete("x")
    assert (
        error.value.status == "INTERNAL"
        and "secret" not in str(error.value)
        and "Traceback" not in str(error.value)
    )
    served.engine.fault = None
    assert served.client.complete("x", SamplingParams(max_tokens=1))


def test_errors_of_the_engine_keep_their_status(serve):
    served = serve()
    served.engine.fault = RequestError("prompt", "needs 9 pages, the cache has 4")
    with pytest.raises(ServerError, match="needs 9 pages") as error:
        served.client.complete("x")
    assert error.value.status == "INVALID_ARGUMENT"


def mutated(message, dice):
    data = bytearray(message.SerializeToString())
    for _ in range(dice.randint(1, 8)):
        at = dice.randrange(len(data))
        data[at : at + dice.randint(0, 3)] = dice.randbytes(dice.randint(0, 3))
    return bytes(data)


def test_random_and_mutated_messages_get_typed_answers(serve):
    served = serve(FakeReplica())
    dice = random.Random(7)
    sampling = pb.SamplingParams(temperature=0, max_tokens=2, stop=["x"])
    sane = pb.GenerateRequest(request_id="r", text="hi", sampling=sampling, slo=pb.Slo(ttft_ms=5))
    for i in range(800):
        data = dice.randbytes(dice.randint(1, 60)) if i % 2 else mutated(sane, dice)
        method = dice.choice(
            [
                "Inference/Generate",
                "Inference/Tokenize",
                "Inference/Detokenize",
                "Control/Abort",
                "Control/GetLoad",
            ]
        )
        code, details = served.status_of(method, data)
        assert code in (grpc.StatusCode.OK, INVALID, grpc.StatusCode.NOT_FOUND), (
            method,
            data,
            code,
            details,
        )
    assert served.client.complete("x", SamplingParams(max_tokens=1)) and not served.engine.requests


def test_random_bytes_at_the_port_hurt_nobody(serve):
    served = serve()
    dice = random.Random(7)
    host, port = served.target.split(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    lies = [
        b"\xff\xff\xff\x04\x00\x00\x00\x00\x00",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x04\x95" + b"." * 50,
    ]
    for i in range(200):
        with socket.create_connection((host, int(port)), timeout=60) as raw:
            raw.sendall(
                (preface if i % 2 else b"")
                + (lies[i % 3] if i < 30 else dice.randbytes(dice.randint(1, 200)))
            )
    assert served.client.complete("x", SamplingParams(max_tokens=1))


def test_an_unreachable_server_is_unavailable():
    with Client("127.0.0.1:1") as client:
        with pytest.raises(ServerError) as error:
            client.complete("x", timeout=60)
        assert error.value.status == "UNAVAILABLE" and not client.healthy()


def test_tokenizer_errors_are_those_of_the_request(serve):
    class Refusing(FakeTokenizer):
        def chat(self, messages, **rest):
            raise RequestError("messages", "roles must alternate")

    with pytest.raises(ServerError, match="roles must alternate") as error:
        serve(tokenizer=Refusing).client.complete([{"role": "user", "content": "x"}])
    assert error.value.field == "messages"
