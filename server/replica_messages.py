"""Converts what crosses border A between processes to messages of replica.proto and back.

Clocks of two processes differ: moments cross as seconds before or after now. Guides cross as what
they were compiled from.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Accepted, Event, Finished, Progress, Token
from jaxserve.api.request import Continuation, KvSource, Request, RequestOptions, Slo
from jaxserve.cache.block_events import Medium, StoredBlocks
from jaxserve.replica.info import ReplicaInfo
from jaxserve.scheduling import Load
from jaxserve.server import jaxserve_pb2 as users
from jaxserve.server import replica_pb2 as pb
from jaxserve.server.grpc.proto import (
    finished_message,
    finished_of,
    guided_message,
    logprobs_message,
    logprobs_of,
    sampling_message,
    sampling_of,
    value_in,
)
from jaxserve.settings.schema import MeshConfig
from jaxserve.text.structured_output import Guide

TOKEN_TYPE = np.dtype("<i4")


def submit_message(number: int, request: Request, now: float) -> pb.Submit:
    """A request as it crosses; now: on the clock of its arrival. Errors: RequestError for a guide
    that does not say what it was compiled from."""
    options = request.options()
    slo = options.pop("slo")
    message = pb.Submit(
        number=number,
        request_id=request.id,
        prompt=np.ascontiguousarray(request.prompt, TOKEN_TYPE).tobytes(),
        sampling=sampling_message(request.sampling),
        age=now - request.arrival,
        ttft=slo.ttft,
        tpot=slo.tpot,
        tbt=slo.tbt,
        class_name=slo.class_name,
        job=request.job,
        probe=request.probe,
        **options,
    )
    if request.kv_source is not None:
        message.kv_source.CopyFrom(pb.KvSource(**dataclasses.asdict(request.kv_source)))
    if request.continuation is not None:
        message.continuation.CopyFrom(_continuation_message(request.continuation, now))
    if request.deadline is not None:
        message.time_left = request.deadline - now
    if request.guide is not None:
        if not isinstance(request.guide, Guide):
            raise RequestError("guided", "this guide cannot be sent to another process")
        message.guided.CopyFrom(guided_message(request.guide.spec))
    return message


def request_of(message: pb.Submit, info: ReplicaInfo, now: float) -> Request:
    """The request of a message, without its guide; now: on the replica's clock. Errors:
    RequestError for what this replica's model cannot take."""
    return Request.make(
        message.request_id,
        _tokens_of("prompt", message.prompt),
        sampling_of(message.sampling),
        vocab=info.vocab,
        max_len=info.max_model_len,
        classes=info.class_names,
        arrival=now - message.age,
        deadline=now + message.time_left if message.HasField("time_left") else None,
        kv_source=_kv_source_of(message),
        continuation=_continuation_of(message, now),
        job=message.job,
        probe=message.probe,
        **_options_of(message),
    )


def _options_of(message: pb.Submit) -> dict[str, Any]:
    """The request's options by name, as `RequestOptions` has them."""
    options = {name: getattr(message, name) for name in RequestOptions().options() if name != "slo"}
    slo = Slo(*(value_in(message, name) for name in ("ttft", "tpot", "class_name", "tbt")))
    return {**options, "slo": slo}


def _kv_source_of(message: pb.Submit) -> KvSource | None:
    if not message.HasField("kv_source"):
        return None
    source = message.kv_source
    return KvSource(source.address, source.blocks, source.request_id, source.block_size)


def _continuation_message(continuation: Continuation, now: float) -> pb.Continuation:
    message = pb.Continuation(weight_version=continuation.weight_version)
    for index, ids in continuation.outputs.items():
        message.completions.add(index=index, output=np.asarray(ids, TOKEN_TYPE).tobytes())
    if continuation.first_token is not None:
        message.first_token_age = now - continuation.first_token
    if continuation.last_token is not None:
        message.last_token_age = now - continuation.last_token
    return message


def _continuation_of(message: pb.Submit, now: float) -> Continuation | None:
    """The inverse of `_continuation_message`. Errors: RequestError."""
    if not message.HasField("continuation"):
        return None
    begun = message.continuation
    outputs = {
        one.index: _tokens_of("continuation", one.output).tolist() for one in begun.completions
    }
    age = value_in(begun, "first_token_age")
    if age is None and any(outputs.values()):
        raise RequestError("continuation", "has tokens and not when the first of them came")
    first_token = None if age is None else now - age
    last_age = value_in(begun, "last_token_age")
    last_token = None if last_age is None else now - last_age
    return Continuation(outputs, first_token, begun.weight_version, last_token)


def _tokens_of(name: str, content: bytes) -> np.ndarray:
    """Reads token ids of the field `name`. Errors: RequestError."""
    if len(content) % TOKEN_TYPE.itemsize:
        raise RequestError(name, f"has {len(content)} bytes, not 4 for each token")
    return np.frombuffer(content, TOKEN_TYPE)


def event_message(event: Event) -> pb.Event:
    match event:
        case Token():
            token = users.Token(index=event.index, ids=[event.id])
            if event.logprobs is not None:
                token.logprobs.append(logprobs_message(event.logprobs))
            return pb.Event(token=token)
        case Accepted():
            return pb.Event(
                accepted=users.Accepted(
                    queue_position=event.queue_position, predicted_ttft=event.predicted_ttft
                )
            )
        case Progress():
            return pb.Event(
                progress=users.Progress(
                    index=event.index,
                    prefilled=event.prefilled,
                    total=event.total,
                    predicted_ttft=event.ttft,
                )
            )
        case Finished():
            error = None if event.error is None else error_message(event.error)
            return pb.Event(finished=finished_message(event), error=error)


def event_of(message: pb.Event) -> Event:
    """The inverse of `event_message`. Errors: RequestError for an event that is not known."""
    match message.WhichOneof("kind"):
        case "token":
            token = message.token
            logprobs = logprobs_of(token.logprobs[0]) if token.logprobs else None
            return Token(token.index, token.ids[0], logprobs)
        case "accepted":
            return Accepted(message.accepted.queue_position, message.accepted.predicted_ttft)
        case "progress":
            progress = message.progress
            return Progress(
                progress.index, progress.prefilled, progress.total, progress.predicted_ttft
            )
        case "finished":
            error = error_of(message.error) if message.HasField("error") else None
            return dataclasses.replace(finished_of(message.finished), error=error)
    raise RequestError("event", "the replica sent an event of another version", "UNIMPLEMENTED")


def events_message(number: int, events: Iterable[Event]) -> pb.RequestEvents:
    return pb.RequestEvents(number=number, events=map(event_message, events))


def stored_message(blocks: StoredBlocks) -> pb.StoredBlocks:
    """Blocks that a cache has stored, without their tokens."""
    return pb.StoredBlocks(keys=blocks.keys, parent=blocks.parent, salt=blocks.salt)


def stored_of(message: pb.StoredBlocks, medium: Medium) -> StoredBlocks:
    parent = value_in(message, "parent")
    return StoredBlocks(tuple(message.keys), medium, parent, salt=message.salt)


def error_message(error: RequestError) -> pb.Error:
    return pb.Error(
        field=error.field,
        message=error.message,
        status=error.status,
        retry_after=error.retry_after,
        reason=error.reason,
    )


def error_of(message: pb.Error) -> RequestError:
    return RequestError(
        message.field,
        message.message,
        message.status,
        value_in(message, "retry_after"),
        message.reason,
    )


def load_message(load: Load) -> pb.Load:
    return pb.Load(**{name.name: getattr(load, name.name) for name in pb.Load.DESCRIPTOR.fields})


def load_of(message: pb.Load) -> Load:
    return Load(**{name.name: getattr(message, name.name) for name in pb.Load.DESCRIPTOR.fields})


def info_text(info: ReplicaInfo) -> str:
    """A replica's facts as JSON."""
    return json.dumps(dataclasses.asdict(info))


def info_of(text: str) -> ReplicaInfo:
    """The inverse of `info_text`. Errors: RequestError for facts of another version."""
    try:
        values = json.loads(text)
        return ReplicaInfo(
            **{
                **values,
                "mesh": MeshConfig(**values["mesh"]),
                "eos_ids": tuple(values["eos_ids"]),
                "class_names": tuple(values["class_names"]),
                "other_names": tuple(values["other_names"]),
                "page_windows": tuple(values["page_windows"]),
            }
        )
    except (TypeError, ValueError, KeyError) as error:
        raise RequestError("info", f"of another version: {error}", "UNIMPLEMENTED") from None
