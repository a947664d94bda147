"""Members of a cluster that send anything at all: a replica and a conductor go on, other sessions
are served, and nothing is left behind."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import threading
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.server import jaxserve_pb2 as users
from jaxserve.server import replica_connection
from jaxserve.server import replica_pb2 as pb
from jaxserve.server import replica_pb2_grpc as rpc
from jaxserve.server.block_service import BlockService
from jaxserve.server.peer_blocks import PeerReplicas
from jaxserve.server.remote_replica import RemoteReplica
from jaxserve.server.replica_auth import CallerCheck, CallerProof
from jaxserve.server.replica_messages import info_text
from jaxserve.server.replica_service import ReplicaService
from jaxserve.store.block_part import BlockPart, PartBytes
from jaxserve.text.structured_output import Guides
from tests.replica.holders import Heard
from tests.server.fakes import EOS, VOCAB, FakeReplica, FakeTokenizer, expected
from tests.server.proto_fuzz import Fuzz
from tests.waiting import SOON, eventually

SECRET = b"of the tests with made-up messages"
PER_CALL = 40  # messages
PROMPT = np.arange(1, 8, dtype=np.int32)
SAMPLING = users.SamplingParams(max_tokens=9)
CONTINUATION = pb.Continuation(
    completions=[pb.BegunCompletion(index=0, output=PROMPT.tobytes())], first_token_age=1.0
)
COMMANDS = [
    pb.Command(alive=pb.Alive()),
    *(
        pb.Command(submit=pb.Submit(number=1, prompt=PROMPT.tobytes(), sampling=SAMPLING, **fields))
        for fields in (
            {"request_id": "a"},
            {"request_id": "b", "guided": users.Guided(regex="ab|cd")},
            {"request_id": "c", "continuation": CONTINUATION},
            {"request_id": "d", "kv_source": pb.KvSource(address="127.0.0.1:1", blocks=1)},
        )
    ),
    pb.Command(cancel=pb.Cancel(call=1, number=1)),
    pb.Command(stop=pb.Stop(call=2, number=1)),
    pb.Command(question=pb.Question(call=3, metrics=True)),
    pb.Command(question=pb.Question(call=4, view_since=0)),
    pb.Command(rejected=pb.Rejected(reason="queue")),
]
ASKED = [
    pb.BlocksAsked(want=pb.Want(keys=bytes(64), request_id="a")),
    pb.BlocksAsked(batch=pb.Batch(blocks=4, peer="127.0.0.1:1", token="ab" * 8, size=256)),
    pb.BlocksAsked(alive=pb.Alive()),
]
EVENTS = [
    pb.Event(accepted=users.Accepted(queue_position=1)),
    pb.Event(token=users.Token(index=0, ids=[5])),
    pb.Event(finished=users.Finished(index=0)),
]
REPORTS = [
    pb.Report(heartbeat=pb.Heartbeat(alive=True, available=True)),
    pb.Report(step=pb.Step(requests=[pb.RequestEvents(number=1, events=EVENTS)])),
    pb.Report(
        step=pb.Step(
            blocks=[pb.BlockChange(medium="device", stored=pb.StoredBlocks(keys=[bytes(16)]))]
        )
    ),
    pb.Report(answer=pb.Answer(call=1, done=True)),
]
ENDS_SECONDS = 30.0


def sizes(many: int) -> pytest.MarkDecorator:
    """A few messages in the suite, and `many` for each of ten seeds in the matrix: 10^5 over all
    tests."""
    matrix = [pytest.param(seed, many, marks=pytest.mark.matrix) for seed in range(1, 11)]
    return pytest.mark.parametrize("seed, count", [(0, 200), *matrix])


class Blocks:
    """A replica's blocks, of which there are none."""

    layout = PartBytes(BlockPart(range(1), range(1)), 64)
    layer_groups = ()

    def __init__(self) -> None:
        self.wanted = 0

    def want(self, keys: list[bytes]) -> None:
        self.wanted += len(keys)

    def unwant(self, keys: list[bytes]) -> None:
        self.wanted -= len(keys)

    def coming(self, request_id: str) -> bool:
        return False

    def read(self, key: bytes, into: np.ndarray, seconds: float) -> bool:
        return False


class Offered:
    """A replica's port, and a conductor that uses it as it should."""

    def __init__(self, stack: contextlib.ExitStack):
        self.behind = FakeReplica(step_seconds=0.001)
        self.behind.start()
        stack.callback(self.behind.close)
        guides = Guides(FakeTokenizer(), VOCAB, (EOS,))
        stack.callback(guides.close)
        peers = PeerReplicas(SECRET)
        stack.callback(peers.close)
        self.blocks = Blocks()
        service = BlockService(peers.planes)
        self.service = ReplicaService(SECRET, max_message_bytes=1 << 20, blocks=service)
        self.target = f"127.0.0.1:{self.service.start('127.0.0.1:0')}"
        stack.callback(self.service.stop)
        self.service.open(self.behind, guides)
        service.open(self.blocks)
        self.remote = RemoteReplica(self.target, SECRET)
        stack.callback(self.remote.close)
        assert self.remote.wait_connected(SOON)
        self._asked = 0

    def assert_serves(self) -> None:
        """Checks that the conductor's requests are answered rightly."""
        self._asked += 1
        heard = Heard()
        asked = Request(
            f"right-{self._asked}",
            np.arange(1, 8, dtype=np.int32),
            SamplingParams(max_tokens=5, ignore_eos=True),
            arrival=self.remote.now(),
        )
        self.remote.submit(asked, heard)
        eventually(lambda: heard.ends, ENDS_SECONDS)
        assert [token.id for token in heard.tokens] == expected(range(1, 8), 5)

    def send(self, method: str, messages: list[bytes]) -> None:
        """Makes a call with these messages as bytes, and waits until it has ended."""
        with grpc.insecure_channel(self.target) as channel:
            proof = CallerProof.begin(rpc.HandshakeStub(channel), SECRET)
            call = proof.call(channel.stream_stream(method), iter(messages), ENDS_SECONDS)
            proof.check(call)
            with contextlib.suppress(grpc.RpcError):
                collections.deque(call, maxlen=0)
            assert call.code() != grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.fixture
def offered():
    with contextlib.ExitStack() as stack:
        yield Offered(stack)


def calls(fuzz: Fuzz, count: int, per_call: int) -> Iterator[list[bytes]]:
    """Lists of messages, `count` in all. One that cannot be read comes last, for it ends the
    call."""
    messages: list[bytes] = []
    for _ in range(count):
        messages.append(fuzz.message())
        if len(messages) == per_call or not fuzz.is_readable(messages[-1]):
            yield messages
            messages = []
    yield messages


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Texts of errors of this package that nothing expected."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.exc_info and record.name.startswith("jaxserve")
    ]


@sizes(5_000)
def test_whatever_a_conductor_sends_other_sessions_are_served(offered, seed, count, caplog):
    threads = threading.active_count()
    for number, messages in enumerate(calls(Fuzz(pb.Command, seed, COMMANDS), count, PER_CALL)):
        offered.send("/jaxserve.replica.v1.Replica/Session", messages)
        if number % 20 == 0:
            offered.assert_serves()
    offered.assert_serves()
    eventually(lambda: not offered.service.requests and not offered.behind.requests)
    eventually(lambda: threading.active_count() <= threads + PER_CALL)
    assert not failures(caplog)


@sizes(1_000)
def test_whatever_an_asker_of_blocks_sends_conductors_are_served(offered, seed, count, caplog):
    for number, messages in enumerate(calls(Fuzz(pb.BlocksAsked, seed, ASKED), count, 8)):
        offered.send("/jaxserve.replica.v1.Blocks/Fetch", messages)
        if number % 20 == 0:
            offered.assert_serves()
    offered.assert_serves()
    eventually(lambda: not offered.blocks.wanted)
    assert not [one for one in threading.enumerate() if one.name == "kv-source"]
    assert not failures(caplog)


class Babbling:
    """A replica that knows the secret, welcomes conductors, and then says anything at all."""

    def __init__(self, fuzz: Fuzz, count: int):
        self._reports = calls(fuzz, count, PER_CALL)
        self.over = threading.Event()
        self.info = info_text(FakeReplica().info)

    def Session(self, commands: object, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield pb.Report(
            welcome=pb.Welcome(info=self.info, max_message_bytes=1 << 20)
        ).SerializeToString()
        yield pb.Report(heartbeat=pb.Heartbeat(alive=True, available=True)).SerializeToString()
        messages = next(self._reports, None)
        if messages is None:
            self.over.set()
            return
        yield from messages

    def listen(self) -> tuple[grpc.Server, int]:
        """Returns a server of this replica, which sends bytes as they are, and its port."""
        callers = CallerCheck(SECRET)
        server = grpc.server(concurrent.futures.ThreadPoolExecutor(8), interceptors=[callers])
        rpc.add_HandshakeServicer_to_server(callers, server)
        session = {"Session": grpc.stream_stream_rpc_method_handler(self.Session)}
        handlers = grpc.method_handlers_generic_handler("jaxserve.replica.v1.Replica", session)
        server.add_generic_rpc_handlers((handlers,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        return server, port


@sizes(4_000)
def test_whatever_a_replica_says_a_conductor_comes_back_to_it(seed, count, monkeypatch):
    monkeypatch.setattr(replica_connection, "RETRY_SECONDS", (0.001, 0.001))
    babbling = Babbling(Fuzz(pb.Report, seed, REPORTS), count)
    with contextlib.ExitStack() as stack:
        server, port = babbling.listen()
        stack.callback(lambda: server.stop(0).wait())
        remote = RemoteReplica(f"127.0.0.1:{port}", SECRET)
        stack.callback(remote.close)
        while not babbling.over.wait(0.01):
            with contextlib.suppress(RequestError):
                remote.count_rejected("any")
        assert remote.info.vocab == VOCAB
