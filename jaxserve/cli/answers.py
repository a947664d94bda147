"""Asks a process of its own for an answer, so that one that hangs or crashes can be reported."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

QUOTED = 300  # characters of the last line that a failed process wrote
END_SECONDS = 5.0  # a process that hangs in a driver cannot even be ended


class NoAnswer(Exception):
    """A process failed. code: its exit code; the message is the last line that it wrote."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


def answer_of(
    command: Sequence[str],
    limit: float,
    question: str = "",
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Runs a command, with a question on its standard input; returns the JSON of its last line. It
    and all that it started are ended. limit: seconds. Errors: TimeoutError, NoAnswer."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(question, timeout=limit)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"took longer than {limit:g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
    if process.returncode:
        raise NoAnswer(process.returncode, " ".join(error.strip().splitlines()[-1:])[:QUOTED])
    return json.loads(out.splitlines()[-1])
