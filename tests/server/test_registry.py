"""Replicas register in etcd, and conductors find them there, whatever happens to etcd."""

from __future__ import annotations

import contextlib
import logging
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.cli.main import main
from jaxserve.cluster.conductor import ConductorSettings
from jaxserve.cluster.roles import Role
from jaxserve.group.channel import free_port
from jaxserve.server import etcd as etcd_module
from jaxserve.server import etcd_folder as folder_module
from jaxserve.server import members as members_module
from jaxserve.server import registry as module
from jaxserve.server.etcd import PASSWORD, USER, Etcd, EtcdError, EtcdUrl
from jaxserve.server.etcd_folder import EtcdFolder
from jaxserve.server.members import Members
from jaxserve.server.registry import Registration, Registry
from jaxserve.settings.schema import ConfigError
from tests.server.etcd_gateway import Gateway
from tests.server.test_members import SECRET, Served
from tests.waiting import SOON, eventually


def url_of(port: int, prefix: str = "test") -> EtcdUrl:
    return EtcdUrl.parse(f"etcd://127.0.0.1:{port}/{prefix}", "registry")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(module, "GONE_SECONDS", 0.3)
    monkeypatch.setattr(folder_module, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(members_module, "FILE_SECONDS", 0.05)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    gateway = Gateway()
    yield gateway
    gateway.stop()


def listed(url: EtcdUrl) -> list[str]:
    """Returns what is in the registry now."""
    return [key.value for key in Etcd(url).list(f"{url.prefix}/replicas/").keys]


def test_an_address_is_listed_until_its_replica_leaves(gateway):
    url = url_of(gateway.port)
    first, second = (Registration(url, address) for address in ("a:1", "b:2"))
    other = Registration(url_of(gateway.port, "test2"), "c:3")
    eventually(lambda: listed(url) == ["a:1", "b:2"])
    first.close()
    assert listed(url) == ["b:2"]
    second.close()
    other.close()
    assert not gateway.keys and not gateway.leases


def test_an_address_goes_with_a_lease_that_nobody_renews(gateway, monkeypatch):
    url = url_of(gateway.port)
    monkeypatch.setattr(module, "LEASE_SECONDS", 1)
    monkeypatch.setattr(module, "RENEW_SECONDS", 60.0)
    registration = Registration(url, "a:1")
    eventually(lambda: listed(url) == ["a:1"])
    eventually(lambda: listed(url) == [])
    registration.close()


@pytest.mark.parametrize("forgets", [False, True])
def test_a_replica_is_listed_again_after_etcd_was_gone(gateway, forgets, caplog):
    url = url_of(gateway.port)
    registration = Registration(url, "a:1")
    eventually(lambda: listed(url) == ["a:1"])
    gateway.stop()
    eventually(lambda: "cannot be registered" in caplog.text)
    if forgets:
        gateway.forget()
    gateway.start()
    eventually(lambda: listed(url) == ["a:1"])
    registration.close()
    assert listed(url) == []


def test_a_conductor_follows_the_registry_and_goes_on_without_it(gateway, monkeypatch, caplog):
    url = url_of(gateway.port)
    with contextlib.ExitStack() as stack:
        first, second = Served(stack), Served(stack)
        registrations = [Registration(url, served.address) for served in (first, second)]
        members = Members([], SECRET, registry=Registry(url))
        stack.callback(members.close)
        conductor = members.conductor(ConductorSettings(routing="load_balanced"))
        conductor.start()
        stack.callback(conductor.close)

        def usable() -> set[str]:
            return {member.name for member in conductor.members if member.usable}

        both = {first.address, second.address}
        eventually(lambda: usable() == both)
        gateway.stop()
        eventually(lambda: "what was read there stays as it was" in caplog.text)
        time.sleep(2 * module.GONE_SECONDS)
        assert usable() == both
        monkeypatch.setattr(module, "GONE_SECONDS", 20.0)
        gateway.forget()
        gateway.start()
        eventually(lambda: set(listed(url)) == both)
        assert usable() == both, "while replicas registered anew"
        monkeypatch.setattr(module, "GONE_SECONDS", 0.3)
        registrations[1].close()
        eventually(lambda: {member.name for member in conductor.members} == {first.address})
        registrations[0].close()


@contextlib.contextmanager
def followed(url: EtcdUrl) -> Iterator[EtcdFolder]:
    """A folder of a registry that is followed, once it was listed."""
    changed = threading.Event()
    folder = EtcdFolder(url, f"{url.prefix}/replicas/", changed.set)
    folder.start()
    assert changed.wait(SOON)
    yield folder
    folder.close()


def values(folder: EtcdFolder) -> list[str]:
    return sorted(key.value for key in folder.keys.values())


def test_changes_are_heard_of_and_not_asked_for(gateway):
    url = url_of(gateway.port)
    with followed(url) as folder:
        registration = Registration(url, "a:1")
        eventually(lambda: values(folder) == ["a:1"])
        registration.close()
        eventually(lambda: values(folder) == [])
        time.sleep(0.3)
        assert gateway.calls.count("kv/range") == 1 and gateway.calls.count("watch") == 1


def test_a_watch_that_is_cut_or_silent_goes_on_where_it_was(gateway, monkeypatch):
    monkeypatch.setattr(etcd_module, "WATCH_SECONDS", 0.2)
    url = url_of(gateway.port)
    with followed(url) as folder:
        for number in range(3):
            eventually(lambda number=number: gateway.calls.count("watch") > 2 * number)
            gateway.cut()
            Etcd(url).put_if(f"test/replicas/{number}", f"{number}", 0)
            eventually(lambda number=number: len(folder.keys) == number + 1)
        assert gateway.calls.count("kv/range") == 1


@pytest.mark.parametrize("loss", ["compact", "forget"])
def test_keys_are_listed_again_when_changes_are_lost(gateway, loss):
    url = url_of(gateway.port)
    client = Etcd(url)
    client.put_if("test/replicas/a", "1", 0)
    client.put_if("test/replicas/b", "2", 0)
    with followed(url) as folder:
        eventually(lambda: gateway.watches)
        gateway.stop()
        gateway.set(b"test/replicas/a", None)
        gateway.set(b"test/replicas/c", b"3")
        getattr(gateway, loss)()
        gateway.start()
        right = ["2", "3"] if loss == "compact" else []
        eventually(lambda: values(folder) == right)
        client.put_if("test/replicas/d", "4", 0)
        eventually(lambda: values(folder) == [*right, "4"])


def test_more_keys_than_an_answer_has_are_listed(gateway, monkeypatch):
    monkeypatch.setattr(etcd_module, "PAGE_KEYS", 3)
    client = Etcd(url_of(gateway.port))
    for number in range(10):
        client.put_if(f"many/{number}", f"{number}", 0)
    assert [key.value for key in client.list("many/").keys] == [f"{n}" for n in range(10)]


def test_of_two_that_set_a_key_at_one_revision_one_does(gateway):
    client = Etcd(url_of(gateway.port))
    assert client.put_if("x/key", "first", 0)
    assert not client.put_if("x/key", "second", 0)
    (key,) = client.list("x/").keys
    assert client.put_if("x/key", "third", key.revision)
    assert not client.put_if("x/key", "fourth", key.revision)
    assert [key.value for key in client.list("x/").keys] == ["third"]


def test_conductors_agree_on_roles_and_remember_them(gateway):
    url = url_of(gateway.port)
    with contextlib.ExitStack() as stack:
        one, other = (Registry(url) for _ in range(2))
        for registry in (one, other):
            stack.callback(registry.close)
        assert one.propose({"a:1": Role.DECODE}, 0)
        assert not other.propose({"b:2": Role.PREFILL}, 0), "it has not seen the first change"
        eventually(
            lambda: other.read().roles == {"a:1": Role.DECODE} and other.read() == one.read()
        )
        assert other.propose({"a:1": Role.DECODE, "b:2": Role.PREFILL}, other.read().version)
        eventually(lambda: len(one.read().roles) == 2)
        gateway.stop()
        assert not one.propose({}, one.read().version)
        assert len(one.read().roles) == 2
        gateway.start()
        later = Registry(url)
        stack.callback(later.close)
        eventually(lambda: later.read() == one.read())
        assert later.addresses() == []


def test_roles_that_cannot_be_read_are_left_out(gateway, caplog):
    url = url_of(gateway.port)
    Etcd(url).put_if("test/roles", '{"a:1": "cook"}', 0)
    registry = Registry(url)
    eventually(lambda: "are not used" in caplog.text)
    assert registry.read().roles == {} and registry.propose({}, registry.read().version)
    registry.close()


def test_what_is_no_address_in_the_registry_changes_nothing(gateway, caplog):
    url = url_of(gateway.port)
    with contextlib.ExitStack() as stack:
        served = Served(stack)
        right = Registration(url, served.address)
        members = Members([], SECRET, registry=Registry(url))
        stack.callback(members.close)
        eventually(lambda: [one.target for one in members.all] == [served.address])
        wrong = Registration(url, "no address")
        eventually(lambda: "'no' is not HOST:PORT" in caplog.text)
        assert [one.target for one in members.all] == [served.address]
        wrong.close()
        right.close()


def test_user_and_password_are_asked_for_and_tokens_that_end_are_renewed(monkeypatch):
    gateway = Gateway(users={"replica": "right"})
    try:
        url = url_of(gateway.port)
        with pytest.raises(EtcdError, match="401"):
            listed(url)
        monkeypatch.setenv(USER, "replica")
        monkeypatch.setenv(PASSWORD, "wrong")
        with pytest.raises(EtcdError, match="does not accept") as refused:
            listed(url)
        assert "wrong" not in str(refused.value)
        monkeypatch.setenv(PASSWORD, "right")
        client = Etcd(url)
        assert client.list("x").keys == []
        gateway.tokens.clear()
        assert client.list("x").keys == []
        assert gateway.calls.count("auth/authenticate") == 3
    finally:
        gateway.stop()


def test_another_server_is_asked_where_one_says_nothing(gateway, monkeypatch):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        first = f"127.0.0.1:{silent.getsockname()[1]}"
        url = EtcdUrl.parse(f"etcd://{first},127.0.0.1:{gateway.port}", "registry")
        assert listed(url) == []
        with pytest.raises(EtcdError, match="does not answer"):
            listed(EtcdUrl((first,), "x", False))


@pytest.mark.parametrize(
    "text", ["etcd://", "etcd://a", "etcd://a:0", "etcd://u:p@a:1", "http://a:1", "etcd://a:1/ü"]
)
def test_an_address_of_etcd_that_is_wrong_is_refused_by_its_field(text):
    with pytest.raises(ConfigError, match="HOST:PORT") as refused:
        EtcdUrl.parse(text, "registry")
    assert refused.value.field == "registry"


def test_a_registry_needs_a_port_for_conductors(capsys):
    assert main(["serve", "--model=random:tiny", "--registry=etcd://a:1"]) == 2
    assert "--registry: needs --replica_port" in capsys.readouterr().err.replace("\n", " ")


# --- with etcd itself


@contextlib.contextmanager
def real_etcd(folder: Path, port: int) -> Iterator[subprocess.Popen]:
    peer = free_port("127.0.0.1")
    url, peers = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
    flags = {
        "data-dir": folder / "data", "listen-client-urls": url, "advertise-client-urls": url,
        "listen-peer-urls": peers, "initial-advertise-peer-urls": peers,
        "initial-cluster": f"default={peers}",
    }  # fmt: skip
    with (folder / "log").open("ab") as log:
        command = ["etcd", *(f"--{name}={value}" for name, value in flags.items())]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")
@pytest.mark.parametrize("forgets", [False, True])
def test_a_replica_stays_registered_with_an_etcd_that_is_killed(tmp_path, forgets, caplog):
    caplog.set_level(logging.INFO)
    port = free_port("127.0.0.1")
    url = url_of(port)

    def there() -> list[str] | None:
        with contextlib.suppress(EtcdError):
            return listed(url)
        return None

    with real_etcd(tmp_path, port):
        registration = Registration(url, "a:1")
        eventually(lambda: there() == ["a:1"])
    assert there() is None
    if forgets:
        shutil.rmtree(tmp_path / "data")
    with real_etcd(tmp_path, port):
        eventually(lambda: there() == ["a:1"])
        registration.close()
        assert there() == []


@pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")
def test_etcd_itself_tells_of_changes_also_after_it_was_killed_or_lost_its_data(tmp_path):
    port = free_port("127.0.0.1")
    url = url_of(port)
    client = Etcd(url)
    with contextlib.ExitStack() as stack:
        with real_etcd(tmp_path, port):
            eventually(lambda: reached(client))
            for number in range(3):
                assert client.put_if(f"test/replicas/{number}", f"{number}", 0)
            folder = stack.enter_context(followed(url))
            assert values(folder) == ["0", "1", "2"]
            assert not client.put_if("test/replicas/0", "other", 0)
            assert client.put_if("test/replicas/0", "new", folder.keys["test/replicas/0"].revision)
            eventually(lambda: values(folder) == ["1", "2", "new"])
        with real_etcd(tmp_path, port):
            eventually(lambda: reached(client))
            assert client.put_if("test/replicas/3", "3", 0)
            eventually(lambda: values(folder) == ["1", "2", "3", "new"])
        shutil.rmtree(tmp_path / "data")
        with real_etcd(tmp_path, port):
            eventually(lambda: values(folder) == [])
            assert client.put_if("test/replicas/4", "4", 0)
            eventually(lambda: values(folder) == ["4"])


def reached(client: Etcd) -> bool:
    with contextlib.suppress(EtcdError):
        client.list("x")
        return True
    return False
