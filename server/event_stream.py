"""Server-sent events: a streamed HTTP answer, and cancelling work when its caller disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class EventStream(Response):
    """Sends what `events` yields, each as one write, until it ends or the caller disconnects.
    `events` is closed in any case.

    events: text of one or more server-sent events. headers: sent besides those of every stream.
    """

    def __init__(self, events: AsyncGenerator[bytes], headers: Mapping[str, str]):
        super().__init__(None)
        self._events = events
        self._extra_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            **self._extra_headers,
        }
        async with contextlib.aclosing(self._events), cancelled_on_disconnect(receive):
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(name.encode(), text.encode()) for name, text in headers.items()],
                }
            )
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.asynccontextmanager
async def cancelled_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancels its body when the caller disconnects; the `async with` then ends without an error.

    receive: of a request whose body has been read, so that only a disconnect can still come.
    """
    task = asyncio.current_task()
    assert task is not None
    disconnected = False

    async def watch() -> None:
        nonlocal disconnected
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not disconnected:
            raise
        task.uncancel()
    finally:
        watcher.cancel()
