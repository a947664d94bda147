"""Errors as gRPC statuses: written by the server, read back by the client.

The field at fault and the reason of a rejection travel as metadata; how long to wait before another
try travels as google.rpc.RetryInfo in the status details.
"""

from __future__ import annotations

import grpc

from jaxserve.api.errors import RequestError
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.errors import REJECT_REASON_HEADER, message_of, reject_reason

FIELD_KEY = "jaxserve-field"
STATUS_DETAILS_KEY = "grpc-status-details-bin"
RETRY_INFO_TYPE = "google.rpc.RetryInfo"
MAX_METADATA_CHARS = 100


class ServerError(RequestError):
    """An error that a server answered with. `status` as in gRPC; `reason` and `retry_after`
    (seconds) are set where the server was overloaded."""

    def __init__(self, error: grpc.RpcError):
        metadata = dict(error.trailing_metadata() or ())
        retry_after = _retry_after(metadata.get(STATUS_DETAILS_KEY))
        super().__init__("", error.details() or "", error.code().name, retry_after)
        self.field = metadata.get(FIELD_KEY, "")
        self.reason = metadata.get(REJECT_REASON_HEADER, "")


async def abort(context: grpc.aio.ServicerContext, error: RequestError) -> None:
    """Ends a call with the error's status, message and metadata."""
    code = grpc.StatusCode.__members__.get(error.status, grpc.StatusCode.INTERNAL)
    message = message_of(error)
    metadata: list[tuple[str, str | bytes]] = []
    if error.field:
        metadata.append((FIELD_KEY, _ascii(error.field)))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        metadata.append((REJECT_REASON_HEADER, _ascii(reject_reason(error))))
        details = _retry_details(code, message, error.retry_seconds)
        metadata.append((STATUS_DETAILS_KEY, details))
    await context.abort(code, message, tuple(metadata))


def _retry_details(code: grpc.StatusCode, message: str, seconds: float) -> bytes:
    """A serialized google.rpc.Status with a RetryInfo in it."""
    retry = pb.RetryInfo()
    retry.retry_delay.FromNanoseconds(int(1e9 * seconds))
    status = pb.RichStatus(code=code.value[0], message=message)
    status.details.add(
        type_url=f"type.googleapis.com/{RETRY_INFO_TYPE}", value=retry.SerializeToString()
    )
    return status.SerializeToString()


def _retry_after(details: bytes | None) -> float | None:
    """The seconds in a serialized google.rpc.Status; None if it holds no RetryInfo."""
    if not details:
        return None
    for detail in pb.RichStatus.FromString(details).details:
        if detail.type_url.endswith(f"/{RETRY_INFO_TYPE}"):
            retry = pb.RetryInfo.FromString(detail.value)
            return retry.retry_delay.ToTimedelta().total_seconds()
    return None


def _ascii(text: str) -> str:
    """Text as gRPC metadata may hold it: printable ASCII, anything else as '?'."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text)[:MAX_METADATA_CHARS]
