"""Logs a message that would come again and again only once."""

from __future__ import annotations

import functools
import logging

MAX_REMEMBERED = 1024  # different messages; the one that is longest unused is forgotten first


class LogOnce:
    """Logs each different message once, as long as it is remembered."""

    def __init__(self, log: logging.Logger):
        self._log = log
        self._say = functools.lru_cache(MAX_REMEMBERED)(self._write)

    def warning(self, message: str, *values: object) -> None:
        """Logs a message, with values for its places, unless it was logged before."""
        self._say(message, *values)

    def forget(self) -> None:
        """Forgets all messages: each is logged again."""
        self._say.cache_clear()

    def _write(self, message: str, *values: object) -> None:
        self._log.warning(f"{message} (not logged again)", *values)
