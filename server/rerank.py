"""/v1/rerank and /score: how similar texts are, by the cosine of their embeddings.

The score is that of a bi-encoder: query and document are embedded each by itself. No template or
instruction is added, and models that judge a pair of texts together (cross-encoders, such as
Qwen3-Reranker) are not asked the way they were trained to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import fastapi
import numpy as np
from pydantic import Field
from starlette.responses import Response

from jaxserve.api.errors import RequestError, check_integer
from jaxserve.api.events import Finished
from jaxserve.api.sampling import MAX_INT32
from jaxserve.server.generation.embedding import (
    MAX_INPUTS,
    Embedding,
    EmbedRequest,
    Input,
    vector_of,
)
from jaxserve.server.generation.fields import FirstFault, Integer, OpenModel
from jaxserve.server.generation.routing import open_router
from jaxserve.server.generation.token_writer import usage_of
from jaxserve.server.generation.unknown_fields import UnknownFields
from jaxserve.server.json_body import JsonObject
from jaxserve.server.models import Models
from jaxserve.server.prompts import Text

INLINE_RESULTS = 256  # more of them are sorted and written in a thread


class Document(OpenModel):
    text: str


class RerankRequest(EmbedRequest):
    """Documents to be put in order by their similarity to a query, as Jina and Cohere ask."""

    query: str | Document
    documents: Annotated[list[str | Document], FirstFault()]
    top_n: Integer | None = Field(None, description="how many of the most similar; default: all")
    return_documents: bool | None = Field(
        None, description="whether results have the documents, as they do by default"
    )

    def inputs(self) -> list[Input]:
        """Returns the query, then the documents. Errors: RequestError."""
        added = self.add_special_tokens is not False
        _check_count("documents", self.documents)
        documents = [
            Input(f"documents.{number}", Text(_text(document), added=added))
            for number, document in enumerate(self.documents)
        ]
        return [Input("query", Text(_text(self.query), added=added)), *documents]


class ScoreRequest(EmbedRequest):
    """Pairs of texts, as vLLM asks: one text beside each of several, or two lists of one length."""

    text_1: str | Annotated[list[str], FirstFault()]
    text_2: str | Annotated[list[str], FirstFault()]

    def inputs(self) -> tuple[list[Input], list[Input]]:
        """Returns both sides of the pairs. Errors: RequestError."""
        first = self._side("text_1", self.text_1)
        second = self._side("text_2", self.text_2)
        if isinstance(self.text_1, list) and len(first) != len(second):
            raise RequestError(
                "text_2", f"has {len(second)} entries; text_1 is a list of {len(first)}"
            )
        return first, second

    def _side(self, field: str, texts: str | list[str]) -> list[Input]:
        added = self.add_special_tokens is not False
        if isinstance(texts, str):
            return [Input(field, Text(texts, added=added))]
        _check_count(field, texts)
        return [
            Input(f"{field}.{number}", Text(text, added=added)) for number, text in enumerate(texts)
        ]


def rerank_routes(models: Models, unknown: UnknownFields) -> fastapi.APIRouter:
    """Returns the routes that compare texts."""
    router = open_router(models)

    @router.post("/rerank", include_in_schema=False)
    @router.post("/v1/rerank")
    @router.post("/v2/rerank")
    async def rerank(body: RerankRequest, request: fastapi.Request) -> Response:
        headers = unknown.headers(body)
        frontend = models.open(body.model)
        return await _rerank(Embedding.of(frontend, body, request, headers, "rerank"), body)

    @router.post("/score")
    @router.post("/v1/score", include_in_schema=False)
    async def score(body: ScoreRequest, request: fastapi.Request) -> Response:
        headers = unknown.headers(body)
        frontend = models.open(body.model)
        return await _score(Embedding.of(frontend, body, request, headers, "score"), body)

    return router


async def _rerank(embedding: Embedding, body: RerankRequest) -> Response:
    """Returns the response with the documents, the most similar first. Errors: RequestError."""
    if body.top_n is not None:
        check_integer("top_n", body.top_n, 1, MAX_INT32)

    def content(ends: list[Finished]) -> JsonObject:
        scores = cosines(ends[:1], ends[1:])
        order = np.argsort(-scores, kind="stable")[: body.top_n].tolist()
        return {
            "id": embedding.id,
            "model": embedding.model,
            "results": [_result(body, number, float(scores[number])) for number in order],
            "usage": usage_of(ends),
        }

    large = len(body.documents) > INLINE_RESULTS
    return await embedding.respond(body.inputs(), content, large)


async def _score(embedding: Embedding, body: ScoreRequest) -> Response:
    """Returns the response with the similarity of each pair. Errors: RequestError."""
    first, second = body.inputs()

    def content(ends: list[Finished]) -> JsonObject:
        scores = cosines(ends[: len(first)], ends[len(first) :])
        data = [
            {"index": number, "object": "score", "score": value}
            for number, value in enumerate(scores.tolist())
        ]
        return embedding.as_list(data, ends)

    inputs = [*first, *second]
    return await embedding.respond(inputs, content, large=len(inputs) > INLINE_RESULTS)


def cosines(first: Sequence[Finished], second: Sequence[Finished]) -> np.ndarray:
    """Returns the cosines [n] f64 of n pairs of embeddings, -1 to 1; a single first one is paired
    with all second ones."""
    sides = [np.array([vector_of(end) for end in ends], np.float64) for ends in (first, second)]
    return np.clip((sides[0] * sides[1]).sum(1), -1.0, 1.0)


def _result(body: RerankRequest, number: int, similarity: float) -> JsonObject:
    result: JsonObject = {"index": number, "relevance_score": similarity}
    if body.return_documents is not False:
        result["document"] = {"text": _text(body.documents[number])}
    return result


def _text(document: str | Document) -> str:
    return document if isinstance(document, str) else document.text


def _check_count(field: str, texts: Sequence[object]) -> None:
    """Refuses too few or too many texts. Errors: RequestError."""
    if not texts:
        raise RequestError(field, "is empty")
    if len(texts) > MAX_INPUTS:
        raise RequestError(field, f"has {len(texts)} entries; the limit is {MAX_INPUTS}")
