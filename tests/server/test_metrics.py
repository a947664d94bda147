"""/metrics of a server: there while the server is, for whoever asks on that path."""

import logging
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from jaxserve.api.errors import RequestError
from jaxserve.api.sampling import SamplingParams
from jaxserve.cli import main as cli
from jaxserve.llm import open_engine
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.client import Client
from jaxserve.server.supervisor import Background
from jaxserve.settings.options import make
from jaxserve.settings.schema import ConfigError, EngineConfig, ServerConfig
from tests.server.fakes import FakeReplica, FakeTokenizer
from tests.waiting import SOON

SETTINGS = {
    "model": "random:tiny",
    "max_model_len": 256,
    "chunk_tokens": 16,
    "max_seqs": 4,
    "pages": 80,
    "profile": "none",
    "classes": "chat:ttft=0.5,tpot=0.05;batch:ttft=600",
}

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,"
    "*/*;q=0.1"
)  # what its version 2 accepts


def fake():
    return FakeReplica(), FakeTokenizer()


def get(server: Background, path: str = "/metrics", host: str = "127.0.0.1") -> str:
    request = urllib.request.Request(
        f"http://{host}:{server.server.ports['http']}{path}", headers={"Accept": PROMETHEUS}
    )
    with urllib.request.urlopen(request, timeout=SOON) as answer:
        return answer.read().decode()


def values(server: Background) -> dict:
    return {
        (sample.name.removeprefix("jaxserve:"), *sample.labels.values()): sample.value
        for family in parse(get(server))
        for sample in family.samples
    }


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_scrape_is_answered_on_the_servers_address(host, caplog):
    caplog.set_level(logging.INFO, "jaxserve")
    with Background(ServerConfig(host=host, grpc_port=0, port=0), fake) as server:
        server.wait_ready()
        shown = f"[{host}]" if ":" in host else host
        assert "jaxserve:num_requests_running 3.0" in get(server, host=shown).splitlines()
        assert f"http {server.server.ports['http']}" in caplog.text
        only = get(server, "/metrics?name[]=jaxserve:num_requests_waiting", shown)
        assert [family.name for family in parse(only)] == ["jaxserve:num_requests_waiting"]


@pytest.mark.parametrize(
    "path", ["/metric", "/metrics/", "/metrics/x", "/favicon.ico", "/..%2fmetrics"]
)
def test_other_paths_are_not_found(path):
    with Background(ServerConfig(grpc_port=0, port=0), fake) as server:
        server.wait_ready()
        with pytest.raises(urllib.error.HTTPError) as error:
            get(server, path)
        assert error.value.code == 404


def test_without_a_port_there_is_none(serve):
    assert set(serve(port=None).server.server.ports) == {"grpc"}


def test_it_answers_while_the_engine_is_built_and_ends_with_the_server():
    warm = threading.Event()
    with Background(ServerConfig(grpc_port=0, port=0), lambda: (warm.wait(), fake())[1]) as server:
        port = server.server.ports["http"]
        assert "process_open_fds" in get(server) and "jaxserve:num_requests_running" not in get(
            server
        )
        warm.set()
        server.wait_ready()
        assert "jaxserve:num_requests_running" in get(server)
        idle = socket.create_connection(("127.0.0.1", port))  # who asks nothing holds nothing up
    idle.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    with Background(ServerConfig(grpc_port=0, port=port), fake) as server:
        assert server.server.ports["http"] == port


def test_a_build_that_fails_ends_it_too():
    def build():
        raise ConfigError("mesh", "too large")

    with (
        pytest.raises(ConfigError, match="mesh"),
        Background(ServerConfig(grpc_port=0, port=0), build) as server,
    ):
        port = server.server.ports["http"]
        server.wait_ready()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_port_in_use_is_one_line_that_names_the_flag(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--model=random:tiny", "--grpc_port=0", f"--port={port}"]) == 2
    out, error = capsys.readouterr()
    (line,) = error.splitlines()
    assert (
        line == f"jaxserve serve: --port: cannot listen on 127.0.0.1:{port}: Address already in use"
        and not out
    )


def test_what_clients_were_served_is_what_is_counted():
    config = make(EngineConfig, SETTINGS)
    with Background(
        ServerConfig(grpc_port=0, port=0),
        lambda: open_engine(config, progress=False, warm_up=False),
    ) as server:
        server.wait_ready()
        with Client(server.target) as client:
            greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            prompts = [list(range(5, 5 + size)) for size in (60, 30, 7)]
            usages = [client.complete(prompt, greedy)[0].usage for prompt in [*prompts, prompts[0]]]
            outputs = client.generate(
                prompts[0],
                SamplingParams(max_tokens=190, ignore_eos=True),
                slo=pb.Slo(class_name="batch"),
            )
            next(outputs)
            outputs.close()
            client.complete(prompts[1], greedy, slo=pb.Slo(ttft_ms=1, class_name="chat"))
            for name in ("other", "x" * 60, "chat\n"):
                with pytest.raises(RequestError):
                    client.complete(prompts[2], greedy, slo=pb.Slo(class_name=name))
            deadline = time.monotonic() + SOON
            while client.load().running or ("request_success_total", "cancelled") not in (
                seen := values(server)
            ):
                assert time.monotonic() < deadline
        assert (
            seen["request_success_total", "length"] == 5
            and seen["request_success_total", "cancelled"] == 1
        )
        assert seen["prefix_cache_hits_total",] >= sum(usage.cached for usage in usages) > 0
        begun = seen["time_to_first_token_seconds_count",]
        assert begun in (5, 6) and seen["prompt_tokens_total",] == 60 + 30 + 7 + 60 + 30 + 60 * (
            begun - 5
        )
        assert seen["generation_tokens_total",] >= 5 * 12
        assert {key[1] for key in seen if key[0] == "ttft_slo_violations_total"} == {
            "default",
            "chat",
            "batch",
        }
