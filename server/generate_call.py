"""What a caller asks to be generated, before it is checked against the model that is served."""

from __future__ import annotations

import dataclasses

from jaxserve.api.request import NORMAL_RETENTION, Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.server.prompts import Prompt
from jaxserve.text.structured_output import Guided


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """How a request reached the server.

    protocol: grpc or http. traceparent, tracestate: W3C trace context, as the caller sent it.
    operation: chat, text_completion or embeddings, for traces. internal: made by the server's own
    readiness check; such a request is neither logged, traced nor counted as rejected.
    """

    protocol: str = ""
    traceparent: str | None = None
    tracestate: str = ""
    operation: str = "text_completion"
    internal: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class GenerateCall:
    """One request to generate or to embed, the same for gRPC and HTTP. Its values are plausible;
    whether this server and its model can serve them is for `Frontend.generate` to check.

    request_id: '' has the server choose one. model: '' means the one that is served. timeout:
    seconds from now. truncate_prompt_tokens: how many tokens to keep of the prompt's end, -1 as
    many as the model takes. ids_only: return token ids without text. keep_special: leave special
    tokens in the text. guided: what the output must match; guided_field: the request field that
    asked for it, for errors. embed: no tokens are wanted, but the prompt's embedding.
    """

    prompt: Prompt
    sampling: SamplingParams
    request_id: str = ""
    model: str = ""
    slo: Slo = dataclasses.field(default_factory=Slo)
    priority: int = 0
    cache_salt: str = ""
    bypass_prefix_cache: bool = False
    cache_retention: int = NORMAL_RETENTION
    timeout: float | None = None
    truncate_prompt_tokens: int | None = None
    ids_only: bool = False
    keep_special: bool = False
    guided: Guided | None = None
    guided_field: str = ""
    embed: bool = False
    origin: Origin = dataclasses.field(default_factory=Origin)
