"""A Mooncake master, and a host that lends memory to its store, as processes on loopback.

As a program, `python -m tests.store.mooncake_processes MASTER BYTES`: lends memory until its
standard input ends. Each line there is a name and a value in hexadecimal, put as it is.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

HOST = "127.0.0.1"
START_SECONDS = 30.0


def master_program() -> str | None:
    """The master of the package, beside this Python or on the path."""
    beside = Path(sys.executable).with_name("mooncake_master")
    return str(beside) if beside.exists() else shutil.which("mooncake_master")


def start_master(port: int, metrics_port: int, log: Path) -> subprocess.Popen:
    program = master_program()
    assert program is not None
    with open(log, "ab") as file:
        process = subprocess.Popen(
            [
                program,
                f"--rpc_port={port}",
                f"--rpc_address={HOST}",
                f"--metrics_port={metrics_port}",
                f"--metrics_host={HOST}",
                "--default_kv_lease_ttl=1000",
                "--client_ttl=3",
                "--logtostderr",
            ],
            stdout=file,
            stderr=file,
        )
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            socket.create_connection((HOST, port), 0.3).close()
            return process
        except OSError:
            assert process.poll() is None, log.read_text()
            time.sleep(0.02)
    process.kill()
    process.wait()
    raise AssertionError(log.read_text())


def start_lender(port: int, log: Path, lent: int = 64 << 20) -> subprocess.Popen:
    with open(log, "ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, f"{HOST}:{port}", str(lent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
        )
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        process.kill()
        process.wait()
        raise AssertionError(log.read_text())
    return process


def overwrite(lender: subprocess.Popen, name: str, value: bytes) -> None:
    """Has the lender put a value of any bytes under a name, in place of what is there."""
    assert lender.stdin is not None and lender.stdout is not None
    lender.stdin.write(f"{name} {value.hex()}\n".encode())
    lender.stdin.flush()
    assert lender.stdout.readline() == b"0\n"


def value_of(lender: subprocess.Popen, name: str) -> bytes:
    assert lender.stdin is not None and lender.stdout is not None
    lender.stdin.write(f"{name}\n".encode())
    lender.stdin.flush()
    return bytes.fromhex(lender.stdout.readline().decode())


def lend(master: str, lent: int) -> None:
    from jaxserve.store.mooncake import CLIENT_BYTES, load_client

    client = load_client().MooncakeDistributedStore()
    assert client.setup(HOST, "P2PHANDSHAKE", lent, CLIENT_BYTES, "tcp", "", master) == 0
    print("ready", flush=True)
    for line in sys.stdin:
        name, *value = line.split()
        if value:
            client.batch_remove([name], True)
            print(client.put(name, bytes.fromhex(value[0])), flush=True)
        else:
            print(client.get(name).hex(), flush=True)
    os._exit(0)


if __name__ == "__main__":
    lend(sys.argv[1], int(sys.argv[2]))
