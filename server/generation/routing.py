"""Routers of the users' port, and what their routes have in common."""

from __future__ import annotations

from collections.abc import Mapping

import fastapi
from starlette.responses import Response

from jaxserve.server.http_app import JsonRoute
from jaxserve.server.models import Models


def open_router(models: Models) -> fastapi.APIRouter:
    """Returns a router for routes that need a model; refused unless one is served."""

    async def check_open() -> None:
        models.check_open()

    return fastapi.APIRouter(route_class=JsonRoute, dependencies=[fastapi.Depends(check_open)])


def json_response(body: bytes, headers: Mapping[str, str]) -> Response:
    """Returns the response with a body of JSON."""
    return Response(body, 200, headers, "application/json")
