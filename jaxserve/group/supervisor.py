"""Starts the members of a group on this machine, watches them, and restarts them.

A member is dead when its process has ended, and when it says nothing for a while: it tells each
second that it lives. When a worker dies, the other workers on this machine are killed, for they
would wait for it in a collective, and all restart; the leader goes on and takes them in. When
the leader dies, all restart. No member outlives the supervisor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.group.child import Child, code_text
from jaxserve.group.member import LOST, REFUSED, Member

SILENT_SECONDS = 7.0  # after its first word, that a member may say nothing
# that one may say nothing which computes, or waits for a processor: its thread that speaks does not
# come to run where another one holds Python's lock
BUSY_SECONDS = 60.0
BUSY_SHARE = 0.5  # of a processor's time that a busy member uses or waits for
POLL_SECONDS = 0.05
END_SECONDS = 3.0  # for members to end by themselves
AFTER_SECONDS = 1.0  # that a leader whose engine was closed may take to end
MAX_PAUSE_SECONDS = 30.0  # between starts that fail
MAX_FAILURES = 6  # starts in a row after which no token came
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Process(Child):
    """A member's process. state: what it says it does; ready: whether it has become ready since
    this was last set to False. Errors: OSError where the command cannot be run."""

    def __init__(self, member: Member, command: Sequence[str], environment: Mapping[str, str]):
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self.member = dataclasses.replace(member, pipe=writing)
        self.pipe = reading
        self.state = ""
        self.ready = False
        self.heard: float | None = None
        self._quiet: tuple[float, float] | None = None  # a silent moment, and `wanted_seconds` then
        self._text = b""
        try:
            super().__init__(
                command,
                {**environment, **self.member.environment()},
                stdin=None if member.leads else subprocess.DEVNULL,
                stdout=None if member.leads else sys.stderr.fileno(),
                pass_fds=[writing],
            )
        except OSError:
            os.close(reading)
            raise
        finally:
            os.close(writing)

    def listen(self, now: float) -> None:
        """Reads what the member said."""
        with contextlib.suppress(OSError):
            while part := os.read(self.pipe, 1 << 16):
                self.heard = now
                self._text += part
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            state = _state(line)
            self.ready = self.ready or (state == "ready" and self.state != "ready")
            self.state = state

    def silent(self, now: float) -> bool:
        """Returns whether it has been silent for too long: a busy one may be so for longer."""
        quiet = 0.0 if self.heard is None else now - self.heard
        if quiet < SILENT_SECONDS / 2:
            self._quiet = None
            return False
        wanted = wanted_seconds(self.pid)
        if self._quiet is None:
            self._quiet = now, wanted
        began, before = self._quiet
        if quiet <= SILENT_SECONDS or now - began < SILENT_SECONDS / 4:
            return False
        is_busy = wanted - before > BUSY_SHARE * (now - began)
        return not is_busy or quiet > BUSY_SECONDS

    def kill(self) -> None:
        """Ends it, and what it started, now."""
        if self.pipe < 0:
            return
        super().kill()
        os.close(self.pipe)
        self.pipe = -1


def wanted_seconds(pid: int) -> float:
    """Returns seconds for which a process's threads have run, or were ready to; 0 where the system
    does not tell."""
    total = 0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError):
            ran, waited, _ = file.read_text().split()
            total += int(ran) + int(waited)
    return total / 1e9


class Supervisor:
    """Runs the members of a group on this machine until its command has ended.

    members: those of this machine; the leader first, where it is here. command: what each runs.
    environment: variables for all. say: called with what happens, for people.
    """

    def __init__(
        self,
        members: Sequence[Member],
        command: Sequence[str],
        environment: Mapping[str, str],
        say: Callable[[str], None],
    ):
        self._members = members
        self._command = list(command)
        self._environment = dict(environment)
        self._say = say
        self._processes: dict[int, Process] = {}
        self._failures = 0
        self._began = time.monotonic()
        self._waits = True  # for a token since the last start
        self._ended: float | None = None  # when the leader's engine was closed
        self._signals: list[int] = []

    def run(self) -> int:
        """Returns the command's exit code, or that of a worker that was refused; as in shells 128
        more than the number of the signal that has ended the leader. Errors: OSError where the
        command cannot be run."""
        previous = {number: signal.signal(number, self._signalled) for number in SIGNALS}
        # where a parent ignores it, exit codes are lost
        previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            self._start(self._members)
            while True:
                code = self._look()
                if code is not None:
                    return code
                self._sleep()
        finally:
            for process in self._processes.values():
                process.kill()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, frame: Any) -> None:
        self._signals.append(number)

    def _start(self, members: Sequence[Member]) -> None:
        self._began = time.monotonic()
        self._waits = True
        for process in self._processes.values():  # the leader's word from before counts no more
            process.ready = False
        for member in members:
            self._processes[member.worker] = Process(member, self._command, self._environment)

    def _sleep(self) -> None:
        """Waits for a while, or until somebody says something."""
        with selectors.DefaultSelector() as selector:
            for process in self._processes.values():
                selector.register(process.pipe, selectors.EVENT_READ)
            selector.select(POLL_SECONDS)
        time.sleep(POLL_SECONDS / 5)

    # --- what has happened

    def _look(self) -> int | None:
        """Looks at all members once; returns an exit code when all is over."""
        now = time.monotonic()
        for process in self._processes.values():
            process.listen(now)
        if self._signals:
            return self._end()
        leader = next((p for p in self._processes.values() if p.member.leads), None)
        processes = [leader] if leader is not None else self._processes.values()
        if self._waits and all(process.ready for process in processes):
            what = "weights are loaded" if leader is None else "tokens come"
            self._say(f"ready: {what} {now - self._began:.1f} s after the start")
            self._waits = False
            self._failures = 0
        ended = {p: self._fate(p, now) for p in self._processes.values()}
        dead = {process: fate for process, fate in ended.items() if fate is not None}
        if not dead:
            return None
        for process, fate in dead.items():
            if process.code == REFUSED:
                return REFUSED  # it has said why
            if process.member.leads and (process.code or 0) > 0 and process.code != LOST:
                return process.code
            self._report(process, fate or "")
        if leader is None:
            return self._without_leader(dead)
        if leader in dead:
            if leader.code == 0:
                return self._wait_for_workers()
            return self._again(self._members)
        if all(process.code == 0 for process in dead):  # the leader has asked them to end
            return self._after_the_end(now)
        return self._again([member for member in self._members if not member.leads])

    def _fate(self, process: Process, now: float) -> str | None:
        """Returns why a member is given up; None if it is not."""
        if process.code is not None:
            return f"ended with {code_text(process.code)}"
        if not process.silent(now):
            return None
        assert process.heard is not None
        return f"has said nothing for {now - process.heard:.0f} s"

    def _report(self, process: Process, fate: str) -> None:
        if process.code != 0:
            self._say(f"{process.member.name} (process {process.pid}) {fate}")

    def _without_leader(self, dead: Mapping[Process, str | None]) -> int | None:
        """On a machine that has workers only: they end when the leader does."""
        if all(process.code == 0 for process in self._processes.values()):
            return 0
        if all(process.code == 0 for process in dead):
            return None
        return self._again(self._members)

    def _again(self, members: Sequence[Member]) -> int | None:
        """Restarts members; returns an exit code if that has failed too often."""
        for member in members:
            if member.worker in self._processes:
                self._processes.pop(member.worker).kill()
        self._failures += self._waits
        if self._failures >= MAX_FAILURES:
            self._say(f"{self._failures} starts in a row without a token: given up")
            return LOST
        pause = min(MAX_PAUSE_SECONDS, 2.0 ** (self._failures - 1)) if self._failures else 0.0
        self._say(
            f"restarting {', '.join(member.name for member in members)}"
            + (f" in {pause:g} s" if pause else "")
        )
        deadline = time.monotonic() + pause
        while time.monotonic() < deadline:
            if self._signals or any(
                process.code is not None for process in self._processes.values()
            ):
                return None  # a signal came or the leader has ended: the group ends
            time.sleep(POLL_SECONDS)
        self._start(members)
        return None

    def _after_the_end(self, now: float) -> int | None:
        """The leader has closed its engine: it ends now, or makes another."""
        self._ended = self._ended or now
        if now - self._ended < AFTER_SECONDS:
            return None
        self._ended = None
        return self._again([member for member in self._members if not member.leads])

    # --- the end

    def _end(self) -> int:
        """A signal came: the leader drains and ends, then the workers do. At a second signal all
        end at once."""
        leaders = [process for process in self._processes.values() if process.member.leads]
        for process in leaders or self._processes.values():
            process.signal(self._signals[0])
        heard = len(self._signals)
        while any(process.code is None for process in leaders):
            now = time.monotonic()
            for process in leaders:
                process.listen(now)
            if len(self._signals) > heard or any(process.silent(now) for process in leaders):
                return 128 + self._signals[0]
            time.sleep(POLL_SECONDS)
        self._wait_for_workers()
        return max([_exit_code(process.code or 0) for process in leaders], default=0)

    def _wait_for_workers(self) -> int:
        deadline = time.monotonic() + END_SECONDS
        heard = len(self._signals)
        while time.monotonic() < deadline and len(self._signals) == heard:
            if all(process.code is not None for process in self._processes.values()):
                break
            time.sleep(POLL_SECONDS)
        return 0


def _state(line: bytes) -> str:
    """Returns the state that a member reports; '' if its line is not understood."""
    try:
        return str(json.loads(line).get("state", ""))
    except (ValueError, AttributeError):
        return ""


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code
