"""/v1/rerank and /score: how similar texts are, by the cosine of their embeddings.

The score is that of a bi-encoder: query and document are embedded each by itself. No template or
instruction is added, and models that judge a pair of texts together (cross-encoders, such as
Qwen3-Reranker) are not asked the way they were trained to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import fastapi
import numpy as np
from pydantic import Field
from starlette.responses import Response

from jaxserve.api.errors import RequestError, check_integer
from jaxserve.api.events import Finished
from jaxserve.server.frontend import Frontend
from jaxserve.server.json_body import JsonObject
from jaxserve.server.openai.answers import usage_of
from jaxserve.server.openai.embeddings import (
    MAX_INPUTS,
    EmbedRequest,
    Input,
    as_list,
    new_id,
    respond_of_ends,
    vector_of,
)
from jaxserve.server.openai.schemas import FirstFault
from jaxserve.server.openai.unknown_fields import OpenModel
from jaxserve.server.prompts import Text

INLINE_RESULTS = 256  # more of them are sorted and written in a thread


class Document(OpenModel):
    text: str


class RerankRequest(EmbedRequest):
    """Documents to be put in order by their similarity to a query, as Jina and Cohere ask."""

    query: str | Document
    documents: Annotated[list[str | Document], FirstFault()]
    top_n: int | None = Field(None, description="how many of the most similar; default: all")
    return_documents: bool | None = Field(
        None, description="whether results have the documents, as they do by default"
    )

    def inputs(self) -> list[Input]:
        """The query, then the documents. Errors: RequestError."""
        special = self.add_special_tokens is not False
        _check_count("documents", self.documents)
        documents = [
            Input(f"documents.{number}", Text(_text(document), special))
            for number, document in enumerate(self.documents)
        ]
        return [Input("query", Text(_text(self.query), special)), *documents]


class ScoreRequest(EmbedRequest):
    """Pairs of texts, as vLLM asks: one text beside each of several, or two lists of one length."""

    text_1: str | Annotated[list[str], FirstFault()]
    text_2: str | Annotated[list[str], FirstFault()]

    def inputs(self) -> tuple[list[Input], list[Input]]:
        """Both sides. Errors: RequestError."""
        first = self._side("text_1", self.text_1)
        second = self._side("text_2", self.text_2)
        if isinstance(self.text_1, list) and len(first) != len(second):
            raise RequestError(
                "text_2", f"has {len(second)} entries; text_1 is a list of {len(first)}"
            )
        return first, second

    def _side(self, field: str, given: str | list[str]) -> list[Input]:
        special = self.add_special_tokens is not False
        if isinstance(given, str):
            return [Input(field, Text(given, special))]
        _check_count(field, given)
        return [
            Input(f"{field}.{number}", Text(text, special)) for number, text in enumerate(given)
        ]


async def rerank(
    frontend: Frontend,
    body: RerankRequest,
    id: str,
    request: fastapi.Request,
    headers: Mapping[str, str],
) -> Response:
    """The documents of a request, the most similar first. Errors: RequestError."""
    if body.top_n is not None:
        check_integer("top_n", body.top_n, 1, 2**31 - 1)
    id = new_id(id, "rerank")

    def content(ends: list[Finished]) -> JsonObject:
        scores = cosines(ends[:1], ends[1:])
        order = np.argsort(-scores, kind="stable")[: body.top_n].tolist()
        return {
            "id": id,
            "model": body.model or frontend.info.served_name,
            "results": [_result(body, number, float(scores[number])) for number in order],
            "usage": usage_of(ends),
        }

    inputs = body.inputs()
    large = len(body.documents) > INLINE_RESULTS
    return await respond_of_ends(frontend, body, inputs, id, request, headers, content, large)


async def score(
    frontend: Frontend,
    body: ScoreRequest,
    id: str,
    request: fastapi.Request,
    headers: Mapping[str, str],
) -> Response:
    """The similarity of each pair of a request. Errors: RequestError."""
    first, second = body.inputs()
    id = new_id(id, "score")

    def content(ends: list[Finished]) -> JsonObject:
        scores = cosines(ends[: len(first)], ends[len(first) :])
        data = [
            {"index": number, "object": "score", "score": value}
            for number, value in enumerate(scores.tolist())
        ]
        return as_list(frontend, body, id, data, ends)

    inputs = [*first, *second]
    large = len(inputs) > INLINE_RESULTS
    return await respond_of_ends(frontend, body, inputs, id, request, headers, content, large)


def cosines(first: Sequence[Finished], second: Sequence[Finished]) -> np.ndarray:
    """Cosines [n] f64 of the embeddings of n pairs, -1 to 1; one first may go with all second."""
    sides = [np.array([vector_of(end) for end in ends], np.float64) for ends in (first, second)]
    return np.clip((sides[0] * sides[1]).sum(1), -1.0, 1.0)


def _result(body: RerankRequest, number: int, similarity: float) -> JsonObject:
    result: JsonObject = {"index": number, "relevance_score": similarity}
    if body.return_documents is not False:
        result["document"] = {"text": _text(body.documents[number])}
    return result


def _text(given: str | Document) -> str:
    return given if isinstance(given, str) else given.text


def _check_count(field: str, given: Sequence[object]) -> None:
    """Errors: RequestError for too few or too many."""
    if not given:
        raise RequestError(field, "is empty")
    if len(given) > MAX_INPUTS:
        raise RequestError(field, f"has {len(given)} entries; the limit is {MAX_INPUTS}")
