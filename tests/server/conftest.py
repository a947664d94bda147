import contextlib
import functools
import gc
from collections.abc import Iterator

import grpc
import httpx
import pytest

from jaxserve.server.auth.access import Authenticator
from jaxserve.server.client import Client
from jaxserve.server.supervisor import Background
from jaxserve.settings.schema import ServerConfig
from tests.server.fakes import FakeReplica, FakeTokenizer
from tests.server.http_client import HttpClient
from tests.server.keyed import TWO

# HTTP clients wait five seconds by default, which is too few where others have the cores. httpx has
# no setting for it; all its functions share one object.
patience = httpx.Client.__init__.__kwdefaults__["timeout"]
for phase in ("connect", "read", "write", "pool"):
    setattr(patience, phase, 60.0)


class Served:
    """A served fake engine, a client, and a bare channel for what the client would not send."""

    def __init__(self, engine, server):
        self.engine = engine
        self.server = server
        self.target = server.target
        self.client = Client(server.target)
        self.channel = grpc.insecure_channel(server.target)
        self.client.wait_ready(60)

    def status_of(self, method, message):
        """(code, details) of a refused call; `message` may be bytes."""
        data = message if isinstance(message, bytes) else message.SerializeToString()
        path = f"/jaxserve.v1.{method}"
        call = (
            self.channel.unary_stream(path)
            if method.endswith("Generate")
            else self.channel.unary_unary(path)
        )
        try:
            answer = call(data, timeout=60)
            list(answer) if method.endswith("Generate") else answer
        except grpc.RpcError as error:
            return error.code(), error.details()
        return grpc.StatusCode.OK, ""


def started(stack: contextlib.ExitStack, engine=None, tokenizer=FakeTokenizer, **config) -> Served:
    """A served fake engine, until the stack is closed."""
    # A server collects all garbage when it starts, and thaws what is frozen when it ends. The tests
    # before this one left millions of objects, which would take it a second.
    gc.freeze()
    engine = engine or FakeReplica()
    ports = ServerConfig(**{"grpc_port": 0, "port": 0, **config})
    server = stack.enter_context(Background(ports, lambda: (engine, tokenizer and tokenizer())))
    served = Served(engine, server)
    stack.callback(served.channel.close)
    stack.callback(served.client.close)
    return served


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """Ends what a test starts, the last first."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def serve():
    """Starts a server of the test's own, of any engine and settings."""
    with contextlib.ExitStack() as stack:
        yield functools.partial(started, stack)


@pytest.fixture(scope="module")
def common():
    """A server that the tests of a file share, which only ask it."""
    with contextlib.ExitStack() as stack:
        yield started(stack)


@pytest.fixture
def scripted(serve, common):
    """Gives a server whose fake engine says a script: the file's, unless it needs settings or an
    engine of its own."""

    def start(engine=None, *, script=(), step_seconds=0.0, **config) -> Served:
        if engine is None and not config:
            common.engine.play(script, step_seconds)
            return common
        return serve(engine or FakeReplica(script=script, step_seconds=step_seconds), **config)

    yield start
    common.engine.play()


@pytest.fixture
def http(scripted):
    """Gives a client of a server as `scripted` does."""
    with contextlib.ExitStack() as clients:
        yield lambda *engine, **how: clients.enter_context(HttpClient(scripted(*engine, **how)))


@pytest.fixture(scope="module")
def asked(common):
    """A client of the server that the tests of a file share."""
    with HttpClient(common) as client:
        yield client


@pytest.fixture
def key_file(tmp_path):
    """Writes a file of keys; returns its path."""

    def write(text, mode=0o600):
        path = tmp_path / "keys.yaml"
        path.write_text(text)
        path.chmod(mode)
        return str(path)

    return write


@pytest.fixture
def access(key_file):
    """The authenticator of the keys in TWO."""
    return Authenticator(ServerConfig(api_keys=key_file(TWO)))
