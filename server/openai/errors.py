"""What callers hear when something goes wrong: a status, and a body as the OpenAI protocol writes
it."""

from __future__ import annotations

import json
import math
from typing import Any
from urllib.parse import quote

from starlette.responses import Response

from jaxserve.api.errors import RequestError

STATUSES = {
    "INVALID_ARGUMENT": 400,
    "OUT_OF_RANGE": 400,
    "FAILED_PRECONDITION": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "INTERNAL": 500,
    "DATA_LOSS": 500,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
UNREAD = (401, 403, 408, 413, 415)  # what is left of the body is not read, and the connection ends
MAX_MESSAGE = 1000  # characters


class HttpError(RequestError):
    """An error of the connection, not of what was asked: `code` is the HTTP status."""

    def __init__(self, field: str, message: str, code: int):
        super().__init__(field, message, "INVALID_ARGUMENT")
        self.code = code


def status_of(error: RequestError) -> int:
    return error.code if isinstance(error, HttpError) else STATUSES.get(error.status, 500)


def body_of(error: RequestError) -> dict[str, Any]:
    code = status_of(error)
    kind = TYPES.get(code, "invalid_request_error" if code < 500 else "server_error")
    return {
        "error": {
            "message": str(error)[:MAX_MESSAGE],
            "type": kind,
            "param": error.field or None,
            "code": error.status.lower(),
        }
    }


def header_value(text: str) -> str:
    """What a caller may have written, as it may stand in a header."""
    return quote(text[:256], safe=" !#$&'()*+,/:;=?@[]~")


def response_of(error: RequestError) -> Response:
    code = status_of(error)
    headers = {"content-type": "application/json"}
    if code in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_seconds)))
    if code == 429:
        headers["jaxserve-reject-reason"] = header_value(
            error.reason or error.field or "overloaded"
        )
    if code == 401:
        headers["www-authenticate"] = 'Basic realm="jaxserve", charset="UTF-8"'
    if code in UNREAD:
        headers["connection"] = "close"
    return Response(json.dumps(body_of(error)), code, headers)
