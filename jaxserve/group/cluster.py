"""Runs the processes of a cluster on this machine: replicas and a conductor, each restarted when
it has ended. None outlives this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.group.child import Child, code_text
from jaxserve.group.member import LOST, REFUSED

POLL_SECONDS = 0.05
STEADY_SECONDS = 30.0  # that a process has to run for its start to count as a success
MAX_PAUSE_SECONDS = 30.0  # between starts that fail
MAX_FAILURES = 6  # starts in a row that fail
# of what computes: it leaves no processor to who takes in and passes on, if it has the same
NICE = 5
KILL_SECONDS = 5.0  # beyond the time for requests to finish, after which a process is killed
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclasses.dataclass
class Task:
    """A process to keep running. stage: those of lower stages end first; those of 0 have this
    process's stdout, and come before the others where processors are short. environment: its
    variables beside those of all. independent: the others are of use without it. steady: whether a
    start of it was a success."""

    name: str
    command: Sequence[str]
    stage: int
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    independent: bool = False
    child: Child | None = None
    began: float = 0.0
    failures: int = 0
    steady: bool = False
    start_at: float = 0.0  # monotonic seconds; infinite for one that is given up


class ProcessSet:
    """Keeps tasks running until a signal, or until there is no use in it: one was refused, or
    failed too often. Those that are independent stay down alone then, unless they were refused at
    first.

    environment: variables for all. drain_seconds: that the
    processes of a stage have to end by themselves. say: called with what happens, for people. poll:
    called often."""

    def __init__(
        self,
        tasks: Sequence[Task],
        environment: Mapping[str, str],
        drain_seconds: float,
        say: Callable[[str], None],
        poll: Callable[[], None] = lambda: None,
    ):
        self._tasks = tasks
        self._environment = environment
        self._drain_seconds = drain_seconds
        self._say = say
        self._poll = poll
        self._signals: list[int] = []

    def run(self) -> int:
        """Returns 0 after a signal, REFUSED where a process was refused for its settings, LOST
        where one, or each that is independent, failed too often. Errors: OSError where a command
        cannot be run."""
        previous = {number: signal.signal(number, self._signalled) for number in SIGNALS}
        # where a parent ignores it, exit codes are lost
        previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            while not self._signals:
                code = self._look(time.monotonic())
                if code is not None:
                    self._drain()
                    return code
                self._poll()
                time.sleep(POLL_SECONDS)
            self._drain()
            return 0
        finally:
            for task in self._tasks:
                if task.child is not None:
                    task.child.kill()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, frame: Any) -> None:
        self._signals.append(number)

    def _look(self, now: float) -> int | None:
        """Starts what is to run and does not; an exit code where that is of no use."""
        for task in self._tasks:
            if task.child is None:
                if now >= task.start_at:
                    self._start(task, now)
            elif task.child.code is not None:
                code = self._ended(task, task.child.code, now)
                if code is not None:
                    return code
        return None

    def _start(self, task: Task, now: float) -> None:
        environment = {**self._environment, **task.environment}
        stdout = sys.stderr.fileno() if task.stage else None
        task.child = Child(task.command, environment, stdin=subprocess.DEVNULL, stdout=stdout)
        if task.stage:
            with contextlib.suppress(ProcessLookupError):  # it may have ended
                os.setpriority(os.PRIO_PROCESS, task.child.pid, NICE)
        task.began = now

    def _ended(self, task: Task, code: int, now: float) -> int | None:
        assert task.child is not None
        pid = task.child.pid
        task.child.kill()  # what it has started
        task.child = None
        if code == REFUSED and not (task.independent and task.steady):
            return REFUSED  # it has said why
        # loading may take longer, and find that the settings do not fit
        succeeded = now - task.began > STEADY_SECONDS and code != REFUSED
        task.steady |= succeeded
        task.failures = 0 if succeeded else task.failures + 1
        if task.failures >= MAX_FAILURES:
            task.start_at = math.inf
            self._say(f"{task.name} has ended {task.failures} times in a row: given up")
            return None if task.independent and self._has_independent() else LOST
        pause = min(MAX_PAUSE_SECONDS, 2.0 ** (task.failures - 2)) if task.failures > 1 else 0.0
        task.start_at = now + pause
        later = f" in {pause:g} s" if pause else ""
        self._say(f"{task.name} (process {pid}) ended with {code_text(code)}: restarts{later}")
        return None

    def _has_independent(self) -> bool:
        """Returns whether one of the independent tasks is not given up."""
        return any(task.independent and task.start_at < math.inf for task in self._tasks)

    def _drain(self) -> None:
        """Ends stage after stage: requests finish. At a second signal all end at once."""
        heard = len(self._signals)
        for stage in sorted({task.stage for task in self._tasks}):
            children = [t.child for t in self._tasks if t.stage == stage and t.child is not None]
            for child in children:
                child.signal(signal.SIGTERM)
            deadline = time.monotonic() + self._drain_seconds + KILL_SECONDS
            while any(child.code is None for child in children):
                if len(self._signals) > heard or time.monotonic() > deadline:
                    return
                time.sleep(POLL_SECONDS)
