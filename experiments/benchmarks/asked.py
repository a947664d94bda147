"""A request to an engine of this process, with the times of its tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from jaxserve.api.events import Event, Finished, Token
from jaxserve.api.request import Request, Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.engine.engine import Engine


class Asked:
    """A request to a started engine, greedy, of `answer` tokens. began: when it was submitted;
    times: when each of its `tokens` came, in seconds of time.perf_counter."""

    def __init__(
        self, engine: Engine, prompt: np.ndarray, answer: int, id: str, slo: Slo | None = None
    ):
        self.times: list[float] = []
        self.tokens: list[int] = []
        self._over = threading.Event()
        request = Request.make(
            id,
            prompt,
            SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True),
            vocab=engine.info.vocab,
            max_len=engine.info.max_model_len,
            arrival=engine.now(),
            slo=slo or Slo(),
        )
        self.began = time.perf_counter()
        engine.post(lambda: engine.submit(request, self._hear))

    def _hear(self, events: Sequence[Event]) -> None:
        now = time.perf_counter()
        for event in events:
            if isinstance(event, Token):
                self.times.append(now)
                self.tokens.append(event.id)
            elif isinstance(event, Finished):
                self._over.set()

    def ttft(self, wait: float) -> float:
        """Waits for the end, at most `wait` seconds; returns seconds to the first token. Errors:
        AssertionError where it does not end by then."""
        assert self._over.wait(wait), "the request does not end"
        return self.times[0] - self.began
