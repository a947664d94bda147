"""Routes of /v1/responses: to ask for a response, and for those that are stored."""

from __future__ import annotations

import fastapi
from starlette.responses import Response

from jaxserve.server.generation.chat import chat_call
from jaxserve.server.generation.responding import STREAMED, respond
from jaxserve.server.generation.unknown_fields import UnknownFields
from jaxserve.server.json_body import JsonObject
from jaxserve.server.models import Models
from jaxserve.server.openai.responses.items import has_references, resolved
from jaxserve.server.openai.responses.request import ResponsesRequest
from jaxserve.server.openai.responses.stored import StoredResponses
from jaxserve.server.openai.responses.writer import ResponsesWriter


def add_responses_routes(router: fastapi.APIRouter, models: Models, unknown: UnknownFields) -> None:
    """Adds the routes to those that need a model."""
    stored = StoredResponses(models.config.stored_responses_mib << 20)

    @router.post("/v1/responses", responses=STREAMED)
    async def responses(body: ResponsesRequest, request: fastapi.Request) -> Response:
        caller = request.state.caller
        items = body.input_items
        if has_references(items):
            known = stored.items(caller.name)
            body = body.model_copy(update={"input": resolved(items, known)})
        headers = unknown.headers(body)
        frontend = models.open(body.model)
        earlier: list[JsonObject] = []
        if body.previous_response_id is not None:
            previous = stored.get(caller.name, body.previous_response_id, "previous_response_id")
            earlier = [*previous.items]
        chat = body.as_chat(earlier)
        call = chat_call(frontend, chat, request.headers)
        items = [*earlier, *body.input_items]

        def store(response: JsonObject) -> None:
            stored.add(caller.name, response, [*items, *response["output"]])

        writer = ResponsesWriter(frontend, body, chat, store if body.store else None)
        return await respond(frontend, [call], writer, request, chat.stream_mode(), headers)

    @router.get("/v1/responses/{id}")
    async def responses_get(id: str, request: fastapi.Request) -> JsonObject:
        return stored.get(request.state.caller.name, id).response

    @router.get("/v1/responses/{id}/input_items")
    async def responses_input_items(id: str, request: fastapi.Request) -> JsonObject:
        """The items of the conversation before the response, the newest first."""
        items = stored.get(request.state.caller.name, id).input_items
        shown = [_with_id(number, item) for number, item in enumerate(items)][::-1]
        ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]}
        return {"object": "list", "data": shown, **ends, "has_more": False}

    @router.delete("/v1/responses/{id}")
    async def responses_delete(id: str, request: fastapi.Request) -> JsonObject:
        stored.delete(request.state.caller.name, id)
        return {"id": id, "object": "response", "deleted": True}


def _with_id(number: int, item: JsonObject) -> JsonObject:
    """An item as it is shown. number: of the item in its conversation, its id where it has none."""
    shown = {"id": f"item_{number}", "type": "message", **item}
    if isinstance(shown.get("content"), str):
        shown["content"] = [{"type": "input_text", "text": shown["content"]}]
    return shown
