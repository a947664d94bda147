"""A server's lines: whose they are, that nobody can write lines of their own, and that they never
tell what was asked or answered."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time

import numpy as np
import pytest

from jaxserve.api.events import Finished, Timing, Usage
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.server import logs

HOSTILE = [
    "a\nI 2026-01-01T00:00:00.000Z jaxserve: forged",
    "a\r\nb",
    "\x1b[2Kgone",
    "\u2028x",
    "\u202egnp",
    "\x00",
    "\ud800",
    'q" x=1',
    "\x85z",
]


@pytest.fixture(autouse=True)
def restored():
    kept = {
        name: (logger.handlers[:], logger.level)
        for name in (None, "jaxserve")
        if (logger := logging.getLogger(name))
    }
    yield
    for name, (handlers, level) in kept.items():
        logger = logging.getLogger(name)
        logger.handlers[:] = handlers
        logger.setLevel(level)


@pytest.fixture(params=["text", "json"])
def format(request):
    logs.setup(request.param, "info")
    return request.param


def lines(capsys) -> list[str]:
    return capsys.readouterr().err.splitlines()


def request(id: str = "r-1", prompt=(5, 6, 7)) -> Request:
    return Request.make(id, np.array(prompt), SamplingParams(max_tokens=5), vocab=10, max_len=100)


def end(
    index=0,
    reason="length",
    cached=0,
    completion=5,
    queued=0.1,
    first=0.5,
    total=0.9,
    gap=0.0,
    error=None,
    in_time=None,
) -> Finished:
    timing = Timing(queued, first, total, gap)
    usage = Usage(3, cached, completion)
    return Finished(index, reason, usage, timing, None, error, in_time=in_time)


def test_a_line_of_json_has_what_machines_look_for(capsys):
    logs.setup("json", "info")
    before = time.time()
    with logs.bound("r-7", "4bf92f3577b34da6a3ce929d0e0e4736"):
        logging.getLogger("jaxserve.server.frontend").warning("left %s", "unread")
    logging.getLogger("jaxserve.engine").info("warm")
    first, second = map(json.loads, lines(capsys))
    at = first.pop("time")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", at) and at[:16] in (
        time.strftime("%Y-%m-%dT%H:%M", time.gmtime(moment)) for moment in (before, time.time())
    )
    assert first == {
        "level": "warning",
        "logger": "jaxserve.server.frontend",
        "message": "left unread",
        "request_id": "r-7",
        "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
    }
    assert second["request_id"] is None and second["trace_id"] is None


def test_a_line_of_text_is_read_by_people(capsys):
    logs.setup("text", "info")
    logging.getLogger("jaxserve.server.supervisor").info("serving on %s:%d", "::1", 8470)
    (line,) = lines(capsys)
    assert re.fullmatch(r"I \S+Z jaxserve\.server\.supervisor: serving on ::1:8470", line)


def test_the_request_goes_with_tasks_and_threads_and_not_beyond(capsys):
    logs.setup("json", "info")
    log = logging.getLogger("jaxserve.x")

    async def one(id: str) -> None:
        with logs.bound(id):
            await asyncio.sleep(0.01)
            await asyncio.to_thread(log.info, id)
        log.info("none")

    async def main() -> None:
        await asyncio.gather(*(one(f"r-{number}") for number in range(3)))

    asyncio.run(main())
    found = [(line["message"], line["request_id"]) for line in map(json.loads, lines(capsys))]
    assert sorted(found[:6]) and {pair for pair in found if pair[0] != "none"} == {
        (f"r-{n}", f"r-{n}") for n in range(3)
    }
    assert all(id is None for message, id in found if message == "none")


def test_an_id_given_with_a_line_is_the_lines_own(capsys, format):
    logging.getLogger("jaxserve.engine").error("the sink failed", extra={"request_id": "r-9"})
    assert "r-9" in lines(capsys)[0]


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_nobody_writes_lines_of_their_own(capsys, format, text):
    with logs.bound(text, text):
        logging.getLogger("jaxserve.x").warning("model %s is not served here", text)
    logs.log_ended(request(text), [end()], "OK", tenant=text)
    written = capsys.readouterr().err
    assert written.count("\n") == 2 and not re.search(
        "[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]", written
    ), ascii(written)
    if format == "json":
        first, second = map(json.loads, written.splitlines())
        assert (
            first["request_id"]
            == first["trace_id"]
            == second["tenant"]
            == second["request_id"]
            == text
        )


def test_long_strings_are_cut(capsys, format):
    logging.getLogger("jaxserve.x").warning("%s", "x" * 100_000)
    assert len(lines(capsys)[0]) < 5000


def test_a_fault_tells_where_and_little_of_what(capsys, format):
    secret = "the prompt\nof somebody " * 100
    try:
        int(secret + "x")
    except ValueError:
        logging.getLogger("jaxserve.x").exception("it failed")
    written = capsys.readouterr().err
    assert (
        "test_logs.py" in written
        and "in test_a_fault_tells_where" in written
        and "ValueError: invalid literal" in written
    )
    assert len(written) < 1500
    if format == "json":
        assert json.loads(written)["exception"].count("\n") == 1
    else:
        first, *rest = written.splitlines()
        assert len(rest) == 2 and all(line.startswith("    ") for line in rest), (
            "no part of it looks like a line of its own"
        )


def test_a_request_that_is_over_has_one_line_without_what_it_said(capsys):
    logs.setup("json", "info")
    logs.log_ended(
        request(prompt=[8, 9, 8, 9]),
        [
            end(0, cached=2, gap=0.3, in_time=True),
            end(1, "stop", completion=1, first=0.4, total=0.4, in_time=False),
        ],
        "OK",
        tenant="acme",
        protocol="http",
        trace_id="t",
    )
    (line,) = map(json.loads, lines(capsys))
    line.pop("time")
    assert line == {
        "level": "info",
        "logger": "jaxserve.requests",
        "message": "ended",
        "request_id": "r-1",
        "trace_id": "t",
        "status": "OK",
        "reason": "length,stop",
        "tenant": "acme",
        "protocol": "http",
        "prompt_tokens": 4,
        "cached_tokens": 2,
        "output_tokens": 6,
        "queued": 0.1,
        "ttft": 0.4,
        "tpot": 0.1,
        "longest_gap": 0.3,
        "seconds": 0.9,
        "in_time": False,
    }


def test_a_request_that_was_refused_has_no_figures(capsys):
    logs.setup("text", "info")
    logs.log_ended(request(), [], "RESOURCE_EXHAUSTED")
    (line,) = lines(capsys)
    assert line.endswith(
        "jaxserve.requests: ended request_id=r-1 status=RESOURCE_EXHAUSTED "
        "reason=resource_exhausted prompt_tokens=3 "
        "cached_tokens=0 output_tokens=0"
    )


@pytest.mark.parametrize("level, shown", [("debug", 5), ("info", 4), ("warning", 3), ("error", 1)])
def test_levels(capsys, level, shown):
    logs.setup("text", level)
    for number in (logging.DEBUG, logging.INFO, logging.WARNING):
        logging.getLogger("jaxserve.x").log(number, "ours")
        logging.getLogger("uvicorn.error").log(number, "of a library")
    logging.getLogger("grpc").error("of a library")
    assert len(lines(capsys)) == shown


def test_set_up_twice_writes_once(capsys):
    logs.setup("json", "info")
    logs.setup("text", "info")
    logging.getLogger("jaxserve.x").info("once")
    (line,) = lines(capsys)
    assert line.startswith("I ")
