"""The channel between leader and workers, over real sockets, and those who attack it."""

import contextlib
import os
import resource
import select
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from typing import Any

import psutil
import pytest
import trustme

from jaxserve.group import channel as channels
from jaxserve.group import handshake
from jaxserve.group.channel import Frame, accept, connect
from jaxserve.group.connection import ChannelError
from jaxserve.group.handshake import Certificate, StrangerError
from tests.waiting import SOON, eventually

SECRET = b"a secret of some length"
HEAD = struct.calcsize("<IB")
CODE = handshake.CODE_BYTES


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Two certificates of the same host: the leader's, and that of somebody between."""
    authority = trustme.CA()
    made = []
    for name in ("leader", "other"):
        folder = tmp_path_factory.mktemp(name)
        issued = authority.issue_cert("127.0.0.1")
        issued.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
        issued.private_key_pem.write_to_path(str(folder / "key.pem"))
        made.append(Certificate.load(str(folder / "cert.pem"), str(folder / "key.pem")))
    return made


@pytest.fixture(params=["plain", "tls"])
def tls(request, certificates):
    """The leader's certificate, or None: tests that take this run with and without."""
    return certificates[0] if request.param == "tls" else None


class Listener:
    """A leader's port. `accepted` holds what came of each handshake: a channel or an error."""

    def __init__(self, tls=None, secret=SECRET):
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = self.server.getsockname()
        self.accepted = []
        self._tls, self._secret = tls, secret
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.server.accept()
                threading.Thread(target=self._accept, args=(connection,), daemon=True).start()

    def _accept(self, connection):
        try:
            self.accepted.append(accept(connection, self._secret, self._tls))
        except ChannelError as error:
            self.accepted.append(error)

    def result(self):
        """Returns what came of the first handshake."""
        eventually(lambda: self.accepted)
        return self.accepted[0]

    def close(self):
        self.server.close()
        for made in self.accepted:
            if not isinstance(made, ChannelError):
                made.close()


@pytest.fixture
def listen():
    made = []

    def listen(*args):
        made.append(Listener(*args))
        return made[-1]

    yield listen
    for listener in made:
        listener.close()


@pytest.fixture
def pair(tls, listen):
    """The leader's side and the worker's."""
    listener = listen(tls)
    worker = connect(listener.address, SECRET, tls is not None)
    yield listener.result(), worker
    worker.close()


class Between:
    """Somebody between worker and leader, who passes on what `change` makes of it. change: from
    (to the leader?, a plain channel's frame, its number) to the bytes that go on; None: ends all.
    The first frame's number is 0; handshakes pass as they are."""

    def __init__(self, address, change):
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()
        self._change = change
        self._ends = [socket.create_connection(address)]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        worker, _ = self._server.accept()
        leader = self._ends[0]
        self._ends.append(worker)
        for source, target, size in (
            (leader, worker, len(channels.MAGIC) + handshake.NONCE_BYTES),
            (worker, leader, handshake.NONCE_BYTES + 32),
            (leader, worker, 32),
        ):
            target.sendall(self._exactly(source, size))
        for source, target, up in ((worker, leader, True), (leader, worker, False)):
            threading.Thread(target=self._pass, args=(source, target, up), daemon=True).start()

    def _pass(self, source, target, up):
        with contextlib.suppress(OSError):
            number = 0
            while head := self._exactly(source, HEAD):
                size = struct.unpack("<IB", head)[0]
                changed = self._change(up, head + self._exactly(source, size + CODE), number)
                if changed is None:
                    break
                target.sendall(changed)
                number += 1
        self.close()

    @staticmethod
    def _exactly(source, size):
        data = b""
        while len(data) < size and (part := source.recv(size - len(data))):
            data += part
        return data

    def close(self):
        for end in (*self._ends, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@pytest.fixture
def through(listen):
    """A leader's and a worker's channel with somebody between."""
    made = []

    def through(change):
        listener = listen()
        made.append(Between(listener.address, change))
        worker = connect(made[-1].address, SECRET)
        return listener.result(), worker

    yield through
    for between in made:
        between.close()


def in_thread(run):
    """Runs something beside the test; returns a list that gets what it raised, or None."""
    ends: list[Exception | None] = []

    def body():
        try:
            run()
            ends.append(None)
        except Exception as error:
            ends.append(error)

    threading.Thread(target=body, daemon=True).start()
    return ends


# --- what is sent arrives


@pytest.mark.parametrize("size", [0, 1, 15, 1 << 14, (1 << 18) + 1, 3_000_000])
def test_frames_of_any_size_arrive_in_both_directions(pair, size):
    content = os.urandom(size)
    ends = [in_thread(lambda side=side: side.send(5, content)) for side in pair]
    assert [side.receive() for side in pair] == [Frame(5, content)] * 2
    eventually(lambda: ends == [[None], [None]])


def test_frames_of_many_threads_arrive_whole_and_in_each_ones_order(pair):
    leader, worker = pair
    sizes = (0, 3, 70_000)

    def send(thread):
        for number in range(30):
            leader.send(thread, bytes([number]) * (1 + sizes[number % 3]))

    ends = [in_thread(lambda thread=thread: send(thread)) for thread in range(8)]
    came = [worker.receive() for _ in range(8 * 30)]
    for thread in range(8):
        contents = [frame.content for frame in came if frame.kind == thread]
        assert contents == [bytes([n]) * (1 + sizes[n % 3]) for n in range(30)]
    eventually(lambda: ends == [[None]] * 8)


def test_large_frames_pass_each_other(pair):
    """More than the kernel's buffers hold, from both sides before either reads."""
    content = os.urandom(24_000_000)
    ends = [in_thread(lambda side=side: side.send(1, content)) for side in pair]
    time.sleep(0.2)
    received = []
    for side in pair:
        in_thread(lambda side=side: received.append(side.receive().content == content))
    eventually(lambda: received == [True, True] and ends == [[None], [None]])


def test_both_sides_talk_at_once_for_a_while(pair):
    def talk(side):
        for number in range(150):
            side.send(number, bytes(number * 400))

    def hear(side):
        for number in range(150):
            assert side.receive() == Frame(number, bytes(number * 400))

    ends = [
        in_thread(lambda side=side, run=run: run(side)) for side in pair for run in (talk, hear)
    ]
    eventually(lambda: ends == [[None]] * 4)


def test_sending_does_not_wait_for_one_who_waits_to_receive(pair):
    leader, worker = pair
    ends = in_thread(leader.receive)
    time.sleep(0.05)
    leader.send(1, b"at once")
    assert worker.receive().content == b"at once" and not ends
    worker.send(2)
    eventually(lambda: ends == [None])


def test_a_process_with_thousands_of_open_files_has_channels_too(listen):
    """Such as a leader that serves thousands of clients."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 3000:
        pytest.skip("this user may open fewer files")
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        listener = listen()
        worker = connect(listener.address, SECRET)
        ends = in_thread(worker.receive)
        time.sleep(0.05)
        listener.result().send(1)
        eventually(lambda: ends == [None])
        worker.close()
    finally:
        for file in files:
            os.close(file)


# --- the end


def test_closing_ends_a_receive_that_waits_on_either_side(pair):
    leader, worker = pair
    ends = [in_thread(leader.receive), in_thread(worker.receive)]
    time.sleep(0.05)
    leader.close()
    eventually(lambda: all(ends))
    assert all(isinstance(end, ChannelError) for (end,) in ends)
    for side in pair:
        with pytest.raises(ChannelError):
            side.receive()
        with pytest.raises(ChannelError):
            for _ in range(100):  # what the kernel takes before it hears of the end
                side.send(1, bytes(100_000))


def test_a_peer_that_stops_reading_ends_a_send_within_its_bound(pair, monkeypatch):
    monkeypatch.setattr(channels, "STALL_SECONDS", 0.5)
    leader, _ = pair
    began = time.monotonic()
    with pytest.raises(ChannelError, match=r"took no bytes for 0\.5 s"):
        while True:
            leader.send(1, bytes(1_000_000))
    assert time.monotonic() - began < SOON
    with pytest.raises(ChannelError):  # half a frame is on its way: nothing may follow it
        leader.send(1)


def test_the_last_word_of_one_who_is_gone_can_be_read_after_sending_has_failed(pair):
    leader, worker = pair
    leader.send(12, b"the end")
    leader.close()
    with pytest.raises(ChannelError):
        for _ in range(100):
            worker.send(1, bytes(100_000))
    assert worker.receive() == Frame(12, b"the end")


def test_a_slow_reader_is_no_reason_to_end(pair, monkeypatch):
    monkeypatch.setattr(channels, "STALL_SECONDS", 4.0)
    leader, worker = pair
    ends = in_thread(lambda: [leader.send(1, bytes(2_000_000)) for _ in range(10)])
    began = time.monotonic()
    for _ in range(10):
        assert len(worker.receive().content) == 2_000_000
        time.sleep(0.5)
    assert time.monotonic() - began > 4
    eventually(lambda: ends == [None])


VANISHES = """
import sys, threading
from jaxserve.group import channel as channels
channels.STALL_SECONDS = 2.0
name, address = sys.argv[1:]
if name == "leader":
    import socket
    with socket.create_server((address, 7713)) as server:
        print("listens", flush=True)
        channel = channels.accept(server.accept()[0], b"a secret of some length")
else:
    channel = channels.connect((address, 7713), b"a secret of some length")
print("joined", flush=True)
try:
    channel.receive()
except OSError as error:
    print("ended:", error, flush=True)
"""


def test_a_host_that_vanishes_without_a_word_is_noticed():
    """Two network namespaces, and the cable between them is cut."""
    names = [f"jaxserve-test-{os.getpid()}-{end}" for end in "ab"]
    ip = lambda *words: subprocess.run(["ip", *words], check=True, capture_output=True)
    processes: list[Any] = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            links = [f"v{os.getpid()}{end}" for end in "ab"]
            ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
            for name, link, last in zip(names, links, (1, 2)):
                ip("link", "set", link, "netns", name)
                ip("-n", name, "addr", "add", f"10.99.99.{last}/24", "dev", link)
                ip("-n", name, "link", "set", link, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"this user cannot make networks: {error}")
        for name, role in zip(names, ("leader", "worker")):
            processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name]
                    + [sys.executable, "-c", VANISHES, role, "10.99.99.1"],
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            assert processes[-1].stdout.readline() == (
                "listens\n" if role == "leader" else "joined\n"
            )
        assert processes[0].stdout.readline() == "joined\n"
        time.sleep(2.5)
        assert [process.poll() for process in processes] == [None, None], "silence is no end"
        ip("-n", names[0], "link", "set", links[0], "down")
        for process in processes:
            assert "ended:" in process.communicate(timeout=SOON)[0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


# --- strangers


def test_a_worker_with_another_secret_is_refused_on_both_sides(tls, listen):
    listener = listen(tls)
    with pytest.raises(StrangerError, match="the leader's secret is another one"):
        connect(listener.address, b"another secret of some length", tls is not None)
    assert "does not know the group's secret" in str(listener.result())


def test_a_leader_with_another_secret_is_refused_by_the_worker(listen):
    """It takes any proof, so that the worker's own check counts."""
    server = socket.create_server(("127.0.0.1", 0))

    def lie():
        connection, _ = server.accept()
        connection.sendall(channels.MAGIC + bytes(32))
        connection.recv(64, socket.MSG_WAITALL)
        connection.sendall(b"x" * 32)

    in_thread(lie)
    with server, pytest.raises(ChannelError, match="does not know the group's secret"):
        connect(server.getsockname(), SECRET)


def test_a_workers_own_proof_sent_back_to_it_is_none(listen):
    server = socket.create_server(("127.0.0.1", 0))

    def mirror():
        connection, _ = server.accept()
        connection.sendall(channels.MAGIC + bytes(32))
        connection.sendall(connection.recv(64, socket.MSG_WAITALL)[32:])

    in_thread(mirror)
    with server, pytest.raises(ChannelError, match="does not know the group's secret"):
        connect(server.getsockname(), SECRET)


def test_another_version_of_frames_is_told_from_a_wrong_secret():
    server = socket.create_server(("127.0.0.1", 0))
    in_thread(lambda: server.accept()[0].sendall(b"jaxserve group 0" + bytes(32)))
    with server, pytest.raises(ChannelError, match="no leader of this version"):
        connect(server.getsockname(), SECRET)


def test_a_recorded_handshake_opens_nothing(listen):
    listener = listen()
    recorded = []

    def change(up, frame, number):
        return frame

    class Recorder(Between):
        @staticmethod
        def _exactly(source, size):
            recorded.append(Between._exactly(source, size))
            return recorded[-1]

    between = Recorder(listener.address, change)
    connect(between.address, SECRET).close()
    between.close()
    eventually(lambda: len(recorded) >= 3 and listener.accepted)
    with socket.create_connection(listener.address) as again:
        again.sendall(recorded[1])  # what the worker said
        eventually(lambda: len(listener.accepted) == 2)
    assert "does not know the group's secret" in str(listener.accepted[1])


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 200, bytes(63), b"\x16\x03\x01\x02\x00\x01" * 40],
    ids=["nothing", "http", "ones", "one byte short", "like tls"],
)
def test_a_stranger_is_sent_away_in_time(tls, listen, monkeypatch, said):
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.5)
    listener = listen(tls)
    with socket.create_connection(listener.address) as stranger:
        stranger.sendall(said)
        assert isinstance(listener.result(), ChannelError)
        stranger.settimeout(SOON)
        with contextlib.suppress(ConnectionError):
            while stranger.recv(1000):
                pass  # until the leader has closed it


def test_a_stranger_that_says_a_byte_now_and_then_is_sent_away_in_time(listen, monkeypatch):
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.9)
    listener = listen()
    began = time.monotonic()
    stranger = socket.create_connection(listener.address)
    with stranger, contextlib.suppress(ConnectionError):
        while not listener.accepted and time.monotonic() - began < SOON:
            stranger.sendall(b"x")
            time.sleep(0.5)  # all that a worker says would take half a minute
    assert isinstance(listener.result(), ChannelError)
    assert time.monotonic() - began < 20


def test_a_leader_that_says_nothing_is_left_in_time(tls, monkeypatch):
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(ChannelError):
        connect(server.getsockname(), SECRET, tls is not None)


def test_a_handshake_holds_few_bytes_whatever_a_stranger_sends(listen):
    listener = listen()
    with socket.create_connection(listener.address) as stranger, contextlib.suppress(OSError):
        for _ in range(2000):
            stranger.sendall(bytes(100_000))  # 200 MB
    assert isinstance(listener.result(), ChannelError)
    connect(listener.address, SECRET).close()


def test_strangers_leave_no_file_open(tls, listen):
    listener = listen(tls)
    process = psutil.Process()
    before = process.num_fds()
    for _ in range(30):
        with pytest.raises(ChannelError):
            connect(listener.address, b"another secret of some length", tls is not None)
        with socket.create_connection(listener.address) as stranger:
            stranger.sendall(b"\xff" * 100)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        for _ in range(30):
            with pytest.raises(ChannelError, match="refused"):
                connect(nobody.getsockname(), SECRET)
    eventually(lambda: len(listener.accepted) == 60 and process.num_fds() <= before)


# --- who stands between


@pytest.mark.parametrize("up", [True, False], ids=["to the leader", "to the worker"])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda frame: frame + frame, id="repeated"),
        pytest.param(lambda frame: b"", id="left out"),
        pytest.param(lambda frame: frame[:4] + b"\x09" + frame[5:], id="another kind"),
        pytest.param(lambda frame: frame[:8] + b"!" + frame[9:], id="another content"),
        pytest.param(lambda frame: frame[:-1] + bytes([frame[-1] ^ 1]), id="another code"),
        pytest.param(lambda frame: b"\x03" + frame[1:], id="a shorter one"),
        pytest.param(lambda frame: b"\xff\xff\xff\xff" + frame[4:], id="a huge one"),
        pytest.param(lambda frame: os.urandom(50), id="garbage"),
    ],
)
def test_a_frame_that_was_changed_ends_the_channel(through, up, change):
    sides = through(lambda goes_up, frame, number: change(frame) if number == 2 else frame)
    receiver, sender = sides if up else sides[::-1]
    for number in range(6):
        with contextlib.suppress(ChannelError):  # the other side may have ended it by now
            sender.send(number, b"some words")
    sender.close()  # garbage may announce more than ever comes
    received = []
    with pytest.raises(ChannelError):
        for _ in range(6):
            received.append(receiver.receive())
    assert received[:2] == [Frame(0, b"some words"), Frame(1, b"some words")]
    assert received[2:] in ([], [Frame(2, b"some words")]), "nothing that came later counts"
    with pytest.raises(ChannelError):
        receiver.receive()


def test_a_truncated_frame_is_no_frame(through):
    leader, worker = through(lambda up, frame, number: frame if number == 0 else None)
    worker.send(1, b"whole")
    assert leader.receive().content == b"whole"
    worker.send(2, b"cut off")
    with pytest.raises(ChannelError, match="closed"):
        leader.receive()


def test_two_frames_do_not_change_places(through):
    kept = []

    def swap(up, frame, number):
        if number == 0:
            kept.append(frame)
            return b""
        return frame + kept.pop() if kept else frame

    leader, worker = through(swap)
    worker.send(1, b"first")
    worker.send(1, b"second")
    with pytest.raises(ChannelError, match="changed on its way"):
        leader.receive()


def test_what_one_side_said_does_not_count_as_the_others(through):
    """A frame sent back to its sender."""
    box = []

    def change(up, frame, number):
        if up:
            box.append(frame)
        return b"" if up else box[0]

    leader, worker = through(change)
    worker.send(1, b"do this")
    eventually(lambda: box)
    leader.send(1, b"do that")
    with pytest.raises(ChannelError, match="changed on its way"):
        worker.receive()


def test_somebody_between_with_another_certificate_is_refused(certificates, listen):
    """They relay the proofs unchanged, each under TLS."""
    leader, other = certificates
    listener = listen(leader)
    server = socket.create_server(("127.0.0.1", 0))

    def relay():
        inside = other.context.wrap_socket(server.accept()[0], server_side=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        outside = context.wrap_socket(socket.create_connection(listener.address))
        with inside, outside:
            inside.sendall(Between._exactly(outside, len(channels.MAGIC) + 32))
            outside.sendall(Between._exactly(inside, 64))
            inside.sendall(Between._exactly(outside, 32) or bytes(32))

    ends = in_thread(relay)
    with server, pytest.raises(ChannelError):
        connect(server.getsockname(), SECRET, tls=True)
    assert "does not know the group's secret" in str(listener.result())
    eventually(lambda: ends)


@pytest.mark.parametrize("leader_has", [True, False])
def test_one_with_tls_and_one_without_do_not_meet(certificates, listen, monkeypatch, leader_has):
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.5)
    listener = listen(certificates[0] if leader_has else None)
    with pytest.raises(ChannelError):
        connect(listener.address, SECRET, tls=not leader_has)
    assert isinstance(listener.result(), ChannelError)


def test_nothing_of_a_frame_can_be_read_under_tls(certificates, listen):
    listener = listen(certificates[0])
    server = socket.create_server(("127.0.0.1", 0))
    seen = bytearray()

    def tap():
        inside, outside = server.accept()[0], socket.create_connection(listener.address)
        with inside, outside:
            while True:
                ready, _, _ = select.select([inside, outside], [], [])
                for end in ready:
                    data = end.recv(1 << 16)
                    if not data:
                        return
                    seen.extend(data)
                    (outside if end is inside else inside).sendall(data)

    in_thread(tap)
    with server:
        worker = connect(server.getsockname(), SECRET, tls=True)
        worker.send(1, b"words that nobody is to read")
        assert listener.result().receive().content == b"words that nobody is to read"
        worker.close()
    assert len(seen) > 500 and b"nobody" not in seen


@pytest.mark.parametrize("order", ["certificate first", "key first", "with a text before"])
def test_a_certificate_and_its_key_may_be_in_one_file(tmp_path, listen, order):
    issued = trustme.CA().issue_cert("127.0.0.1")
    pems = [issued.cert_chain_pems[0].bytes(), issued.private_key_pem.bytes()]
    if order == "key first":
        pems.reverse()
    if order == "with a text before":
        pems.insert(0, "subject=Zoë\n".encode("latin-1"))
    file = tmp_path / "both.pem"
    file.write_bytes(b"".join(pems))
    listener = listen(Certificate.load(str(file), str(file)))
    connect(listener.address, SECRET, tls=True).close()
    assert not isinstance(listener.result(), ChannelError)
