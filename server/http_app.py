"""Parts of the FastAPI applications of all HTTP ports: reading of JSON bodies within limits,
strict models, and errors in the OpenAI protocol's form."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import fastapi
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match

import jaxserve
from jaxserve.api.errors import RequestError, internal_error
from jaxserve.server.errors import caller_gone
from jaxserve.server.event_loop import run_in_thread_if
from jaxserve.server.http_errors import HttpError, error_response
from jaxserve.server.json_body import NOT_AN_OBJECT, PARSE_IN_THREAD_BYTES, parse

MAX_FIELD_CHARS = 200  # of a field's name in an error
MAX_REASON_CHARS = 300  # of what a validator says of it
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
# newer FastAPIs trace by themselves, and their traces quote a body that is refused
NO_TELEMETRY: dict[str, Any] = (
    {
        "telemetry": dict.fromkeys(
            ("tracing", "metrics", "logs", "operation_spans", "auto_configure"), False
        )
    }
    if "telemetry" in inspect.signature(fastapi.FastAPI).parameters
    else {}
)
_FIELD = re.compile(r"[a-z_0-9]+")
_TYPE_NAMES = ("str", "int", "bool", "float", "dict", "list", "constrained")
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


class StrictModel(BaseModel):
    """A model that refuses unknown fields: a caller would otherwise believe that they have an
    effect."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class JsonRequest(fastapi.Request):
    """A request whose JSON body is parsed within limits, off the event loop if it is large."""

    async def read_json(self) -> None:
        """Reads and parses the body, for `json()` to return. Errors: RequestError."""
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise HttpError("content-type", "must be application/json", 415)
        try:
            body = await self.body()
        except ClientDisconnect:
            raise caller_gone() from None
        large = len(body) > PARSE_IN_THREAD_BYTES
        # `_json` is where starlette's `json()` looks first
        self._json = await run_in_thread_if(large, functools.partial(parse, body))


class JsonRoute(APIRoute):
    """A route that reads its body, if it has one, by way of `JsonRequest`."""

    def get_route_handler(self) -> Callable[[fastapi.Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read_and_handle(request: fastapi.Request) -> Response:
            request = JsonRequest(request.scope, request.receive)
            if self.body_field is not None:
                await request.read_json()
            return await handle(request)

        return read_and_handle


def make_app(title: str) -> fastapi.FastAPI:
    """An application without routes. Whatever its routes raise becomes an error response; neither
    bodies nor errors are passed to any other observer."""
    app = fastapi.FastAPI(
        title=title,
        version=jaxserve.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        **NO_TELEMETRY,
    )
    app.router.route_class = JsonRoute
    for exception, respond in _RESPONSES.items():
        app.add_exception_handler(exception, functools.partial(_respond, respond))
    app.add_exception_handler(HTTPException, _routing_response)
    schema = functools.partial(_schema, app.openapi)
    app.openapi = functools.cache(schema)  # type: ignore[method-assign]
    return app


def _schema(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The OpenAPI schema with our form of errors in place of FastAPI's."""
    schema = make()
    schema["components"]["schemas"]["Error"] = ERROR_SCHEMA
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    return schema


async def _respond(
    respond: Callable[[Any], Response], request: fastapi.Request, error: Exception
) -> Response:
    """Calls a handler on the event loop: starlette runs one that is no coroutine in a thread."""
    return respond(error)


def _validation_response(error: RequestValidationError) -> Response:
    """Names the first field that is wrong."""
    return error_response(first_fault(error.errors()[0]))


def first_fault(fault: Mapping[str, Any]) -> RequestError:
    """The error that tells what a validator says."""
    path = [str(part) for part in fault["loc"] if part != "body"]
    # behind the field, of those of several types: which type was tried
    field = ".".join(itertools.takewhile(_is_field, path))[:MAX_FIELD_CHARS]
    message = fault["msg"].removeprefix("Value error, ")[:MAX_REASON_CHARS]
    return RequestError(field, message if path else NOT_AN_OBJECT)


def _is_field(part: str) -> bool:
    return bool(_FIELD.fullmatch(part)) and part not in _TYPE_NAMES


async def _routing_response(request: fastapi.Request, error: Exception) -> Response:
    """Answers for a route or a method that does not exist."""
    assert isinstance(error, HTTPException)
    code = error.status_code
    path = ascii(request.url.path[:MAX_FIELD_CHARS])
    if code == 404:
        return error_response(RequestError("", f"there is no route {path}", "NOT_FOUND"))
    if code != 405:
        return error_response(HttpError("", str(error.detail), code))
    allowed = ", ".join(_methods(request))
    response = error_response(HttpError("", f"{path} has the methods {allowed} only", code))
    response.headers["allow"] = allowed
    return response


def _methods(request: fastapi.Request) -> list[str]:
    """The methods of a request's path, of all its routes."""
    scopes = {method: {**request.scope, "method": method} for method in METHODS}
    found = [
        method
        for method, scope in scopes.items()
        if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)
    ]
    return ["HEAD", *found] if "GET" in found else found


def _internal_response(error: Exception) -> Response:
    return error_response(internal_error())


_RESPONSES: dict[type[Exception], Callable[[Any], Response]] = {
    RequestError: error_response,
    RequestValidationError: _validation_response,
    Exception: _internal_response,
}
