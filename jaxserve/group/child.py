"""A process that does not outlive the one that has started it, nor what itself has started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

from jaxserve.group.member import LOST

_PR_SET_PDEATHSIG = 1
# found here, for between fork and exec little may be called; only Linux has it
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)


class Child:
    """A process in a session of its own. stdin, stdout, stderr: None: those of this process.
    pass_fds: what it inherits of the open files. Errors: OSError where the command cannot be
    run."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: int | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
    ):
        parent = os.getpid()
        self._code: int | None = None
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            start_new_session=True,
            preexec_fn=lambda: _die_with(parent),
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs. The kernel keeps its number until `kill`, so that no
        other process is taken for it."""
        if self._code is None and hasattr(os, "waitid"):
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None:
                ended = status.si_code == os.CLD_EXITED
                self._code = status.si_status if ended else -status.si_status
        elif self._code is None:
            self._code = self._process.poll()
        return self._code

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it, and what it started, now. To be called once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._code = self._process.wait()


def code_text(code: int) -> str:
    """An exit code for people: 'SIGKILL', 'exit code 1'."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies, also while it is stopped."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it is dead already
        os._exit(LOST)
