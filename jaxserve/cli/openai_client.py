"""A client of one server over the OpenAI protocol, ours or another: answers as they come.

Only fields of the protocol are sent, so that any server understands them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import httpx

from jaxserve.api.errors import RequestError
from jaxserve.cli.display import Waiting
from jaxserve.cli.own_server import OwnServer, StartingServer, starting_server
from jaxserve.cli.sampling_flags import HELP
from jaxserve.server.openai.reading import chunk_of, error_message, first_model
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 600.0  # between two events of an answer
CLIENT = [
    Option("url", str, None, "address of a running server, http://HOST:PORT; default: start one"),
    Option(
        "api_key",
        str,
        None,
        "key for --url, where it asks for one; default: JAXSERVE_API_KEY, which no list of "
        "processes shows",
    ),
]
ANSWER = [
    Option("max_tokens", int, None, HELP["max_tokens"], 1),
    Option("temperature", float, None, HELP["temperature"], 0),
    Option("top_p", float, None, HELP["top_p"], 0, 1),
    Option("seed", int, None, HELP["seed"]),
]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some text of an answer. reasoning: what the model thinks before it answers."""

    text: str
    reasoning: bool = False


Pieces = Generator[Piece, None, None]


@dataclasses.dataclass
class Answered:
    """Statistics of an answer: tokens of prompt and output (0 if the server does not report them),
    seconds to its first text and to its end, why it ended."""

    prompt_tokens: int = 0
    tokens: int = 0
    first: float = 0.0
    total: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        speed = self.tokens / self.total if self.total else 0.0
        tokens = f"{self.prompt_tokens} + {self.tokens} tokens, " if self.tokens else ""
        rate = f", {speed:.1f} tokens/s" if self.tokens else ""
        return f"{tokens}first after {self.first:.2f} s{rate}, ended by {self.reason or 'you'}"


class OpenAIClient:
    """Talks to one server; a context manager. answered: of the newest answer."""

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None):
        """model: None for the first one that the server names. Errors: ConfigError where the server
        cannot be reached or refuses the key."""
        base = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        self._url = base
        try:
            self._http = httpx.Client(base_url=f"{base}/v1", headers=headers, timeout=timeout)
        except httpx.InvalidURL as error:
            raise ConfigError("url", f"{url}: {error}") from None
        self.answered = Answered()
        try:
            self.model = model or self._first_model()
        except BaseException:
            self._http.close()
            raise

    def __enter__(self) -> OpenAIClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def chat(self, messages: Sequence[Mapping[str, str]], fields: Mapping[str, Any]) -> Pieces:
        """The answer to a conversation. Leaving it early ends the server's work. Errors:
        RequestError."""
        return self._stream("/chat/completions", {"messages": list(messages), **fields})

    def complete(self, prompt: str, fields: Mapping[str, Any]) -> Pieces:
        """Completes a text; otherwise as `chat`."""
        return self._stream("/completions", {"prompt": prompt, **fields})

    def _first_model(self) -> str:
        with self._told("url"):
            return first_model(self._http.get("/models"))["id"]

    def _stream(self, path: str, body: Mapping[str, Any]) -> Pieces:
        asked = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        self.answered = answered = Answered()
        began = time.monotonic()
        with self._told(""), self._http.stream("POST", path, json={**asked, **body}) as answer:
            if answer.is_error:
                answer.read()
                raise RequestError("", error_message(answer), "INVALID_ARGUMENT")
            for chunk in filter(None, map(chunk_of, answer.iter_lines())):
                for piece in _pieces(chunk, answered):
                    answered.first = answered.first or time.monotonic() - began
                    yield piece
                answered.total = time.monotonic() - began

    @contextlib.contextmanager
    def _told(self, field: str) -> Iterator[None]:
        """Says in a line that the server is not there, or went away."""
        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            message = f"{self._url}: {str(error) or type(error).__name__}"
            if field:
                raise ConfigError(field, message) from None
            raise RequestError("", message, "UNAVAILABLE") from None


def _pieces(chunk: Mapping[str, Any], answered: Answered) -> Pieces:
    if usage := chunk.get("usage"):
        answered.prompt_tokens = usage.get("prompt_tokens", 0)
        answered.tokens = usage.get("completion_tokens", 0)
    for choice in chunk.get("choices", ()):
        answered.reason = choice.get("finish_reason") or answered.reason
        delta = choice.get("delta") or {}
        if thought := delta.get("reasoning_content") or delta.get("reasoning"):
            yield Piece(thought, reasoning=True)
        if text := delta.get("content") or choice.get("text"):
            yield Piece(text)


def answer_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of ANSWER that were given, as fields of a request."""
    return {each.name: values[each.name] for each in ANSWER if values[each.name] is not None}


@contextlib.contextmanager
def client_of(values: Mapping[str, Any]) -> Iterator[OpenAIClient]:
    """A client of the server at --url, or of one that runs within the block. Errors:
    ConfigError."""
    key = values["api_key"] or os.environ.get("JAXSERVE_API_KEY") or None
    if values["url"]:
        model = values["model"] if "model" in getattr(values, "origins", ()) else None
        with OpenAIClient(values["url"], key, model) as client:
            yield client
        return
    quiet = {"JAXSERVE_LOG_LEVEL": os.environ.get("JAXSERVE_LOG_LEVEL", "warning")}
    with starting_server(values, quiet) as server, OpenAIClient(_waited(server).url) as client:
        yield client


def _waited(starting: StartingServer) -> OwnServer:
    """The server, once it takes requests."""
    if not sys.stderr.isatty():
        return starting.ready()
    waiting = Waiting("loading and compiling", sys.stderr)
    server = starting.ready(waiting)
    waiting.done()
    return server
