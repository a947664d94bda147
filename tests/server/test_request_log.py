"""Each request has one line and one span, whatever becomes of it."""

from __future__ import annotations

import asyncio
import json
import logging

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Finished, Timing, Usage
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.server.generate_call import Origin
from jaxserve.server.logs import JsonFormatter
from jaxserve.server.request_log import RequestLog
from jaxserve.server.tracing import Tracer
from tests.server.fakes import TRACE

ORIGIN = Origin("http", f"00-{TRACE}-00f067aa0ba902b7-01", operation="chat")
END = Finished(0, "length", Usage(3, 1, 5), Timing(0.1, 0.2, 0.6))


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(json.loads(JsonFormatter().format(record)))


@pytest.fixture
def kept():
    """(request_log, lines, spans)"""
    handler = Kept()
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    logger = logging.getLogger("jaxserve")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield (
        RequestLog(Tracer(provider=provider)),
        handler.lines,
        lambda: [
            span for span in exporter.get_finished_spans() if span.name == "jaxserve.generate"
        ],
    )
    logger.removeHandler(handler)
    logger.setLevel(level)


def request() -> Request:
    return Request.make(
        "r-1", np.array([5, 6, 7]), SamplingParams(max_tokens=5), vocab=10, max_len=100
    )


def test_what_ended_well(kept):
    request_log, lines, spans = kept
    request_log.model = "smollm2"
    with request_log.follow(request(), ORIGIN, "acme") as outcome:
        logging.getLogger("jaxserve.x").info("inside")
        outcome.finished.append(END)
    inside, line = lines
    assert inside["request_id"] == "r-1" and inside["trace_id"] == TRACE
    assert (
        line.items()
        >= {
            "status": "OK",
            "reason": "length",
            "tenant": "acme",
            "protocol": "http",
            "trace_id": TRACE,
            "ttft": 0.2,
        }.items()
    )
    (span,) = spans()
    assert (
        span.attributes["gen_ai.operation.name"] == "chat"
        and span.attributes["gen_ai.usage.output_tokens"] == 5
    )
    assert span.status.is_ok and span.attributes["gen_ai.request.model"] == "smollm2"


@pytest.mark.parametrize(
    "raised, status, reason",
    [
        (RequestError("queue", "full", "RESOURCE_EXHAUSTED"), "RESOURCE_EXHAUSTED", "queue"),
        (
            RequestError("slo", "late", "RESOURCE_EXHAUSTED", reason="ttft"),
            "RESOURCE_EXHAUSTED",
            "ttft",
        ),
        (ZeroDivisionError("x"), "INTERNAL", "internal"),
        (asyncio.CancelledError(), "CANCELLED", "cancelled"),
        (GeneratorExit(), "CANCELLED", "cancelled"),
    ],
)
def test_what_ended_otherwise(kept, raised, status, reason):
    request_log, lines, spans = kept
    with pytest.raises(type(raised)), request_log.follow(request(), ORIGIN) as outcome:
        outcome.output_tokens += 3
        raise raised
    (line,), (span,) = lines, spans()
    assert line["status"] == span.attributes["error.type"] == status and not span.status.is_ok
    assert line["reason"] == reason and "ttft" not in line
    assert line["output_tokens"] == 3


def test_a_stream_that_ends_in_another_task_is_no_fault(kept):
    request_log, lines, spans = kept

    async def main() -> None:
        follow = request_log.follow(request(), ORIGIN)
        (await asyncio.create_task(_enter(follow))).finished.append(END)
        await asyncio.create_task(_leave(follow))
        logging.getLogger("jaxserve.x").info("after")

    asyncio.run(main())
    assert (
        [line["status"] for line in lines[:1]] == ["OK"]
        and lines[1]["request_id"] is None
        and len(spans()) == 1
    )


async def _enter(follow):
    return follow.__enter__()


async def _leave(follow):
    follow.__exit__(None, None, None)


def test_of_what_the_server_asks_itself_nothing_is_kept(kept):
    request_log, lines, spans = kept
    with request_log.follow(request(), Origin(internal=True)) as outcome:
        outcome.finished.append(END)
    assert not lines and not spans()


def test_without_a_tracer_there_is_the_line(kept):
    with RequestLog(Tracer()).follow(request(), ORIGIN) as outcome:
        outcome.finished.append(END)
    assert kept[1][0]["trace_id"] == TRACE
