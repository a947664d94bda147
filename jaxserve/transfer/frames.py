"""The bytes that sender and receiver exchange over TCP once both have proved to know the secret.

A request names a window by its token and epoch, an offset and a number of bytes, which follow it.
The receiver answers each in its order. Requests and answers carry codes over their number in the
connection, so that none can be repeated, left out or made up; the bytes themselves do not.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum

from jaxserve.group.connection import ChannelError
from jaxserve.group.handshake import CODE_BYTES, Purpose, frame_code
from jaxserve.transfer.protocol import TransferError

PURPOSE = Purpose(b"jaxserve move  1", "receiver of transfers", "cluster")  # changes with frames
TOKEN_BYTES = 16
SLICE_BYTES = 1 << 20  # of one request, at most
_REQUEST = struct.Struct("<16sQQI")
_ANSWER = struct.Struct("<B")
REQUEST_BYTES = _REQUEST.size + CODE_BYTES
ANSWER_BYTES = _ANSWER.size + CODE_BYTES


def decode_token(text: str) -> bytes:
    """The token of a `Window` of this transport. Errors: TransferError."""
    try:
        token = bytes.fromhex(text)
    except ValueError:
        token = b""
    if len(token) != TOKEN_BYTES:
        raise TransferError("token", f"must be {TOKEN_BYTES} bytes in hexadecimal digits")
    return token


class Answer(IntEnum):
    """Outcome of a request."""

    WRITTEN = 0
    NO_WINDOW = 1
    LEASE_OVER = 2
    OUTSIDE = 3


REFUSALS = {
    Answer.NO_WINDOW: "window: the receiver lends no such window, or has ended it",
    Answer.LEASE_OVER: "window: its lease is over",
    Answer.OUTSIDE: "offset: the bytes are not inside the window that the receiver lent",
}


@dataclass(frozen=True)
class Request:
    """size: bytes that follow. offset: in the window."""

    token: bytes
    epoch: int
    offset: int
    size: int

    def encode(self, key: bytes, number: int) -> bytes:
        head = _REQUEST.pack(self.token, self.epoch, self.offset, self.size)
        return head + frame_code(key, number, head)

    @classmethod
    def decode(cls, data: memoryview, key: bytes, number: int) -> Request:
        """Decodes a request. Errors: ChannelError."""
        request = cls(*_REQUEST.unpack(_checked(data, key, number)))
        if not 0 < request.size <= SLICE_BYTES:
            raise ChannelError(f"a request of {request.size} bytes; the limit is {SLICE_BYTES}")
        return request


def encode_answer(answer: Answer, key: bytes, number: int) -> bytes:
    head = _ANSWER.pack(answer)
    return head + frame_code(key, number, head)


def decode_answer(data: memoryview, key: bytes, number: int) -> Answer:
    """Decodes an answer. Errors: ChannelError."""
    (value,) = _ANSWER.unpack(_checked(data, key, number))
    try:
        return Answer(value)
    except ValueError:
        raise ChannelError(f"an answer of {value} means nothing") from None


def _checked(data: memoryview, key: bytes, number: int) -> bytes:
    """The frame without its code. Errors: ChannelError where the code is not the right one."""
    head = bytes(data[:-CODE_BYTES])
    if not hmac.compare_digest(data[-CODE_BYTES:], frame_code(key, number, head)):
        raise ChannelError("a frame was changed or repeated on its way")
    return head
