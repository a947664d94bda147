"""Parts of answers that several protocols share: tokens with their log-probabilities, and usage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jaxserve.api.events import Finished, Logprobs
from jaxserve.server.json_body import JsonObject
from jaxserve.server.streams import Stream
from jaxserve.text.output import Completion, Delta, Output
from jaxserve.text.tokenizer import Tokenizer


def usage_of(ended: Iterable[Finished | Completion]) -> JsonObject:
    """The usage of all prompts and completions of a request. A prompt counts once, however many
    completions it has."""
    prompt = 0
    cached = 0
    completion = 0
    for one in ended:
        completion += one.usage.completion
        if one.index == 0:
            prompt += one.usage.prompt
            cached += one.usage.cached
    return _usage(prompt, completion) | {"prompt_tokens_details": {"cached_tokens": cached}}


def _usage(prompt: int, completion: int) -> JsonObject:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


class RunningUsage:
    """The usage of a streamed response so far."""

    def __init__(self, streams: Sequence[Stream]):
        self._prompt = sum(len(stream.request.prompt) for stream in streams)
        self._completion = 0

    def added(
        self, outputs: Iterable[Output], chunks: Iterable[JsonObject]
    ) -> Iterator[JsonObject]:
        """The chunks of these outputs, each with the usage up to them."""
        self._completion += sum(len(one.ids) for one in outputs if isinstance(one, Delta))
        usage = _usage(self._prompt, self._completion)
        return ({**chunk, "usage": usage} for chunk in chunks)


class TokenWriter:
    """Writes single tokens and their log-probabilities. as_ids: by their ids, not their texts."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool = False):
        self._tokenizer = tokenizer
        self.as_ids = as_ids

    def bytes(self, id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.piece(id)

    def text(self, id: int) -> str:
        if self._tokenizer is None or self.as_ids:
            return f"token_id:{id}"
        return self.bytes(id).decode(errors="replace")

    def chat_logprobs(self, ids: Sequence[int], logprobs: Sequence[Logprobs]) -> list[JsonObject]:
        """Log-probabilities of tokens in the form of chat completions."""
        return [
            {
                **self._chat_logprob(id, value.chosen),
                "top_logprobs": [self._chat_logprob(*top) for top in value.top],
            }
            for id, value in zip(ids, logprobs)
        ]

    def prompt_logprobs(self, completion: Completion) -> list[dict[str, JsonObject] | None]:
        """Log-probabilities of a prompt's tokens in the form of vLLM, by id; None for the first,
        which nothing predicts. A token that is not among the most likely ones has no rank."""
        values = completion.prompt_logprobs or ()
        return [
            None if value is None else self._by_id(id, value)
            for id, value in zip(completion.prompt_ids, values)
        ]

    def _by_id(self, chosen: int, value: Logprobs) -> dict[str, JsonObject]:
        entries = {str(chosen): self._ranked(chosen, value.chosen, None)}
        for rank, (id, logprob) in enumerate(value.top, 1):
            entries[str(id)] = self._ranked(id, logprob, rank)
        return entries

    def _ranked(self, id: int, logprob: float, rank: int | None) -> JsonObject:
        return {"logprob": logprob, "rank": rank, "decoded_token": self.text(id)}

    def _chat_logprob(self, id: int, logprob: float) -> JsonObject:
        return {"token": self.text(id), "logprob": logprob, "bytes": list(self.bytes(id))}
