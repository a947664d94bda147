"""Logs what requests bring about once, however many of them do."""

from __future__ import annotations

import logging

MAX_LOGGED = 256  # different messages


class LogOnce:
    """Logs each different message once, and at most MAX_LOGGED of them."""

    def __init__(self, log: logging.Logger):
        self._log = log
        self._logged: set[tuple[object, ...]] = set()

    def warning(self, message: str, *values: object) -> None:
        """Logs a message, with values for its places, unless it has been logged before."""
        entry = (message, *values)
        if entry not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(entry)
            self._log.warning(f"{message} (not logged again)", *values)
