"""Callers of a server that fails: they ask all the time, and compare every answer with what the
same prompt gave before the first fault."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from experiments.script import keep
from jaxserve.api.sampling import SamplingParams
from jaxserve.cli.display import table
from jaxserve.server.client import Client, ServerError

PROMPTS = [(5, 24), (40, 40), (300, 16), (90, 30), (12, 60)]  # tokens of prompt and answer


class Callers:
    """Ask all the time, and note what becomes of each request: (second, what, how long)."""

    def __init__(self, target: str, count: int, limit: float):
        self._target = target
        self._limit = limit
        self.right: dict[int, list[int]] = {}
        self.ends: list[tuple[float, str, float]] = []
        self.token_at = 0.0
        self.asked_at = 0.0  # when the newest request with a token was sent
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask_again, args=(number,)) for number in range(count)
        ]

    def learn(self) -> None:
        """Learns what each prompt gives while nothing fails."""
        with Client(self._target) as client:
            client.wait_ready(self._limit)
            for number in range(len(PROMPTS)):
                self.right[number] = self._ask(client, number)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, client: Client, number: int) -> list[int]:
        size, tokens = PROMPTS[number]
        prompt = [5 + (number * 7919 + at * 131) % 490 for at in range(size)]
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        sent = time.monotonic()
        ids: list[int] = []
        for output in client.generate(prompt, sampling, timeout=self._limit, ids_only=True):
            new = getattr(output, "ids", ())
            if new:
                self.token_at = time.monotonic()
                self.asked_at = max(self.asked_at, sent)
                ids += new
        return ids

    def _ask_again(self, number: int) -> None:
        dice = random.Random(number)
        with Client(self._target) as client:
            while not self._stop.is_set():
                which = dice.randrange(len(PROMPTS))
                began = time.monotonic()
                try:
                    what = "right" if self._ask(client, which) == self.right[which] else "WRONG"
                except ServerError as error:
                    what = error.status
                    self._stop.wait(0.2)
                self.ends.append((began, what, time.monotonic() - began))

    def until_answered(self, at: float, limit: float) -> float | None:
        """Seconds from `at` until a token came of a request that was sent later; None where none
        did in time."""
        while self.asked_at < at and time.monotonic() < at + limit:
            time.sleep(0.02)
        return self.token_at - at if self.asked_at >= at else None


def in_turns(pairs: list, rounds: int, dice: random.Random) -> Iterator[Any]:
    """All pairs before any comes again."""
    for start in range(0, rounds, len(pairs)):
        yield from dice.sample(pairs, len(pairs))[: rounds - start]


def show(faults: list[dict[str, Any]], callers: Callers, left: dict[str, Any]) -> None:
    """Prints what became of requests, and how long until tokens came again, by kind of fault."""
    rows = []
    for key in sorted({(fault["victim"], fault["signal"]) for fault in faults}):
        seconds = [
            fault["seconds_to_token"]
            for fault in faults
            if (fault["victim"], fault["signal"]) == key and fault["seconds_to_token"] is not None
        ]
        if seconds:
            median = f"{statistics.median(seconds):.1f}"
            rows.append([*key, str(len(seconds)), median, f"{max(seconds):.1f}"])
    print(table(["victim", "signal", "rounds", "s to a token, median", "most"], rows))
    ends = Counter(what for _, what, _ in callers.ends)
    longest = max((seconds for _, _, seconds in callers.ends), default=0.0)
    print(f"requests: {dict(ends)}; the longest took {longest:.1f} s")
    print(f"left at the end: {left}")


def end(
    process: subprocess.Popen, running: Callable[[], list], port: int, shared: set[str]
) -> dict[str, Any]:
    """Ends a server by SIGTERM and counts what it leaves: processes of those that `running` tells,
    listeners on its port, names in shared memory beside those in `shared`."""
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = process.wait(60)
    return {
        "exit_code": code,
        "seconds_to_end": time.monotonic() - began,
        "processes": len(running()),
        "listeners": listens(port),
        "shared_memory": len(shared_memory() - shared),
    }


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def report(
    values: dict[str, Any],
    faults: list[dict[str, Any]],
    callers: Callers,
    left: dict[str, Any],
    **more: Any,
) -> int:
    """Prints and keeps what came of a run; returns its exit code: 1 where an answer was wrong,
    something was left, or no token came again after a fault."""
    show(faults, callers, left)
    ends = Counter(what for _, what, _ in callers.ends)
    keep(values, faults=faults, ends=ends, left=left, **more)
    bad = any(left.get(name) for name in ("busy", "processes", "listeners", "shared_memory"))
    silent = any(fault["seconds_to_token"] is None for fault in faults)
    return int(bool(ends["WRONG"]) or bad or silent)


def shared_memory() -> set[str]:
    """Names in shared memory."""
    return set(os.listdir("/dev/shm"))


def listens(port: int) -> int:
    """1 where somebody listens on a port of loopback, else 0."""
    with socket.socket() as probe:
        return int(probe.connect_ex(("127.0.0.1", port)) == 0)
