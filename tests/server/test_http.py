"""Connections over HTTP: bombs, laggards, readers who stop and callers who go away cost others
nothing and leave nothing behind."""

import asyncio
import contextlib
import http.client
import json
import socket
import struct
import threading
import time

import httpx
import psutil
import pytest

from jaxserve.server import logs
from jaxserve.server.http_server import Listener
from jaxserve.settings.schema import ServerConfig
from tests.server.fakes import PARENT, TRACE, FakeReplica, expected
from tests.waiting import SOON, eventually

BODY = {"prompt": "hello", "max_tokens": 4000, "stream": True, "ignore_eos": True}


def connect(served):
    return socket.create_connection(("127.0.0.1", served.server.server.ports["http"]), timeout=SOON)


def send_request(served, body=b"", path="/v1/completions", headers=()):
    """A connection with a POST on its way."""
    there = connect(served)
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    if not any(line.startswith(("content-length", "transfer-encoding")) for line in headers):
        lines.append(f"content-length: {len(body)}")
    there.sendall("\r\n".join([*lines, "", ""]).encode() + body)
    return there


def status_of(there):
    """The status of what comes, or None where the connection just ends."""
    data = b""
    while not data.endswith(b"\n") and (more := there.recv(4096)):
        data += more
        if b"\r\n" in data:
            break
    return int(data.split()[1]) if data else None


def well(served):
    answer = httpx.post(
        f"{served.server.url}/v1/completions", json={"prompt": "hi", "max_tokens": 3}, timeout=SOON
    )
    return answer.json()["choices"][0]["text"] == bytes(expected(b"hi", 3)).decode()


def idle(served):
    return not served.engine.requests and not served.server.server.frontend.streams


def test_a_body_over_the_limit_is_413_whatever_its_header_says(serve):
    served = serve(max_body_mib=1)
    before = psutil.Process().memory_info().rss
    for length in (2**20 + 1, 2**30, 2**63, 10**30):
        assert status_of(send_request(served, headers=[f"content-length: {length}"])) in (400, 413)
    there = send_request(served, headers=["transfer-encoding: chunked"])
    with pytest.raises(OSError):
        for _ in range(1000):
            there.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
    assert psutil.Process().memory_info().rss - before < 32 << 20
    assert well(served) and idle(served)


@pytest.mark.parametrize(
    "header",
    ["content-length: -1", "content-length: x", "content-length: 1, 2", "transfer-encoding: nope"],
)
def test_lengths_that_lie_are_refused(common, header):
    assert status_of(send_request(common, headers=[header])) in (400, 501)
    assert well(common)


def test_a_header_over_the_limit_is_431(serve):
    served = serve(max_header_kib=8)
    there = connect(served)
    there.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ")
    with pytest.raises(OSError):  # nobody takes it
        for _ in range(200):
            there.sendall(b"x" * 65536)
            time.sleep(0.001)
    assert status_of(_header_of(served, 20_000)) == 431 and well(served)


@pytest.mark.parametrize(
    "line, fields, status",
    [
        ("GET /version HTTP/1.1", ["x-long: " + "x" * 6000], 200),
        ("GET /version HTTP/1.1", ["x-long: " + "x" * 9000], 431),
        ("GET /version HTTP/1.1", [f"x-{number}: {'x' * 80}" for number in range(100)], 431),
        (f"GET /version?{'q' * 9000} HTTP/1.1", [], 431),
        ("GET /version HTTP/1.1", [f"x-{number}: y" for number in range(250)], 200),
        ("GET /version HTTP/1.1", [f"x-{number}: y" for number in range(300)], 431),
    ],
)
def test_a_header_that_comes_at_once_has_the_same_limit(serve, line, fields, status):
    served = serve(max_header_kib=8)
    there = connect(served)
    there.sendall("\r\n".join([line, "host: localhost", *fields, "", ""]).encode())
    assert status_of(there) == status and well(served)


def _header_of(served, size):
    there = connect(served)
    there.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"x" * size)
    return there


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
def test_compressed_bodies_are_not_read(common, encoding):
    assert (
        status_of(send_request(common, b"x" * 100, headers=[f"content-encoding: {encoding}"]))
        == 415
    )


def test_who_sends_a_byte_a_second_is_shown_out(serve):
    served = serve(header_timeout=0.5, body_timeout=0.5)
    slow = connect(served)
    with pytest.raises(OSError):
        for char in b"GET /health HTTP/1.1\r\nhost: " + b"x" * 1000:  # in 50 s
            slow.sendall(bytes([char]))
            time.sleep(0.05)
    body = send_request(served, b"{", headers=["content-length: 100"])
    assert status_of(body) == 408 and status_of(connect(served)) == 408 and well(served)


def test_a_second_request_on_a_connection_has_its_time_too(serve):
    served = serve(header_timeout=1.0)
    there = connect(served)
    there.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    data = b""
    while not data.endswith(b"\r\n\r\nok"):
        data += there.recv(4096)
    there.sendall(b"GET /hea")
    assert status_of(there) == 408


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_tokens_do_not_wait_until_the_caller_has_acknowledged_the_last_ones(host):
    """On a connection that is used again that would be 40 ms."""

    async def main():
        options = []

        async def app(scope, receive, send):
            options.append(
                scope["transport"]
                .get_extra_info("socket")
                .getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            )
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

        listener = Listener(app, ServerConfig(host=host), "port", 0)
        await listener.start()
        async with httpx.AsyncClient() as client:
            await client.get(f"http://{f'[{host}]' if ':' in host else host}:{listener.port}")
        await listener.stop()
        assert options == [1]

    asyncio.run(main())


def test_idle_connections_are_closed_and_there_is_a_most_of_them(serve):
    served = serve(max_connections=20, header_timeout=3.0)
    crowd = [connect(served) for _ in range(40)]
    assert sum(status_of(there) == 503 for there in crowd[20:]) == 20
    assert all(status_of(there) == 408 for there in crowd[:20])
    eventually(lambda: well(served))


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x95K\x01.",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"\0" * 1000,
        b"GET\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused(serve, data):
    served = serve(header_timeout=0.5)
    there = connect(served)
    there.sendall(data)
    assert status_of(there) in (400, 404, 408, None) and well(served)


def test_a_reset_frees_the_request_within_a_second(serve):
    served = serve(FakeReplica(step_seconds=0.01))
    for stream in (True, False):
        there = send_request(served, json.dumps({**BODY, "stream": stream}).encode())
        eventually(lambda: served.engine.requests)
        there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        there.close()
        eventually(lambda: idle(served))
    assert len(served.engine.cancelled) == 2


def test_a_caller_who_goes_before_the_first_token_frees_the_request(serve):
    engine = FakeReplica()
    engine.paused = True
    served = serve(engine)
    there = send_request(served, json.dumps(BODY).encode())
    eventually(lambda: engine.requests)
    there.close()
    eventually(lambda: idle(served))
    assert engine.prefill_steps == 0


def test_a_reader_who_stops_is_cut_off_and_others_are_not(serve):
    served = serve(FakeReplica(step_seconds=0.0005), stall_timeout=1.0)
    there = socket.socket()
    there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    there.connect(("127.0.0.1", served.server.server.ports["http"]))
    body = json.dumps({**BODY, "n": 128, "max_tokens": 4000}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    there.sendall(head % len(body) + body)
    eventually(lambda: served.engine.requests)
    assert well(served)
    eventually(lambda: idle(served))
    assert served.engine.cancelled and well(served)


@pytest.mark.parametrize(
    "path, more",
    [
        ("completions", {}),
        ("completions", {"echo": True}),
        ("chat/completions", {"prompt": None, "messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_silence_is_broken_by_comments_and_not_by_a_chunk_that_looks_like_a_token(
    serve, path, more
):
    engine = FakeReplica()
    engine.paused = True
    served = serve(engine, progress_interval=0.2)
    body = {name: value for name, value in {**BODY, **more}.items() if value is not None}
    with httpx.stream("POST", f"{served.server.url}/v1/{path}", json=body, timeout=SOON) as answer:
        lines = answer.iter_lines()
        assert [next(lines) for _ in range(6)] == [": waiting", ""] * 3
        engine.paused = False
        assert next(line for line in lines if line not in (": waiting", "")) == ":"
        assert [next(lines), next(lines)[:6]] == ["", "data: "]
    eventually(lambda: idle(served))


def test_many_at_random_points_leave_nothing(serve):
    served = serve(FakeReplica(step_seconds=0.001, chunk=2))

    def one(number):
        there = send_request(
            served, json.dumps({**BODY, "stream": number % 2 == 0, "n": 1 + number % 3}).encode()
        )
        time.sleep(0.001 * (number % 50))
        there.close()

    for start in range(0, 300, 50):
        threads = [threading.Thread(target=one, args=(start + number,)) for number in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    eventually(lambda: idle(served))
    assert well(served)


def test_draining_ends_no_stream_and_takes_no_new_one(serve):
    served = serve(FakeReplica())
    served.engine.paused = True
    url = served.server.url
    texts = []

    def one():
        answer = httpx.post(
            f"{url}/v1/completions", json={"prompt": "hi", "max_tokens": 100}, timeout=SOON
        )
        texts.append(answer.json()["choices"][0]["text"])

    threads = [threading.Thread(target=one) for _ in range(50)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(served.engine.requests) == 50)
    served.server.stop()
    eventually(lambda: served.server.server.frontend.state == "stopping")
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "hi"}).status_code == 503
    assert (
        httpx.get(f"{url}/ready").status_code == 503
        and httpx.get(f"{url}/health").status_code == 200
    )
    served.engine.paused = False
    for thread in threads:
        thread.join()
    assert texts == [bytes(expected(b"hi", 100)).decode()] * 50


def test_who_has_sent_the_next_request_already_may_go_away(serve):
    served = serve(FakeReplica(step_seconds=0.01))
    there = send_request(served, b'{"prompt": "hi", "max_tokens": 500, "ignore_eos": true}')
    eventually(lambda: served.engine.requests)
    there.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    time.sleep(0.1)
    there.close()
    eventually(lambda: not served.engine.requests)


def test_lines_about_a_request_are_not_in_the_name_of_the_one_before(serve, monkeypatch):
    """A large body makes the server stop reading; whatever has it read on, the next request is
    nobody's but its own."""
    seen: list[str] = []
    monkeypatch.setattr(
        logs,
        "log_ended",
        lambda *rest, trace_id="", **more: seen.append(trace_id or logs.current_ids.get()[1]),
    )
    there = http.client.HTTPConnection(
        "127.0.0.1", serve().server.server.ports["http"], timeout=SOON
    )
    body = b" " * 70_000 + json.dumps({"prompt": "hi", "max_tokens": 2}).encode()
    for count, parent in enumerate(({"traceparent": PARENT}, {}), 1):
        there.putrequest("POST", "/v1/completions")
        for name, value in {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **parent,
        }.items():
            there.putheader(name, value)
        there.endheaders()
        time.sleep(0.05)
        there.send(body)
        assert there.getresponse().read()
        eventually(lambda count=count: len(seen) == count)
    assert seen == [TRACE, ""]


def test_a_body_that_comes_after_its_answer_holds_no_connection(serve):
    served = serve(header_timeout=0.5, body_timeout=0.5, keep_alive=1.0)
    there = connect(served)
    there.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
    assert status_of(there) == 200
    there.settimeout(SOON)
    with contextlib.suppress(ConnectionError):
        there.sendall(b"1\r\na\r\n")
        while there.recv(4096):
            pass


def test_answers_that_nobody_reads_are_cut_off(serve):
    served = serve(stall_timeout=1.0)
    there = socket.socket()
    there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    there.connect(("127.0.0.1", served.server.server.ports["http"]))
    there.settimeout(1.0)
    # the server stops reading, for its own answers are not taken
    with contextlib.suppress(OSError):
        for _ in range(20_000):
            there.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n")
    eventually(lambda: served.server.server.http_connections == 0)
    assert well(served)


def test_going_away_within_a_body_is_no_fault_of_ours(serve, caplog):
    served = serve()
    send_request(served, b"{", headers=["content-length: 100"]).close()
    assert well(served) and "Traceback" not in caplog.text


def test_head_is_answered_wherever_get_is(common):
    with httpx.Client(base_url=common.server.url) as client:
        paths = ["/", "/health", "/version", "/metrics", "/page/", "/openapi.json", "/v1/models"]
        paths += ["/v1/models/missing", "/v1/missing"]
        for path in paths:
            got = client.get(path)
            head = client.head(path)
            assert (head.status_code, head.content) == (got.status_code, b""), path
            assert head.headers.get("content-type") == got.headers.get("content-type")
            if path != "/metrics":  # which change
                assert head.headers["content-length"] == str(len(got.content))
        assert client.head("/v1/completions").status_code == 405


def test_a_wrong_method_is_told_all_that_there_are_and_a_wrong_path_itself(common):
    with httpx.Client(base_url=common.server.url) as client:
        for method, path, allowed in (
            ("PUT", "/v1/models", "HEAD, GET"),
            ("GET", "/v1/chat/completions", "POST"),
            ("OPTIONS", "/tokenize", "POST"),
            ("PATCH", "/v1/responses/resp_1", "HEAD, GET, DELETE"),
            ("BREW", "/v1/embeddings/", "POST"),
        ):
            answer = client.request(method, path)
            assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
            assert allowed in answer.json()["error"]["message"]
        missing = client.post("/v1//completions", json={"prompt": "x"})
        assert missing.status_code == 404 and "'/v1//completions'" in missing.text


def test_a_slash_at_the_end_of_a_path_has_no_effect(common):
    body = {"prompt": "hi", "max_tokens": 2}
    answers = [
        httpx.post(f"{common.server.url}/v1/completions{end}?api-version=1", json=body).json()
        for end in ("", "/")
    ]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert httpx.get(f"{common.server.url}/v1/models/").json()["object"] == "list"


def test_a_path_may_come_as_a_whole_url(common):
    there = connect(common)
    there.sendall(b"GET http://localhost/v1/models?x=1 HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert status_of(there) == 200


def test_a_callers_request_id_comes_back_whatever_the_answer(common):
    with httpx.Client(base_url=common.server.url, headers={"x-request-id": "trace 7"}) as client:
        completions = {"prompt": ["a", "b"], "max_tokens": 1}
        answers = [
            client.get("/version"),
            client.get("/v1/missing"),
            client.post("/v1/completions", json=completions),
            client.post("/v1/completions", json={**completions, "max_tokens": -1}),
            client.post("/v1/embeddings", json={"input": "a"}),
        ]
    assert [answer.headers.get_list("x-request-id") for answer in answers] == [["trace 7"]] * 5
    assert [answer.status_code for answer in answers] == [200, 404, 200, 400, 200]


def test_requests_of_one_id_are_answered_all_and_can_be_aborted_by_it(serve):
    served = serve(FakeReplica(step_seconds=0.01))
    url = served.server.url
    answers = []

    def ask():
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=BODY, headers={"x-request-id": "trace"}
        ) as answer:
            assert answer.headers["x-request-id"] == "trace"
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        answers.append([json.loads(line.removeprefix("data: ")) for line in lines])

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(served.engine.requests) == 3)
    other = served.client.generate("hello", request_id="trace2")
    next(other)
    assert served.client.abort("trace") == 3
    for thread in threads:
        thread.join()
    ids = {lines[0]["id"] for lines in answers}
    assert len(ids) == 3 and "trace" in ids
    assert all(lines[-1]["error"]["code"] == "cancelled" for lines in answers)
    served.client.abort("trace2")
