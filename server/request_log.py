"""Records each request: a log line when it has ended, and an OpenTelemetry span if traces are on.

with request_log.follow(request, origin) as finished:
    ...  # log lines in here bear the request's id; append the ends of completions to `finished`
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jaxserve.api.errors import RequestError, internal_error
from jaxserve.api.events import Finished
from jaxserve.api.request import Request
from jaxserve.server import logs
from jaxserve.server.errors import caller_gone
from jaxserve.server.generate_call import Origin
from jaxserve.server.tracing import Tracer


class RequestLog:
    """Writes the log lines and spans of one server. `model`: the served model's name, set once it
    is known."""

    def __init__(self, tracer: Tracer):
        self._tracer = tracer
        self.model = ""

    def close(self) -> None:
        """Sends the spans that are left; blocks for seconds if no collector takes them."""
        self._tracer.close()

    @contextlib.contextmanager
    def follow(
        self, request: Request, origin: Origin, tenant: str = ""
    ) -> Iterator[list[Finished]]:
        """Follows a request to its end, which is the exit, and records it. What is raised inside
        is the error that it ended with; a cancellation means that the caller went away."""
        finished: list[Finished] = []
        if origin.internal:
            yield finished
            return
        span = self._tracer.start(
            origin.traceparent,
            request,
            tracestate=origin.tracestate,
            model=self.model,
            operation=origin.operation,
        )
        error: RequestError | None = caller_gone()
        try:
            with logs.bound(request.id, span.trace_id):
                yield finished
            error = None
        except RequestError as raised:
            error = raised
            raise
        except Exception:
            error = internal_error()
            raise
        finally:
            span.end(finished, error)
            logs.log_ended(
                request,
                finished,
                "OK" if error is None else error.status,
                tenant=tenant,
                protocol=origin.protocol,
                trace_id=span.trace_id,
            )
