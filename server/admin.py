"""The operators' HTTP port: draining, aborting, cache and log control, settings, adapters,
weights. It has API keys of its own, and none of the users' routes."""

from __future__ import annotations

import dataclasses
import logging
from typing import Literal

import fastapi

from jaxserve.api.errors import RequestError
from jaxserve.server.adapter_routes import adapter_routes
from jaxserve.server.frontend import DRAINING, SERVING, Frontend
from jaxserve.server.http_app import StrictModel, make_app
from jaxserve.server.json_body import JsonObject
from jaxserve.server.kv_routes import kv_routes
from jaxserve.server.weight_routes import weight_routes

log = logging.getLogger(__name__)


class AbortRequest(StrictModel):
    request_id: str | None = None
    all: bool = False


class LevelRequest(StrictModel):
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"]
    logger: str = "jaxserve"


def operators_app(frontend: Frontend) -> fastapi.FastAPI:
    """The application of the operators' port."""
    app = make_app("jaxserve admin")

    @app.post("/admin/drain")
    async def drain() -> JsonObject:
        """Refuses new requests; running ones continue. Undone by /admin/resume."""
        frontend.check_open()
        frontend.state = DRAINING
        log.warning("draining, as the operator asked")
        return _state(frontend)

    @app.post("/admin/resume")
    async def resume() -> JsonObject:
        if frontend.state == DRAINING:
            frontend.state = SERVING
        frontend.check_open()
        return _state(frontend)

    @app.post("/reset_prefix_cache")  # as vLLM names it
    @app.post("/admin/flush_cache")
    async def flush_cache() -> dict[str, int]:
        """Forgets cached prefixes that no request uses; returns how many pages that frees."""
        return {"pages": await frontend.ask_replica(frontend.require_replica().flush_cache)}

    @app.post("/admin/abort")
    async def abort(body: AbortRequest) -> dict[str, int]:
        if body.all == (body.request_id is not None):
            raise RequestError("request_id", "give either request_id or all=true")
        if body.request_id is None:
            return {"aborted": await frontend.abort(list(frontend.streams))}
        if body.request_id not in frontend.streams:
            raise RequestError(
                "request_id", f"{body.request_id[:100]!r} is not running", "NOT_FOUND"
            )
        return {"aborted": await frontend.abort([body.request_id])}

    @app.post("/admin/log_level")
    async def log_level(body: LevelRequest) -> dict[str, str]:
        if body.logger.split(".")[0] != "jaxserve":
            raise RequestError("logger", "must be jaxserve or one below it")
        logging.getLogger(body.logger).setLevel(body.level)
        return {body.logger: body.level}

    @app.get("/admin/requests")
    async def requests() -> list[JsonObject]:
        return [
            {"id": stream.request.id, "prompt_tokens": len(stream.request.prompt)}
            for stream in frontend.streams.values()
        ]

    @app.get("/admin/usage")
    async def usage() -> JsonObject:
        """Requests and tokens by key, tenant, and model or adapter, since the server's start."""
        return {"since": frontend.started, "usage": frontend.usage.rows()}

    @app.get("/admin/config")
    async def config() -> JsonObject:
        """The settings in use; no secrets are among them."""
        engine = {} if frontend.replica is None else frontend.replica.info.settings
        return {"server": dataclasses.asdict(frontend.config), "engine": engine}

    app.include_router(kv_routes(frontend))
    app.include_router(adapter_routes(frontend))
    app.include_router(weight_routes(frontend))
    return app


def _state(frontend: Frontend) -> JsonObject:
    return {"state": frontend.state, "requests": len(frontend.streams)}
