"""Connections of a load generator to one server: the OpenAI protocol over HTTP, any server's, or
our gRPC. What is measured over both is the same: the moment of each event that has tokens, and the
counts of the server's own usage."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.api.sampling import SamplingParams
from jaxserve.server.client import AsyncClient
from jaxserve.server.http_errors import STATUS_CODES
from jaxserve.server.openai.reading import chunk_of, error_message, first_model
from jaxserve.settings.schema import ConfigError
from jaxserve.text.output import Delta, Finished

GENERIC_VOCAB = 256  # over HTTP no server states its vocabulary; every model has as many tokens
CONNECT_SECONDS = 10.0
STATUSES = {code: name for name, code in reversed(STATUS_CODES.items())}


@dataclasses.dataclass(frozen=True)
class Served:
    """A server's own description. max_len: tokens of a sequence; None if unknown."""

    address: str
    model: str
    vocab: int
    max_len: int | None


@dataclasses.dataclass(frozen=True)
class Ended:
    """End of an answer, by the server. cached: tokens of the prompt whose KV was reused; None
    where it does not say, as for `tokens`, those of the output, and for `in_time`, whether it kept
    its objectives."""

    reason: str = ""
    tokens: int | None = None
    cached: int | None = None
    in_time: bool | None = None


class Transport(Protocol):
    """Requests to one server."""

    @property
    def served(self) -> Served: ...

    def prepare(self, prompt: np.ndarray, output: int) -> Any:
        """Makes what `send` takes for a prompt of token ids and `output` tokens to generate."""

    async def send(self, message: Any, heard: Callable[[], object]) -> Ended:
        """Sends a request and waits for its end. heard: called at each event that has tokens.
        Errors: RequestError."""

    async def encode(self, text: str) -> list[int]:
        """The token ids of a text, by the server. Errors: ConfigError."""


@dataclasses.dataclass(frozen=True)
class Grpc:
    """Our own protocol. ignore_eos: whether outputs have exactly the asked length."""

    client: AsyncClient
    served: Served
    ignore_eos: bool

    def prepare(self, prompt: np.ndarray, output: int) -> tuple[np.ndarray, SamplingParams]:
        return prompt, SamplingParams(temperature=0, max_tokens=output, ignore_eos=self.ignore_eos)

    async def send(
        self, message: tuple[np.ndarray, SamplingParams], heard: Callable[[], object]
    ) -> Ended:
        ended = Ended()
        async for output in self.client.generate(*message, ids_only=True):
            if isinstance(output, Delta) and len(output.ids):
                heard()
            elif isinstance(output, Finished):
                usage = output.usage
                ended = Ended(output.reason, usage.completion, usage.cached, output.in_time)
        return ended

    async def encode(self, text: str) -> list[int]:
        try:
            return await self.client.tokenize(text)
        except RequestError as error:
            raise ConfigError("workload", f"the server counts no tokens: {error}") from None


@dataclasses.dataclass(frozen=True)
class Http:
    """Completions of the OpenAI protocol, streamed. ignore_eos: as for `Grpc`."""

    client: httpx.AsyncClient
    served: Served
    ignore_eos: bool

    def prepare(self, prompt: np.ndarray, output: int) -> bytes:
        body: dict[str, Any] = {
            "model": self.served.model,
            "prompt": prompt.tolist(),
            "max_tokens": output,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:  # not of the protocol, but vLLM, SGLang and llama.cpp know it
            body["ignore_eos"] = True
        return json.dumps(body, separators=(",", ":")).encode()

    async def send(self, message: bytes, heard: Callable[[], object]) -> Ended:
        ended = Ended()
        url = f"{self.served.address}/v1/completions"
        headers = {"content-type": "application/json"}
        with told():
            async with self.client.stream("POST", url, content=message, headers=headers) as answer:
                if answer.is_error:
                    await answer.aread()
                    status = STATUSES.get(answer.status_code, "UNKNOWN")
                    raise RequestError("", error_message(answer), status)
                async for line in answer.aiter_lines():
                    chunk = chunk_of(line)
                    if chunk and chunk.get("choices"):
                        heard()
                    ended = _ended(ended, chunk or {})
        return ended

    async def encode(self, text: str) -> list[int]:
        body = {"model": self.served.model, "prompt": text}
        try:
            answer = await self.client.post(f"{self.served.address}/tokenize", json=body)
            if answer.is_error:
                raise ConfigError("workload", f"{answer.url}: {error_message(answer)}")
            return list(answer.json()["tokens"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ConfigError("workload", f"/tokenize of the server: {error}") from None


def _ended(ended: Ended, chunk: Mapping[str, Any]) -> Ended:
    """Adds one more chunk to what is known of an answer's end."""
    for choice in chunk.get("choices", ()):
        if reason := choice.get("finish_reason"):
            ended = dataclasses.replace(ended, reason=reason, in_time=choice.get("in_time"))
    if usage := chunk.get("usage"):
        details = usage.get("prompt_tokens_details") or {}
        ended = dataclasses.replace(
            ended, tokens=usage.get("completion_tokens"), cached=details.get("cached_tokens")
        )
    return ended


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Turns what goes wrong on a connection into a RequestError."""
    try:
        yield
    except (httpx.HTTPError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError("", str(error) or type(error).__name__, "UNAVAILABLE") from None


@contextlib.asynccontextmanager
async def over_grpc(
    target: str, api_key: str | None, tls_ca: str | None, vocab: int | None, ignore_eos: bool
) -> AsyncIterator[Transport]:
    """Connects to a target, HOST:PORT. vocab: token ids are below it; default: the model's.
    Errors: ConfigError."""
    roots = None
    try:
        if tls_ca is not None:
            roots = Path(tls_ca).read_bytes()
    except OSError as error:
        raise ConfigError("tls_ca", f"{tls_ca}: {error.strerror}") from None
    async with AsyncClient(target, api_key=api_key, root_certificates=roots) as client:
        try:
            info = await client.model_info()
        except RequestError as error:
            denied = error.status in ("UNAUTHENTICATED", "PERMISSION_DENIED")
            field = {True: "api_key", False: "target"}[denied]
            raise ConfigError(field, str(error)) from None
        served = Served(target, info.model, vocab or info.vocab, info.max_len)
        yield Grpc(client, served, ignore_eos)


@contextlib.asynccontextmanager
async def over_http(
    url: str, api_key: str | None, tls_ca: str | None, vocab: int | None, ignore_eos: bool
) -> AsyncIterator[Transport]:
    """Connects to a server, http://HOST:PORT. vocab: as for `over_grpc`; default: GENERIC_VOCAB.
    Errors: ConfigError."""
    address = url.rstrip("/").removesuffix("/v1")
    trusted: bool | ssl.SSLContext = True
    try:
        if tls_ca is not None:
            trusted = ssl.create_default_context(cafile=tls_ca)
    except OSError as error:
        raise ConfigError("tls_ca", f"{tls_ca}: {error.strerror or error}") from None
    headers = {}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    async with httpx.AsyncClient(
        headers=headers,
        verify=trusted,
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    ) as client:
        try:
            row = first_model(await client.get(f"{address}/v1/models"))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError("url", f"{url}: {error or type(error).__name__}") from None
        served = Served(address, row["id"], vocab or GENERIC_VOCAB, row.get("max_model_len"))
        yield Http(client, served, ignore_eos)
