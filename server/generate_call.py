"""Calls to generate, of any protocol, before they are checked against the model that is served."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxserve.api.request import RequestOptions
from jaxserve.api.sampling import SamplingParams
from jaxserve.server.kv_tickets import KvTransfer
from jaxserve.server.prompts import Prompt
from jaxserve.text.structured_output import Guided


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """The way by which a request reached the server.

    protocol: grpc or http. traceparent, tracestate: W3C trace context, as the caller sent it.
    operation: chat, text_completion or embeddings, for traces. internal: made by the server's own
    readiness check; such a request is neither logged, traced nor counted as rejected.
    """

    protocol: str = ""
    traceparent: str | None = None
    tracestate: str = ""
    operation: str = "text_completion"
    internal: bool = False

    @classmethod
    def of_http(cls, headers: Mapping[str, str], operation: str) -> Origin:
        """Returns the origin of a request over HTTP."""
        traceparent = headers.get("traceparent")
        return cls("http", traceparent, headers.get("tracestate", ""), operation)


@dataclasses.dataclass(frozen=True, slots=True)
class GenerateCall(RequestOptions):
    """A request to generate or to embed, the same for gRPC and HTTP. Its values are plausible;
    `Frontend.generate` checks them against the server and its model.

    request_id: '' has the server choose one. model: '' means the one that is served. timeout:
    seconds from now. truncate_prompt_tokens: how many tokens to keep of the prompt's end, -1 as
    many as the model takes. ids_only: return token ids without text. keep_special: leave special
    tokens in the text. streamed: send tokens as they come. prompt_only: leave out the output, of
    which the engine makes at least a token. guided: what the output must match; guided_field: the
    request field that asked for it, for errors. kv_transfer: what a router asks of the prompt's KV.
    """

    prompt: Prompt
    sampling: SamplingParams
    request_id: str = ""
    model: str = ""
    timeout: float | None = None
    truncate_prompt_tokens: int | None = None
    ids_only: bool = False
    keep_special: bool = False
    streamed: bool = True
    prompt_only: bool = False
    guided: Guided | None = None
    guided_field: str = ""
    kv_transfer: KvTransfer | None = None
    origin: Origin = dataclasses.field(default_factory=Origin)
