"""Spans of OpenTelemetry, where its library is installed and somebody wants them: one for each
request, and its parts inside.

`jaxserve.generate` lasts from a request's arrival to its end; `queued`, `prefill` and `decode`
inside it are made at the end, of the times that the engine noted. Who wants them says
--traces_endpoint, or OTEL_EXPORTER_OTLP_ENDPOINT, or has set a provider up before; otherwise a span
is an object that does nothing. Names of attributes are those of the semantic conventions where they
have one. No text is among them.
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
PARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?"
)
VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
LONGEST = 200  # characters of what an error says
MAX_STATE = 512  # characters of a tracestate


class Span:
    """One request, for who traces nothing. `trace_id`: 32 hexadecimal digits, the caller's where it
    sent some, else ''."""

    def __init__(self, trace_id: str = ""):
        self.trace_id = trace_id

    def end(self, finished: Sequence[Finished] = (), error: RequestError | None = None) -> None:
        """The request is over. finished: the ends of its completions; error: what it was refused or
        ended with."""


class Tracer:
    """Starts the spans of one server. `close` sends what was not sent yet."""

    def __init__(self, endpoint: str | None = None, provider: Any = None):
        """endpoint: where spans go; None: where the environment says. provider: instead of both.

        Errors: ConfigError where an endpoint is given and a package is missing.
        """
        self._provider = provider or _provider(endpoint)
        self._own = (
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
        """The span of a request that is here, under the caller's where it sent a valid traceparent.
        operation: chat or text_completion."""
        match = PARENT.fullmatch(traceparent or "")
        if self._tracer is None:
            return Span(match[1] if match else "")
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = {"traceparent": traceparent, "tracestate": tracestate[:MAX_STATE]} if match else {}
        began = time.time_ns() - int((time.monotonic() - request.arrival) * 1e9)
        span = self._tracer.start_span(
            "jaxserve.generate",
            TraceContextTextMapPropagator().extract(parent),
            SpanKind.SERVER,
            _asked(request, model, operation),
            start_time=began,
        )
        return _Recorded(self._tracer, span, began)

    def close(self) -> None:
        """Sends what is left; blocks for some seconds where nobody takes it."""
        if self._own:
            self._provider.shutdown()


class _Recorded(Span):
    """A span that somebody hears of. `began`: nanoseconds since the epoch."""

    def __init__(self, tracer: Any, span: Any, began: int):
        super().__init__(format(span.get_span_context().trace_id, "032x"))
        self._tracer = tracer
        self._span = span
        self._began = began

    def end(self, finished: Sequence[Finished] = (), error: RequestError | None = None) -> None:
        from opentelemetry.trace import Status, StatusCode

        span = self._span
        last = time.time_ns()
        if not span.is_recording():
            return
        if finished:
            whole = Summary.of(finished)
            last = self._at(whole.total)
            span.set_attributes(_answered(finished, whole))
            self._parts(whole)
        if error is not None:
            span.set_attribute("error.type", error.status)
            span.set_status(Status(StatusCode.ERROR, str(error)[:LONGEST]))
        span.end(last)

    def _parts(self, whole: Summary) -> None:
        from opentelemetry.trace import set_span_in_context

        inside = set_span_in_context(self._span)
        began = 0.0
        for name, seconds in (
            ("queued", whole.queued),
            ("prefill", whole.prefill),
            ("decode", whole.decode),
        ):
            if seconds > 0:
                self._tracer.start_span(name, inside, start_time=self._at(began)).end(
                    self._at(began + seconds)
                )
            began += seconds

    def _at(self, seconds: float) -> int:
        return self._began + int(seconds * 1e9)


def _asked(request: Request, model: str, operation: str) -> dict[str, Any]:
    sampling = request.sampling
    slo = request.slo
    found = {
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
    return {name: value for name, value in found.items() if value is not None}


def _answered(finished: Sequence[Finished], whole: Summary) -> dict[str, Any]:
    """What became of it. Figures of a token are there where there was one."""
    found: dict[str, Any] = {
        "gen_ai.usage.output_tokens": whole.output,
        "gen_ai.usage.cache_read.input_tokens": whole.cached,
        "gen_ai.response.finish_reasons": [end.reason for end in finished],
        "jaxserve.queue_seconds": whole.queued,
        "jaxserve.prefill_seconds": whole.prefill,
        "jaxserve.decode_seconds": whole.decode,
        "gen_ai.response.time_to_first_chunk": whole.ttft,
        "jaxserve.ttft": whole.ttft,
        "jaxserve.tpot": whole.tpot,
    }
    return {name: value for name, value in found.items() if value is not None}


def _provider(endpoint: str | None) -> Any:
    """Of the spans: ours for an endpoint, else the one that this process has; None where nobody
    wants any. Errors: ConfigError."""
    named = endpoint or next(filter(None, map(os.environ.get, VARIABLES)), None)
    if named is None:
        return _ready_made()
    try:
        return _exporting(endpoint)
    except ImportError as error:
        if endpoint:
            raise ConfigError("traces_endpoint", f"needs {error.name}: {INSTALL}") from None
        log.warning("no traces are sent to %s, for %s is missing: %s", named, error.name, INSTALL)
        return None


def _ready_made() -> Any:
    """What an agent such as `opentelemetry-instrument` has set up."""
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    provider = trace.get_tracer_provider()
    return (
        None
        if isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider))
        else provider
    )


def _exporting(endpoint: str | None) -> Any:
    """A provider whose spans go out in batches, on a thread of its own."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    protocol = next(filter(None, map(os.environ.get, PROTOCOLS)), "grpc")
    if protocol not in EXPORTERS:
        raise ConfigError(
            "traces_endpoint",
            f"{PROTOCOLS[1]} is {protocol!r:.50}, not one of {', '.join(EXPORTERS)}",
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
