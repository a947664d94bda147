"""Routes for operators' tools: health, load, version, metrics."""

from __future__ import annotations

import fastapi
from starlette.responses import PlainTextResponse, Response

import jaxserve
from jaxserve.server.frontend_metrics import CONTENT_TYPE
from jaxserve.server.model_metrics import exposed_metrics
from jaxserve.server.models import Models
from jaxserve.server.readiness import Readiness


def health_routes(models: Models, readiness: Readiness) -> fastapi.APIRouter:
    """Returns the routes that answer in every state of the server."""
    router = fastapi.APIRouter()

    @router.get("/health", response_class=PlainTextResponse)
    async def health() -> Response:
        """Answers 200 while the process works; 503 if only a restart helps."""
        return _health_response(readiness.liveness_fault())

    @router.get("/ready", response_class=PlainTextResponse)
    async def ready() -> Response:
        """Answers 200 while requests are accepted and tokens come out: a caller's within the last
        seconds, else one that this check generates."""
        return _health_response(await readiness.readiness_fault())

    @router.get("/load")
    async def load() -> dict[str, int]:
        """Returns how many requests the server has, for routers."""
        return {"server_load": models.requests}

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": jaxserve.__version__}

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: fastapi.Request) -> Response:
        """Returns metrics in the text format of Prometheus; name[]=... selects some. The replica's
        are missing while it is built."""
        text = await exposed_metrics(models, request.query_params.getlist("name[]"))
        return Response(text, 200, media_type=CONTENT_TYPE)

    return router


def _health_response(fault: str) -> Response:
    return PlainTextResponse(fault or "ok", 503 if fault else 200)
