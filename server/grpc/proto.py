"""Converts protobuf messages to plain data and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Accepted, Finished, Logprobs, Progress, Timing, Usage
from jaxserve.api.request import Slo, seconds_of
from jaxserve.api.sampling import SamplingParams
from jaxserve.replica.info import ReplicaInfo
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.generate_call import GenerateCall
from jaxserve.server.prompts import Chat, Prompt, Text
from jaxserve.text.output import Delta, Output
from jaxserve.text.structured_output import Guided

# a prompt as callers of the clients write it
PromptArgument = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, str]]


def stated_sampling(message: pb.SamplingParams) -> dict[str, Any]:
    """Returns the sampling parameters that are set, by name."""
    return {field.name: value for field, value in message.ListFields()}


def sampling_of(message: pb.SamplingParams) -> SamplingParams:
    """The inverse of `sampling_message`. Errors: RequestError."""
    return SamplingParams.make(**stated_sampling(message))


def slo_of(message: pb.Slo) -> Slo:
    """Latency objectives in seconds. Errors: RequestError."""
    ttft = seconds_of("slo.ttft_ms", value_in(message, "ttft_ms"))
    tpot = seconds_of("slo.tbt_ms", value_in(message, "tbt_ms"))
    tbt = seconds_of("slo.gap_ms", value_in(message, "gap_ms"))
    return Slo(ttft, tpot, message.class_name or None, tbt)


def generate_call(
    message: pb.GenerateRequest, timeout: float | None, info: ReplicaInfo
) -> GenerateCall:
    """The call that a message asks for. timeout: seconds that the caller waits. Errors:
    RequestError."""
    guided = guided_of(message.guided)
    return GenerateCall(
        prompt=prompt_of(message),
        sampling=info.sampling(**stated_sampling(message.sampling)),
        request_id=message.request_id,
        model=message.model,
        timeout=timeout,
        ids_only=message.ids_only,
        guided=guided,
        guided_field=f"guided.{guided.kind}" if guided else "",
        slo=slo_of(message.slo),
        priority=message.slo.priority,
        embed=message.embed,
        **{field.name: getattr(message.kv, field.name) for field in message.kv.DESCRIPTOR.fields},
    )


def guided_of(message: pb.Guided) -> Guided | None:
    """Returns what the output must match; None if it is free."""
    match message.WhichOneof("kind"):
        case None:
            return None
        case "choice":
            return Guided("choice", choices=tuple(message.choice.texts))
        case "json_object":
            return Guided("json_object") if message.json_object else None
        case kind:
            return Guided(kind, getattr(message, kind))


def guided_message(guided: Guided) -> pb.Guided:
    """The inverse of `guided_of`. Errors: RequestError."""
    guided.check()
    message = pb.Guided()
    if guided.kind == "choice":
        message.choice.texts.extend(guided.choices)
    else:
        setattr(message, guided.kind, guided.kind == "json_object" or guided.text)
    return message


def prompt_of(message: pb.GenerateRequest | pb.TokenizeRequest) -> Prompt:
    """The prompt of a GenerateRequest or a TokenizeRequest. Errors: RequestError if there is
    none."""
    match message.WhichOneof("prompt"):
        case "token_ids":
            return message.token_ids.ids
        case "text":
            return Text(message.text, getattr(message, "special", True))
        case "chat":
            return Chat([{"role": m.role, "content": m.content} for m in message.chat.messages])
    raise RequestError("prompt", "is missing")


def value_in(message: Any, name: str) -> Any:
    """Returns the value of a field; None if it is not set."""
    return getattr(message, name) if message.HasField(name) else None


def event_message(id: str, prompt_tokens: int, output: Output) -> pb.GenerateEvent:
    """The message for one output of a request's stream."""
    match output:
        case Delta():
            token = pb.Token(
                index=output.index,
                ids=output.ids,
                text=output.text,
                logprobs=map(logprobs_message, output.logprobs),
            )
            return pb.GenerateEvent(token=token)
        case Progress():
            return pb.GenerateEvent(
                progress=pb.Progress(
                    index=output.index,
                    prefilled=output.prefilled,
                    total=output.total,
                    predicted_ttft=output.ttft,
                )
            )
        case Accepted():
            return pb.GenerateEvent(
                accepted=pb.Accepted(
                    request_id=id,
                    queue_position=output.queue_position,
                    prompt_tokens=prompt_tokens,
                    predicted_ttft=output.predicted_ttft,
                )
            )
        case Finished():
            return pb.GenerateEvent(finished=finished_message(output))


def finished_message(event: Finished) -> pb.Finished:
    usage = event.usage
    timing = event.timing
    message = pb.Finished(
        index=event.index,
        reason=event.reason,
        usage=pb.Usage(prompt=usage.prompt, cached=usage.cached, completion=usage.completion),
        timing=pb.Timing(**dataclasses.asdict(timing)),
        prompt_logprobs=map(logprobs_message, event.prompt_logprobs or ()),
        embedding=event.embedding,
        weight_version=event.weight_version,
    )
    if event.in_time is not None:
        message.in_time = event.in_time
    return message


def logprobs_message(logprobs: Logprobs | None) -> pb.Logprobs:
    if logprobs is None:
        return pb.Logprobs()
    return pb.Logprobs(
        chosen=logprobs.chosen,
        top=[pb.Logprobs.Top(id=id, logprob=value) for id, value in logprobs.top],
    )


def output_of(event: pb.GenerateEvent) -> Output:
    """The output of a message: the inverse of `event_message`, for clients. Errors:
    RequestError."""
    match event.WhichOneof("event"):
        case "token":
            token = event.token
            return Delta(
                token.index,
                list(token.ids),
                token.text,
                [logprobs_of(p) or Logprobs(math.nan) for p in token.logprobs],
            )
        case "progress":
            return Progress(
                event.progress.index,
                event.progress.prefilled,
                event.progress.total,
                event.progress.predicted_ttft,
            )
        case "accepted":
            return Accepted(event.accepted.queue_position, event.accepted.predicted_ttft)
        case "finished":
            return finished_of(event.finished)
    raise RequestError(
        "event", "the server sent an event that this client does not know", "UNIMPLEMENTED"
    )


def finished_of(message: pb.Finished) -> Finished:
    usage = message.usage
    timing = message.timing
    return Finished(
        message.index,
        message.reason,
        Usage(usage.prompt, usage.cached, usage.completion),
        Timing(**{name: getattr(timing, name) for name in timing.DESCRIPTOR.fields_by_name}),
        tuple(map(logprobs_of, message.prompt_logprobs)) or None,
        embedding=np.array(message.embedding, np.float32) if message.embedding else None,
        weight_version=message.weight_version,
        in_time=value_in(message, "in_time"),
    )


def logprobs_of(message: pb.Logprobs) -> Logprobs | None:
    if not message.HasField("chosen"):
        return None
    return Logprobs(message.chosen, tuple((top.id, top.logprob) for top in message.top))


def generate_message(
    prompt: PromptArgument,
    sampling: SamplingParams | None,
    guided: Guided | None = None,
    **fields: Any,
) -> pb.GenerateRequest:
    """A request to send. sampling: None for the server's defaults. Errors: RequestError."""
    message = pb.GenerateRequest(**fields)
    if guided is not None:
        message.guided.CopyFrom(guided_message(guided))
    set_prompt(message, prompt)
    if sampling is not None:
        message.sampling.CopyFrom(sampling_message(sampling))
    return message


def set_prompt(message: pb.GenerateRequest | pb.TokenizeRequest, prompt: PromptArgument) -> None:
    """Sets a message's prompt to text, token ids or chat messages. Errors: RequestError."""
    if isinstance(prompt, str):
        message.text = prompt
    elif len(prompt) and isinstance(prompt[0], Mapping):
        message.chat.CopyFrom(pb.Chat(messages=map(_chat_message, prompt)))
    else:
        message.token_ids.SetInParent()
        message.token_ids.ids.extend(_int_list(prompt))


def sampling_message(sampling: SamplingParams) -> pb.SamplingParams:
    """Sampling parameters to send. All that have a value are set: a server may have defaults of its
    own."""
    message = pb.SamplingParams()
    for field in message.DESCRIPTOR.fields:
        value = getattr(sampling, field.name)
        if value is None:
            continue
        if field.name == "logit_bias":
            message.logit_bias.update(dict(value))
        elif isinstance(value, tuple):
            getattr(message, field.name).extend(value)
        else:
            setattr(message, field.name, value)
    return message


def _chat_message(message: Mapping[str, str]) -> pb.Chat.Message:
    if set(message) != {"role", "content"}:
        raise RequestError(
            "messages", f"an entry has role and content, not {', '.join(map(repr, message))}"
        )
    return pb.Chat.Message(**message)


def _int_list(ids: Iterable[Any]) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
