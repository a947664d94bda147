"""Who used the CPUs of this machine while something was measured: those measured, or others. A
disturbed run looks plausible and is not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
# in /proc/PID/stat, after the name
USER = 11
SYSTEM = 12
CHILDREN_USER = 13
CHILDREN_SYSTEM = 14


@dataclass(frozen=True)
class CpuUsage:
    """CPU seconds of a span of time: of the machine as a whole (the hypervisor's theft included),
    and of the processes measured."""

    wall: float
    machine: float
    own: float
    cpus: int

    @property
    def foreign(self) -> float:
        """Share of the machine that others used, in percent."""
        # ticks are counted twice, and differ
        return min(max(0.0, 100 * (self.machine - self.own) / (self.wall * self.cpus)), 100.0)

    @property
    def cores(self) -> float:
        """Cores that the processes measured kept busy."""
        return self.own / self.wall


class Meter:
    """Measures from now on. The processes are `pids` and all that they started; this process counts
    as one of them."""

    def __init__(self, pids: Iterable[int]):
        self._pids = list(pids)
        self._began, self._machine, self._own = time.monotonic(), machine_seconds(), self._seconds()

    def read(self) -> CpuUsage:
        wall = time.monotonic() - self._began
        return CpuUsage(
            wall,
            machine_seconds() - self._machine,
            self._seconds() - self._own,
            os.cpu_count() or 1,
        )

    def _seconds(self) -> float:
        stats = _stats()
        mine = os.getpid()
        family = set(self._pids) & stats.keys()
        while more := {pid for pid, (parent, *_) in stats.items() if parent in family} - family:
            family |= more
        return sum(own + ended for pid, (_, own, ended) in stats.items() if pid in family) + (
            stats[mine][1] if mine in stats else 0
        )


def machine_seconds() -> float:
    """CPU seconds that all processes of the machine have used since it started."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / TICK


def wait_until_quiet(pids: Iterable[int], limit: float, until: float, span: float = 0.5) -> bool:
    """Waits until others use less than `limit` percent for `span` seconds. False where that did not
    happen before the moment `until`."""
    while True:
        meter = Meter(pids)
        time.sleep(span)
        if meter.read().foreign <= limit:
            return True
        if time.monotonic() >= until:
            return False


def _stats() -> dict[int, tuple[int, float, float]]:
    """Process -> its parent, CPU seconds of its own, CPU seconds of its children that ended."""
    found = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        own, ended = (
            (int(fields[a]) + int(fields[b])) / TICK
            for a, b in ((USER, SYSTEM), (CHILDREN_USER, CHILDREN_SYSTEM))
        )
        found[int(entry.name)] = int(fields[1]), own, ended
    return found
