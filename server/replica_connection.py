"""Keeps a session with a replica on another process, and begins another one when it ends.

One thread reads the reports. A replica that is silent for a while, or that ended the session, is
tried again until it answers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from jaxserve.api.errors import RequestError
from jaxserve.server import replica_pb2 as pb
from jaxserve.server.remote_requests import Parts
from jaxserve.server.replica_session import ReplicaSession

log = logging.getLogger(__name__)
SILENT_SECONDS = 4.0  # without a report; a replica sends one each quarter of a second
ALIVE_SECONDS = 0.5  # between messages that this side lives
RETRY_SECONDS = (0.1, 2.0)  # between attempts to begin a session, at first and at most


class Listener(Protocol):
    """Handles what a connection receives, on its thread."""

    def began(self, welcome: pb.Welcome, heartbeat: pb.Heartbeat) -> None:
        """Called before a session is used, under the lock. Errors: RequestError for a replica that
        cannot be used."""

    def received(self, report: pb.Report) -> None:
        """Called with each report."""

    def lost(self, error: RequestError) -> None:
        """Called after each attempt or session has ended."""


class ReplicaConnection:
    """A connection to the replica at `target`. lock: held while a session begins or is lost.

    fault: why there is no session.
    """

    def __init__(
        self,
        target: str,
        session: Callable[[], ReplicaSession],
        listener: Listener,
        lock: threading.RLock,
        silent_seconds: float,
    ):
        self.fault = "it has not answered yet"
        self.connected = threading.Event()
        self._target = target
        self._new_session = session
        self._listener = listener
        self._lock = lock
        self._silent_seconds = silent_seconds
        self._newest: ReplicaSession | None = None  # may not have begun
        self._session: ReplicaSession | None = None
        self._deferred: deque[pb.Report] = deque()  # read while a sink waited for an answer
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._run, name=f"replica {target}", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name=f"watch {target}", daemon=True)

    def start(self) -> None:
        self._reader.start()
        self._watcher.start()

    @property
    def session(self) -> ReplicaSession | None:
        """The session, if one has begun and is not lost."""
        return self._session

    def require_session(self) -> ReplicaSession:
        """Returns the session. Errors: RequestError, UNAVAILABLE, if there is none."""
        if self._session is None:
            raise self.lost_error()
        return self._session

    def lost_error(self) -> RequestError:
        return RequestError("", f"the replica {self._target} is lost: {self.fault}", "UNAVAILABLE")

    @property
    def is_reader(self) -> bool:
        """True on the thread that reads the reports."""
        return threading.current_thread() is self._reader

    def read_until(
        self, done: threading.Event, seconds: float, split: Callable[[pb.Report], Parts]
    ) -> None:
        """Reads reports for a sink that waits for an answer. Their other parts are kept until the
        sink has returned: other sinks may not be called within it. Errors: RequestError."""
        backlog = self._deferred
        self._deferred = deque()
        deadline = time.monotonic() + seconds
        try:
            while not done.is_set() and time.monotonic() < deadline:
                report = backlog.popleft() if backlog else self.require_session().next()
                parts = split(report)
                if parts.awaited is not None:
                    self._listener.received(parts.awaited)
                if parts.remainder is not None:
                    self._deferred.append(parts.remainder)
        finally:
            self._deferred.extend(backlog)

    def close(self) -> bool:
        """Ends the session and the threads; returns False if this was called before."""
        if self._closing.is_set():
            return False
        self._closing.set()
        session = self._session
        if session is not None:
            session.end()
        for thread in (self._reader, self._watcher):
            if thread is not threading.current_thread():
                thread.join()
        return True

    def _run(self) -> None:
        pause, longest = RETRY_SECONDS
        while not self._closing.is_set():
            try:
                self._hold_session()
            except RequestError as error:
                self.fault = str(error)
            except Exception:
                log.exception("the session with the replica %s failed", self._target)
                self.fault = "its session failed; the log tells more"
            if self._lose_session():
                pause = RETRY_SECONDS[0]
            self._closing.wait(pause)
            pause = min(2 * pause, longest)
        self._lose_session()

    def _hold_session(self) -> None:
        """Begins a session and passes its reports on until it ends. Errors: RequestError, why it
        ended."""
        session = self._new_session()
        self._newest = session
        welcome = session.open()
        heartbeat = session.next().heartbeat
        with self._lock:
            if self._closing.is_set():
                return
            self._listener.began(welcome, heartbeat)
            self._session = session
            self.connected.set()
        log.info("the replica %s answers", self._target)
        while True:
            report = self._deferred.popleft() if self._deferred else session.next()
            self._listener.received(report)

    def _lose_session(self) -> bool:
        """Ends the session or the attempt at one; returns whether a session had begun."""
        with self._lock:
            had_session = self._session is not None
            self.connected.clear()
            self._session = None
            self._deferred.clear()
        if self._newest is not None:
            self._newest.end()
        error = self.lost_error()
        if self._closing.is_set():
            error = RequestError("", "closed", "UNAVAILABLE")
        elif had_session:
            log.error("the replica %s is lost: %s", self._target, self.fault)
        self._listener.lost(error)
        return had_session

    def _watch(self) -> None:
        """Sends the replica signs of life, and ends a session in which it is silent."""
        while not self._closing.wait(ALIVE_SECONDS):
            session = self._newest
            if session is None:
                continue
            if time.monotonic() - session.heard_at > self._silent_seconds:
                session.end(f"it has said nothing for {self._silent_seconds:g} s")
            elif session is self._session:
                session.say(pb.Command(alive=pb.Alive()))
        if self._newest is not None:
            self._newest.end()
