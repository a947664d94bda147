"""Routes of Anthropic's protocol."""

from __future__ import annotations

import fastapi
from starlette.responses import Response

from jaxserve.server.anthropic.messages import MessagesWriter
from jaxserve.server.anthropic.schemas import CountRequest, MessagesRequest
from jaxserve.server.generation.chat import chat_call
from jaxserve.server.generation.responding import STREAMED, respond
from jaxserve.server.generation.routing import json_response, open_router
from jaxserve.server.generation.unknown_fields import UnknownFields
from jaxserve.server.json_body import dump
from jaxserve.server.models import Models


def anthropic_routes(models: Models, unknown: UnknownFields) -> fastapi.APIRouter:
    """Returns the routes of Anthropic's protocol."""
    router = open_router(models)

    @router.post("/v1/messages", responses=STREAMED)
    async def messages(body: MessagesRequest, request: fastapi.Request) -> Response:
        headers = unknown.headers(body)
        frontend = models.open(body.model)
        chat = body.as_chat()
        call = chat_call(frontend, chat, request.headers)
        writer = MessagesWriter(frontend, body, chat)
        return await respond(frontend, [call], writer, request, chat.stream_mode(), headers)

    @router.post("/v1/messages/count_tokens")
    async def messages_count_tokens(body: CountRequest, request: fastapi.Request) -> Response:
        headers = unknown.headers(body)
        frontend = models.open(body.model)
        call = chat_call(frontend, body.as_chat(), request.headers)
        ids = await frontend.tokenize(call.prompt, request.state.caller)
        return json_response(dump({"input_tokens": len(ids)}), headers)

    return router
