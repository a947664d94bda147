"""Transfers and peers that are closed at a test's end, which must leave nothing behind."""

import contextlib
import threading

import numpy as np
import psutil
import pytest
import trustme

from tests.transfer.peer import Peer, make, noise
from tests.waiting import eventually

SIZE = 17 << 20  # of a memory


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificate")
    issued = trustme.CA().issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    return str(folder / "cert.pem"), str(folder / "key.pem")


@pytest.fixture
def kind():
    """The kind of transfers; modules give others."""
    return "tcp"


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("transfer")]


@pytest.fixture
def transfers(kind, certificate):
    """Makes transfers of a kind: (seed of the memory's noise, 0 for zeros)."""
    made = []

    def make_one(seed=0, size=SIZE, **options):
        memory = noise(size, seed) if seed else np.zeros(size, np.uint8)
        made.append(make(kind, memory, certificate, **options))
        return made[-1]

    process = psutil.Process()
    files = process.num_fds()
    yield make_one
    left = [counts for one in made if (counts := one.counts()).windows or counts.tickets]
    with contextlib.ExitStack() as stack:
        for one in made:
            stack.callback(one.close)
    eventually(lambda: not threads())
    eventually(lambda: process.num_fds() <= files)
    assert not left, "leases or tickets are left"


@pytest.fixture
def peers(kind, certificate):
    """Makes peers of the same kind in other processes."""
    made = []

    def make_one(seed=0, size=SIZE):
        made.append(Peer(kind, size, seed, certificate if kind == "tls" else ()))
        return made[-1]

    yield make_one
    for one in made:
        one.close()
