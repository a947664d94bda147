"""Reads answers of the OpenAI protocol, ours or another server's, as clients of it do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx

from jaxserve.api.errors import RequestError
from jaxserve.settings.schema import ConfigError

QUOTED = 300  # characters of what a server says that is no error of the protocol


def chunk_of(line: str) -> Mapping[str, Any] | None:
    """Returns the chunk in a line of a stream, if it has one. Errors: RequestError for a chunk with
    an error."""
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return None
    chunk = json.loads(data)
    if chunk.get("error"):
        error = chunk["error"]
        message = error.get("message", error) if isinstance(error, dict) else error
        raise RequestError("", str(message), "INTERNAL")
    return chunk


def first_model(answer: httpx.Response) -> Mapping[str, Any]:
    """The first row of what /v1/models answered; `id` is its name. Errors: ConfigError."""
    if answer.status_code in (401, 403):
        raise ConfigError("api_key", error_message(answer))
    if answer.is_error:
        raise ConfigError("url", f"{answer.url}: {error_message(answer)}")
    try:
        row = answer.json()["data"][0]
        row["id"]
    except (ValueError, LookupError, TypeError):
        raise ConfigError("url", f"{answer.url} names no models") from None
    return row


def error_message(answer: httpx.Response) -> str:
    """Returns the message of an answer with an error, which was read."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"HTTP {answer.status_code} {answer.text[:QUOTED].strip()}".strip()
