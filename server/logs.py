"""Logging to stderr, one line of text or of JSON per record, with the id of the request it is
about.

What callers wrote (ids, names of tenants and models) may appear, escaped so that it can neither end
a line nor forge one. Prompts, outputs and keys never do: `log_ended` takes only figures from a
request.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TextIO

from jaxserve.api.events import Finished, Summary
from jaxserve.api.request import Request

MAX_CHARS = 4000  # of a message or a value
MAX_CAUSES = 3  # exceptions logged of a chain of them
MAX_ERROR_CHARS = 300  # of an exception's text, which may quote what it failed at
UNQUOTED = re.compile(r"[^\s\"=]+")

log = logging.getLogger("jaxserve.requests")
current_ids: ContextVar[tuple[str, str]] = ContextVar("request", default=("", ""))


def setup(format: str, level: str) -> None:
    """Logs to stderr from now on. format: text or json. level: debug, info, warning or error, for
    jaxserve's loggers; libraries log warnings at least."""
    handler = _Stderr()
    handler.setFormatter({"json": JsonFormatter, "text": TextFormatter}[format]())
    root = logging.getLogger()
    root.handlers = [
        other for other in root.handlers if type(other) not in (logging.StreamHandler, _Stderr)
    ] + [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
    logging.getLogger("jaxserve").setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers = []
        logging.getLogger(name).propagate = True
        logging.getLogger(name).setLevel(logging.NOTSET)


@contextlib.contextmanager
def bound(request_id: str, trace_id: str = "") -> Iterator[None]:
    """Adds a request's id to the lines logged inside, by this task or thread and those it
    starts."""
    token = current_ids.set((request_id, trace_id))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # entered in another task
            current_ids.reset(token)


def log_ended(
    request: Request,
    finished: Sequence[Finished],
    status: str,
    *,
    refused: str = "",
    output_tokens: int = 0,
    tenant: str = "",
    protocol: str = "",
    trace_id: str = "",
) -> None:
    """Logs the one line about a request that has ended. finished: the ends of its completions, as
    far as they came. status: name of a gRPC status. refused: the limit that it was refused for.
    output_tokens: that came, of whatever has no end."""
    summary = Summary.of(finished) if finished else None
    reasons = dict.fromkeys(end.reason for end in finished)
    fields: dict[str, Any] = {
        "status": status,
        "reason": ",".join(reasons) or refused or status.lower(),
        "tenant": tenant or None,
        "protocol": protocol or None,
        "prompt_tokens": len(request.prompt),
        "cached_tokens": summary.cached if summary else 0,
        "output_tokens": summary.output if summary else output_tokens,
    }
    if summary:
        times = {
            "queued": summary.queued,
            "ttft": summary.ttft,
            "tpot": summary.tpot,
            "longest_gap": summary.longest_gap or None,
            "seconds": summary.total,
        }
        fields |= {
            name: round(seconds, 6) for name, seconds in times.items() if seconds is not None
        }
        fields["in_time"] = summary.in_time
    present = {name: value for name, value in fields.items() if value is not None}
    log.info(
        "ended",
        extra={
            "fields": present,
            "request_id": request.id,
            "trace_id": trace_id or current_ids.get()[1],
        },
    )


class TextFormatter(logging.Formatter):
    """Lines for people, a traceback indented below:

    I 2026-01-31T23:59:59.123Z jaxserve.server.supervisor: message request_id=x
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = {**_request_ids(record), **_fields(record)}
        pairs = "".join(
            f" {name}={_quoted_if_needed(value)}"
            for name, value in fields.items()
            if value is not None
        )
        head = f"{record.levelname[:1]} {_time(record)} {record.name}"
        line = f"{head}: {escaped(_message(record))}{pairs}"
        return "\n    ".join([line, *_exception_lines(record)])


class JsonFormatter(logging.Formatter):
    """JSON lines: time, level, logger, message, request_id, trace_id, further fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields |= {"message": _message(record), **_request_ids(record)}
        if faults := _exception_lines(record):
            fields["exception"] = "\n".join(faults)
        return json.dumps({**fields, **_fields(record)}, default=str)


def escaped(text: str) -> str:
    """Escapes whatever ends a line, moves the cursor or turns the direction of writing: \\n, \\x1b,
    \\u202e."""
    text = text[:MAX_CHARS]
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _message(record: logging.LogRecord) -> str:
    return record.getMessage()[:MAX_CHARS]


def _quoted_if_needed(value: object) -> str:
    text = escaped(str(value))
    return text if UNQUOTED.fullmatch(text) else '"' + text.replace('"', '\\"') + '"'


def _time(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.created * 1000) % 1000:03}Z"


def _request_ids(record: logging.LogRecord) -> dict[str, str | None]:
    request_id, trace_id = current_ids.get()
    return {
        "request_id": getattr(record, "request_id", "") or request_id or None,
        "trace_id": getattr(record, "trace_id", "") or trace_id or None,
    }


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    return getattr(record, "fields", {})


def _exception_lines(record: logging.LogRecord) -> list[str]:
    """An exception's traceback without lines of source, its type, the beginning of its text; then
    the same of its causes."""
    error = record.exc_info[1] if record.exc_info else None
    lines = []
    for _ in range(MAX_CAUSES):
        if error is None:
            break
        traceback = error.__traceback__
        while traceback is not None:
            code = traceback.tb_frame.f_code
            lines.append(f"{code.co_filename}:{traceback.tb_lineno} in {code.co_name}")
            traceback = traceback.tb_next
        lines.append(escaped(f"{type(error).__name__}: {str(error)[:MAX_ERROR_CHARS]}"))
        error = error.__cause__
    return lines


class _Stderr(logging.StreamHandler):
    """Writes to sys.stderr as it is at each line: tests and tools replace it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr
