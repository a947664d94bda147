"""Dynamo's requests as ours, and our events as the chunks that it streams: plain data on both
sides, so that Dynamo need not be installed.

Source: dynamo.common.backend.engine (`GenerateRequest`, `GenerateChunk`), release 1.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Event, Finished, Token
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.replica.info import ReplicaInfo

Chunk = dict[str, Any]
TokenText = Callable[[int], str]
SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)
STOP = ("max_tokens", "min_tokens", "ignore_eos")
# of which the backend knows nothing, and that change what is generated
UNSUPPORTED = ("guided_decoding", "best_of", "use_beam_search")
UNSUPPORTED_INPUTS = ("multi_modal_data", "prefill_result", "bootstrap_info", "encoder_result")


def request_of(given: Mapping[str, Any], id: str, info: ReplicaInfo, arrival: float) -> Request:
    """The request that Dynamo asks for. Stop strings are Dynamo's: it cancels where it finds one.
    arrival: seconds on the replica's clock. Errors: RequestError that names field and limit."""
    for name in UNSUPPORTED_INPUTS:
        if given.get(name):
            raise RequestError(name, "is not supported by this replica", "FAILED_PRECONDITION")
    return Request.make(
        id,
        given["token_ids"],
        _sampling(given, info),
        vocab=info.vocab,
        max_len=info.max_model_len,
        classes=info.class_names,
        arrival=arrival,
    )


def _sampling(given: Mapping[str, Any], info: ReplicaInfo) -> SamplingParams:
    options = given.get("sampling_options") or {}
    stop = given.get("stop_conditions") or {}
    output = given.get("output_options") or {}
    for name in UNSUPPORTED:
        if options.get(name) not in (None, False, 1):
            raise RequestError(f"sampling_options.{name}", "is not supported by this backend")
    fields = {name: options.get(name) for name in SAMPLING}
    fields |= {name: stop.get(name) for name in STOP}
    top_k = options.get("top_k")
    ids = [*(stop.get("stop_token_ids") or ()), *(stop.get("stop_token_ids_hidden") or ())]
    if fields["max_tokens"] is None:
        fields["max_tokens"] = info.max_model_len
    return info.sampling(
        top_k=None if top_k is None or top_k < 0 else top_k,
        # the model's own ends are known, and a request may have few others
        stop_token_ids=sorted(set(ids) - set(info.eos_ids)),
        logprobs=output.get("logprobs"),
        **fields,
    )


def chunks_of(events: Sequence[Event], text: TokenText) -> Iterator[Chunk]:
    """The chunks of a step's events. text: of a token, beside its log-probability. Errors:
    RequestError where a completion ended with one."""
    for event in events:
        if isinstance(event, Token):
            yield _token_chunk(event, text)
        elif isinstance(event, Finished):
            yield _last_chunk(event)


def _token_chunk(event: Token, text: TokenText) -> Chunk:
    chunk: Chunk = {"token_ids": [event.id], "index": event.index}
    if event.logprobs is not None:
        chunk["log_probs"] = [event.logprobs.chosen]
        chunk["top_logprobs"] = [
            [
                {"rank": rank, "token_id": id, "token": text(id), "logprob": logprob}
                for rank, (id, logprob) in enumerate(event.logprobs.top, 1)
            ]
        ]
    return chunk


def _last_chunk(event: Finished) -> Chunk:
    if event.error is not None:
        raise event.error
    usage = event.usage
    return {
        "token_ids": [],
        "index": event.index,
        # a deadline cuts an output as its length does
        "finish_reason": "length" if event.reason == "deadline" else event.reason,
        "completion_usage": {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
            "total_tokens": usage.prompt + usage.completion,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
        },
    }
