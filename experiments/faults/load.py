"""Callers that ask all the time for what is known beforehand, and a record of each request."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxserve.api.sampling import SamplingParams
from jaxserve.server.client import Client, ServerError

PROMPTS = 24
VOCABULARY = 500
PROMPT_TOKENS = (6, 40, 150, 300, 90, 220)
ANSWER_TOKENS = (60, 120, 200, 300)
RIGHT, WRONG, HUNG = "right", "wrong", "hung"
PAUSE_SECONDS = 0.4  # of a caller between requests, at most


@dataclass(frozen=True)
class Question:
    """A prompt and how its answer is sampled: greedily, or with a seed."""

    prompt: tuple[int, ...]
    sampling: SamplingParams


def questions(seed: int) -> list[Question]:
    dice = random.Random(seed)
    made = []
    for number in range(PROMPTS):
        size = PROMPT_TOKENS[number % len(PROMPT_TOKENS)]
        prompt = tuple(dice.randrange(5, VOCABULARY) for _ in range(size))
        tokens = ANSWER_TOKENS[number % len(ANSWER_TOKENS)]
        draws = {"temperature": 0.8, "seed": 1000 + number} if number % 2 else {"temperature": 0}
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, **draws)
        made.append(Question(prompt, sampling))
    return made


@dataclass
class Asked:
    """One request. end: how it ended, right, wrong, hung or a status; "" while it runs."""

    sent: float
    first: float = 0.0
    ended: float = 0.0
    end: str = ""
    ids: list[int] = field(default_factory=list)


def answer(client: Client, question: Question, salt: str, seconds: float, asked: Asked) -> None:
    """Reads the tokens of an answer as they come. Errors: ServerError."""
    outputs = client.generate(
        question.prompt,
        question.sampling,
        timeout=seconds,
        ids_only=True,
        kv={"cache_salt": salt},
    )
    for output in outputs:
        new = getattr(output, "ids", ())
        if new:
            asked.first = asked.first or time.monotonic()
            asked.ids += new


def right_answers(
    target: str, all_questions: Sequence[Question], seconds: float
) -> list[list[int]]:
    """Asks one server, one question after the other, while nothing fails."""
    found = []
    with Client(target) as client:
        client.wait_ready(seconds)
        for number, question in enumerate(all_questions):
            asked = Asked(time.monotonic())
            answer(client, question, f"first {number}", seconds, asked)
            found.append(asked.ids)
    return found


class Callers:
    """Threads that ask again and again until `stop`. Each request has a cache salt of its own, so
    that its prompt is computed, or fetched from who computes it for this request. bound: seconds in
    which a request must have an answer or a status."""

    def __init__(
        self,
        target: str,
        all_questions: Sequence[Question],
        right: Sequence[Sequence[int]],
        count: int,
        bound: float,
    ):
        self._target = target
        self._questions = all_questions
        self._right = right
        self._bound = bound
        self._numbers = itertools.count()
        self._over = threading.Event()
        self.all: list[Asked] = []
        self._threads = [
            threading.Thread(target=self._call, args=(number,), daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Returns when all requests have ended, or should have long ago."""
        self._over.set()
        deadline = time.monotonic() + 3 * self._bound
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def running(self) -> list[Asked]:
        return [asked for asked in self.all[-10 * len(self._threads) :] if not asked.end]

    def _call(self, number: int) -> None:
        dice = random.Random(number)
        with Client(self._target) as client:
            while not self._over.is_set():
                which = dice.randrange(len(self._questions))
                asked = Asked(time.monotonic())
                self.all.append(asked)
                self._ask(client, which, asked)
                self._over.wait(dice.uniform(0.0, PAUSE_SECONDS))

    def _ask(self, client: Client, which: int, asked: Asked) -> None:
        salt = f"{next(self._numbers)}"
        try:
            answer(client, self._questions[which], salt, 2 * self._bound, asked)
            end = RIGHT if asked.ids == list(self._right[which]) else WRONG
        except ServerError as error:
            end = error.status
            partial = self._right[which][: len(asked.ids)]
            if asked.ids != list(partial):
                end = WRONG
        asked.ended = time.monotonic()
        asked.end = HUNG if asked.ended - asked.sent > self._bound else end

    def between(self, begin: float, until: float) -> Counter[str]:
        """Counts the ends of requests that ran at some moment of a time."""
        return Counter(
            asked.end or HUNG
            for asked in self.all
            if asked.sent < until and (not asked.ended or asked.ended > begin)
        )
