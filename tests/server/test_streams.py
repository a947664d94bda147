"""What waits on its way from the engine's thread to a caller while the event loop is busy, and what
does not."""

import asyncio

import numpy as np
import pytest

from jaxserve.api.events import Accepted, Finished, Timing, Token, Usage
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.server import streams
from jaxserve.server.auth.access import Authenticator
from jaxserve.server.request_log import Outcome
from jaxserve.server.streams import Mailbox, Stream
from jaxserve.settings.schema import ServerConfig
from jaxserve.text.output import Delta, NoText, OutputProcessor
from tests.waiting import SOON

END = Finished(0, "length", Usage(3, 0, 4), Timing(0.0, 0.1, 0.2))


@pytest.fixture
def busy(monkeypatch):
    """Streams have had all of the time that they may take."""
    monkeypatch.setattr(streams, "CPU_SHARE", 1e-9)
    monkeypatch.setattr(streams, "MAX_REST_SECONDS", 1000.0)


def opened():
    request = Request("r", np.arange(3, dtype=np.int32), SamplingParams(max_tokens=4))
    stream = Stream(
        request,
        OutputProcessor(request, (), NoText, [].append),
        Authenticator(ServerConfig()).anonymous,
        given_id="",
        now=0.0,
        heartbeat_seconds=1000.0,
        on_tokens=lambda: None,
        outcome=Outcome(),
    )
    return Mailbox(asyncio.get_running_loop()), stream


def seen(outputs):
    return [
        id for output in outputs if isinstance(output, Delta) for id in output.ids
    ], END in outputs


def test_that_a_request_was_accepted_does_not_wait_for_a_busy_loop(busy):
    async def main():
        (mailbox, other), (_, stream) = opened(), opened()
        mailbox.put(other, [])
        await asyncio.sleep(0.01)  # the mailbox was emptied just now, and is to rest
        mailbox.put(stream, [Accepted(0)])
        await asyncio.wait_for(stream.accepted(), SOON)

    asyncio.run(main())


def test_first_tokens_and_ends_do_not_wait_for_a_busy_loop(busy):
    async def main():
        mailbox, stream = opened()
        mailbox.put(stream, [Token(0, 1)])
        await asyncio.sleep(0.01)
        assert seen(await stream.take()) == ([1], False)
        # the mailbox was never emptied before: nor does this one wait
        mailbox.put(stream, [Token(0, 2)])
        await asyncio.sleep(0.01)
        assert seen(await stream.take()) == ([2], False)
        waiting = asyncio.create_task(stream.take())
        await asyncio.sleep(0.01)
        mailbox.put(stream, [Token(0, 3)])
        await asyncio.sleep(0.2)
        assert not waiting.done()
        mailbox.put(stream, [Token(0, 4), END])
        assert seen(await asyncio.wait_for(waiting, SOON)) == ([3, 4], True)

    asyncio.run(main())


def test_tokens_that_waited_come_in_order_and_once():
    async def main():
        mailbox, stream = opened()
        told = list(range(1, 200))
        for id in told:
            mailbox.put(stream, [Token(0, id)])
            if id % 7 == 0:
                await asyncio.sleep(0)
        mailbox.put(stream, [END])
        got = []
        while outputs := await stream.take():
            got += [id for output in outputs if isinstance(output, Delta) for id in output.ids]
        return told, got

    told, got = asyncio.run(main())
    assert got == told
