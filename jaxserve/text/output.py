"""Turns the engine's events of a request into what its caller reads: detokenization, stop strings,
whole completions.

An `OutputProcessor` takes the events of one request and gives `Output`s, in which consecutive
tokens of a completion are one `Delta` with ids and text. Text that may be the beginning of a stop
string is held back until that is decided. Once a stop string is complete, the text ends before it,
the engine is asked to stop, and tokens that were already on their way are dropped. The token that
ends a completion (end of text or a stop id) is among its ids, not in its text. The last `Delta` of
a completion always comes together with its `Finished`, also where a stop string ended it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from jaxserve.api.events import Accepted, Event, Finished, Logprobs, Progress, Timing, Token, Usage
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams


class Detokenizer(Protocol):
    """Turns a stream of token ids into text, piece by piece; `flush` gives what is left."""

    def push(self, *ids: int) -> str: ...
    def flush(self) -> str: ...


class NoText:
    """The detokenizer of a caller who wants ids only: gives no text."""

    def push(self, *ids: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
    """Further tokens of one completion.

    index: which of the request's n completions. text: may lag behind the ids. logprobs: one for
    each id, or none at all.
    """

    index: int
    ids: Sequence[int]
    text: str = ""
    logprobs: Sequence[Logprobs] = ()


def merged(deltas: Sequence[Delta]) -> Delta:
    """Joins consecutive deltas of one completion to one."""
    if len(deltas) == 1:
        return deltas[0]
    ids = [id for delta in deltas for id in delta.ids]
    logprobs = [p for delta in deltas for p in delta.logprobs]
    return Delta(deltas[0].index, ids, "".join(delta.text for delta in deltas), logprobs)


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """A whole completion. reason: stop, length, cancelled, deadline or error. stop: the stop string
    or id that ended it. embedding, weight_version, in_time: see `Finished`."""

    index: int
    prompt_ids: Sequence[int]
    ids: Sequence[int]
    text: str
    reason: str
    usage: Usage
    timing: Timing
    logprobs: Sequence[Logprobs] | None = None
    prompt_logprobs: Sequence[Logprobs | None] | None = None
    stop: str | int | None = None
    embedding: np.ndarray | None = None
    weight_version: str = ""
    in_time: bool | None = None


Output = Accepted | Progress | Delta | Finished


class StopStrings:
    """Finds stop strings in a text that comes in pieces.

    found: the one that is complete, '' before; it is the one that ends first, and the longest of
    several that end at the same character.
    """

    def __init__(self, stops: Sequence[str]):
        self.found = ""
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # characters of each stop string that the text ends with
        self._held_back = ""

    def push(self, text: str) -> str:
        """Takes a piece of text; returns the text that cannot be part of a stop string. Once one is
        found nothing more is returned."""
        if self.found:
            return ""
        if not self._stops:
            return text
        pending = self._held_back + text
        self._held_back = ""
        for end in range(len(pending) - len(text), len(pending)):
            length = self._advance(pending[end])
            if length:
                self.found = pending[end + 1 - length : end + 1]
                return pending[: end + 1 - length]
        certain = len(pending) - max(self._matched)
        self._held_back = pending[certain:]
        return pending[:certain]

    def flush(self) -> str:
        """Returns the text that was held back."""
        text = self._held_back
        self._held_back = ""
        return text

    def _advance(self, char: str) -> int:
        """Matches one more character against all stop strings (Knuth-Morris-Pratt). Returns the
        length of the longest one that is complete with it, 0 for none."""
        longest = 0
        for i, (stop, borders) in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            matched += stop[matched] == char
            self._matched[i] = matched
            if matched == len(stop):
                longest = max(longest, matched)
        return longest


def _borders(text: str) -> list[int]:
    """Computes, for each prefix of the text, the length of its longest proper prefix that is also
    its suffix: the failure function of Knuth-Morris-Pratt."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[length] != text[i]:
            length = borders[length - 1]
        length += text[length] == text[i]
        borders[i] = length
    return borders


class CompletionState:
    """The text of one completion so far: its detokenizer and its stop strings.

    stop_strings: one is `found` once it has ended the completion. Stop strings do not match text
    of the first `min_tokens` tokens.
    """

    def __init__(
        self, index: int, sampling: SamplingParams, eos_ids: Iterable[int], detokenizer: Detokenizer
    ):
        self.index = index
        self.stop_strings = StopStrings(sampling.stop)
        self._output_tokens = 0
        self._min_tokens = sampling.min_tokens
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._end_ids = self._stop_ids
        if not sampling.ignore_eos:
            self._end_ids |= frozenset(eos_ids)
        self._detokenizer = detokenizer
        # whether tokens need not be looked at one by one
        self._batched = not sampling.stop and sampling.logprobs is None
        # the last id where it may be the one that ends the completion: its text is held back
        self._held_id: int | None = None
        # the tokens up to a stop string: they are held back until the engine has ended
        self._last_delta: Delta | None = None

    def push(self, tokens: Sequence[Token]) -> Delta | None:
        """Takes the next tokens and drops those after a stop string. Returns None once one is
        found: `finish` returns the last tokens."""
        if self.stop_strings.found:
            return None
        delta = self._delta(tokens)
        if self.stop_strings.found:
            self._last_delta = delta
            return None
        return delta

    def _delta(self, tokens: Sequence[Token]) -> Delta:
        ids = [token.id for token in tokens]
        if self._batched and self._held_id is None and self._end_ids.isdisjoint(ids):
            self._output_tokens += len(ids)
            return Delta(self.index, ids, self._detokenizer.push(*ids), [])
        return self._push_each(tokens)

    def _push_each(self, tokens: Sequence[Token]) -> Delta:
        ids = []
        texts = []
        logprobs = []
        for token in tokens:
            if self.stop_strings.found:
                break
            self._output_tokens += 1
            ids.append(token.id)
            if token.logprobs is not None:
                logprobs.append(token.logprobs)
            texts.append(self._text_of(token.id))
        return Delta(self.index, ids, "".join(texts), logprobs)

    def finish(self, event: Finished) -> tuple[Delta | None, Finished]:
        """Ends the completion. Returns what was held back, if anything, and the event as the caller
        gets it."""
        text = ""
        if not self.stop_strings.found:
            text = self._rest(event.reason)
        usage = dataclasses.replace(event.usage, completion=self._output_tokens)
        event = dataclasses.replace(event, usage=usage)
        if self.stop_strings.found:  # maybe in the text that was held back
            found = self.stop_strings.found
            event = dataclasses.replace(event, reason="stop", error=None, stop=found)
        elif event.reason == "stop" and self._held_id in self._stop_ids:
            event = dataclasses.replace(event, stop=self._held_id)
        held_back = []
        if self._last_delta is not None:
            held_back.append(self._last_delta)
        if text:
            held_back.append(Delta(self.index, (), text))
        return (merged(held_back) if held_back else None), event

    def _text_of(self, id: int) -> str:
        """The text that is certain once this token has come."""
        text = ""
        if self._held_id is not None:
            text = self._before_stop(self._detokenizer.push(self._held_id))
        self._held_id = id if id in self._end_ids else None
        if self._held_id is not None or self.stop_strings.found:
            return text
        return text + self._before_stop(self._detokenizer.push(id))

    def _rest(self, reason: str) -> str:
        """The text that was held back; without that of the token that ended the completion."""
        text = ""
        if self._held_id is not None and reason != "stop":
            text = self._detokenizer.push(self._held_id)
        text = self._before_stop(text + self._detokenizer.flush())
        if not self.stop_strings.found:
            text += self.stop_strings.flush()
        return text

    def _before_stop(self, text: str) -> str:
        """The part of further text that is certain to stand before any stop string."""
        if self._output_tokens < self._min_tokens:
            return text
        return self.stop_strings.push(text)


class OutputProcessor:
    """Turns the events of one request into outputs.

    unfinished: completions that have not ended. stop: called with a completion's index when a stop
    string has ended it, so that the engine goes no further.
    """

    def __init__(
        self,
        request: Request,
        eos_ids: Iterable[int],
        detokenizer: Callable[[], Detokenizer],
        stop: Callable[[int], object],
    ):
        n = request.sampling.n
        self.unfinished = n
        self._completions = [
            CompletionState(i, request.sampling, eos_ids, detokenizer()) for i in range(n)
        ]
        self._stop = stop

    def feed(self, events: Sequence[Event]) -> list[Output]:
        """Returns the outputs of a batch of events."""
        outputs: list[Output] = []
        tokens: list[Token] = []  # consecutive, of one completion
        for event in events:
            if isinstance(event, Token) and (not tokens or tokens[0].index == event.index):
                tokens.append(event)
                continue
            self._push(tokens, outputs)
            tokens = []
            if isinstance(event, Token):
                tokens.append(event)
            elif isinstance(event, Finished):
                self._finish(event, outputs)
            else:
                outputs.append(event)
        self._push(tokens, outputs)
        return outputs

    def _push(self, tokens: list[Token], outputs: list[Output]) -> None:
        if not tokens:
            return
        completion = self._completions[tokens[0].index]
        stopped_before = completion.stop_strings.found
        delta = completion.push(tokens)
        if delta is not None:
            outputs.append(delta)
        if completion.stop_strings.found and not stopped_before:
            self._stop(completion.index)

    def _finish(self, event: Finished, outputs: list[Output]) -> None:
        delta, event = self._completions[event.index].finish(event)
        self.unfinished -= 1
        outputs.extend(filter(None, (delta, event)))


class PromptProcessor(OutputProcessor):
    """Leaves out the token that the engine makes after a prompt whose output is not wanted."""

    def _push(self, tokens: list[Token], outputs: list[Output]) -> None:
        pass

    def _finish(self, event: Finished, outputs: list[Output]) -> None:
        self.unfinished -= 1
        usage = dataclasses.replace(event.usage, completion=0)
        reason = "length" if event.reason == "stop" else event.reason
        outputs.append(dataclasses.replace(event, usage=usage, reason=reason))


class CompletionCollector:
    """Puts the completions of one request together from its outputs."""

    def __init__(self, prompt_ids: Sequence[int]):
        self._prompt_ids = prompt_ids
        self._deltas: dict[int, list[Delta]] = {}
        self._finished: list[Finished] = []

    def add(self, output: Output) -> None:
        if isinstance(output, Delta):
            self._deltas.setdefault(output.index, []).append(output)
        elif isinstance(output, Finished):
            self._finished.append(output)

    def completions(self) -> list[Completion]:
        """Returns the completions that have finished, by index."""
        return [
            self._joined(finished) for finished in sorted(self._finished, key=lambda f: f.index)
        ]

    def _joined(self, finished: Finished) -> Completion:
        joined = merged(self._deltas.get(finished.index) or [Delta(finished.index, [])])
        return Completion(
            finished.index,
            self._prompt_ids,
            joined.ids,
            joined.text,
            finished.reason,
            finished.usage,
            finished.timing,
            joined.logprobs or None,
            finished.prompt_logprobs,
            finished.stop,
            finished.embedding,
            finished.weight_version,
            finished.in_time,
        )
