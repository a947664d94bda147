"""`jaxserve demo --cluster`: what it shows, and that nothing is left of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.api.events import Finished, Timing, Usage
from jaxserve.lab.cli import demo_cluster
from jaxserve.lab.cli.demo_cluster import Addresses, Ask, summary, talk
from tests.server.fakes import FakeReplica
from tests.waiting import eventually

TINY = [
    "--model=random:tiny", "--max_model_len=512", "--long=400", "--max_tokens=8", "--pages=64",
    "--max_seqs=2", "--chunk_tokens=32",
]  # fmt: skip
START_SECONDS = 280.0
END_SECONDS = 60.0


async def document(client, tokens: int) -> list[int]:
    return [3 + number % 200 for number in range(tokens)]


def test_users_ask_about_one_document_the_first_one_alone(serve, capsys):
    served = serve(FakeReplica(step_seconds=0.01))
    addresses = Addresses(served.target, "http://127.0.0.1:1")
    values = {"model": "fake", "long": 90, "max_tokens": 5}
    assert asyncio.run(talk(addresses, values, document)) == 0
    shown = capsys.readouterr().out
    done = [line.split(" |")[0] for line in shown.splitlines() if "done: 5 tokens" in line]
    assert done[0] == "user 1" and sorted(done) == ["user 1", "user 2", "user 3", "user 4"]
    assert shown.index("user 1 | [done") < shown.index("user 2 | [first")


def test_a_request_that_fails_is_told_and_ends_the_demo_with_a_fault(serve, capsys):
    addresses = Addresses(serve().target, "http://127.0.0.1:1")
    values = {"model": "fake", "long": 5000, "max_tokens": 5}
    assert asyncio.run(talk(addresses, values, document)) == 1
    shown = capsys.readouterr()
    assert "user 1: " in shown.err and "the prompt is too long" in shown.err
    assert len(re.findall("user . .* failed", shown.out)) == 4


def test_tables_tell_where_kv_was_and_who_fetched_what_from_whom():
    ends = [Finished(0, "length", Usage(500, n, 8), Timing(0, 0, 1)) for n in (0, 496)]
    asks = [Ask(f"user {n}", "", 2.0 / (n + 1), end) for n, end in enumerate(ends)]
    kv = {"hit_tokens": 1000, "from_host": 160, "from_disk": 32, "from_peers": 496}
    fetched = [{"source": "a:1", "blocks": 31, "bytes": 3 << 20, "seconds": 0.25}]
    members = [
        {"name": "a:1", "role": "prefill", "kv": None},
        {"name": "b:2", "role": "decode", "kv": {**kv, "fetched": fetched}},
    ]
    rows = [line.split() for line in summary(asks, members).splitlines()]
    assert ["a:1", "prefill", "0", "0", "0", "0"] in rows
    assert ["b:2", "decode", "312", "160", "32", "496"] in rows
    assert ["a:1", "b:2", "31", "3.0", "0.25"] in rows
    assert ["user", "1", "500", "496", "1.00", "s", "length"] in rows


def test_a_cluster_that_is_not_ready_in_time_is_ended(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(demo_cluster, "START_SECONDS", 3.0)
    code = "import time; print('busy', flush=True); time.sleep(99)"
    sleep = [sys.executable, "-S", "-E", "-c", code]
    monkeypatch.setattr(demo_cluster, "cluster_command", lambda values, ports: sleep)
    monkeypatch.setattr(demo_cluster, "engine_config", lambda values: None)
    refused = pytest.raises(demo_cluster.ConfigError, match="not ready in 3 s")
    with refused, demo_cluster.cluster({}, tmp_path):
        pass
    assert "busy" in capfd.readouterr().err
    assert not _children()


def _children() -> list[str]:
    mine = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [one for one in mine if b"time.sleep(99)" in Path(f"/proc/{one}/cmdline").read_bytes()]


# --- with replicas


def marked(mark: str) -> list[int]:
    """Processes with this variable in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


@contextlib.contextmanager
def demo(tmp_path: Path):
    """Runs the demo: its process and a function that gives what it has written so far."""
    mark = f"DEMO_OF_TEST={tmp_path}"
    output = tmp_path / "output"
    command = [sys.executable, "-m", "jaxserve", "demo", "--cluster", *TINY]
    environment = {**os.environ, **dict([mark.split("=", 1)])}
    with output.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        try:
            yield process, output.read_text
        finally:
            process.kill()
            process.wait()
    eventually(lambda: not marked(mark), END_SECONDS)


@pytest.mark.matrix
def test_the_document_is_computed_once_and_goes_to_who_decodes(tmp_path):
    with demo(tmp_path) as (process, shown):
        assert process.wait(START_SECONDS) == 0, shown()
        assert re.search(r"live page: http://127\.0\.0\.1:\d+/", shown())
        rows = [line.split() for line in shown().splitlines()]
        hits = {row[0]: row[1:] for row in rows if row[1:2] in (["prefill"], ["decode"])}
        assert [row[0] for row in hits.values()].count("decode") == 2
        assert sum(int(row[4]) for row in hits.values() if row[0] == "decode") >= 400 // 16 * 16
        assert not shown().count("failed")


@pytest.mark.matrix
@pytest.mark.parametrize("line", ["they load", "serving on"])
def test_ctrl_c_ends_all_processes(line, tmp_path):
    with demo(tmp_path) as (process, shown):
        eventually(lambda: line in shown() or process.poll() is not None, START_SECONDS)
        process.send_signal(signal.SIGINT)
        assert process.wait(END_SECONDS) in (0, 130), shown()
