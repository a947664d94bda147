"""A process's identity in its group, passed by its supervisor, and its reports to the
supervisor."""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jaxserve.settings.schema import ConfigError

VARIABLE = "JAXSERVE_GROUP"  # set by the supervisor, JSON
SECRET_VARIABLE = "JAXSERVE_GROUP_SECRET"
MIN_SECRET = 16  # characters
BEAT_SECONDS = 1.0
LEADER = -1  # in place of a worker's number
REFUSED = 2  # exit code of a member that must not be started again as it is
LOST = 70  # of one that ends because another is gone: to be started again


@dataclass(frozen=True)
class Member:
    """A process of a group. worker: its number, or LEADER. workers: how many there are. host, port:
    where the leader listens for them. local: its number on this machine. pipe: file descriptor to
    the supervisor. tls_cert, tls_key: files of the leader's certificate, where it has one."""

    worker: int
    workers: int
    host: str
    port: int
    local: int = 0
    pipe: int = -1
    ranks_across_hosts: bool = False
    tls_cert: str = ""
    tls_key: str = ""

    @property
    def leads(self) -> bool:
        return self.worker == LEADER

    @property
    def name(self) -> str:
        return "leader" if self.leads else f"worker {self.worker}"

    @property
    def secret(self) -> bytes:
        """The group's secret. Errors: ConfigError if there is none."""
        return checked_secret(os.environ.get(SECRET_VARIABLE, "")).encode()

    def environment(self) -> dict[str, str]:
        """Variables for this member's process, beside the secret."""
        return {VARIABLE: json.dumps(asdict(self))}


def checked_secret(secret: str) -> str:
    """Returns the secret. Errors: ConfigError if it is too short."""
    if len(secret) < MIN_SECRET:
        raise ConfigError("secret", f"{SECRET_VARIABLE} must have at least {MIN_SECRET} characters")
    return secret


def this_member() -> Member | None:
    """This process in its group; None outside of groups. Errors: ConfigError."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        return Member(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "group", f"{VARIABLE} is not what `jaxserve launch` sets: {error}"
        ) from None


class Pulse:
    """Tells the supervisor each second that this process lives, and what it does; ends the process
    when the supervisor is gone. Does nothing without a supervisor, and in a process that a
    member has started without its pipe, such as the server of `bench serve`."""

    def __init__(self, member: Member):
        self._member = member
        self._state: dict[str, Any] = {"state": "starting"}
        self._lock = threading.Lock()  # of the state and the pipe: no old word after a new one
        self._pipe = member.pipe if _is_pipe(member.pipe) else -1
        if self._pipe < 0:
            return
        os.set_blocking(self._pipe, False)
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def tell(self, **state: Any) -> None:
        """Changes what the next beats say, and beats at once."""
        self._write(state)

    def _beat(self) -> None:
        while True:
            self._write()
            time.sleep(BEAT_SECONDS)

    def _write(self, change: Mapping[str, Any] | None = None) -> None:
        if self._pipe < 0:
            return
        try:
            with self._lock:
                self._state.update(change or {})
                os.write(self._pipe, json.dumps(self._state).encode() + b"\n")
        except BlockingIOError:  # the supervisor is stopped: it reads later, or never
            pass
        except OSError:
            print(f"{self._member.name}: the supervisor is gone", file=sys.stderr, flush=True)
            os._exit(LOST)


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except (OSError, OverflowError):
        return False
