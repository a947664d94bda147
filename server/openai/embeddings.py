"""/v1/embeddings: a vector for each input, of any model that is served."""

from __future__ import annotations

import base64
from typing import Literal

from pydantic import Field
from starlette.responses import Response

from jaxserve.api.errors import check_integer
from jaxserve.api.events import Finished
from jaxserve.server.generation.embedding import (
    MAX_INPUTS,
    Embedding,
    EmbedRequest,
    Input,
    vector_of,
)
from jaxserve.server.generation.fields import Integer, PromptField
from jaxserve.server.json_body import JsonObject
from jaxserve.server.prompts import prompts_of

INLINE_VALUES = 4096  # more numbers than these are written in a thread


class EmbeddingsRequest(EmbedRequest):
    input: PromptField = Field(...)
    dimensions: Integer | None = Field(
        None, description="only this number of the first numbers of each embedding"
    )
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = Field(
        None, description="as in vLLM: whether embeddings have length 1, as they do by default"
    )

    def inputs(self) -> list[Input]:
        """Returns the inputs with their fields. Errors: RequestError."""
        added = self.add_special_tokens is not False
        prompts = prompts_of("input", self.input, MAX_INPUTS, added)
        if len(prompts) == 1:
            return [Input("input", prompts[0])]
        return [Input(f"input.{number}", prompt) for number, prompt in enumerate(prompts)]


async def respond_with_embeddings(embedding: Embedding, body: EmbeddingsRequest) -> Response:
    """Returns the response with the embeddings of the body's inputs. Errors: RequestError."""
    inputs = body.inputs()
    size = embedding.frontend.info.d_model
    if body.dimensions is not None:
        check_integer("dimensions", body.dimensions, 1, size)
        size = body.dimensions

    def content(ends: list[Finished]) -> JsonObject:
        data = [
            {"object": "embedding", "index": number, "embedding": _written(body, end)}
            for number, end in enumerate(ends)
        ]
        return embedding.as_list(data, ends)

    return await embedding.respond(inputs, content, large=len(inputs) * size > INLINE_VALUES)


def _written(body: EmbeddingsRequest, end: Finished) -> str | list[float]:
    """Returns an embedding as a list of numbers, or as base64 of little-endian f32."""
    vector = vector_of(end, body.dimensions, body.normalize is not False)
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
