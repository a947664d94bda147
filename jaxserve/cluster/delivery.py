"""Hands callers of a conductor the events of their requests, in order and one call at a time."""

from __future__ import annotations

import logging
import threading

from jaxserve.cluster.routed import RoutedRequest

log = logging.getLogger(__name__)


class Delivery:
    """Calls the sinks of requests. lock: under which requests change; never held while a sink or a
    member is called."""

    def __init__(self, lock: threading.Lock):
        self._lock = lock

    def deliver(self, routed: RoutedRequest) -> None:
        """Hands a caller the events that wait for it, unless another thread does just now, or a
        call of this thread further up."""
        while True:
            with self._lock:
                if routed.delivering or not routed.outbox:
                    return
                events = routed.outbox.popleft()
                if routed.silent or not events:
                    continue
                routed.delivering = True
            try:
                routed.sink(events)
            except Exception:
                log.exception("the sink of request %r failed", routed.request.id)
                self._silence(routed)
            finally:
                with self._lock:
                    routed.delivering = False

    def _silence(self, routed: RoutedRequest) -> None:
        """Silences a sink that raised, and cancels its request."""
        with self._lock:
            routed.silent = True
            routed.ending = ("cancelled", None)
            member = routed.member if routed.placed else None
        if member is not None:
            member.ask(lambda replica: replica.cancel(routed.request.id))
