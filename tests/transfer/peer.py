"""The other side of transfers, as a process that can be killed and stopped. It is told what to do
by lines of JSON. `python -m tests.transfer.peer KIND BYTES SEED [CERTIFICATE KEY]`."""

import json
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np

from jaxserve.group.handshake import Certificate
from jaxserve.transfer import TcpTransfer, Window

ROOT = Path(__file__).parents[2]
SECRET = b"a secret of the cluster"


def noise(size, seed):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def make(kind, memory, certificate=(), **options):
    """certificate: paths of certificate and key, for kind 'tls'."""
    tls = Certificate.load(*certificate) if kind == "tls" else None
    return TcpTransfer(memory, SECRET, tls=tls, **options)


class Peer:
    """A process with a transfer. Its memory is noise of a seed, 0 for zeros."""

    def __init__(self, kind, size, seed=0, certificate=()):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.transfer.peer", kind, str(size), str(seed), *certificate],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
        )
        assert self.answer() == "ready"

    def answer(self):
        for line in self.process.stdout:
            if line.startswith("@@"):
                return json.loads(line[2:])
        raise AssertionError(f"the peer ended with {self.process.wait()}")

    def begin(self, what, **arguments):
        """Says what to do and does not wait."""
        self.process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self.process.stdin.flush()

    def ask(self, what, **arguments):
        self.begin(what, **arguments)
        return self.answer()

    def lend(self, base, size, seconds=60.0):
        return Window.from_json(self.ask("lend", base=base, size=size, seconds=seconds))

    def holds(self, base, data):
        """Returns True if its memory has these bytes there."""
        return self.ask("crc", base=base, size=data.nbytes) == zlib.crc32(data)

    def signal(self, number):
        os.kill(self.process.pid, number)
        if number == signal.SIGSTOP:  # the signal takes effect a moment later
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def close(self):
        self.process.kill()
        self.process.communicate(timeout=60)


def main(kind, size, seed, *certificate):
    memory = noise(int(size), int(seed)) if int(seed) else np.zeros(int(size), np.uint8)
    transfer = make(kind, memory, certificate)

    def say(value):
        print("@@" + json.dumps(value), flush=True)

    say("ready")
    for line in sys.stdin:
        told = json.loads(line)
        what = told.pop("do")
        if what == "lend":
            say(transfer.lend(**told).to_json())
        elif what == "end":
            say(transfer.end(Window.from_json(told["window"])))
        elif what == "crc":
            say(zlib.crc32(memory[told["base"] : told["base"] + told["size"]]))
        elif what == "write":
            window = Window.from_json(told["window"])
            say("begins")
            ticket = transfer.write(window, 0, memory[: told["size"]], told["seconds"])
            say(transfer.wait(ticket, told["seconds"] + 30))


if __name__ == "__main__":
    main(*sys.argv[1:])
