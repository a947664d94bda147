"""The event loop hears few sockets in a turn, and all of them in the end."""

import contextlib
import selectors
import socket

from jaxserve.server.event_loop import AT_ONCE, FewAtOnce

CROWD = 50


def test_a_crowd_is_heard_by_and_by_and_nobody_is_left_out():
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(contextlib.closing(FewAtOnce()))
        assert selector.select(0) == []
        pairs = [tuple(map(stack.enter_context, socket.socketpair())) for _ in range(CROWD)]
        for here, there in pairs:
            there.send(b"x")
            selector.register(here, selectors.EVENT_READ)
        talkative = set()                               # while all go on talking
        for _ in range(500):
            heard = {key.fd for key, _ in selector.select(0)}
            assert len(heard) == AT_ONCE
            talkative |= heard
        assert talkative == {here.fileno() for here, _ in pairs}
        turns = 0
        while heard := selector.select(0):              # while each has said its word once it was heard
            turns += 1
            for key, events in heard:
                assert events == selectors.EVENT_READ
                key.fileobj.recv(1)
        assert turns == -(-CROWD // AT_ONCE)
