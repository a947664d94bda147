"""A conductor follows the file that names its replicas."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from jaxserve.cluster.conductor import ConductorSettings
from jaxserve.server import members as module
from jaxserve.server.members import Members, addresses
from jaxserve.server.replica_service import ReplicaService
from jaxserve.settings.schema import ConfigError
from tests.replica.holders import Holder
from tests.server.fakes import FakeReplica
from tests.waiting import eventually

SECRET = b"of the tests of members"


class Served:
    """A fake that a service offers on a port of this machine."""

    def __init__(self, stack: contextlib.ExitStack, **settings):
        self.fake = FakeReplica(**settings)
        self.fake.start()
        service = ReplicaService(SECRET)
        self.address = f"127.0.0.1:{service.start('127.0.0.1:0')}"
        service.open(self.fake)
        stack.callback(self.fake.close)
        stack.callback(service.stop)


def name_in(file: Path, text: str) -> None:
    """Replaces a file that may be read meanwhile: a part of it would name other replicas."""
    fresh = file.with_suffix(".new")
    fresh.write_text(text)
    fresh.rename(file)


def test_replicas_come_and_go_with_the_file_that_names_them(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FILE_SECONDS", 0.02)
    file = tmp_path / "replicas"
    with contextlib.ExitStack() as stack:
        first, second = Served(stack, step_seconds=0.01), Served(stack)
        name_in(file, f"{first.address}  # the first\n")
        members = Members([], SECRET, file=file)
        stack.callback(members.close)
        conductor = members.conductor(ConductorSettings(routing="load_balanced"))
        conductor.start()
        stack.callback(conductor.close)
        held = Holder(conductor)
        old = held.submit("old", tokens=50)
        first.fake.paused = True  # else its request might be over before the second is known
        assert [member.name for member in conductor.members] == [first.address]
        name_in(file, f"{second.address}\n")
        eventually(lambda: any(m.usable and m.name == second.address for m in conductor.members))
        new = held.submit("new", tokens=5)
        assert list(first.fake.requests) == ["old"]
        first.fake.paused = False
        held.wait_ended(old, new)
        assert (old.end.reason, new.end.reason) == ("length", "length")
        eventually(lambda: [m.name for m in conductor.members] == [second.address])
        for wrong in ("", "not an address\n"):
            name_in(file, wrong)
            time.sleep(10 * module.FILE_SECONDS)
            assert held.submit(f"after {wrong!r}")
            assert {member.address for member in conductor.members} == {second.address}


def test_addresses_are_read_with_comments_between_them():
    assert addresses("a:1, [::1]:2\n# none\nb.c:3", "replicas") == ["a:1", "[::1]:2", "b.c:3"]


@pytest.mark.parametrize(
    "text, fault",
    [
        ("a:1 b", "'b' is not HOST:PORT"),
        ("a:0", "'a:0' is not HOST:PORT"),
        ("a:1,a:1", "more than once"),
        (" ".join(f"a:{port}" for port in range(1, 1026)), "the limit is 1024"),
    ],
)
def test_a_list_that_is_wrong_is_refused_by_its_field(text, fault):
    with pytest.raises(ConfigError, match=fault) as refused:
        addresses(text, "replicas_file")
    assert refused.value.field == "replicas_file"
