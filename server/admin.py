"""The operators' port: it has keys of its own, and none of the users' routes."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, Literal

import fastapi

from jaxserve.api.errors import RequestError
from jaxserve.server.frontend import DRAINING, SERVING, Frontend
from jaxserve.server.http_app import StrictModel, make_app

log = logging.getLogger(__name__)


class AbortRequest(StrictModel):
    request_id: str | None = None
    all: bool = False


class LevelRequest(StrictModel):
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"]
    logger: str = "jaxserve"


def application(front: Frontend) -> fastapi.FastAPI:
    app = make_app("jaxserve admin")

    @app.post("/admin/drain")
    async def drain() -> dict[str, Any]:
        """Takes no new requests; those that run go on. Undone by /admin/resume."""
        front.check_open()
        front.state = DRAINING
        log.warning("draining, as the operator asked")
        return _state(front)

    @app.post("/admin/resume")
    async def resume() -> dict[str, Any]:
        if front.state == DRAINING:
            front.state = SERVING
        front.check_open()
        return _state(front)

    @app.post("/admin/flush_cache")
    async def flush_cache() -> dict[str, int]:
        """Forgets every prefix that nobody holds; tells how many pages that frees."""
        return {"pages": await front.of_engine(front.running.flush_cache)}

    @app.post("/admin/abort")
    async def abort(body: AbortRequest) -> dict[str, int]:
        if body.all == (body.request_id is not None):
            raise RequestError("request_id", "give either request_id or all=true")
        if body.request_id is not None and body.request_id not in front.streams:
            raise RequestError(
                "request_id", f"{body.request_id[:100]!r} is not running", "NOT_FOUND"
            )
        ids = list(front.streams) if body.request_id is None else [body.request_id]
        return {"aborted": await front.abort(ids)}

    @app.post("/admin/log_level")
    async def log_level(body: LevelRequest) -> dict[str, str]:
        if body.logger.split(".")[0] != "jaxserve":
            raise RequestError("logger", "must be jaxserve or one below it")
        logging.getLogger(body.logger).setLevel(body.level)
        return {body.logger: body.level}

    @app.get("/admin/requests")
    async def requests() -> list[dict[str, Any]]:
        return [
            {"id": stream.request.id, "prompt_tokens": len(stream.request.prompt)}
            for stream in front.streams.values()
        ]

    @app.get("/admin/config")
    async def config() -> dict[str, Any]:
        """The settings in use; no secrets are among them."""
        engine = {} if front.engine is None else dataclasses.asdict(front.engine.config)
        return {"server": dataclasses.asdict(front.config), "engine": engine}

    return app


def _state(front: Frontend) -> dict[str, Any]:
    return {"state": front.state, "requests": len(front.streams)}
