"""Sums of what callers have used since the server's start, for bills and reports."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.server.auth.access import Caller
from jaxserve.server.request_log import Outcome

MAX_ROWS = 4096  # further keys and models are counted together
OTHERS = ("*", "*", "*")


@dataclasses.dataclass(slots=True)
class Used:
    """Sums of requests that were accepted: tokens of their prompts, of these the cached ones, and
    tokens put out."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class UsageTable:
    """Counts by name of the key, tenant, and model or adapter. Belongs to the event loop."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str], Used] = {}

    def count(self, caller: Caller, model: str, prompt: int, outcome: Outcome) -> None:
        """Counts a request of a caller for a model, which has ended, or was cancelled: then nothing
        is known of cached tokens. prompt: its tokens."""
        row = caller.name, caller.tenant, model
        if row not in self._rows and len(self._rows) >= MAX_ROWS:
            row = OTHERS
        used = self._rows.setdefault(row, Used())
        used.requests += 1
        used.completion_tokens += outcome.output_tokens
        used.prompt_tokens += prompt
        if outcome.finished:
            used.cached_tokens += outcome.finished[0].usage.cached

    def rows(self) -> list[dict[str, Any]]:
        """Returns all sums, by key, tenant and model."""
        return [
            {"key": key, "tenant": tenant, "model": model, **dataclasses.asdict(used)}
            for (key, tenant, model), used in sorted(self._rows.items())
        ]
