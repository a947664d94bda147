"""Errors as HTTP answers: a status code, and a body in the OpenAI protocol's form."""

from __future__ import annotations

import json
import math
from typing import Any
from urllib.parse import quote

from starlette.responses import Response

from jaxserve.api.errors import RequestError
from jaxserve.api.request import KNOWN_REASONS
from jaxserve.server.errors import REJECT_REASON_HEADER, message_of, reject_reason

STATUS_CODES = {
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
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
# the rest of the body is not read, so the connection cannot be used again
CLOSING_CODES = (401, 403, 408, 413, 415, 431)
MAX_HEADER_VALUE_CHARS = 256


class HttpError(RequestError):
    """An error of the HTTP exchange itself, not of what was asked. `code` is the HTTP status."""

    def __init__(self, field: str, message: str, code: int):
        super().__init__(field, message, "INVALID_ARGUMENT")
        self.code = code


def status_code(error: RequestError) -> int:
    """The HTTP status code of an error."""
    return error.code if isinstance(error, HttpError) else STATUS_CODES.get(error.status, 500)


def error_body(error: RequestError) -> dict[str, Any]:
    """The JSON body of an error: in the OpenAI protocol's form, and with the type that Anthropic's
    has."""
    code = status_code(error)
    kind = ERROR_TYPES.get(code, "invalid_request_error" if code < 500 else "server_error")
    return {
        "type": "error",
        "error": {
            "message": message_of(error),
            "type": kind,
            "param": error.field or None,
            "code": error.reason if error.reason in KNOWN_REASONS else error.status.lower(),
        },
    }


def header_value(text: str) -> str:
    """Escapes text that a caller may have written, for use as the value of a header, which must not
    begin or end with white space."""
    return quote(text[:MAX_HEADER_VALUE_CHARS].strip(" "), safe=" !#$&'()*+,/:;=?@[]~")


def error_response(error: RequestError) -> Response:
    """The whole HTTP answer for an error, with the headers that its status asks for."""
    code = status_code(error)
    headers = {"content-type": "application/json"}
    if code in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_seconds)))
    if code == 429:
        headers[REJECT_REASON_HEADER] = header_value(reject_reason(error))
    if code == 401:
        headers["www-authenticate"] = 'Basic realm="jaxserve", charset="UTF-8"'
    if code in CLOSING_CODES:
        headers["connection"] = "close"
    return Response(json.dumps(error_body(error)), code, headers)
