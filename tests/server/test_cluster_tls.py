"""TLS between replicas and conductors: certificates and authorities are renewed without a restart,
and addresses that others could not reach are not told to them."""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import trustme

from jaxserve.api.request import KvSource
from jaxserve.cache.hashes import KEY_BYTES
from jaxserve.cli import main as cli
from jaxserve.group.handshake import Certificate
from jaxserve.server.auth.tls import Authorities, Tls
from jaxserve.server.block_service import BlockService
from jaxserve.server.own_address import OwnAddress
from jaxserve.server.peer_blocks import PeerReplicas
from jaxserve.server.remote_replica import RemoteReplica
from jaxserve.server.replica_service import ReplicaService
from jaxserve.settings.schema import ConfigError, ServerConfig
from jaxserve.store.block_part import BlockPart, PartBytes
from tests.server.fakes import FakeReplica
from tests.waiting import SOON

SECRET = b"of the tests of a cluster's TLS"
KEYS = [bytes([number]) * KEY_BYTES for number in range(5)]
LAYOUT = PartBytes(BlockPart(range(1), range(1)), 1000)
BLOCK = LAYOUT.bytes


class Blocks:
    """A replica's blocks, all of which there are."""

    layout = LAYOUT
    layer_groups = ()

    def want(self, keys: Sequence[bytes]) -> None:
        pass

    unwant = want

    def coming(self, request_id: str) -> bool:
        return False

    def read(self, key: bytes, into: np.ndarray, seconds: float) -> bool:
        into[:] = key[0]
        return True


class Replica:
    """A replica's port with TLS, and the files of its certificate and of the cluster's
    authorities."""

    def __init__(self, folder, stack: contextlib.ExitStack):
        self._folder = folder
        self.authority = folder / "ca.pem"
        self.renew()
        self.config = ServerConfig(
            tls_cert=str(folder / "cert.pem"), tls_key=str(folder / "key.pem")
        )
        self.tls = Tls.from_config(self.config)
        self.peers = self.peer(Authorities("cluster_ca", self.authority))
        blocks = BlockService(self.peers.planes)
        self._service = ReplicaService(SECRET, blocks=blocks)
        behind = FakeReplica()
        behind.start()
        port = self._service.start("127.0.0.1:0", self.tls.credentials(clients=False))
        self._service.open(behind)
        blocks.open(Blocks())
        self.address = f"127.0.0.1:{port}"
        stack.callback(behind.close)
        stack.callback(self._service.stop)
        stack.callback(self.peers.close)

    def renew(self) -> None:
        """Writes a certificate of a new authority."""
        authority = trustme.CA()
        made = authority.issue_cert("localhost", "127.0.0.1")
        self._write("ca.pem", authority.cert_pem.bytes())
        self._write("cert.pem", made.cert_chain_pems[0].bytes())
        self._write("key.pem", made.private_key_pem.bytes())

    def _write(self, name: str, data: bytes) -> None:
        fresh = self._folder / f"{name}.new"
        fresh.write_bytes(data)
        fresh.chmod(0o600)
        fresh.rename(self._folder / name)

    def peer(self, authorities: Authorities) -> PeerReplicas:
        certificate = Certificate.given(self.config.tls_cert, self.config.tls_key)
        return PeerReplicas(SECRET, tls=certificate, authorities=authorities)


@pytest.fixture
def replica(tmp_path, stack):
    return Replica(tmp_path, stack)


def fetched(peers: PeerReplicas, replica: Replica) -> int:
    """Number of blocks that come."""
    into = np.empty(BLOCK, np.uint8)
    source = KvSource(replica.address, len(KEYS))
    with contextlib.closing(peers.open(source, KEYS, math.inf, LAYOUT)) as stream:
        return sum(stream.read(key, into) for key in KEYS)


@pytest.mark.parametrize("trusted", ["cluster_ca", "tls_cert"])
def test_blocks_are_fetched_before_and_after_all_certificates_were_renewed(replica, stack, trusted):
    file = replica.authority if trusted == "cluster_ca" else Path(replica.config.tls_cert)
    near = replica.peer(Authorities(trusted, file))
    stack.callback(near.close)
    assert fetched(near, replica) == len(KEYS)
    replica.renew()
    replica.tls.refresh()
    assert fetched(near, replica) == len(KEYS)
    shown = ssl.get_server_certificate(("127.0.0.1", int(near.transfer.address.split(":")[1])))
    assert shown.split() == (replica.authority.with_name("cert.pem")).read_text().split()


def test_a_conductor_begins_sessions_before_and_after_the_authority_was_renewed(replica, stack):
    authorities = Authorities("cluster_ca", replica.authority)
    for _ in range(2):
        remote = RemoteReplica(replica.address, SECRET, authorities)
        stack.callback(remote.close)
        assert remote.wait_connected(SOON)
        replica.renew()
        replica.tls.refresh()


def test_authorities_that_cannot_be_read_change_nothing(replica, stack, caplog):
    authorities = Authorities("cluster_ca", replica.authority)
    near = replica.peer(authorities)
    stack.callback(near.close)
    replica.authority.write_text("no certificate")
    assert fetched(near, replica) == len(KEYS)
    assert "not a PEM file; the authorities stay as they were" in caplog.text
    with pytest.raises(ConfigError, match=r"cluster_ca: .* not a PEM file"):
        Authorities("cluster_ca", replica.authority)


@pytest.mark.parametrize(
    "given, address",
    [
        ("10.0.0.7", "10.0.0.7:8480"),
        ("replica-3.example:9000", "replica-3.example:9000"),
        ("[fd00::7]", "[fd00::7]:8480"),
        ("[fd00::7]:9000", "[fd00::7]:9000"),
    ],
)
def test_the_address_that_is_given_is_advertised(given, address):
    assert OwnAddress.of(given, "0.0.0.0").at(8480) == address


def test_several_addresses_are_advertised_for_kv():
    several = OwnAddress.of("10.0.0.7,b.example:9000,[fd00::7]", "0.0.0.0")
    assert several.at(8480) == "10.0.0.7:8480"
    assert several.all_at(8480) == ["10.0.0.7:8480", "b.example:9000", "[fd00::7]:8480"]
    assert several.hosts == ["10.0.0.7", "b.example", "fd00::7"]


def test_the_host_is_advertised_where_it_is_an_address():
    assert OwnAddress.of(None, "10.0.0.7").at(8480) == "10.0.0.7:8480"
    assert OwnAddress.of(None, "fd00::7").at(8480) == "[fd00::7]:8480"


@pytest.mark.parametrize(
    "given", ["", "0.0.0.0", "[::]:1", "a b", "host:0", "host:99999", "a:1:2", "a,", "a,a"]
)
def test_what_is_no_address_of_others_is_refused(given):
    with pytest.raises(ConfigError) as refused:
        OwnAddress.of(given, "0.0.0.0")
    assert refused.value.field == "advertise_address"


def test_loopback_is_never_advertised_for_all_addresses(monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda: "localhost")
    with contextlib.suppress(ConfigError):  # where this machine has no network
        assert not OwnAddress.of(None, "0.0.0.0").host.startswith(("127.", "localhost"))
    monkeypatch.setattr("jaxserve.server.own_address.FAR", ((socket.AF_INET, "127.0.0.1"),))
    with pytest.raises(ConfigError, match=r"must be given with --host=0\.0\.0\.0") as refused:
        OwnAddress.of(None, "0.0.0.0")
    assert refused.value.field == "advertise_address"


@pytest.mark.parametrize(
    "flags, error",
    [
        (["--advertise_address=a"], "--advertise_address: needs --replica_port"),
        (["--kv_port=1"], "--kv_port: needs --replica_port"),
        (["--transfer=mooncake", "--insecure"], "--transfer: needs --replica_port"),
        (["--transfer=mooncake", "--replica_port=0"], "--transfer: mooncake needs --insecure"),
        (["--cluster_ca=a", "--replica_port=0"], "--cluster_ca: needs --tls_cert"),
    ],
)
def test_flags_of_a_cluster_without_effect_are_refused(flags, error, capsys):
    assert cli.main(["serve", "--model=random:tiny", *flags]) == cli.USAGE
    assert error in " ".join(capsys.readouterr().err.split())


def test_a_transfer_whose_package_is_missing_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("JAXSERVE_CLUSTER_SECRET", "of the tests of flags of clusters")
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    flags = ["--replica_port=0", "--transfer=mooncake", "--insecure"]
    assert cli.main(["serve", "--model=random:tiny", *flags]) == cli.USAGE
    assert "pip install mooncake-transfer-engine" in " ".join(capsys.readouterr().err.split())


def test_a_port_for_kv_that_is_taken_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("JAXSERVE_CLUSTER_SECRET", SECRET.decode())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = ["--replica_port=0", f"--kv_port={port}"]
        assert cli.main(["serve", "--model=random:tiny", *flags]) == cli.USAGE
    assert f"--kv_port: cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
