"""The share of this process's cores that other processes keep busy, while steps are measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")
IDLE = (3, 4)  # columns of a core's line: idle, and idle while something is read or written
COLUMNS = 8  # the others are parts of these, for guests
MOST = 0.1  # share of the cores that others may have: beyond, steps are disturbed
STRETCH = 0.5  # seconds that a look covers: the system counts in hundredths of a second
LOOKS = 0.25  # seconds between looks while it is waited for quiet


class OtherWork:
    """Looks at the cores that this process may use. Steps of other devices are disturbed less by
    what cores do: `watched` is False for them, and where the system does not say what cores do."""

    def __init__(self, platform: str = "cpu"):
        self.watched = platform == "cpu" and _busy() is not None
        self.cores = len(os.sched_getaffinity(0)) if self.watched else 0
        self._last = self._look()

    def share(self) -> float:
        """Returns the share, 0 to 1, since it was last asked; 0 where nothing is watched."""
        if not self.watched:
            return 0.0
        wall, busy, own = self._look()
        before = self._last
        self._last = wall, busy, own
        of_others = (busy - before[1]) - (own - before[2])
        return min(max(of_others / max(self.cores * (wall - before[0]), 1e-9), 0.0), 1.0)

    def is_stretch(self) -> bool:
        """Returns whether it was last asked so long ago that its answer means something."""
        return time.perf_counter() - self._last[0] >= STRETCH

    def wait(self, seconds: float) -> bool:
        """Waits until others leave the cores alone, at most this long; returns whether they do."""
        deadline = time.perf_counter() + seconds
        self.share()
        while self.watched:
            time.sleep(LOOKS)
            if self.share() <= MOST:
                return True
            if time.perf_counter() >= deadline:
                return False
        return True

    def _look(self) -> tuple[float, float, float]:
        """Returns seconds of wall clock, of the cores at work, and of this process at work."""
        return time.perf_counter(), _busy() or 0.0, time.process_time()


def _busy() -> float | None:
    """Returns the seconds for which the cores that this process may use were at work, or taken by
    other machines on the same hardware; None where the system does not say."""
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    try:
        lines = [line.split() for line in STAT.read_text().splitlines()]
        ticks = [list(map(int, line[1 : COLUMNS + 1])) for line in lines if line[0] in cores]
    except (OSError, ValueError, IndexError):
        return None
    if not ticks:
        return None
    busy = sum(sum(core) - sum(core[column] for column in IDLE) for core in ticks)
    return busy / os.sysconf("SC_CLK_TCK")
