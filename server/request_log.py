"""What is kept of each request: a line in the log when it is over, and a span, where spans are
wanted.

    with trail.follow(request, origin) as ends:       # what is logged inside bears the request's id
        ...                                             # the ends of its completions are added to
        `ends`; what ended it is raised
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
    """`model`: the name of what is served, once it is known."""

    def __init__(self, tracer: Tracer):
        self._tracer = tracer
        self.model = ""

    def close(self) -> None:
        """Sends the spans that are left; blocks for some seconds where nobody takes them."""
        self._tracer.close()

    @contextlib.contextmanager
    def follow(
        self, request: Request, origin: Origin, tenant: str = ""
    ) -> Iterator[list[Finished]]:
        """A request from here to its end. What is raised inside is what it ended with; whoever
        drops it is a caller who went away."""
        ends: list[Finished] = []
        if origin.internal:
            yield ends
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
                yield ends
            error = None
        except RequestError as raised:
            error = raised
            raise
        except Exception:
            error = internal_error()
            raise
        finally:
            span.end(ends, error)
            logs.ended(
                request,
                ends,
                "OK" if error is None else error.status,
                tenant=tenant,
                protocol=origin.protocol,
                trace_id=span.trace_id,
            )
