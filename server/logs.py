"""Logs of a server: lines of text or of JSON on stderr, each about a request with the request's id.

What callers wrote (ids, names of tenants and models) may stand in a line, escaped so that it can
neither end the line nor look like another one. Prompts, outputs and keys never do: lines are made
of what `ended` takes from a request, and of our own words.
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

LONGEST = 4000  # characters of a message or a value
CAUSES = 3  # exceptions told of a chain of them
LONGEST_ERROR = 300  # of the text of an exception, which may quote what it failed at
PLAIN = re.compile(r"[^\s\"=]+")

log = logging.getLogger("jaxserve.requests")
_request: ContextVar[tuple[str, str]] = ContextVar("request", default=("", ""))


def setup(format: str, level: str) -> None:
    """Lines to stderr from now on. format: text or json. level: debug, info, warning or error, of
    our own lines; libraries' lines are warnings at least."""
    handler = _Stderr()
    handler.setFormatter(Json() if format == "json" else Text())
    root = logging.getLogger()
    root.handlers = [
        other for other in root.handlers if type(other) not in (logging.StreamHandler, _Stderr)
    ] + [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
    logging.getLogger("jaxserve").setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers, logging.getLogger(name).propagate = [], True


@contextlib.contextmanager
def bound(request_id: str, trace_id: str = "") -> Iterator[None]:
    """Lines written inside, by this task or thread and those begun by it, are about this
    request."""
    token = _request.set((request_id, trace_id))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # it ends in another task than it began in
            _request.reset(token)


def ended(
    request: Request,
    finished: Sequence[Finished],
    status: str,
    *,
    tenant: str = "",
    protocol: str = "",
    trace_id: str = "",
) -> None:
    """The one line about a request that is over. finished: the ends of its completions that are
    known; status: gRPC's name of it."""
    whole = Summary.of(finished) if finished else None
    fields: dict[str, Any] = {
        "status": status,
        "reason": ",".join(dict.fromkeys(end.reason for end in finished)) or status.lower(),
        "tenant": tenant or None,
        "protocol": protocol or None,
        "prompt_tokens": len(request.prompt),
        "cached_tokens": whole.cached if whole else 0,
        "output_tokens": whole.output if whole else 0,
    }
    if whole:
        times = {
            "queued": whole.queued,
            "ttft": whole.ttft,
            "tpot": whole.tpot,
            "seconds": whole.total,
        }
        fields |= {
            name: round(seconds, 6) for name, seconds in times.items() if seconds is not None
        }
    known = {name: value for name, value in fields.items() if value is not None}
    log.info(
        "ended",
        extra={
            "fields": known,
            "request_id": request.id,
            "trace_id": trace_id or _request.get()[1],
        },
    )


class Text(logging.Formatter):
    """I 2026-01-31T23:59:59.123Z jaxserve.server.supervisor: message request_id=x; a traceback follows,
    indented."""

    def format(self, record: logging.LogRecord) -> str:
        told = {**_about(record), **_fields(record)}
        pairs = "".join(
            f" {name}={_shown(value)}" for name, value in told.items() if value is not None
        )
        line = f"{record.levelname[:1]} {_time(record)} {record.name}: {escaped(_message(record))}{pairs}"
        return "\n    ".join([line, *_faults(record)])


class Json(logging.Formatter):
    """An object on a line: time, level, logger, message, request_id, trace_id, what else is known,
    and exception."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        told |= {"message": _message(record), **_about(record)}
        if faults := _faults(record):
            told["exception"] = "\n".join(faults)
        return json.dumps({**told, **_fields(record)}, default=str)


def escaped(text: str) -> str:
    """Without what ends a line, moves the cursor or turns the direction of writing: these are
    written as \\n, \\x1b, \\u202e."""
    text = text[:LONGEST]
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    )


def _message(record: logging.LogRecord) -> str:
    return record.getMessage()[:LONGEST]


def _shown(value: Any) -> str:
    text = escaped(str(value))
    return text if PLAIN.fullmatch(text) else '"' + text.replace('"', '\\"') + '"'


def _time(record: logging.LogRecord) -> str:
    return (
        time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        + f".{int(record.created * 1000) % 1000:03}Z"
    )


def _about(record: logging.LogRecord) -> dict[str, str | None]:
    request_id, trace_id = _request.get()
    return {
        "request_id": getattr(record, "request_id", "") or request_id or None,
        "trace_id": getattr(record, "trace_id", "") or trace_id or None,
    }


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    return getattr(record, "fields", {})


def _faults(record: logging.LogRecord) -> list[str]:
    """Where an exception was raised, and its kind; of its text only the beginning. Lines of source,
    which say no more, are left out. What it came of is told after it."""
    error = record.exc_info[1] if record.exc_info else None
    lines = []
    for _ in range(CAUSES):
        if error is None:
            break
        place = error.__traceback__
        while place is not None:
            lines.append(
                f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno} in {place.tb_frame.f_code.co_name}"
            )
            place = place.tb_next
        lines.append(escaped(f"{type(error).__name__}: {str(error)[:LONGEST_ERROR]}"))
        error = error.__cause__
    return lines


class _Stderr(logging.StreamHandler):
    """To what stderr is when a line is written."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr
