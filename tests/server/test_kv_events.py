"""KV events of a server: who may listen where, and that they are what the replica's cache tells."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from jaxserve.cache.block_events import StoredBlocks
from jaxserve.server.supervisor import check_host
from jaxserve.settings.schema import ConfigError, ServerConfig
from tests.observe.kv_schema import DECODER
from tests.server.fakes import FakeReplica
from tests.waiting import eventually

zmq = pytest.importorskip("zmq", reason="pip install 'jaxserve[cluster]'")
ANY = "tcp://127.0.0.1:0"


def test_a_router_hears_of_the_blocks_of_the_replica_that_is_served(serve):
    replica = FakeReplica()
    served = serve(engine=replica, kv_events=ANY, kv_events_address="10.1.2.3:8000")
    size = replica.info.block_size
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 100)
        socket.setsockopt(zmq.SUBSCRIBE, b"kv@10.1.2.3:8000@")
        socket.connect(served.server.server.kv_events.endpoint)
        eventually(lambda: bool(replica.block_events))
        for _ in range(50):  # until the subscription has come
            tokens = np.arange(size, dtype=np.int32)
            replica.block_events.stored(StoredBlocks([bytes(18)], tokens=tokens))
            with contextlib.suppress(zmq.Again):
                topic, _, payload = socket.recv_multipart()
                break
        else:
            pytest.fail("nothing came")
    (event, *_) = DECODER.decode(payload).events
    assert topic == f"kv@10.1.2.3:8000@{replica.info.served_name}".encode()
    assert (event.token_ids, event.block_size) == (list(range(size)), size)


def test_nobody_listens_to_the_replica_once_the_server_has_ended(serve):
    replica = FakeReplica()
    served = serve(engine=replica, kv_events=ANY)
    eventually(lambda: bool(replica.block_events))
    served.server.__exit__(None)
    assert not replica.block_events


@pytest.mark.parametrize("field", ["kv_events", "kv_events_replay"])
def test_an_endpoint_beyond_loopback_needs_insecure_whatever_the_keys(field):
    given = {"kv_events": ANY, field: "tcp://0.0.0.0:5557", "tls_client_ca": "ca.pem"}
    with pytest.raises(ConfigError, match=f"{field}: '0.0.0.0' is not a loopback address"):
        check_host(ServerConfig(**given))
    check_host(ServerConfig(**given, insecure=True))


def test_replay_without_events_is_refused():
    with pytest.raises(ConfigError, match="kv_events_replay: is for --kv_events"):
        check_host(ServerConfig(kv_events_replay=ANY))
