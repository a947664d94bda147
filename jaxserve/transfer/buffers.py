"""Who may send next where receive memory is short: a line of transfers before bounded buffers.

A decode replica has a fixed number of receive buffers. A prefill replica asks for all the buffers
of a transfer before it sends anything (handshake). Transfers get theirs whole, in the order in
which they first asked, and keep them until all their parts arrived and the receiver has taken them,
or until their lease is over (Tetris 4.2). So no transfer waits for ever behind younger ones, and
none that came half holds memory for ever. Pure: time is an argument, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.transfer.protocol import TransferError, check_seconds

MAX_WAITING = 4096


@dataclass(frozen=True)
class Grant:
    """Buffers that are a transfer's until the moment `until`, or, once all its parts have arrived,
    until it is released."""

    transfer: str
    buffers: tuple[int, ...]
    until: float


@dataclass
class _Asking:
    """A transfer in the line. heard: when it asked last."""

    buffers: int
    parts: int
    seconds: float
    heard: float


@dataclass
class _Holding:
    """missing: parts that have not arrived."""

    grant: Grant
    missing: set[int] = field(default_factory=set)


class ReceiveBuffers:
    """Grants `count` buffers, numbered from 0, to transfers that are named by texts.

    lease: most seconds for which a transfer may keep buffers that were not filled. patience: a
    transfer that waits and has not asked again for that long has left the line.

    A transfer that keeps asking, with n before it in the line, waits at most (n + 1) (L + C + 2 t)
    seconds: L is the longest lease and at least the patience, C the time from a transfer's last
    part to its release, t the time between two askings and between two calls of `expired`.
    """

    def __init__(self, count: int, lease: float, patience: float):
        if count < 1:
            raise TransferError("count", "there must be at least one buffer")
        check_seconds(lease)
        check_seconds(patience)
        self.count = count
        self.lease = lease
        self.patience = patience
        self._free = list(reversed(range(count)))
        self._line: dict[str, _Asking] = {}  # in the order of first asking
        self._held: dict[str, _Holding] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def waiting(self) -> int:
        return len(self._line)

    def ask(
        self, transfer: str, buffers: int, parts: int, seconds: float, now: float
    ) -> Grant | None:
        """Asks for buffers, for a transfer of `parts` parts, to be filled within `seconds` from its
        grant. None: it stands in line, and is to ask again within `patience`. Asking again changes
        nothing else. Errors: TransferError for what could never be granted, and where the line is
        full."""
        if transfer in self._held:
            return self._held[transfer].grant
        self._check(buffers, parts, seconds)
        if transfer in self._line:
            self._line[transfer].heard = now
        else:
            self._leave_line(now)
            if len(self._line) >= MAX_WAITING:
                raise TransferError("transfers", f"{MAX_WAITING} wait, which is the limit")
            self._line[transfer] = _Asking(buffers, parts, seconds, now)
        self._grant(now)
        held = self._held.get(transfer)
        return held.grant if held else None

    def arrived(self, transfer: str, part: int, now: float) -> bool:
        """Notes that a part, counted from 0, is in the buffers. Returns whether all are: they are
        kept until `release` then. Errors: TransferError where the transfer has no grant or its
        lease is over."""
        held = self._held.get(transfer)
        if held is None:
            raise TransferError("transfer", f"{transfer!r} has no buffers")
        if held.missing and now >= held.grant.until:
            raise TransferError("transfer", f"the lease of {transfer!r} is over")
        held.missing.discard(part)
        return not held.missing

    def expired(self, now: float) -> list[Grant]:
        """Lists grants whose lease is over before all parts arrived. They hold their buffers until
        `release`: end their windows first. To be called now and then."""
        self._leave_line(now)
        self._grant(now)
        return [
            held.grant for held in self._held.values() if held.missing and now >= held.grant.until
        ]

    def release(self, transfer: str, now: float) -> list[Grant]:
        """Takes a transfer's buffers, or its place in the line. Returns the grants that follow from
        that, which their transfers are to get. Nothing may be written into the buffers any more."""
        self._line.pop(transfer, None)
        held = self._held.pop(transfer, None)
        if held is not None:
            self._free.extend(held.grant.buffers)
        self._leave_line(now)
        return self._grant(now)

    def check(self) -> None:
        """Checks the invariants. Errors: AssertionError where a buffer is lost, or is two
        transfers'."""
        used = [number for held in self._held.values() for number in held.grant.buffers]
        assert sorted(self._free + used) == list(range(self.count)), (self._free, used)

    def _check(self, buffers: int, parts: int, seconds: float) -> None:
        if not 0 < buffers <= self.count:
            raise TransferError("buffers", f"must be from 1 to {self.count}, not {buffers}")
        if parts < 1:
            raise TransferError("parts", f"must be at least 1, not {parts}")
        if not 0 < seconds <= self.lease:
            raise TransferError("seconds", f"must be positive, {self.lease:g} at most")

    def _leave_line(self, now: float) -> None:
        """Forgets those that have not asked for too long."""
        gone = [name for name, one in self._line.items() if now - one.heard > self.patience]
        for name in gone:
            del self._line[name]

    def _grant(self, now: float) -> list[Grant]:
        """Grants to the first in line as long as there is enough for it: none overtakes."""
        made = []
        while self._line:
            transfer, asking = next(iter(self._line.items()))
            if asking.buffers > len(self._free):
                break
            del self._line[transfer]
            numbers = tuple(self._free.pop() for _ in range(asking.buffers))
            grant = Grant(transfer, numbers, now + asking.seconds)
            self._held[transfer] = _Holding(grant, set(range(asking.parts)))
            made.append(grant)
        return made
