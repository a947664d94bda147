"""Routes of the OpenAI protocol, with vLLM's that render prompts."""

from __future__ import annotations

from collections.abc import Mapping

import fastapi
from starlette.responses import Response

from jaxserve.server.frontend import Frontend
from jaxserve.server.generation.chat import ChatRequest, chat_call
from jaxserve.server.generation.embedding import Embedding
from jaxserve.server.generation.responding import INLINE_TOKENS, STREAMED, respond
from jaxserve.server.generation.routing import json_response, open_router
from jaxserve.server.generation.unknown_fields import UnknownFields
from jaxserve.server.json_body import JsonObject, dump_in_thread_if
from jaxserve.server.models import Models
from jaxserve.server.openai.chat import ChatWriter
from jaxserve.server.openai.completions import CompletionRequest, CompletionWriter, completion_calls
from jaxserve.server.openai.embeddings import EmbeddingsRequest, respond_with_embeddings
from jaxserve.server.openai.responses.routes import add_responses_routes


def openai_routes(models: Models, unknown: UnknownFields) -> fastapi.APIRouter:
    """Returns the routes of the OpenAI protocol."""
    router = open_router(models)
    add_responses_routes(router, models, unknown)
    _add_generating_routes(router, models, unknown)
    _add_rendering_routes(router, models, unknown)
    _add_model_routes(router, models)

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingsRequest, request: fastapi.Request) -> Response:
        headers = unknown.headers(body)
        embedding = Embedding.of(models.open(body.model), body, request, headers, "embd")
        return await respond_with_embeddings(embedding, body)

    return router


def _add_generating_routes(
    router: fastapi.APIRouter, models: Models, unknown: UnknownFields
) -> None:
    @router.post("/v1/completions", responses=STREAMED)
    async def completions(body: CompletionRequest, request: fastapi.Request) -> Response:
        headers = unknown.headers(body)
        frontend = models.open(body.model)
        calls = completion_calls(body, request.headers, frontend.info)
        writer = CompletionWriter(frontend, body, calls)
        return await respond(frontend, calls, writer, request, body.stream_mode(), headers)

    @router.post("/v1/chat/completions", responses=STREAMED)
    async def chat_completions(body: ChatRequest, request: fastapi.Request) -> Response:
        headers = unknown.headers(body)
        frontend = models.open(body.model)
        call = chat_call(frontend, body, request.headers)
        writer = ChatWriter(frontend, body)
        return await respond(frontend, [call], writer, request, body.stream_mode(), headers)


def _add_rendering_routes(
    router: fastapi.APIRouter, models: Models, unknown: UnknownFields
) -> None:
    @router.post("/v1/completions/render")
    async def completions_render(body: CompletionRequest, request: fastapi.Request) -> Response:
        """Returns the token ids of each prompt, for routers that seek the replica which has most of
        them."""
        headers = unknown.headers(body)
        frontend = models.open(body.model)
        calls = completion_calls(body, request.headers, frontend.info)
        prompts = [await frontend.render(call, request.state.caller) for call in calls]
        return await _rendered([{"token_ids": ids.tolist()} for ids in prompts], headers)

    @router.post("/v1/chat/completions/render")
    async def chat_completions_render(body: ChatRequest, request: fastapi.Request) -> Response:
        """Returns the token ids that the model would be given."""
        headers = unknown.headers(body)
        frontend = models.open(body.model)
        call = chat_call(frontend, body, request.headers)
        ids = await frontend.render(call, request.state.caller)
        return await _rendered({"token_ids": ids.tolist()}, headers)


def _add_model_routes(router: fastapi.APIRouter, models: Models) -> None:
    @router.get("/v1/models")
    async def all_models() -> JsonObject:
        known = (frontend for frontend in models.all if frontend.replica is not None)
        return {"object": "list", "data": [row for frontend in known for row in _rows(frontend)]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> JsonObject:
        frontend = models.named(name)
        rows = _rows(frontend)
        return next((model for model in rows if model["id"] == name), rows[0])


def _rows(frontend: Frontend) -> list[JsonObject]:
    """Returns the model, once for each of its names, and its adapters."""
    info = frontend.info
    names = (info.served_name, *info.other_names)
    roots: dict[str, tuple[str, str | None]] = dict.fromkeys(names, (info.served_name, None))
    replica = frontend.require_replica()
    version = replica.weights.version
    adapters = replica.adapters.by_name.values()
    roots |= {adapter.name: (adapter.folder, info.served_name) for adapter in adapters}
    return [
        {
            "id": name,
            "object": "model",
            "created": frontend.started,
            "owned_by": "jaxserve",
            "root": root,
            "parent": parent,
            "max_model_len": info.max_model_len,
            "weight_version": version,
        }
        for name, (root, parent) in roots.items()
    ]


async def _rendered(content: JsonObject | list[JsonObject], headers: Mapping[str, str]) -> Response:
    """Writes token ids, in a thread if there are many."""
    prompts = content if isinstance(content, list) else [content]
    count = sum(len(prompt["token_ids"]) for prompt in prompts)
    return json_response(await dump_in_thread_if(count > INLINE_TOKENS, lambda: content), headers)
