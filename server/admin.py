"""The operators' HTTP port: draining, aborting, cache and log control, settings, adapters,
weights. It has API keys of its own, and none of the users' routes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, Literal

import fastapi

from jaxserve.api.errors import RequestError
from jaxserve.server.adapter_routes import adapter_routes
from jaxserve.server.frontend import Frontend
from jaxserve.server.http_app import StrictModel, make_app
from jaxserve.server.json_body import JsonObject
from jaxserve.server.kv_routes import kv_routes
from jaxserve.server.models import Models
from jaxserve.server.weight_routes import weight_routes

log = logging.getLogger(__name__)


class AbortRequest(StrictModel):
    request_id: str | None = None
    all: bool = False


class LevelRequest(StrictModel):
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"]
    logger: str = "jaxserve"


def operators_app(models: Models) -> fastapi.FastAPI:
    """The application of the operators' port."""
    app = make_app("jaxserve admin")

    @app.post("/admin/drain")
    async def drain() -> JsonObject:
        """Refuses new requests; running ones continue. Undone by /admin/resume."""
        models.check_open()
        models.drain()
        log.warning("draining, as the operator asked")
        return _state(models)

    @app.post("/admin/resume")
    async def resume() -> JsonObject:
        models.resume()
        models.check_open()
        return _state(models)

    @app.post("/reset_prefix_cache")  # as vLLM names it
    @app.post("/admin/flush_cache")
    async def flush_cache(model: str = "") -> dict[str, int]:
        """Forgets cached prefixes that no request uses, of all models unless one is named; returns
        how many pages that frees."""
        meant = [models.named(model)] if model else models.all
        flushed = [
            await frontend.ask_replica(frontend.require_replica().flush_cache) for frontend in meant
        ]
        return {"pages": sum(flushed)}

    @app.post("/admin/abort")
    async def abort(body: AbortRequest) -> dict[str, int]:
        if body.all == (body.request_id is not None):
            raise RequestError("request_id", "give either request_id or all=true")
        ids = list(models.streams) if body.request_id is None else [body.request_id]
        if body.request_id is not None and body.request_id not in models.streams:
            raise RequestError(
                "request_id", f"{body.request_id[:100]!r} is not running", "NOT_FOUND"
            )
        return {"aborted": await models.abort(ids)}

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
            for frontend in models.all
            for stream in frontend.streams.values()
        ]

    @app.get("/admin/usage")
    async def usage() -> JsonObject:
        """Requests and tokens by key, tenant, and model or adapter, since the server's start."""
        rows = [row for frontend in models.all for row in frontend.usage.rows()]
        return {"since": models.all[0].started, "usage": rows}

    @app.get("/admin/config")
    async def config() -> JsonObject:
        """The settings in use; no secrets are among them."""
        engines = {frontend.name: _engine_settings(frontend) for frontend in models.all}
        server = dataclasses.asdict(models.config)
        if models.several:
            return {"server": server, "engines": engines}
        return {"server": server, "engine": engines[models.all[0].name]}

    app.include_router(kv_routes(models))
    app.include_router(adapter_routes(models))
    app.include_router(weight_routes(models))
    return app


def _engine_settings(frontend: Frontend) -> Mapping[str, Any]:
    return {} if frontend.replica is None else frontend.replica.info.settings


def _state(models: Models) -> JsonObject:
    return {"state": models.state, "requests": models.requests}
