"""Log-probabilities in the form of /v1/completions: of each token its text, which is also the key
of the likeliest ones, and its place in the choice's text."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.api.events import Logprobs
from jaxserve.server.generation.token_writer import TokenWriter
from jaxserve.server.json_body import JsonObject


class CompletionLogprobs:
    """Writes the log-probabilities of tokens."""

    def __init__(self, tokens: TokenWriter):
        self._tokens = tokens

    def write(
        self, ids: Sequence[int], values: Sequence[Logprobs | None], offsets: Sequence[int]
    ) -> JsonObject:
        """values: None for the first token of a prompt, which nothing predicts. offsets: places of
        the tokens in the choice's text."""
        return {
            "tokens": [self._name(id) for id in ids],
            "token_logprobs": [None if value is None else value.chosen for value in values],
            "top_logprobs": [
                None if value is None else self._top(id, value) for id, value in zip(ids, values)
            ],
            "text_offset": list(offsets),
        }

    def _top(self, chosen: int, value: Logprobs) -> dict[str, float]:
        """The likeliest tokens. Of several with one text the chosen one is shown, or else the
        likeliest."""
        top = {self._name(chosen): value.chosen}
        for id, logprob in value.top:
            top.setdefault(self._name(id), logprob)
        return top

    def _name(self, id: int) -> str:
        """A token's text, or its bytes, as OpenAI writes them, where these are part of a
        character."""
        try:
            self._tokens.bytes(id).decode()
        except UnicodeDecodeError:
            if not self._tokens.as_ids:
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._tokens.bytes(id))
        return self._tokens.text(id)
