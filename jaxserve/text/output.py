"""From the tokens of a request to the text a caller reads.

An `OutputProcessor` follows one request. The engine's events go in, batch by batch; out come the same events
with each completion's tokens gathered in `Delta`s, text included. Text that may begin a stop string
is held back until it is known; once a stop string is there, the text ends before it, the engine is
told, and tokens that were already on their way are dropped. The token that ends a completion (end
of text or a stop id) is among its ids, not in its text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from jaxserve.api.events import Accepted, Event, Finished, Logprobs, Progress, Timing, Token, Usage
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams


class Detokenizer(Protocol):
    def push(self, *ids: int) -> str: ...
    def flush(self) -> str: ...


class NoText:
    """The detokeniser of a caller who wants ids only."""

    def push(self, *ids: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
    """More of one completion. The text may lag behind the ids; the logprobs are as many as the ids,
    or none."""

    index: int
    ids: Sequence[int]
    text: str = ""
    logprobs: Sequence[Logprobs] = ()


def merged(deltas: Sequence[Delta]) -> Delta:
    """Deltas of one completion that follow each other, as one."""
    if len(deltas) == 1:
        return deltas[0]
    ids = [id for delta in deltas for id in delta.ids]
    logprobs = [p for delta in deltas for p in delta.logprobs]
    return Delta(deltas[0].index, ids, "".join(delta.text for delta in deltas), logprobs)


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """One completion, whole. reason: stop, length, cancelled, deadline or error."""

    index: int
    prompt_ids: Sequence[int]
    ids: Sequence[int]
    text: str
    reason: str
    usage: Usage
    timing: Timing
    logprobs: Sequence[Logprobs] | None = None
    prompt_logprobs: Sequence[Logprobs | None] | None = None


Output = Accepted | Progress | Delta | Finished


class StopStrings:
    """Finds the stop string that ends first (the longest of these), however the text is split into
    pieces."""

    def __init__(self, stops: Sequence[str]):
        self.found = False
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # how much of each stop string the text ends with
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is certain to stand before any stop string; after a match nothing more."""
        if self.found or not self._stops:
            return "" if self.found else text
        held = self._held + text
        self._held = ""
        for end in range(len(held) - len(text), len(held)):
            whole = self._advance(held[end])
            if whole:
                self.found = True
                return held[: end + 1 - whole]
        sure = len(held) - max(self._matched)
        self._held = held[sure:]
        return held[:sure]

    def flush(self) -> str:
        held = self._held
        self._held = ""
        return held

    def _advance(self, char: str) -> int:
        """Knuth-Morris-Pratt, one character on; the length of the longest stop string that is
        complete with it, or 0."""
        whole = 0
        for i, (stop, borders) in enumerate(self._stops):
            at = self._matched[i]
            while at and stop[at] != char:
                at = borders[at - 1]
            at += stop[at] == char
            self._matched[i] = at
            if at == len(stop):
                whole = max(whole, at)
        return whole


def _borders(text: str) -> list[int]:
    """For each prefix of the text the length of its longest proper prefix that is also its
    suffix."""
    borders = [0] * len(text)
    at = 0
    for i in range(1, len(text)):
        while at and text[at] != text[i]:
            at = borders[at - 1]
        at += text[at] == text[i]
        borders[i] = at
    return borders


class CompletionState:
    """One completion while it is written. min_tokens counts tokens; stop strings that come before
    it do not match."""

    def __init__(
        self, index: int, sampling: SamplingParams, eos_ids: Iterable[int], detokenizer: Detokenizer
    ):
        self.index = index
        self.stops = StopStrings(sampling.stop)
        self._count = 0
        self._min_tokens = sampling.min_tokens
        self._ends = frozenset(sampling.stop_token_ids) | frozenset(
            () if sampling.ignore_eos else eos_ids
        )
        self._detokenizer = detokenizer
        # so that tokens need not be looked at one by one
        self._plain = not sampling.stop and sampling.logprobs is None
        # an id that may be the one that ends the completion: its text waits
        self._last: int | None = None

    def push(self, tokens: Sequence[Token]) -> Delta:
        """Tokens that follow each other. Those behind a stop string are dropped."""
        ids = [token.id for token in tokens]
        if self._plain and self._last is None and self._ends.isdisjoint(ids):
            self._count += len(ids)
            return Delta(self.index, ids, self._detokenizer.push(*ids), [])
        return self._push_each(tokens)

    def _push_each(self, tokens: Sequence[Token]) -> Delta:
        ids = []
        texts = []
        logprobs = []
        for token in tokens:
            if self.stops.found:
                break
            self._count += 1
            ids.append(token.id)
            if token.logprobs is not None:
                logprobs.append(token.logprobs)
            texts.append(self._text(token.id))
        return Delta(self.index, ids, "".join(texts), logprobs)

    def finish(self, event: Finished) -> tuple[Delta | None, Finished]:
        """What text is left, and the event as the caller sees it."""
        text = "" if self.stops.found else self._rest(event.reason)
        event = dataclasses.replace(
            event, usage=dataclasses.replace(event.usage, completion=self._count)
        )
        if self.stops.found:
            event = dataclasses.replace(event, reason="stop", error=None)
        return (Delta(self.index, (), text) if text else None), event

    def _text(self, id: int) -> str:
        held = self._last
        self._last = id if id in self._ends else None
        text = "" if held is None else self._scan(self._detokenizer.push(held))
        return (
            text
            if self._last is not None or self.stops.found
            else text + self._scan(self._detokenizer.push(id))
        )

    def _rest(self, reason: str) -> str:
        text = "" if self._last is None or reason == "stop" else self._detokenizer.push(self._last)
        return self._scan(text + self._detokenizer.flush()) + (
            "" if self.stops.found else self.stops.flush()
        )

    def _scan(self, text: str) -> str:
        return text if self._count < self._min_tokens else self.stops.push(text)


class OutputProcessor:
    """One request while it is answered. `stop(index)` is called when a stop string has ended a
    completion."""

    def __init__(
        self,
        request: Request,
        eos_ids: Iterable[int],
        detokenizer: Callable[[], Detokenizer],
        stop: Callable[[int], object],
    ):
        n = request.sampling.n
        self.unfinished = n
        self._writers = [
            CompletionState(i, request.sampling, eos_ids, detokenizer()) for i in range(n)
        ]
        self._stop = stop

    def feed(self, events: Sequence[Event]) -> list[Output]:
        """The outputs of a batch of events."""
        outputs: list[Output] = []
        run: list[Token] = []
        for event in events:
            if isinstance(event, Token) and (not run or run[0].index == event.index):
                run.append(event)
                continue
            self._write(run, outputs)
            run = []
            if isinstance(event, Token):
                run.append(event)
            elif isinstance(event, Finished):
                self._finish(event, outputs)
            else:
                outputs.append(event)
        self._write(run, outputs)
        return outputs

    def _write(self, tokens: list[Token], outputs: list[Output]) -> None:
        if not tokens:
            return
        writer = self._writers[tokens[0].index]
        done = writer.stops.found
        delta = writer.push(tokens)
        if delta.ids:
            outputs.append(delta)
        if writer.stops.found and not done:
            self._stop(writer.index)

    def _finish(self, event: Finished, outputs: list[Output]) -> None:
        delta, event = self._writers[event.index].finish(event)
        self.unfinished -= 1
        outputs.extend(filter(None, (delta, event)))


class CompletionCollector:
    """The completions of one request, put together from its outputs."""

    def __init__(self, prompt_ids: Sequence[int]):
        self._prompt_ids = prompt_ids
        self._parts: dict[int, list[Delta]] = {}
        self._finished: list[Finished] = []

    def add(self, output: Output) -> None:
        if isinstance(output, Delta):
            self._parts.setdefault(output.index, []).append(output)
        elif isinstance(output, Finished):
            self._finished.append(output)

    def completions(self) -> list[Completion]:
        """Those that have finished, in the order of their indexes."""
        return [
            self._joined(finished) for finished in sorted(self._finished, key=lambda f: f.index)
        ]

    def _joined(self, finished: Finished) -> Completion:
        whole = merged(self._parts.get(finished.index) or [Delta(finished.index, [])])
        return Completion(
            finished.index,
            self._prompt_ids,
            whole.ids,
            whole.text,
            finished.reason,
            finished.usage,
            finished.timing,
            whole.logprobs or None,
            finished.prompt_logprobs,
        )
