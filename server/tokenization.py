"""Routes that show a model's tokens, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

import fastapi
from pydantic import Field
from starlette.responses import Response

from jaxserve.api.errors import RequestError
from jaxserve.server.generation.fields import FirstFault, IdsField, Messages, OpenModel
from jaxserve.server.generation.responding import INLINE_TOKENS
from jaxserve.server.generation.routing import json_response, open_router
from jaxserve.server.generation.token_writer import TokenWriter
from jaxserve.server.generation.tools import MAX_TOOLS, ChosenTools, Tool
from jaxserve.server.generation.unknown_fields import UnknownFields
from jaxserve.server.json_body import JsonObject, dump_in_thread_if
from jaxserve.server.models import Models
from jaxserve.server.prompts import Chat, Text


class TokenizeRequest(OpenModel):
    model: str = ""
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Annotated[list[Tool], FirstFault()] | None = Field(None, max_length=MAX_TOOLS)
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(OpenModel):
    model: str = ""
    tokens: IdsField = Field(...)
    skip_special_tokens: bool = False


def tokenization_routes(models: Models, unknown: UnknownFields) -> fastapi.APIRouter:
    """Returns the routes that convert texts to tokens and back."""
    router = open_router(models)

    @router.get("/tokenizer_info")
    async def tokenizer_info(model: str = "") -> JsonObject:
        """The tokenizer's special tokens and the chat template, as tokenizer_config.json has
        them."""
        frontend = models.open(model)
        if frontend.tokenizer is None:
            raise RequestError("", "this model has no tokenizer", "NOT_FOUND")
        return frontend.tokenizer.config

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: fastapi.Request) -> Response:
        headers = unknown.headers(body)
        frontend = models.open(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("prompt", "give either prompt or messages")
        if body.prompt is None:
            prompt: Chat | Text = Chat(
                body.messages or (),
                [
                    function.as_message()
                    for function in ChosenTools(body.tools or (), None).functions
                ],
                body.chat_template_kwargs or {},
                body.add_generation_prompt,
                body.continue_final_message,
            )
        else:
            prompt = Text(body.prompt, added=body.add_special_tokens)
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

        return json_response(await dump_in_thread_if(len(ids) > INLINE_TOKENS, content), headers)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: fastapi.Request) -> Response:
        headers = unknown.headers(body)
        frontend = models.open(body.model)
        if not isinstance(body.tokens, list):
            raise RequestError("tokens", "must be a list of token ids")
        text = await frontend.detokenize(
            body.tokens, request.state.caller, body.skip_special_tokens, "tokens"
        )
        large = len(body.tokens) > INLINE_TOKENS
        return json_response(await dump_in_thread_if(large, lambda: {"prompt": text}), headers)

    return router
