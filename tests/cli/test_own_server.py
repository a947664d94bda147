"""A server that a command started ends with the command, however that ends."""

import os
import signal
import sys
import time

import psutil
import pytest

COMMANDS = {
    "soak": ["soak", "--minutes=9", "--callers=1"],
    "bench serve": ["bench", "serve", "--qps=0.1", "--requests=99", "--prompt=4"],
}
TINY = ["--model=random:tiny", "--max_model_len=256", "--max_seqs=2", "--profile=none"]


def wait_for(condition, seconds: float = 120.0):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not come to that")


@pytest.mark.parametrize("moment", ["starting", "serving"])
@pytest.mark.parametrize("name, number", [("soak", signal.SIGTERM), ("bench serve", signal.SIGHUP)])
def test_a_signal_to_the_command_ends_its_server_too(name, number, moment, tmp_path):
    log = tmp_path / "output"
    with open(log, "w") as out:
        command = psutil.Popen(
            [sys.executable, "-m", "jaxserve", *COMMANDS[name], *TINY],
            stdout=out,
            stderr=out,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
    started = [command]
    try:
        started += wait_for(command.children)
        (_, server) = started
        if moment == "serving":  # its port has a connection
            wait_for(lambda: [c for c in server.net_connections() if c.status == "ESTABLISHED"])
        command.send_signal(number)
        assert command.wait(90) == 128 + number, log.read_text()
        assert not server.is_running(), log.read_text()
    finally:
        for process in filter(psutil.Process.is_running, started):
            process.kill()
