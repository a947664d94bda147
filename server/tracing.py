"""OpenTelemetry traces: one span per request, with its phases inside.

`jaxserve.generate` lasts from a request's arrival to its end; its children `queued`, `prefill` and
`decode` are made at the end, of the times that the replica measured. Traces are on if
--traces_endpoint or OTEL_EXPORTER_OTLP_ENDPOINT names a collector, or if the process has a tracer
provider already; otherwise spans do nothing. Attributes have the names of the semantic conventions
where these have one, and hold no text of prompts or outputs.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import time
from collections.abc import Sequence
from typing import Any

import jaxserve
from jaxserve.api.errors import RequestError
from jaxserve.api.events import Finished, Summary
from jaxserve.api.request import Request
from jaxserve.settings.schema import ConfigError

log = logging.getLogger(__name__)
INSTALL = "pip install jaxserve[traces]"
TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?"
)
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
MAX_ERROR_CHARS = 200
MAX_TRACESTATE_CHARS = 512


class Span:
    """A request's span where traces are off: does nothing. `trace_id`: the caller's, 32 hexadecimal
    digits; '' if it sent none."""

    def __init__(self, trace_id: str = ""):
        self.trace_id = trace_id

    def end(self, finished: Sequence[Finished] = (), error: RequestError | None = None) -> None:
        """Ends the span. finished: the ends of the request's completions. error: by which it was
        refused or ended."""


class Tracer:
    """Starts the spans of one server; `close` sends those that are left."""

    def __init__(self, endpoint: str | None = None, provider: Any = None):
        """endpoint: of the collector; None takes the environment's. provider: an OpenTelemetry
        tracer provider, in place of both.

        Errors: ConfigError if an endpoint is given and a package is missing.
        """
        self._provider = provider or _provider(endpoint)
        self._shuts_down = (
            provider is None and self._provider is not None and hasattr(self._provider, "shutdown")
        )
        self._tracer = (
            None
            if self._provider is None
            else self._provider.get_tracer("jaxserve", jaxserve.__version__)
        )

    def start(
        self,
        traceparent: str | None,
        request: Request,
        *,
        tracestate: str = "",
        model: str = "",
        operation: str = "text_completion",
    ) -> Span:
        """Starts the span of a request that has arrived, as a child of the caller's if its
        traceparent is valid. operation: chat, text_completion or embeddings."""
        match = TRACEPARENT.fullmatch(traceparent or "")
        if self._tracer is None:
            return Span(match[1] if match else "")
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = (
            {"traceparent": traceparent, "tracestate": tracestate[:MAX_TRACESTATE_CHARS]}
            if match
            else {}
        )
        start_ns = time.time_ns() - int((time.monotonic() - request.arrival) * 1e9)
        span = self._tracer.start_span(
            "jaxserve.generate",
            TraceContextTextMapPropagator().extract(parent),
            SpanKind.SERVER,
            _request_attributes(request, model, operation),
            start_time=start_ns,
        )
        return _RecordedSpan(self._tracer, span, start_ns)

    def close(self) -> None:
        """Sends the spans that are left; blocks for seconds if no collector takes them."""
        if self._shuts_down:
            self._provider.shutdown()


class _RecordedSpan(Span):
    """A span that is exported. start_ns: nanoseconds since the epoch."""

    def __init__(self, tracer: Any, span: Any, start_ns: int):
        super().__init__(format(span.get_span_context().trace_id, "032x"))
        self._tracer = tracer
        self._span = span
        self._start_ns = start_ns

    def end(self, finished: Sequence[Finished] = (), error: RequestError | None = None) -> None:
        from opentelemetry.trace import Status, StatusCode

        span = self._span
        end_ns = time.time_ns()
        if not span.is_recording():
            return
        if finished:
            summary = Summary.of(finished)
            end_ns = self._at(summary.total)
            span.set_attributes(_result_attributes(finished, summary))
            self._add_phases(summary)
        if error is not None:
            span.set_attribute("error.type", error.status)
            span.set_status(Status(StatusCode.ERROR, str(error)[:MAX_ERROR_CHARS]))
        span.end(end_ns)

    def _add_phases(self, summary: Summary) -> None:
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(self._span)
        start = 0.0
        for name, seconds in (
            ("queued", summary.queued),
            ("prefill", summary.prefill),
            ("decode", summary.decode),
        ):
            if seconds > 0:
                phase = self._tracer.start_span(name, context, start_time=self._at(start))
                phase.end(self._at(start + seconds))
            start += seconds

    def _at(self, seconds: float) -> int:
        """Nanoseconds since the epoch, of seconds since the request's arrival."""
        return self._start_ns + int(seconds * 1e9)


def _request_attributes(request: Request, model: str, operation: str) -> dict[str, Any]:
    sampling = request.sampling
    slo = request.slo
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "jaxserve",
        "gen_ai.request.model": model,
        "gen_ai.response.id": request.id,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.request.top_k": sampling.top_k if sampling.top_k > 0 else None,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.choice.count": sampling.n if sampling.n > 1 else None,
        "jaxserve.slo.class": slo.class_name,
        "jaxserve.slo.ttft": slo.ttft,
        "jaxserve.slo.tpot": slo.tpot,
        "gen_ai.usage.input_tokens": len(request.prompt),
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _result_attributes(finished: Sequence[Finished], summary: Summary) -> dict[str, Any]:
    """Attributes of a request that has ended; those of its first token if it had one."""
    attributes: dict[str, Any] = {
        "gen_ai.usage.output_tokens": summary.output,
        "gen_ai.usage.cache_read.input_tokens": summary.cached,
        "gen_ai.response.finish_reasons": [end.reason for end in finished],
        "jaxserve.queue_seconds": summary.queued,
        "jaxserve.prefill_seconds": summary.prefill,
        "jaxserve.decode_seconds": summary.decode,
        "gen_ai.response.time_to_first_chunk": summary.ttft,
        "jaxserve.ttft": summary.ttft,
        "jaxserve.tpot": summary.tpot,
        "jaxserve.longest_gap": summary.longest_gap or None,
        "jaxserve.in_time": summary.in_time,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _provider(endpoint: str | None) -> Any:
    """The tracer provider: one that exports if an endpoint is named, else the process's own; None
    if traces are off. Errors: ConfigError."""
    named = endpoint or next(filter(None, map(os.environ.get, ENDPOINT_VARIABLES)), None)
    if named is None:
        return _process_provider()
    try:
        return _exporting_provider(endpoint)
    except ImportError as error:
        if endpoint:
            raise ConfigError("traces_endpoint", f"needs {error.name}: {INSTALL}") from None
        log.warning("no traces are sent to %s, for %s is missing: %s", named, error.name, INSTALL)
        return None


def _process_provider() -> Any:
    """The provider that an agent such as `opentelemetry-instrument` has set up, if any."""
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider)):
        return None
    return provider


def _exporting_provider(endpoint: str | None) -> Any:
    """A provider that exports spans in batches, on a thread of its own."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    protocol = next(filter(None, map(os.environ.get, PROTOCOL_VARIABLES)), "grpc")
    if protocol not in EXPORTERS:
        raise ConfigError(
            "traces_endpoint",
            f"{PROTOCOL_VARIABLES[1]} is {protocol!r:.50}, not one of {', '.join(EXPORTERS)}",
        )
    exporter = importlib.import_module(EXPORTERS[protocol]).OTLPSpanExporter
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    provider = TracerProvider(
        resource=Resource.create({} if named else {"service.name": "jaxserve"})
    )
    provider.add_span_processor(
        BatchSpanProcessor(exporter(endpoint=endpoint) if endpoint else exporter())
    )
    return provider
