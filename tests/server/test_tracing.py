"""Spans of requests: whose child they are, what they tell, when their parts were; and that nothing
happens where nobody wants them."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
import types
from typing import ClassVar

import httpx
import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Finished, Timing, Usage
from jaxserve.api.request import Request, Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.server import tracing
from jaxserve.server.tracing import Tracer
from jaxserve.settings.schema import ConfigError
from tests.server.fakes import PARENT, TRACE
from tests.waiting import eventually

NO_SLO = Slo()


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in (*tracing.ENDPOINT_VARIABLES, *tracing.PROTOCOL_VARIABLES):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def spans():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def finished() -> dict:
        return {span.name: span for span in exporter.get_finished_spans()}

    finished.tracer = Tracer(provider=provider)
    return finished


def request(slo=NO_SLO, ago=2.0, **fields) -> Request:
    sampling = SamplingParams.make(**{"temperature": 0.5, "max_tokens": 5, "seed": 3, **fields})
    return Request.make(
        "r-1",
        np.array([5, 6, 7]),
        sampling,
        vocab=10,
        max_len=100,
        classes=("chat",),
        slo=slo,
        arrival=time.monotonic() - ago,
    )


def end(
    index=0,
    reason="length",
    completion=5,
    queued=0.25,
    first=0.75,
    total=1.75,
    cached=2,
    error=None,
) -> Finished:
    return Finished(
        index,
        reason,
        Usage(3, cached, completion),
        Timing(queued, first, total, 0.5),
        None,
        error,
        in_time=True,
    )


def test_a_span_is_the_callers_child_and_tells_of_request_and_answer(spans):
    span = spans.tracer.start(
        PARENT, request(Slo(class_name="chat", ttft=1.0)), model="smollm2", operation="chat"
    )
    assert span.trace_id == TRACE and not spans()
    span.end([end()])
    found = spans()["jaxserve.generate"]
    assert (
        found.parent.span_id == 0x00F067AA0BA902B7
        and format(found.context.trace_id, "032x") == TRACE
    )
    assert found.kind == trace.SpanKind.SERVER and found.status.status_code == StatusCode.UNSET
    assert dict(found.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "jaxserve",
        "gen_ai.request.model": "smollm2",
        "gen_ai.response.id": "r-1",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 3,
        "jaxserve.slo.class": "chat",
        "jaxserve.slo.ttft": 1.0,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ("length",),
        "jaxserve.queue_seconds": 0.25,
        "jaxserve.prefill_seconds": 0.5,
        "jaxserve.decode_seconds": 1.0,
        "jaxserve.ttft": 0.75,
        "gen_ai.response.time_to_first_chunk": 0.75,
        "jaxserve.tpot": 0.25,
        "jaxserve.longest_gap": 0.5,
        "jaxserve.in_time": True,
    }


def test_parts_were_when_the_engine_says(spans):
    before = time.time()
    spans.tracer.start(None, request(ago=2.0)).end([end()])
    found = spans()
    whole = found["jaxserve.generate"]
    assert whole.parent is None and abs(whole.start_time / 1e9 - (before - 2.0)) < 0.5
    seconds = {
        name: ((span.start_time - whole.start_time) / 1e9, (span.end_time - whole.start_time) / 1e9)
        for name, span in found.items()
    }
    assert {name: pytest.approx(times, abs=1e-6) for name, times in seconds.items()} == {
        "queued": (0, 0.25),
        "prefill": (0.25, 0.75),
        "decode": (0.75, 1.75),
        "jaxserve.generate": (0, 1.75),
    }
    assert all(
        span.parent.span_id == whole.context.span_id
        for name, span in found.items()
        if span is not whole
    )


@pytest.mark.parametrize(
    "timing, tokens, parts",
    [
        ((1.0, 1.0, 1.0), 0, {"queued"}),
        ((0.25, 1.0, 1.0), 0, {"queued", "prefill"}),
        ((0.0, 0.5, 1.0), 1, {"prefill", "decode"}),
    ],
)
def test_only_what_happened_has_a_part(spans, timing, tokens, parts):
    ended = end(
        reason="cancelled", completion=tokens, queued=timing[0], first=timing[1], total=timing[2]
    )
    spans.tracer.start(None, request()).end(
        [ended], RequestError("", "the request was aborted", "CANCELLED")
    )
    found = spans()
    assert found.keys() == parts | {"jaxserve.generate"}
    assert ("jaxserve.ttft" in found["jaxserve.generate"].attributes) == bool(tokens)
    assert "jaxserve.tpot" not in found["jaxserve.generate"].attributes


def test_several_completions_are_one_request(spans):
    spans.tracer.start(None, request(n=2)).end(
        [end(), end(1, "stop", 3, queued=0.5, first=0.6, total=2.0)]
    )
    found = spans()["jaxserve.generate"]
    assert (
        found.attributes["gen_ai.request.choice.count"] == 2
        and found.attributes["gen_ai.usage.output_tokens"] == 8
    )
    assert (
        found.attributes["gen_ai.response.finish_reasons"] == ("length", "stop")
        and found.attributes["jaxserve.ttft"] == 0.6
    )
    assert (found.end_time - found.start_time) / 1e9 == pytest.approx(2.0)


def test_what_was_refused_is_an_error_without_parts(spans):
    spans.tracer.start(PARENT, request()).end(
        (), RequestError("queue", "too long " * 100, "RESOURCE_EXHAUSTED")
    )
    (found,) = spans().values()
    assert found.status.status_code == StatusCode.ERROR and len(found.status.description) <= 200
    assert (
        found.attributes["error.type"] == "RESOURCE_EXHAUSTED"
        and "gen_ai.usage.output_tokens" not in found.attributes
    )


def test_a_span_ends_once(spans):
    span = spans.tracer.start(None, request())
    span.end([end()])
    span.end((), RequestError("", "x", "CANCELLED"))
    assert spans()["jaxserve.generate"].status.status_code == StatusCode.UNSET and len(spans()) == 4


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "x",
        "00-0-0-01",
        f"ff-{TRACE}-00f067aa0ba902b7-01",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-00f067aa0ba902b7-01",
        PARENT + "\n",
        "0" * 100_000,
    ],
)
def test_what_is_no_traceparent_begins_a_trace(spans, header):
    span = spans.tracer.start(header, request())
    span.end([end()])
    assert spans()["jaxserve.generate"].parent is None and span.trace_id not in ("", TRACE)
    assert Tracer().start(header, request()).trace_id == ""


def test_where_nobody_wants_traces_there_are_none():
    tracer = Tracer()
    span = tracer.start(PARENT, request())
    assert type(span) is tracing.Span and span.trace_id == TRACE
    span.end([end()])
    tracer.close()


def test_only_our_own_spans_are_recorded_and_no_prompt_is_in_them(serve, monkeypatch):
    """An agent may have set up tracing for the whole process, which the web framework would join
    in."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    served = serve()
    url = f"http://127.0.0.1:{served.server.server.ports['http']}/v1/completions"
    codes = [
        httpx.post(url, json={"prompt": "secret", **rest}).status_code
        for rest in ({}, {"n": "secret"}, {"max_tokens": -1})
    ]
    assert codes == [200, 400, 400]
    eventually(exporter.get_finished_spans)
    found = exporter.get_finished_spans()
    assert {span.instrumentation_scope.name for span in found} == {"jaxserve"} and not any(
        "secret" in span.to_json() for span in found
    )


def test_what_is_not_sampled_costs_no_parts():
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ALWAYS_OFF)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    span = Tracer(provider=provider).start(PARENT, request())
    span.end([end()])
    assert span.trace_id == TRACE and not exporter.get_finished_spans()


def test_no_text_of_the_request_is_told(spans):
    spans.tracer.start(None, request(stop=["the secret"])).end([end()])
    assert "secret" not in str([dict(span.attributes) for span in spans().values()])


def test_an_endpoint_without_the_exporter_says_what_to_install(monkeypatch, caplog):
    monkeypatch.setitem(tracing.EXPORTERS, "grpc", "opentelemetry.exporter.nowhere")
    with pytest.raises(
        ConfigError,
        match=r"traces_endpoint: needs opentelemetry\.exporter\S*: pip install jaxserve\[traces\]",
    ):
        Tracer("http://localhost:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://elsewhere:4317")
    caplog.set_level(logging.WARNING)
    assert type(Tracer().start(None, request())) is tracing.Span, (
        "the variable may be meant for others"
    )
    assert "pip install jaxserve[traces]" in caplog.text


class Exporter(SpanExporter):
    """Keeps what it is given, as a collector would."""

    sent: ClassVar[list] = []

    def __init__(self, endpoint=None):
        self.endpoint = endpoint

    def export(self, spans):
        self.sent.extend(
            (self.endpoint, span.resource.attributes["service.name"], span.name) for span in spans
        )
        return SpanExportResult.SUCCESS


@pytest.mark.parametrize(
    "endpoint, variables, service",
    [
        ("http://here:4317", {}, "jaxserve"),
        (
            None,
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://there:4318", "OTEL_SERVICE_NAME": "mine"},
            "mine",
        ),
    ],
)
def test_spans_go_to_the_endpoint_and_what_is_left_at_the_end(
    monkeypatch, endpoint, variables, service
):
    monkeypatch.setitem(
        sys.modules, "an_exporter", types.SimpleNamespace(OTLPSpanExporter=Exporter)
    )
    monkeypatch.setitem(tracing.EXPORTERS, "http/protobuf", "an_exporter")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Exporter, "sent", [])
    tracer = Tracer(endpoint)
    tracer.start(None, request()).end([end()])
    tracer.close()
    assert (endpoint, service, "jaxserve.generate") in Exporter.sent and len(Exporter.sent) == 4


def test_without_the_library_a_server_starts_all_the_same():
    code = f"""
import sys
for name in ("opentelemetry", "opentelemetry.trace"):
    sys.modules[name] = None
from jaxserve.server.tracing import Tracer
span = Tracer().start({PARENT!r}, None)
span.end([])
assert span.trace_id == {TRACE!r}
from jaxserve.settings.schema import ConfigError
try:
    Tracer("http://x")
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "pip install jaxserve[traces]" in done.stdout, done.stderr
