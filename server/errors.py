"""Parts of error answers that gRPC and HTTP have in common."""

from __future__ import annotations

from jaxserve.api.errors import RequestError

MAX_MESSAGE_CHARS = 1000  # gRPC trailers are limited to 8 KiB
REJECT_REASON_HEADER = "jaxserve-reject-reason"


def message_of(error: RequestError) -> str:
    """The error's text, cut to what either protocol may carry."""
    return str(error)[:MAX_MESSAGE_CHARS]


def reject_reason(error: RequestError) -> str:
    """Returns the exhausted resource in one word: the value of REJECT_REASON_HEADER."""
    return error.reason or error.field or "overloaded"


def caller_gone() -> RequestError:
    """The error of a request whose caller disconnected before its end."""
    return RequestError("", "the caller went away", "CANCELLED")
