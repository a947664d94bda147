"""The load of short prompts beside long ones: what a caller sees of a server, what makes a figure
worth nothing, and the comparison of servers."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import urllib.request

import pytest

from experiments.benchmarks import mixed_traffic
from experiments.benchmarks.engines import EngineError
from experiments.benchmarks.http_servers import HttpServer, serving
from experiments.benchmarks.mixed_load import chosen, turned
from experiments.benchmarks.mixed_results import COUNTS, SECONDS, SHARES, Results, Turn, verdict
from experiments.benchmarks.mixed_traffic import TTFT, Traffic, Visit, visit
from jaxserve.api.errors import RequestError
from jaxserve.lab.research.generator import Sent
from jaxserve.lab.research.transports import over_http
from jaxserve.settings.schema import ConfigError
from tests.server.conftest import started
from tests.server.fakes import FakeReplica
from tests.waiting import eventually

TRAFFIC = Traffic(
    long=1600,
    longs=2,
    short=8,
    shorts=20,
    short_output=4,
    every=0.05,
    decodes=2,
    decode_output=3000,
    alone=1,
)
SERVER = """
import http.server, subprocess, sys, threading
print("starts", flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
threading.Timer(0.5, lambda: print("compiled", flush=True)).start()
port = int(sys.argv[-1].removeprefix("--port="))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def at_once(monkeypatch):
    """Leaves out the seconds for which a real server settles; on a busy machine steps of a few
    milliseconds give events of several tokens."""
    monkeypatch.setattr(mixed_traffic, "SETTLED", 0.0)
    monkeypatch.setattr(mixed_traffic, "AHEAD", 0.0)
    monkeypatch.setattr(mixed_traffic, "OWN_EVENTS", 0.0)


@pytest.fixture
def serve():
    """Serves a replica; gives its address."""
    with contextlib.ExitStack() as stack:
        yield lambda replica: started(stack, replica).server.url


def visited(url, traffic=TRAFFIC, mixed=True):
    async def all_of_it():
        async with over_http(url, None, None, None, ignore_eos=True) as transport:
            return await visit(transport, traffic, 1, mixed)

    return asyncio.run(all_of_it())


def sent(at, first, *gaps, prompt=64):
    """A request that was answered, by hand."""
    return Sent(at, prompt, 1 + len(gaps), at, first, first + sum(gaps), list(gaps), 1 + len(gaps))


def by_hand(short_ttft=1.0, gap=2.0):
    """A long prompt, which takes 10 s alone, prefills from 100 to 120 s."""
    return Visit(
        short_alone=[sent(1, 1.5)],
        long_alone=[sent(10, 20)],
        shorts=[sent(at, at + short_ttft, 0.05) for at in (101, 110, 119, 121)],
        longs=[sent(100, 120)],
        decodes=[sent(90, 91, *[gap] * 20)],
    )


def turn(server, number, found, faults=(), quiet=True):
    return Turn(server, "float32", number, found, faults, 0.0, 0.0, quiet, 1.0)


def test_a_server_is_asked_for_prompts_alone_and_then_for_all_at_once(serve, at_once):
    replica = FakeReplica(step_seconds=0.002, chunk=8)
    url = serve(replica)
    found = visited(url)
    assert found.faults(least_shorts=1) == []
    assert found.figures().keys() == {*SECONDS, *SHARES, *COUNTS}
    assert (len(found.longs), len(found.decodes), len(found.long_alone)) == (2, 2, 1)
    eventually(lambda: len(replica.cancelled) == 2)  # the decodes, once all else has ended
    prompts = [tuple(request.prompt) for request in replica.submitted]
    assert len(set(prompts)) == len(prompts), "prompts share nothing"
    assert visited(url, mixed=False).figures().keys() == {"short_alone", "long_alone"}


def test_requests_that_fail_are_a_fault_and_the_visit_ends(serve, at_once):
    replica = FakeReplica()
    url = serve(replica)
    replica.fault = RequestError("queue", "no room", "RESOURCE_EXHAUSTED")
    (fault,) = visited(url).faults(least_shorts=1)
    assert "requests failed" in fault and "no room" in fault


def test_decodes_that_end_too_early_are_a_fault(serve, at_once):
    url = serve(FakeReplica(step_seconds=0.002, chunk=8))
    few = Traffic(**{**vars(TRAFFIC), "decode_output": 2, "longs": 1})
    assert any("decodes" in fault for fault in visited(url, few).faults(least_shorts=0))


def test_figures_by_hand():
    found = by_hand()
    assert len(found.beside) == 3, "the last short prompt came after the long one's first token"
    assert found.gaps(found.decodes[0]) == [2.0] * 11, "from 99 to 121 s"
    figures = found.figures()
    assert (figures["short_p50"], figures["decode_mean"], figures["gap_p99"]) == (1.0, 2.0, 2.0)
    assert (figures["long_ttft"], figures["long_alone"]) == (20, 10)
    in_time = {name: figures[name] for name in SHARES}
    assert in_time == {
        "shorts_in_time": 1.0,
        "shorts_in_both": 1.0,
        "longs_in_time": 1.0,
        "decodes_in_time": 0.0,
    }
    assert by_hand(short_ttft=TTFT + 1).figures()["shorts_in_time"] == 0.0


def test_a_load_that_did_not_come_about_is_a_fault():
    assert by_hand().faults(least_shorts=3) == []
    (few,) = by_hand().faults(least_shorts=4)
    assert few.startswith("3 of 4 short prompts came while a long one had no first token")
    cached = by_hand()
    cached.longs[0].cached = 16
    assert cached.faults(3) == ["16 tokens of prompts were in a cache; none should be"]
    merged = by_hand()
    for each in merged.shorts:
        each.tokens = 8
    assert merged.faults(3) == ["32 tokens came in 8 events: gaps are not those of tokens"]


def test_ratios_are_of_rounds_that_count():
    turns = [
        turn("jaxserve", 1, by_hand(short_ttft=1.0)),
        turn("vllm-cpu", 1, by_hand(short_ttft=4.0)),
        turn("jaxserve", 2, by_hand(short_ttft=1.0)),
        turn("vllm-cpu", 2, by_hand(short_ttft=10.0)),
        turn("jaxserve", 3, by_hand(short_ttft=1.0)),
        turn("vllm-cpu", 3, by_hand(short_ttft=0.1), quiet=False),
    ]
    results = Results(turns, "float32")
    ratio = results.ratio("vllm-cpu", "short_p50")
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((0.1, 0.175, 0.25))
    assert "0.175 (0.1 to 0.25)" in results.shown(["jaxserve", "vllm-cpu"])
    assert verdict(turns) == []
    kept = {
        (each["server"], each["figure"]): each for each in results.record(["jaxserve", "vllm-cpu"])
    }
    assert kept["vllm-cpu", "short_p50"]["ratio"]["median"] == pytest.approx(0.175)
    assert kept["vllm-cpu", "shorts_in_time"]["share"]["median"] == 0.0
    assert kept["vllm-cpu", "shorts_in_time"]["ratio"] is None


def test_a_server_without_a_round_that_counts_and_every_fault_are_in_the_verdict():
    turns = [
        turn("jaxserve", 1, by_hand()),
        turn("vllm-cpu", 1, Visit(), faults=("it did not start",)),
    ]
    assert verdict(turns) == [
        "vllm-cpu, float32, round 1: it did not start",
        "vllm-cpu, float32: no round counts",
    ]
    assert "-" in Results(turns, "float32").shown(["jaxserve", "vllm-cpu"])


def test_no_server_always_follows_the_same_one():
    names = ["jaxserve", "vllm-cpu", "vllm-cpu-tuned"]
    assert {turned(names, number)[0] for number in (1, 2, 3)} == set(names)
    with pytest.raises(ConfigError, match="servers: 'sglang': known are jaxserve"):
        chosen("servers", "sglang", names)


def test_a_server_is_waited_for_and_ends_with_all_that_it_started(tmp_path):
    log = tmp_path / "log"
    server = HttpServer((sys.executable, "-c", SERVER), {}, "/health", settled="compiled")
    with serving(server, log) as (url, pid):
        assert "compiled" in log.read_text()
        assert urllib.request.urlopen(url).status == 200
        child = int(log.read_text().split()[1])
        os.kill(child, 0)
    eventually(lambda: not any(map(runs, (pid, child))))


def runs(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat") as f:
        return f.read().rpartition(")")[2].split()[0] != "Z"  # not yet taken off the list
    return False


def test_a_server_that_does_not_start_says_why(tmp_path):
    server = HttpServer((sys.executable, "-c", "raise SystemExit('no memory')"), {}, "/health")
    with pytest.raises(EngineError, match="no memory"), serving(server, tmp_path / "log"):
        pass


@pytest.mark.matrix
def test_servers_of_a_tiny_model_are_compared_and_a_load_that_is_too_small_fails(tmp_path):
    command = [sys.executable, "-m", "experiments.benchmarks.mixed_load", "--model=random:tiny"]
    flags = [
        *("--servers=jaxserve,jaxserve-fcfs", "--rounds=1", "--foreign=100", "--patience=0"),
        *("--long=400", "--longs=1", "--alone=1", "--short=16", "--shorts=5", "--every=0.01"),
        *("--decode_output=300", "--least_shorts=1000", f"--json={tmp_path / 'figures'}"),
    ]
    environment = os.environ | {"JAXSERVE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [*command, *flags], capture_output=True, text=True, timeout=900, env=environment
    )
    assert done.returncode == 1 and "the figures need 1000" in done.stderr, done.stderr
    kept = json.loads((tmp_path / "figures").read_text())
    turns = {each["server"]: each for each in kept["turns"]}
    assert turns.keys() == {"jaxserve", "jaxserve-fcfs"} and not turns["jaxserve-fcfs"]["faults"]
    assert {each["server"] for each in kept["figures"]["float32"]} == {"jaxserve-fcfs"}
