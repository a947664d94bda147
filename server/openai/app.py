"""The users' HTTP port: routes of the OpenAI protocol, tokenization, health, metrics, dashboard."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import fastapi
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.responses import PlainTextResponse, Response

import jaxserve
from jaxserve.api.errors import RequestError
from jaxserve.observe.metric_aliases import VllmAliases
from jaxserve.server import dashboard
from jaxserve.server.anthropic.messages import MessagesWriter
from jaxserve.server.anthropic.schemas import CountRequest, MessagesRequest
from jaxserve.server.frontend import Frontend
from jaxserve.server.frontend_metrics import CONTENT_TYPE, exposition
from jaxserve.server.generate_call import GenerateCall
from jaxserve.server.http_app import JsonRoute, make_app
from jaxserve.server.json_body import JsonObject, dump, dump_in_thread_if
from jaxserve.server.openai import chat, completions, embeddings, rerank
from jaxserve.server.openai.answers import (
    INLINE_TOKENS,
    STREAMED,
    TokenWriter,
    request_id,
    respond,
)
from jaxserve.server.openai.responses.routes import add_routes as add_responses_routes
from jaxserve.server.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from jaxserve.server.openai.unknown_fields import UnknownFields
from jaxserve.server.prompts import Chat, Text
from jaxserve.server.readiness import Readiness

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
        409: "the request id is in use",
        413: "the body is too large",
        415: "the body is compressed or not JSON",
        429: "too many requests; Retry-After says when to try again",
        499: "the caller went away",
        500: "internal error",
        503: "the server is starting, draining or out of order",
        504: "the deadline has passed",
    }.items()
}


def users_app(frontend: Frontend, readiness: Readiness) -> fastapi.FastAPI:
    """The application of the users' port."""
    app = make_app("jaxserve")
    unknown = UnknownFields(frontend.config.strict_fields)
    app.include_router(_generating_routes(frontend, unknown), responses=ERROR_RESPONSES)
    app.include_router(_embedding_routes(frontend, unknown), responses=ERROR_RESPONSES)
    app.include_router(_model_routes(frontend, unknown), responses=ERROR_RESPONSES)
    app.include_router(_health_routes(frontend, readiness))
    app.include_router(dashboard.router(frontend, _visible_ids))
    app.openapi()  # cached by this call: it takes 40 ms, which would stall streams later
    return app


def _open_router(frontend: Frontend) -> fastapi.APIRouter:
    """For routes that need a model; refused unless the server is open."""

    async def check_open() -> None:
        frontend.check_open()

    return fastapi.APIRouter(route_class=JsonRoute, dependencies=[fastapi.Depends(check_open)])


def _generating_routes(frontend: Frontend, unknown: UnknownFields) -> fastapi.APIRouter:
    """Routes that generate, or show what would be given to the model."""
    router = _open_router(frontend)
    add_responses_routes(router, frontend, unknown)

    @router.post("/v1/completions", responses=STREAMED)
    async def complete(body: CompletionRequest, request: fastapi.Request) -> Response:
        headers = unknown.headers(body)
        calls = completions.generate_calls(body, request_id(body, request), request.headers)
        writer = completions.CompletionWriter(frontend, body, calls)
        return await respond(frontend, calls, writer, request, body.stream_mode(), headers)

    @router.post("/v1/chat/completions", responses=STREAMED)
    async def converse(body: ChatRequest, request: fastapi.Request) -> Response:
        headers = unknown.headers(body)
        call = chat.generate_call(frontend, body, request_id(body, request), request.headers)
        writer = chat.ChatWriter(frontend, body)
        return await respond(frontend, [call], writer, request, body.stream_mode(), headers)

    @router.post("/v1/messages", responses=STREAMED)
    async def message(body: MessagesRequest, request: fastapi.Request) -> Response:
        headers = unknown.headers(body)
        asked = body.as_chat()
        call = chat.generate_call(frontend, asked, request_id(body, request), request.headers)
        writer = MessagesWriter(frontend, body, asked)
        return await respond(frontend, [call], writer, request, asked.stream_mode(), headers)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest, request: fastapi.Request) -> Response:
        headers = unknown.headers(body)
        call = chat.generate_call(frontend, body.as_chat(), "", request.headers)
        ids = await _ids(call, request)
        return _json_response(dump({"input_tokens": len(ids["token_ids"])}), headers)

    @router.post("/v1/completions/render")
    async def render_completion(body: CompletionRequest, request: fastapi.Request) -> Response:
        """The token ids of each prompt: for routers, which find the replica that has most of
        them."""
        headers = unknown.headers(body)
        calls = completions.generate_calls(body, request_id(body, request), request.headers)
        return await _rendered([await _ids(call, request) for call in calls], headers)

    @router.post("/v1/chat/completions/render")
    async def render_chat(body: ChatRequest, request: fastapi.Request) -> Response:
        """The token ids that the model would be given."""
        headers = unknown.headers(body)
        call = chat.generate_call(frontend, body, request_id(body, request), request.headers)
        return await _rendered(await _ids(call, request), headers)

    async def _ids(call: GenerateCall, request: fastapi.Request) -> JsonObject:
        frontend.check_model(call.model)
        ids = await frontend.tokenize(call.prompt, request.state.caller)
        return {"token_ids": ids.tolist()}

    return router


def _embedding_routes(frontend: Frontend, unknown: UnknownFields) -> fastapi.APIRouter:
    """Routes that embed texts, and compare them by that."""
    router = _open_router(frontend)

    @router.post("/v1/embeddings")
    async def embed(body: embeddings.EmbeddingsRequest, request: fastapi.Request) -> Response:
        id = request_id(body, request)
        return await embeddings.answer(frontend, body, id, request, unknown.headers(body))

    @router.post("/rerank", include_in_schema=False)
    @router.post("/v1/rerank")
    @router.post("/v2/rerank")
    async def order(body: rerank.RerankRequest, request: fastapi.Request) -> Response:
        id = request_id(body, request)
        return await rerank.rerank(frontend, body, id, request, unknown.headers(body))

    @router.post("/score")
    @router.post("/v1/score", include_in_schema=False)
    async def compare(body: rerank.ScoreRequest, request: fastapi.Request) -> Response:
        id = request_id(body, request)
        return await rerank.score(frontend, body, id, request, unknown.headers(body))

    return router


def _model_routes(frontend: Frontend, unknown: UnknownFields) -> fastapi.APIRouter:
    """Routes that tell of the model, and of its tokens."""
    router = _open_router(frontend)

    @router.get("/v1/models")
    async def models() -> JsonObject:
        return {"object": "list", "data": _models(frontend)}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> JsonObject:
        frontend.check_model(name)
        known = _models(frontend)
        return next((model for model in known if model["id"] == name), known[0])

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> JsonObject:
        """The tokenizer's special tokens and the chat template, as tokenizer_config.json has
        them."""
        if frontend.tokenizer is None:
            raise RequestError("", "this model has no tokenizer", "NOT_FOUND")
        return frontend.tokenizer.config

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: fastapi.Request) -> Response:
        headers = unknown.headers(body)
        frontend.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("prompt", "give either prompt or messages")
        if body.prompt is None:
            prompt: Chat | Text = Chat(
                body.messages or (),
                [chat.tool_message(tool) for tool in body.tools or ()],
                body.chat_template_kwargs or {},
                body.add_generation_prompt,
                body.continue_final_message,
            )
        else:
            prompt = Text(body.prompt, body.add_special_tokens)
        ids = (await frontend.tokenize(prompt, request.state.caller)).tolist()

        def content() -> JsonObject:
            answer: JsonObject = {
                "count": len(ids),
                "max_model_len": frontend.info.max_model_len,
                "tokens": ids,
                "token_strs": None,
            }
            if body.return_token_strs:
                token_writer = TokenWriter(frontend.tokenizer)
                answer["token_strs"] = [token_writer.text(id) for id in ids]
            return answer

        return _json_response(await dump_in_thread_if(len(ids) > INLINE_TOKENS, content), headers)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: fastapi.Request) -> Response:
        headers = unknown.headers(body)
        frontend.check_model(body.model)
        if not isinstance(body.tokens, list):
            raise RequestError("tokens", "must be a list of token ids")
        text = await frontend.detokenize(
            body.tokens, request.state.caller, body.skip_special_tokens, "tokens"
        )
        large = len(body.tokens) > INLINE_TOKENS
        return _json_response(await dump_in_thread_if(large, lambda: {"prompt": text}), headers)

    return router


def _health_routes(frontend: Frontend, readiness: Readiness) -> fastapi.APIRouter:
    """Routes that answer whatever state the server is in."""
    router = fastapi.APIRouter()

    @router.head("/health", include_in_schema=False)
    @router.get("/health", response_class=PlainTextResponse)
    async def health() -> Response:
        """200 while the process works; 503 if only a restart helps."""
        return _health_response(readiness.liveness_fault())

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", response_class=PlainTextResponse)
    async def ready() -> Response:
        """200 while requests are accepted and tokens come out: a caller's within the last seconds,
        else one that this check generates."""
        return _health_response(await readiness.readiness_fault())

    @router.get("/load")
    async def load() -> dict[str, int]:
        """How many requests are here, as routers ask for it."""
        return {"server_load": len(frontend.streams)}

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": jaxserve.__version__}

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: fastapi.Request) -> Response:
        """In the text format of Prometheus; name[]=... selects some. Without the replica's while it
        is built."""
        registries: list[CollectorRegistry | VllmAliases] = [frontend.metrics.registry]
        if frontend.replica is not None:
            registries.append(frontend.replica.metrics_registry)
        if frontend.replica is not None and frontend.config.metrics_aliases == "vllm":
            replica = frontend.replica
            aliases = VllmAliases(replica.metrics_registry, replica.info.served_name)
            registries.append(aliases)
        chosen: Sequence[Collector] = registries
        if names := request.query_params.getlist("name[]"):
            chosen = [registry.restricted_registry(names) for registry in registries]
        text = await frontend.ask_replica(functools.partial(exposition, chosen))
        return Response(text, 200, media_type=CONTENT_TYPE)

    return router


def _visible_ids(request: fastapi.Request) -> Callable[[str], bool] | None:
    """Whether the dashboard may show a request's id to the caller; None: it may show all."""
    caller = request.state.caller
    return caller.owns_id if caller.name else None


def _models(frontend: Frontend) -> list[JsonObject]:
    """The model, once for each of its names."""
    info = frontend.info
    return [
        {
            "id": name,
            "object": "model",
            "created": frontend.started,
            "owned_by": "jaxserve",
            "root": info.served_name,
            "parent": None,
            "max_model_len": info.max_model_len,
        }
        for name in (info.served_name, *info.other_names)
    ]


async def _rendered(content: JsonObject | list[JsonObject], headers: Mapping[str, str]) -> Response:
    """Writes token ids, in a thread if there are many."""
    prompts = content if isinstance(content, list) else [content]
    count = sum(len(prompt["token_ids"]) for prompt in prompts)
    return _json_response(await dump_in_thread_if(count > INLINE_TOKENS, lambda: content), headers)


def _json_response(body: bytes, headers: Mapping[str, str]) -> Response:
    return Response(body, 200, headers, "application/json")


def _health_response(fault: str) -> Response:
    return PlainTextResponse(fault or "ok", 503 if fault else 200)
