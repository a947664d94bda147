"""Records each request: a log line when it has ended, and an OpenTelemetry span if traces are on.

with request_log.follow(request, origin) as outcome:
    ...  # log lines in here bear the request's id; tell `outcome` what comes
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from jaxserve.api.errors import RequestError, internal_error
from jaxserve.api.events import Finished
from jaxserve.api.request import Request
from jaxserve.server import logs
from jaxserve.server.errors import caller_gone
from jaxserve.server.generate_call import Origin
from jaxserve.server.tracing import Tracer


@dataclasses.dataclass(slots=True)
class Outcome:
    """Results of a request so far. finished: ends of its completions."""

    finished: list[Finished] = dataclasses.field(default_factory=list)
    output_tokens: int = 0


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
    def follow(self, request: Request, origin: Origin, tenant: str = "") -> Iterator[Outcome]:
        """Follows a request to its end, which is the exit, and records it. What is raised inside
        is the error that it ended with; a cancellation means that the caller went away."""
        outcome = Outcome()
        if origin.internal:
            yield outcome
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
                yield outcome
            error = None
        except RequestError as raised:
            error = raised
            raise
        except Exception:
            error = internal_error()
            raise
        finally:
            span.end(outcome.finished, error)
            logs.log_ended(
                request,
                outcome.finished,
                "OK" if error is None else error.status,
                refused=_limit_of(error),
                output_tokens=outcome.output_tokens,
                tenant=tenant,
                protocol=origin.protocol,
                trace_id=span.trace_id,
            )


def _limit_of(error: RequestError | None) -> str:
    """The limit that a request was refused for, in one word; '' for any other end."""
    if error is None or error.status != "RESOURCE_EXHAUSTED":
        return ""
    return error.reason or error.field
