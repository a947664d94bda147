"""The harm that proxies do to connections, and the verdict over a run of faults."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from experiments.faults.__main__ import Fault, pairs, rows, wrong_with
from experiments.faults.proxy import PortsOf, Proxy, every_port
from experiments.faults.soak import MORE, grown
from jaxserve.group.channel import free_port
from tests.waiting import eventually

VALUES = {"running": 4, "limit": 60.0, "rounds": 1, "only": "", "launched": 1}


class Echo:
    """A server that sends back what it gets, and END where its peer sends no more."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = self._socket.getsockname()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                end, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(end,), daemon=True).start()

    def _serve(self, end: socket.socket) -> None:
        with end:
            try:
                while data := end.recv(1000):
                    end.sendall(data)
                end.sendall(b"END")
            except OSError:
                return

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def echo():
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo):
    one = Proxy(("127.0.0.1", free_port("127.0.0.1")), echo.address)
    yield one
    one.close()


@pytest.fixture
def client(proxy):
    with socket.create_connection(proxy.address, 30) as end:
        end.sendall(b"before")
        assert end.recv(100) == b"before"
        yield end


def read(end: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (part := end.recv(100)):
        data += part
    return data


@pytest.mark.parametrize(
    "kind, said", [("duplicate", b"abcdabcd"), ("reorder", b"cdab"), ("delay", b"abcd")]
)
def test_bytes_come_twice_or_in_another_order_or_later(proxy, client, kind, said):
    harm = proxy.begin(kind, every_port)
    client.sendall(b"abcd")
    assert read(client, len(said)) == said
    assert harm.done
    proxy.end()
    client.sendall(b"efgh")
    assert read(client, 4) == b"efgh"


def test_what_is_held_comes_when_the_harm_ends(proxy, client):
    harm = proxy.begin("hold", every_port)
    client.sendall(b"abcd")
    eventually(lambda: harm.done)
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.recv(100)
    proxy.end()
    client.settimeout(30)
    assert read(client, 4) == b"abcd"


def is_cut(end: socket.socket) -> bool:
    try:
        end.sendall(b"abcd")
        return end.recv(100) == b""
    except (BrokenPipeError, ConnectionResetError):
        return True


def test_connections_are_cut_and_new_ones_too_until_the_harm_ends(proxy, client):
    proxy.begin("cut", every_port)
    assert is_cut(client)
    with socket.create_connection(proxy.address, 30) as other:
        assert is_cut(other)
    proxy.end()
    with socket.create_connection(proxy.address, 30) as other:
        other.sendall(b"abcd")
        assert read(other, 4) == b"abcd"


def test_a_server_whose_peer_ended_half_may_go_on_sending(proxy, client):
    proxy.begin("half-close", every_port)
    assert read(client, 3) == b"END"


def test_only_connections_of_the_given_processes_are_harmed(proxy, client):
    ours = client.getsockname()[1]
    assert PortsOf(lambda: {os.getpid()})(ours)
    assert not PortsOf(lambda: {os.getpid()}, inverse=True)(ours)
    assert not PortsOf(set)(ours)
    harm = proxy.begin("hold", PortsOf(set))
    client.sendall(b"abcd")
    assert read(client, 4) == b"abcd" and not harm.done


def fault(**fields) -> Fault:
    sound = {"streaming": 4, "running": 5, "happened": "yes", "seconds": 1.0, "ends": {"right": 9}}
    return Fault("SIGKILL", "decode 1", **{**sound, **fields})


def test_a_sound_run_has_no_fault():
    assert not wrong_with([fault(ends={"right": 9, "UNAVAILABLE": 2})], {"busy": {}}, VALUES)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"happened": ""}, "did not happen"),
        ({"streaming": 3}, "3 requests had tokens"),
        ({"seconds": None}, "not whole in 60 s"),
        ({"ends": {"wrong": 1}}, "1 wrong"),
        ({"ends": {"hung": 2}}, "2 hung"),
    ],
)
def test_a_run_fails_where_a_fault_did_not_happen_or_harmed(fields, said):
    (found,) = wrong_with([fault(**fields)], {}, VALUES)
    assert said in found and "SIGKILL of decode 1" in found


def test_a_run_fails_where_faults_are_missing_or_something_is_left():
    assert wrong_with([], {}, VALUES) == ["0 faults of 1"]
    assert wrong_with([fault()], {"processes": 2}, VALUES) == ["left at the end: processes 2"]


def test_faults_of_one_kind_are_one_row():
    found = rows([fault(), fault(ends={"right": 1, "UNAVAILABLE": 3}, seconds=5.0)])
    assert found == [
        ["decode", "SIGKILL", "2", "5", "10", "3 UNAVAILABLE", "0", "0", "0", "0", "3.0", "5.0"]
    ]


def test_a_run_without_a_group_has_faults_of_all_others():
    alone = pairs({**VALUES, "launched": 0})
    assert ("conductor", "SIGKILL") in alone and ("kv", "duplicate") in alone
    assert not {target for target, _ in alone} & {"leader", "worker", "group"}
    assert len(pairs(VALUES)) > len(alone)


def test_a_soak_tells_of_processes_that_have_more_than_before():
    before = {"serve 1": (100.0, 20, 10), "conductor 2": (50.0, 5, 5)}
    assert not grown(before, {name: (900.0, *rest) for name, (_, *rest) in before.items()})
    threads = {**before, "serve 1": (100.0, 21 + MORE, 10)}
    assert grown(before, threads) == [f"serve 1: threads 20 before, {21 + MORE} after"]
    files = {**before, "conductor 2": (50.0, 5, 6 + MORE)}
    assert grown(before, files) == [f"conductor 2: descriptors 5 before, {6 + MORE} after"]
    assert grown(before, {"serve 1": before["serve 1"]}) == ["conductor 2 ended"]
