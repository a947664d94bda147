"""Calls that may hang: late ones are left alone, and nothing waits beyond its deadline."""

import threading
import time

import pytest

from jaxserve.store.call_threads import CallThreads
from tests.waiting import SOON, eventually


def soon(seconds: float = SOON) -> float:
    return time.monotonic() + seconds


def test_a_call_returns_what_the_function_returns_or_raises():
    threads = CallThreads(1, 2, 100)
    with threads.borrow(soon()) as thread:
        assert thread.call(divmod, 7, 2, deadline=soon()) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            thread.call(divmod, 7, 0, deadline=soon())
        assert [row.size for row in thread.rows] == [100, 100]
        assert all(row.ctypes.data % 4096 == 0 for row in thread.rows)
    assert threads.close(SOON)


def test_a_late_lane_is_lent_again_when_its_call_has_ended():
    threads = CallThreads(1, 1, 8)
    go = threading.Event()
    with threads.borrow(soon()) as thread, pytest.raises(TimeoutError):
        thread.call(go.wait, deadline=soon(0.05))
    began = time.monotonic()
    with threads.borrow(soon(4 * SOON)) as other:
        assert other is None
    assert time.monotonic() - began < SOON, "where all threads hang, nobody waits for one"
    go.set()

    def lent_again() -> bool:
        with threads.borrow(soon()) as again:
            return again is thread

    eventually(lent_again)
    assert threads.close(SOON)


def test_who_finds_no_lane_waits_until_the_deadline():
    threads = CallThreads(1, 1, 8)
    with threads.borrow(soon()) as thread:
        assert thread is not None
        with threads.borrow(soon(0.05)) as other:
            assert other is None
        found = []

        def borrow() -> None:
            with threads.borrow(soon()) as late:
                found.append(late)

        waiting = threading.Thread(target=borrow)
        waiting.start()
    waiting.join(SOON)
    assert found == [thread]


def test_close_tells_whether_a_call_hangs():
    threads = CallThreads(2, 1, 8)
    go = threading.Event()
    with threads.borrow(soon()) as thread, pytest.raises(TimeoutError):
        thread.call(go.wait, deadline=soon(0.02))
    assert not threads.close(0.05)
    with threads.borrow(soon()) as none:
        assert none is None
    go.set()
