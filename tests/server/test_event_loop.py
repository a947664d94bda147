"""The event loop hears few sockets in a turn, and all of them in the end."""

import asyncio
import contextlib
import selectors
import socket

import pytest

from jaxserve.server import event_loop
from jaxserve.server.event_loop import MAX_READY_SOCKETS, FairSelector

CROWD = 50


@pytest.fixture
def pairs():
    """Connections whose first ends have something to read."""
    with contextlib.ExitStack() as stack:
        pairs = [tuple(map(stack.enter_context, socket.socketpair())) for _ in range(CROWD)]
        for here, there in pairs:
            here.setblocking(False)
            there.send(b"x")
        yield pairs


def test_a_crowd_is_heard_by_and_by_and_nobody_is_left_out(pairs):
    with contextlib.closing(FairSelector()) as selector:
        assert selector.select(0) == []
        for here, _ in pairs:
            selector.register(here, selectors.EVENT_READ)
        turns = -(-CROWD // (MAX_READY_SOCKETS - 1))  # the first one is heard in all of them
        talkative = [[key.fd for key, _ in selector.select(0)] for _ in range(turns)]
        assert {len(heard) for heard in talkative} == {MAX_READY_SOCKETS}  # while all go on talking
        assert set().union(*talkative) == {here.fileno() for here, _ in pairs}
        assert all(pairs[0][0].fileno() in heard for heard in talkative)
        turns = 0
        while heard := selector.select(0):  # while each has said its word once it was heard
            turns += 1
            for key, events in heard:
                assert events == selectors.EVENT_READ
                key.fileobj.recv(1)
        assert turns == -(-CROWD // MAX_READY_SOCKETS)


def test_the_loop_does_other_work_while_a_crowd_is_heard(pairs):
    async def main():
        loop = asyncio.get_running_loop()
        heard = []
        turns = [0]

        def hear(here):
            heard.append(here.recv(1))

        for here, _ in pairs:
            loop.add_reader(here, hear, here)
        while len(heard) < CROWD:
            turns.append(len(heard))
            await asyncio.sleep(0)
        for here, _ in pairs:
            loop.remove_reader(here)
        return [after - before for before, after in zip(turns, turns[1:])]

    assert max(event_loop.run(main())) == MAX_READY_SOCKETS
