"""Parts of the staging memory that are lent, under which tokens, until when."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass

from jaxserve.transfer.frames import TOKEN_BYTES, Answer, Request
from jaxserve.transfer.protocol import MAX_WINDOWS, TransferError


@dataclass
class Lease:
    """A window as its receiver knows it: [base, base + size), until the moment `until`."""

    epoch: int
    base: int
    size: int
    until: float
    ended: bool = False

    def open(self, now: float) -> bool:
        """Returns whether bytes may be written there now."""
        return not self.ended and now < self.until

    def overlaps(self, base: int, size: int) -> bool:
        return self.base < base + size and base < self.base + self.size


class Windows:
    """All leases of a receiver, by token. A lease that is over stays until it is ended, so that who
    comes late gets that answer."""

    def __init__(self) -> None:
        self._leases: dict[bytes, Lease] = {}
        self._epoch = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._leases)

    def lend(self, base: int, size: int, until: float) -> tuple[bytes, int]:
        """Token and epoch of a new lease. Errors: TransferError."""
        with self._lock:
            if len(self._leases) >= MAX_WINDOWS:
                raise TransferError("windows", f"{MAX_WINDOWS} are lent, which is the limit")
            if any(lease.overlaps(base, size) for lease in self._leases.values()):
                raise TransferError(
                    "base", f"bytes {base} to {base + size} overlap a window that is lent"
                )
            self._epoch += 1
            token = secrets.token_bytes(TOKEN_BYTES)
            self._leases[token] = Lease(self._epoch, base, size, until)
            return token, self._epoch

    def find(self, request: Request, now: float) -> Lease | Answer:
        """The lease that a request may write into, or why it may not."""
        with self._lock:
            lease = self._leases.get(request.token)
        if lease is None or lease.epoch != request.epoch:
            return Answer.NO_WINDOW
        if request.offset + request.size > lease.size:
            return Answer.OUTSIDE
        return lease if lease.open(now) else Answer.LEASE_OVER

    def end(self, token: bytes, epoch: int) -> None:
        """Ends one lease, if there is such a one."""
        with self._lock:
            lease = self._leases.get(token)
            if lease is not None and lease.epoch == epoch:
                lease.ended = True
                del self._leases[token]

    def end_expired(self, now: float) -> int:
        """Ends the leases that are over; returns how many."""
        with self._lock:
            over = [token for token, lease in self._leases.items() if not lease.open(now)]
            for token in over:
                self._leases.pop(token).ended = True
            return len(over)

    def end_all(self) -> None:
        with self._lock:
            for lease in self._leases.values():
                lease.ended = True
            self._leases.clear()
