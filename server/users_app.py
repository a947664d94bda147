"""The users' HTTP port: the routes of all protocols, health, metrics and the dashboard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fastapi

from jaxserve.server import dashboard
from jaxserve.server.adapter_routes import adapter_routes, refuse_keyed
from jaxserve.server.anthropic.routes import anthropic_routes
from jaxserve.server.generation.unknown_fields import UnknownFields
from jaxserve.server.health_routes import health_routes
from jaxserve.server.http_app import make_app
from jaxserve.server.models import Models
from jaxserve.server.openai.routes import openai_routes
from jaxserve.server.readiness import Readiness
from jaxserve.server.rerank import rerank_routes
from jaxserve.server.tokenization import tokenization_routes

THROTTLED_PATHS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
    }
)  # of POSTs that compute
OPEN_PATHS = frozenset({"/health", "/ready"})  # need no API key: load balancers have none
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    code: {
        "description": description,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    for code, description in {
        400: "a field is invalid; the error names it",
        401: "the API key is missing or unknown",
        403: "the API key is for another port, or a page of another site sent the request",
        404: "no such model or route",
        405: "the route does not have this method",
        408: "the body took too long",
        413: "the body is too large",
        415: "the body is compressed or not JSON",
        431: "the header is too large",
        429: "too many requests; Retry-After says when to try again",
        499: "the caller went away",
        500: "internal error",
        503: "the server is starting, draining or out of order",
        504: "the deadline has passed",
    }.items()
}


def users_app(models: Models, readiness: Readiness) -> fastapi.FastAPI:
    """Returns the application of the users' port."""
    app = make_app("jaxserve")
    unknown = UnknownFields(models.config.strict_fields)
    for routes in (openai_routes, anthropic_routes, rerank_routes, tokenization_routes):
        app.include_router(routes(models, unknown), responses=ERROR_RESPONSES)
    app.include_router(
        adapter_routes(models),
        dependencies=[fastapi.Depends(refuse_keyed)],
        responses=ERROR_RESPONSES,
    )
    app.include_router(health_routes(models, readiness))
    app.include_router(dashboard.router(models, _visible_ids))
    app.openapi()  # cached by this call: it takes 40 ms, which would stall streams later
    return app


def _visible_ids(request: fastapi.Request) -> Callable[[str], bool] | None:
    """Returns the test of ids that the dashboard may show to the caller; None: it may show all."""
    caller = request.state.caller
    return caller.owns_id if caller.name else None
