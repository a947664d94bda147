"""A worker's port for blocks: where it listens, how others reach it, and who may ask there."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from jaxserve.api.request import KvSource
from jaxserve.group.channel import free_port
from jaxserve.server.own_address import OwnAddress
from jaxserve.server.peer_blocks import PeerReplicas
from jaxserve.server.worker_port import BlocksPort, worker_address
from jaxserve.settings.schema import ConfigError, ServerConfig
from tests.server.test_part_blocks import Part, part
from tests.server.test_peer_blocks import BLOCK, LAYOUT, SECRET, asked, content, key


@pytest.mark.parametrize(
    "host, advertised, own_host, listens, reached",
    [
        ("127.0.0.1", None, "127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("10.0.0.1", None, "127.0.0.1", "10.0.0.1", "10.0.0.1"),
        ("0.0.0.0", "box.example:8480", "127.0.0.1", "0.0.0.0", "box.example"),
        ("10.0.0.1", "front.example", "10.0.0.2", "10.0.0.2", "10.0.0.2"),
        ("::1", None, "::1", "::1", "::1"),
    ],
)
def test_a_worker_is_reached_at_its_own_machine(host, advertised, own_host, listens, reached):
    """The flags are those of the leader's host on all hosts."""
    assert worker_address(host, advertised, own_host) == (listens, OwnAddress(reached))


@pytest.fixture
def opened():
    with contextlib.ExitStack() as stack:

        def open(config: ServerConfig | None = None, host: str = "127.0.0.1", port: int = 0):
            peers = PeerReplicas(SECRET)
            stack.callback(peers.close)
            opened = BlocksPort(config or ServerConfig(), peers, host, port)
            stack.callback(opened.close)
            return opened

        yield open


def test_its_part_is_given_to_those_who_know_the_secret(opened):
    number = free_port("127.0.0.1")
    port = opened(port=number)
    assert port.address == f"127.0.0.1:{number}"
    port.open(Part(part(0, 3, 0, 2), range(4)))
    into = np.empty(LAYOUT.of(part(0, 3, 0, 2)).bytes, np.uint8)
    right = np.empty_like(into)
    LAYOUT.take(content(key(2)), part(0, 3, 0, 2), right)
    for secret, comes in ((SECRET, True), (b"of some other cluster", False)):
        with contextlib.closing(PeerReplicas(secret)) as near:
            source = KvSource(port.address, 10)
            layout = LAYOUT.of(part(0, 3, 0, 2))
            with contextlib.closing(asked(near, source, [2], layout=layout)) as stream:
                assert stream.read(key(2), into) == comes
                assert not comes or (into == right).all()
            with contextlib.closing(asked(near, source, [2])) as stream:
                assert not stream.read(key(2), np.empty(BLOCK, np.uint8)), "it has no whole blocks"


def test_a_port_that_others_could_read_is_refused(opened):
    with pytest.raises(ConfigError, match="needs --tls_cert"):
        opened(ServerConfig(replica_port=0), host="0.0.0.0")
