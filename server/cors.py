"""Lets pages of other sites send requests from a browser (CORS), where they are allowed to."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from jaxserve.server.errors import REJECT_REASON_HEADER
from jaxserve.server.generation.load_report import LOAD_HEADER
from jaxserve.server.generation.unknown_fields import HEADER as IGNORED_HEADER
from jaxserve.settings.schema import ServerConfig

EXPOSED_HEADERS = ("retry-after", "x-request-id", IGNORED_HEADER, LOAD_HEADER, REJECT_REASON_HEADER)


def with_cors(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    """The application, with the headers by which browsers let pages of `allowed_origins` read its
    answers, and with answers to what browsers ask beforehand, which has no API key."""
    if not config.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=EXPOSED_HEADERS,
    )
