"""TLS on the gRPC port and for servers that take an SSLContext."""

import asyncio
import contextlib
import datetime
import logging
import queue
import ssl
from pathlib import Path

import grpc
import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from jaxserve.api.sampling import SamplingParams
from jaxserve.cli import main as cli
from jaxserve.server.auth.tls import Authorities, Tls
from jaxserve.server.client import AsyncClient, Client
from jaxserve.server.cluster_port import check_replica_port
from jaxserve.server.remote_replica import RemoteReplica
from jaxserve.server.supervisor import Background, check_host, warn_of_host
from jaxserve.settings.schema import ConfigError, ServerConfig
from tests.server.fakes import FakeReplica, FakeTokenizer
from tests.waiting import SOON, eventually

HOSTS = ("localhost", "127.0.0.1")
PAST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
ONE = SamplingParams(max_tokens=1)


class Files:
    """PEM files of made-up authorities."""

    def __init__(self, folder):
        self.folder = folder
        self.ours = trustme.CA()
        self.theirs = trustme.CA()

    def write(self, name, data, mode=0o600):
        path = self.folder / name
        fresh = self.folder / f"{name}.new"
        fresh.write_bytes(data)
        fresh.chmod(mode)
        fresh.rename(path)
        return str(path)

    def pair(self, name="server", authority=None, key=None, **fields):
        """tls_cert and tls_key of a server; key: another certificate's."""
        made = (authority or self.ours).issue_cert(*HOSTS, **fields)
        chain = b"".join(part.bytes() for part in made.cert_chain_pems)
        return {
            "tls_cert": self.write(f"{name}.pem", chain),
            "tls_key": self.write(f"{name}.key", (key or made).private_key_pem.bytes()),
        }

    def client(self, authority=None, **fields):
        """A client's arguments for its certificate."""
        made = (authority or self.ours).issue_cert("client@example.org", **fields)
        return {
            "certificate": b"".join(part.bytes() for part in made.cert_chain_pems),
            "private_key": made.private_key_pem.bytes(),
        }

    def client_ca(self):
        return {"tls_client_ca": self.write("ca.pem", self.ours.cert_pem.bytes())}

    @property
    def roots(self):
        return {"root_certificates": self.ours.cert_pem.bytes()}


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


@contextlib.contextmanager
def served(config):
    with Background(
        ServerConfig(grpc_port=0, port=0, **config), lambda: (FakeReplica(), FakeTokenizer())
    ) as server:
        server.wait_ready()
        yield server


def reaches(target, **credentials):
    """Returns True if a client gets through the handshake."""
    ends = (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE)
    states = queue.SimpleQueue()
    with Client(target, **credentials) as client:
        client.channel.subscribe(states.put, try_to_connect=True)
        while (state := states.get(timeout=60)) not in ends:
            pass
        if state != grpc.ChannelConnectivity.READY:
            return False
        client.wait_ready(60)
        return client.tokenize("ab") == [97, 98]


def test_a_server_with_a_certificate_speaks_tls_and_nothing_else(files):
    with served(files.pair()) as server:
        assert reaches(server.target, **files.roots)
        assert not reaches(server.target)
        assert not reaches(server.target, tls=True)
        assert not reaches(server.target, root_certificates=files.theirs.cert_pem.bytes())

        async def main():
            async with AsyncClient(server.target, **files.roots) as client:
                return await client.complete("x", ONE)

        assert asyncio.run(asyncio.wait_for(main(), SOON))


def test_client_certificates_of_the_right_authority_alone_get_in(files):
    config = files.pair() | files.client_ca()
    for name in ("tls_cert", "tls_client_ca"):  # as `openssl x509 -text` writes them
        path = Path(config[name])
        path.write_bytes("Subject: O = Größe\n".encode() + path.read_bytes())
    with served(config) as server:
        assert reaches(server.target, **files.roots, **files.client())
        assert not reaches(server.target, **files.roots)
        assert not reaches(server.target, **files.roots, **files.client(files.theirs))
        assert not reaches(server.target, **files.roots, **files.client(not_after=PAST))


def test_an_expired_certificate_is_warned_of_and_not_taken_by_clients(files, caplog):
    with served(files.pair(not_after=PAST)) as server:
        assert not reaches(server.target, **files.roots)
    assert "has expired" in caplog.text


def test_a_certificate_that_ends_soon_is_warned_of(files, caplog):
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=3)
    Tls.from_config(ServerConfig(**files.pair(not_after=soon)))
    assert f"expires on {soon.date()}" in caplog.text
    caplog.clear()
    Tls.from_config(ServerConfig(**files.pair()))
    assert not caplog.text


def test_a_renewed_certificate_is_taken_up_and_a_broken_one_is_not(files, caplog):
    config = files.pair()
    with served(config) as server:
        assert reaches(server.target, **files.roots)
        files.write("server.pem", b"-----BEGIN CERTIFICATE-----\nbroken")
        eventually(lambda: "stays as it was" in caplog.text)
        assert reaches(server.target, **files.roots)
        files.pair(authority=files.theirs)
        eventually(lambda: reaches(server.target, root_certificates=files.theirs.cert_pem.bytes()))
        assert not reaches(server.target, **files.roots)


# --- an SSLContext


def shake(server, client):
    """Connects a client to a server with these contexts; returns what it reads. Errors: those of
    the handshake."""

    async def answer(reader, writer):
        writer.write(b"hello")
        await writer.drain()
        writer.close()

    async def main():
        listening = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=server)
        async with listening:
            reader, writer = await asyncio.open_connection(
                *listening.sockets[0].getsockname(), ssl=client, server_hostname="localhost"
            )
            try:
                return await reader.read()
            finally:
                writer.close()

    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    return asyncio.run(asyncio.wait_for(main(), SOON))


def context_of(files, authority=None, certificate=None):
    context = ssl.create_default_context()
    (authority or files.ours).configure_trust(context)
    if certificate:
        certificate.configure_cert(context)
    return context


def test_a_context_serves_the_certificate_and_follows_its_renewal(files):
    tls = Tls.from_config(ServerConfig(**files.pair()))
    server = tls.context()
    assert shake(server, context_of(files)) == b"hello"
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(server, context_of(files, files.theirs))
    files.write("server.key", b"-----BEGIN nothing")
    tls.refresh()
    assert shake(server, context_of(files)) == b"hello"
    files.pair(authority=files.theirs)
    tls.refresh()
    assert shake(server, context_of(files, files.theirs)) == b"hello"


def test_a_context_asks_for_client_certificates_where_there_is_an_authority(files):
    server = Tls.from_config(ServerConfig(**files.pair(), **files.client_ca())).context()
    issue = lambda authority, **fields: context_of(
        files, certificate=authority.issue_cert("client@example.org", **fields)
    )
    assert shake(server, issue(files.ours)) == b"hello"
    for wrong in (context_of(files), issue(files.theirs), issue(files.ours, not_after=PAST)):
        # TLS 1.3: the client may see no more than the end
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            assert shake(server, wrong) == b""


def test_old_protocols_are_refused(files):
    server = Tls.from_config(ServerConfig(**files.pair())).context()
    old = context_of(files)
    assert server.minimum_version is ssl.TLSVersion.TLSv1_2
    old.set_ciphers("DEFAULT:@SECLEVEL=0")
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        shake(server, old)


# --- settings


def mistaken(files):
    pair = files.pair()
    other = files.pair("other")
    cert = pair["tls_cert"]
    key = pair["tls_key"]
    text = files.write("text", b"hello")
    broken = files.write("broken", b"-----BEGIN CERTIFICATE-----\nhello")
    plain = Path(key).read_bytes()
    secret = serialization.BestAvailableEncryption(b"x")
    locked = serialization.load_pem_private_key(plain, None).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret
    )
    return [
        ("tls_key", "is missing", {"tls_cert": cert}),
        ("tls_cert", "is missing", {"tls_key": key}),
        ("tls_client_ca", "need TLS", {"tls_client_ca": cert}),
        ("tls_cert", "No such file", {"tls_cert": "/no/file", "tls_key": key}),
        ("tls_key", "No such file", {"tls_cert": cert, "tls_key": "/no/file"}),
        ("tls_cert", "not a PEM file", {"tls_cert": text, "tls_key": key}),
        ("tls_cert", "cannot be used", {"tls_cert": broken, "tls_key": key}),
        ("tls_key", "is not the key of", {"tls_cert": cert, "tls_key": other["tls_key"]}),
        ("tls_key", "is encrypted", {"tls_cert": cert, "tls_key": files.write("locked", locked)}),
        ("tls_key", "chmod 600", {"tls_cert": cert, "tls_key": files.write("open", plain, 0o644)}),
        ("tls_client_ca", "No such file", {**pair, "tls_client_ca": "/no/file"}),
        ("tls_client_ca", "holds no PEM certificates", {**pair, "tls_client_ca": broken}),
    ]


def test_mistakes_name_the_setting_before_anything_is_served(files):
    for field, message, config in mistaken(files):
        with pytest.raises(ConfigError, match=message) as error, served(config):
            pass
        assert error.value.field == field, message


def test_a_key_of_another_user_is_refused(files, give_away):
    pair = files.pair()
    give_away(pair["tls_key"])
    with pytest.raises(ConfigError, match="another user"):
        Tls.from_config(ServerConfig(**pair))


def test_an_address_for_strangers_needs_keys_or_client_certificates_and_says_what_is_in_plain_text(
    files, caplog
):
    outside = {"host": "0.0.0.0"}
    for config, refused, warned in (
        ({}, True, ["INSECURE", "no TLS"]),
        ({"insecure": True}, False, ["INSECURE", "no TLS"]),
        (files.pair(), True, ["INSECURE"]),
        ({"api_keys": "f"}, False, ["no TLS"]),
        ({**files.pair(), "api_keys": "f"}, False, []),
        ({**files.pair(), **files.client_ca()}, False, []),
    ):
        caplog.clear()
        config = ServerConfig(**outside, **config)
        if refused:
            with pytest.raises(ConfigError, match=r"api_keys.*tls_client_ca.*insecure"):
                check_host(config)
        else:
            check_host(config)
        warn_of_host(config)
        assert [record.message.split(":")[0] for record in caplog.records] == warned
    caplog.clear()
    warn_of_host(ServerConfig())
    assert not caplog.records


def test_a_running_server_with_keys_and_tls_is_measured(files, capsys, tmp_path, monkeypatch):
    key_file = tmp_path / "keys.yaml"
    out = tmp_path / "out.json"
    assert cli.main(["keys", f"--file={key_file}", "--add=bench"]) == 0
    key = capsys.readouterr().out.strip()
    ca = files.write("roots.pem", files.ours.cert_pem.bytes())
    command = [
        "bench",
        "serve",
        "--requests=3",
        "--qps=100",
        "--output=2",
        "--warmup=0",
        "--prompt=4",
    ]
    with served({**files.pair(), "api_keys": str(key_file)}) as server:
        with Client(server.target, **files.roots) as client:
            client.wait_ready(60)
        target = [f"--target={server.target}", f"--tls_ca={ca}"]
        assert cli.main([*command, *target, f"--api_key={key}", f"--json={out}"]) == 0
        assert key not in out.read_text()
        monkeypatch.setenv("JAXSERVE_API_KEY", key)
        assert cli.main([*command, *target]) == 0
        assert cli.main([*command, *target, "--api_key=wrong"]) != 0


def gets(files, url, client=None):
    """Asks for /v1/models over HTTPS; returns the status, or None if the handshake fails."""
    context = ssl.create_default_context(cadata=files.ours.cert_pem.bytes().decode())
    if client is not None:
        context.load_cert_chain(
            files.write("c.pem", client["certificate"]), files.write("c.key", client["private_key"])
        )
    try:
        return httpx.get(f"{url}/v1/models", verify=context, timeout=60).status_code
    except httpx.HTTPError:
        return None


def test_http_and_the_operators_port_speak_tls_as_grpc_does(files):
    with served(files.pair() | files.client_ca() | {"admin_port": 0}) as server:
        assert server.url.startswith("https://") and gets(files, server.url, files.client()) == 200
        admin = f"https://127.0.0.1:{server.server.ports['admin']}"
        for url in (server.url, admin):
            assert gets(files, url) is None and gets(files, url, files.client(files.theirs)) is None
            assert gets(files, url, files.client(not_after=PAST)) is None
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"{url.replace('https', 'http')}/health", timeout=5)
        assert gets(files, admin, files.client()) == 404


def test_conductors_reach_a_replica_by_tls_and_need_no_client_certificate(files, monkeypatch):
    monkeypatch.setenv("JAXSERVE_CLUSTER_SECRET", "of the tests of TLS")
    settings = {**files.pair(), **files.client_ca(), "replica_port": 0}
    config = ServerConfig(grpc_port=0, port=None, **settings)
    with Background(config, lambda: (FakeReplica(), FakeTokenizer())) as server:
        server.wait_ready()
        target = server.server.address("replica")
        roots = [
            Authorities("cluster_ca", Path(files.write(name, authority.cert_pem.bytes())))
            for name, authority in (("ours.pem", files.ours), ("theirs.pem", files.theirs))
        ]
        ours, theirs, plain = [
            RemoteReplica(target, b"of the tests of TLS", authorities)
            for authorities in (*roots, None)
        ]
        try:
            assert ours.wait_connected(SOON) and ours.info.vocab == 257
            assert not theirs.wait_connected(0.5) and not plain.wait_connected(0)
        finally:
            for remote in (ours, theirs, plain):
                remote.close()


def test_a_replica_port_for_others_needs_tls():
    with pytest.raises(ConfigError, match=r"replica_port: on .* it needs --tls_cert"):
        check_replica_port(ServerConfig(host="0.0.0.0", replica_port=0))
