"""Processes that are kept running: small ones that end in all ways."""

import os
import signal
import sys
import time

import pytest

from jaxserve.group import cluster
from jaxserve.group.cluster import ProcessSet, Task
from jaxserve.group.member import LOST, REFUSED

STEADY = 3.0  # a process that fails at once is over sooner, on a busy machine too
SLEEPS = "import time; time.sleep(600)"
# writes a line where it is ended, as one that has finished its requests
DRAINS = """
import signal, sys, time
def end(*_):
    open("ended", "a").write("x")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
open("started", "a").write("x")
time.sleep(600)
"""
# serves for a while, and then ends again and again
ONCE = f"""
import os, sys, time
first = not os.path.exists("runs")
open("runs", "a").write("x")
if first:
    time.sleep({2 * STEADY})
sys.exit(1 if first else CODE)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, "STEADY_SECONDS", STEADY)
    monkeypatch.setattr(cluster, "MAX_PAUSE_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)


def task(code: str, stage: int = 1, **more) -> Task:
    return Task(f"task {stage}", [sys.executable, "-S", "-E", "-c", code], stage, **more)


def run(tasks: list[Task], until: str = "") -> tuple[int, list[str]]:
    """Runs tasks until they end, or until `until` is in a line that is printed; returns the exit
    code and the lines."""
    said: list[str] = []
    deadline = time.monotonic() + 60

    def poll() -> None:
        assert time.monotonic() < deadline, said
        if until and any(until in line for line in said):
            os.kill(os.getpid(), signal.SIGTERM)

    return ProcessSet(tasks, dict(os.environ), 5.0, said.append, poll).run(), said


def size(name: str) -> int:
    return os.path.getsize(name) if os.path.exists(name) else 0


@pytest.mark.parametrize("code", [REFUSED, 1])
def test_one_that_has_served_and_fails_ever_after_stays_down_alone(code):
    others = [task(DRAINS, 0), task(SLEEPS, independent=True)]
    failing = task(ONCE.replace("CODE", str(code)), independent=True)
    assert run([failing, *others], until="given up")[0] == 0
    assert (size("started"), size("ended")) == (1, 1), "the others were not disturbed"
    assert size("runs") == 1 + cluster.MAX_FAILURES


@pytest.mark.parametrize("independent", [True, False])
def test_a_first_start_that_is_refused_ends_all_after_their_requests(independent):
    wait = "import os, sys, time\nwhile not os.path.exists('started'): time.sleep(0.01)\n"
    refused = task(wait + f"time.sleep({2 * STEADY}); sys.exit({REFUSED})", independent=independent)
    assert run([task(DRAINS, 0), refused])[0] == REFUSED
    assert size("ended") == 1


@pytest.mark.parametrize("independent", [True, False])
def test_all_end_where_nothing_of_use_is_left(independent):
    failing = [task("import sys; sys.exit(1)", independent=independent) for _ in range(2)]
    code, said = run([task(DRAINS, 0), *failing])
    assert code == LOST
    assert sum("given up" in line for line in said) == (2 if independent else 1)
