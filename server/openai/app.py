"""The routes that users have: the OpenAI protocol, tokens, health, metrics, version."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import fastapi
from starlette.responses import PlainTextResponse, Response

import jaxserve
from jaxserve.api.errors import RequestError
from jaxserve.server import dashboard
from jaxserve.server.frontend import Frontend
from jaxserve.server.frontend_metrics import CONTENT_TYPE, exposition
from jaxserve.server.http_app import JsonRoute, make_app
from jaxserve.server.json_body import dump_in_thread_if
from jaxserve.server.openai import chat, completions
from jaxserve.server.openai.responses import INLINE_TOKENS, answer
from jaxserve.server.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampled,
    TokenizeRequest,
)
from jaxserve.server.prompts import Chat, Text
from jaxserve.server.readiness import Readiness

OPEN_PATHS = frozenset({"/health", "/ready"})  # who asks whether we live needs no key
ERRORS: dict[int | str, dict[str, Any]] = {
    code: {
        "description": text,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    for code, text in {
        400: "a field that is wrong, by name",
        401: "no key, or none of ours",
        403: "a key for another port, or a page of another site",
        404: "no such model or route",
        405: "another method",
        408: "too slow",
        409: "the request id is in use",
        413: "the body is too large",
        415: "compressed, or not JSON",
        429: "too much at once; Retry-After says when again",
        499: "the caller went away",
        500: "a fault of ours",
        503: "not ready, or draining",
        504: "the deadline passed",
    }.items()
}


def application(front: Frontend, probe: Readiness) -> fastapi.FastAPI:
    app = make_app("jaxserve")
    app.include_router(_protocol(front), responses=ERRORS)
    app.include_router(_upkeep(front, probe))
    app.include_router(dashboard.router(front, _mine))
    app.openapi()  # made once, in 40 ms: now, not while others are served
    return app


def _protocol(front: Frontend) -> fastapi.APIRouter:
    router = fastapi.APIRouter(route_class=JsonRoute)

    @router.post("/v1/completions")
    async def complete(body: CompletionRequest, request: fastapi.Request) -> Response:
        front.check_open()
        asks = completions.asks_of(body, _id(body, request), request.headers)
        return await answer(
            front, asks, completions.CompletionWriter(front, body, asks), request, _usage(body)
        )

    @router.post("/v1/chat/completions")
    async def converse(body: ChatRequest, request: fastapi.Request) -> Response:
        front.check_open()
        ask = chat.ask_of(body, _id(body, request), request.headers)
        return await answer(front, [ask], chat.ChatWriter(front, body), request, _usage(body))

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        front.check_open()
        return {"object": "list", "data": [_model(front)]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        front.check_open()
        front.check_model(name)
        return _model(front)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: fastapi.Request) -> Response:
        front.check_open()
        front.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("prompt", "give either prompt or messages")
        prompt = (
            Chat(body.messages or ())
            if body.prompt is None
            else Text(body.prompt, body.add_special_tokens)
        )
        ids = (await front.ids(prompt, request.state.caller)).tolist()

        def make() -> dict[str, Any]:
            texts = (
                {"token_strs": [front.tokenizer.piece(id).decode(errors="replace") for id in ids]}
                if body.return_token_strs
                else {}
            )
            return {
                "count": len(ids),
                "max_model_len": front.engine.max_len,
                "tokens": ids,
                **texts,
            }

        return Response(
            await dump_in_thread_if(len(ids) > INLINE_TOKENS, make), media_type="application/json"
        )

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: fastapi.Request) -> Response:
        front.check_open()
        front.check_model(body.model)
        if not isinstance(body.tokens, list):
            raise RequestError("tokens", "must be a list of token ids")
        text = await front.text(
            body.tokens, request.state.caller, body.skip_special_tokens, "tokens"
        )
        return Response(
            await dump_in_thread_if(len(body.tokens) > INLINE_TOKENS, lambda: {"prompt": text}),
            media_type="application/json",
        )

    return router


def _upkeep(front: Frontend, probe: Readiness) -> fastapi.APIRouter:
    router = fastapi.APIRouter()

    @router.get("/health", response_class=PlainTextResponse)
    async def health() -> Response:
        """200 while the process does its work; 503 where only a restart helps."""
        return _said(probe.alive())

    @router.get("/ready", response_class=PlainTextResponse)
    async def ready() -> Response:
        """200 while requests are taken and tokens come: one of somebody's, or else one of our own
        that is made now."""
        return _said(await probe.ready())

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": jaxserve.__version__}

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: fastapi.Request) -> Response:
        """For Prometheus; name[]=... for some of them only. Empty while the engine is built."""
        names = request.query_params.getlist("name[]")
        registries = [front.metrics.registry] + (
            [] if front.engine is None else [front.engine.metrics.registry]
        )
        chosen = (
            [registry.restricted_registry(names) for registry in registries]
            if names
            else registries
        )
        return Response(
            await front.of_engine(functools.partial(exposition, chosen)),
            200,
            media_type=CONTENT_TYPE,
        )

    return router


def _mine(request: fastapi.Request) -> Callable[[str], bool] | None:
    """Which requests' ids the caller may see on the live page; None: all."""
    caller = request.state.caller
    return caller.knows if caller.name else None


def _id(body: Sampled, request: fastapi.Request) -> str:
    return body.request_id or request.headers.get("x-request-id", "")


def _usage(body: Sampled) -> bool | None:
    """See `answer`. Errors: RequestError."""
    if not body.stream:
        if body.stream_options is not None:
            raise RequestError("stream_options", "is for stream=true")
        return None
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _model(front: Frontend) -> dict[str, Any]:
    name = front.engine.config.source.model
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "jaxserve",
        "root": name,
        "parent": None,
        "max_model_len": front.engine.max_len,
    }


def _said(fault: str) -> Response:
    return PlainTextResponse(fault or "ok", 503 if fault else 200)
