"""Times the suite: when its two parts end, and the processor time of each file."""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest

# Folders of tests that serving does not need. They carry the mark `lab`, all others `serving`.
LABORATORY = ("lab/", "experiments/")
PROPERTY = "processor_time"  # of a report, in seconds
MOST = 12  # files that are named at the end


class Times:
    """Each process of pytest-xdist measures its own tests; the one that reports adds them up.
    Processes that a test starts count once they have ended and were waited for."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.ended: dict[str, float] = {}
        self.by_file: Counter[str] = Counter()
        self._used = _processor_time()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> pytest.TestReport:
        report = yield
        used = _processor_time()
        report.user_properties.append((PROPERTY, used - self._used))
        self._used = used
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0].removeprefix("tests/")
        self.by_file[file] += dict(report.user_properties).get(PROPERTY, 0)
        self.ended["lab" if file.startswith(LABORATORY) else "serving"] = time.monotonic()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self.ended) < 2:
            return
        parts = (f"{part} after {at - self.began:.0f} s" for part, at in self.ended.items())
        terminalreporter.write_line(f"over: {', '.join(parts)}")
        most = (f"{file} {seconds:.0f}" for file, seconds in self.by_file.most_common(MOST))
        total = self.by_file.total()
        terminalreporter.write_line(f"processor time: {total:.0f} s; {', '.join(most)}")


def _processor_time() -> float:
    """Seconds that this process, and those that it has waited for, took so far."""
    return sum(os.times()[:4])
