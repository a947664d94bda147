"""What operators see of requests over both protocols: one line, one span and one count for each,
and nothing of what was said."""

from __future__ import annotations

import http.client
import json
import logging
import time

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families as parse

from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.logs import JsonFormatter
from jaxserve.server.tracing import Tracer
from tests.server.fakes import PARENT, TRACE, FakeReplica
from tests.server.keyed import TWO
from tests.waiting import eventually


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[dict] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(json.loads(JsonFormatter().format(record)))

    def ends(self) -> list[dict]:
        return [line for line in self.kept if line["logger"] == "jaxserve.requests"]


@pytest.fixture
def lines():
    handler = Lines()
    logger = logging.getLogger("jaxserve")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def traced(served):
    """Spans of whole requests, kept from now on."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    served.server.server.frontend.request_log._tracer = Tracer(provider=provider)
    return lambda: [
        span for span in exporter.get_finished_spans() if span.name == "jaxserve.generate"
    ]


def post(served, path: str, body: dict, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(
        "127.0.0.1", served.server.server.ports["http"], timeout=60
    )
    connection.request(
        "POST", path, json.dumps(body), {"content-type": "application/json", **headers}
    )
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def counted(served) -> dict:
    connection = http.client.HTTPConnection(
        "127.0.0.1", served.server.server.ports["http"], timeout=60
    )
    connection.request("GET", "/metrics", headers={"authorization": "Bearer a-key"})
    page = connection.getresponse().read().decode()
    connection.close()
    return {
        (sample.name.removeprefix("jaxserve:"), *sample.labels.values()): sample.value
        for family in parse(page)
        for sample in family.samples
    }


def test_a_request_over_either_protocol_is_one_line_and_one_span(serve, lines, key_file):
    served = serve(api_keys=key_file(TWO))
    spans = traced(served)
    key = {"authorization": "Bearer a-key"}
    body = {"messages": [{"role": "user", "content": "the secret"}], "max_tokens": 3}
    assert (
        post(
            served,
            "/v1/chat/completions",
            body,
            traceparent=PARENT,
            **{"x-request-id": "of-http"},
            **key,
        )[0]
        == 200
    )
    message = pb.GenerateRequest(
        text="the secret",
        request_id="of-grpc",
        sampling=pb.SamplingParams(max_tokens=3, temperature=0),
    )
    call = served.channel.unary_stream("/jaxserve.v1.Inference/Generate")
    list(
        call(
            message.SerializeToString(),
            timeout=60,
            metadata=[("traceparent", PARENT), *key.items()],
        )
    )
    eventually(lambda: len(lines.ends()) == 2 and len(spans()) == 2)
    for line, span, protocol in zip(lines.ends(), spans(), ("http", "grpc")):
        assert (
            line["request_id"].endswith(f"of-{protocol}")
            and line["protocol"] == protocol
            and line["trace_id"] == TRACE
        )
        assert (line["status"], line["reason"], line["output_tokens"]) == (
            "OK",
            "length",
            3,
        ) and line["tenant"]
        assert (
            format(span.context.trace_id, "032x") == TRACE
            and span.parent.span_id == 0x00F067AA0BA902B7
        )
        assert span.attributes["gen_ai.usage.output_tokens"] == 3 and span.attributes[
            "gen_ai.response.finish_reasons"
        ] == ("length",)
    assert [span.attributes["gen_ai.operation.name"] for span in spans()] == [
        "chat",
        "text_completion",
    ]
    assert "secret" not in str(lines.kept) and "a-key" not in str(lines.kept)


def test_who_goes_away_is_told_so(serve, lines):
    served = serve(FakeReplica(step_seconds=0.01))
    spans = traced(served)
    connection = http.client.HTTPConnection(
        "127.0.0.1", served.server.server.ports["http"], timeout=60
    )
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps({"prompt": "x", "max_tokens": 4000, "stream": True}),
        {"content-type": "application/json"},
    )
    answer = connection.getresponse()
    answer.read(20)
    answer.close()
    connection.close()
    call = served.channel.unary_stream("/jaxserve.v1.Inference/Generate")(
        pb.GenerateRequest(
            text="x", sampling=pb.SamplingParams(max_tokens=4000)
        ).SerializeToString(),
        timeout=60,
    )
    next(call)
    call.cancel()
    eventually(lambda: len(lines.ends()) == 2 and len(spans()) == 2)
    assert (
        [line["status"] for line in lines.ends()]
        == [span.attributes["error.type"] for span in spans()]
        == ["CANCELLED"] * 2
    )


def test_answers_are_counted_by_protocol_and_status(serve, key_file):
    served = serve(api_keys=key_file(TWO))
    key = {"authorization": "Bearer a-key"}
    assert post(served, "/v1/completions", {"prompt": "x"})[0] == 401
    assert post(served, "/v1/completions", {"prompt": "x", "max_tokens": -1}, **key)[0] == 400
    assert post(served, "/v1/completions", {"prompt": "x", "max_tokens": 2}, **key)[0] == 200
    assert post(served, "/no/such/route", {}, **key)[0] == 404
    with pytest.raises(grpc.RpcError):
        list(
            served.channel.unary_stream("/jaxserve.v1.Inference/Generate")(
                b"\xff", timeout=60, metadata=list(key.items())
            )
        )
    with pytest.raises(grpc.RpcError):
        list(served.channel.unary_stream("/jaxserve.v1.Inference/Generate")(b"", timeout=60))
    # counted after the caller has heard
    eventually(lambda: ("requests_total", "grpc", "INVALID_ARGUMENT") in counted(served))
    found = counted(served)
    for status in ("400", "401", "404"):
        assert found["requests_total", "http", status] == 1, status
    assert found["requests_total", "http", "200"] >= 2  # our looks are among them
    assert (
        found["requests_total", "grpc", "INVALID_ARGUMENT"]
        == found["requests_total", "grpc", "UNAUTHENTICATED"]
        == 1
    )
    assert found["process_open_fds",] > 3
    eventually(lambda: counted(served)["event_loop_lag_seconds_count",] > 0)


def test_what_is_refused_for_want_of_room_is_counted_by_reason(serve):
    served = serve(FakeReplica(step_seconds=0.01, max_queue=0))
    assert post(served, "/v1/completions", {"prompt": "x"})[0] == 429
    found = counted(served)
    assert (
        found["early_rejections_total", "queue"] == 1
        and found["requests_total", "http", "429"] == 1
    )


def test_what_readiness_asks_is_nobodys_request(serve, lines):
    served = serve()
    time.sleep(0.05)
    connection = http.client.HTTPConnection(
        "127.0.0.1", served.server.server.ports["http"], timeout=60
    )
    connection.request("GET", "/ready")
    assert connection.getresponse().status == 200 and not lines.ends()
    connection.close()
