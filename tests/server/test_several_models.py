"""Several models behind one server, each with a fake replica of its own: who serves a request, and
what is told where several are meant. `tests/cli/test_serve_models.py` has real ones."""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry

from jaxserve.api.errors import RequestError
from jaxserve.api.sampling import SamplingParams
from jaxserve.cli import main as cli
from jaxserve.replica.adapters import Adapter
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server import model_metrics, readiness
from jaxserve.server.client import Client
from jaxserve.server.grpc.errors import ServerError
from jaxserve.server.supervisor import Background, Server, run
from jaxserve.settings.schema import ConfigError, ServerConfig
from tests.server.fakes import FakeReplica, FakeTokenizer
from tests.waiting import eventually

NAMES = ("one", "two")
SAYS = {"one": b"first", "two": b"second"}  # what each model answers
LOAD_SECONDS = 0.2  # that the files of an adapter take
CHAT = [{"role": "user", "content": "x"}]


class NamedReplica(FakeReplica):
    """A fake replica whose model is called by a name of its own, and which has one adapter."""

    def __init__(self, name: str, other_names: tuple[str, ...] = (), adapter: str = ""):
        super().__init__(script=list(SAYS[name]))
        self.name = name
        self.other_names = other_names
        self.adapters = OneAdapter(adapter or f"{name}-lora")

    @property
    def info(self):
        names = {"served_name": self.name, "other_names": self.other_names}
        return dataclasses.replace(super().info, **names)


class OneAdapter:
    """Adapters of a replica that takes others too."""

    def __init__(self, name: str):
        self.by_name = {name: Adapter(name, "folder", name, 1)}

    def load(self, name: str, folder: str, in_place: bool = False) -> Adapter:
        time.sleep(LOAD_SECONDS)
        self.by_name[name] = Adapter(name, folder, name, 2)
        return self.by_name[name]

    def unload(self, name: str) -> None:
        del self.by_name[name]


class Pair:
    """A server of two models. replicas: by name; client: of its HTTP port; admin: of the operators'
    one."""

    def __init__(self, stack: contextlib.ExitStack):
        self.replicas = {name: NamedReplica(name) for name in NAMES}
        builds = {name: lambda name=name: self.build(name) for name in NAMES}
        config = ServerConfig(grpc_port=0, port=0, admin_port=0, metrics_aliases="vllm")
        self.background = stack.enter_context(Background(config, builds))
        self.background.wait_ready()
        server = self.background.server
        new = lambda url: stack.enter_context(httpx.Client(base_url=url, timeout=60, verify=False))
        self.client = new(self.background.url)
        self.admin = new(server.address("admin"))
        self.grpc = stack.enter_context(Client(self.background.target))

    def build(self, name: str):
        return self.replicas[name], FakeTokenizer()

    def post(self, path: str, **body) -> httpx.Response:
        return self.client.post(path, json=body)


@pytest.fixture(scope="module")
def pair():
    with contextlib.ExitStack() as stack:
        yield Pair(stack)


def said(name: str, tokens: int = 5) -> str:
    return SAYS[name][:tokens].decode()


@pytest.mark.parametrize("name", NAMES)
def test_each_protocol_asks_the_model_that_a_request_names(pair, name):
    limits = {"max_tokens": 5, "ignore_eos": True}
    text = pair.post("/v1/completions", model=name, prompt="x", **limits).json()
    assert (text["model"], text["choices"][0]["text"]) == (name, said(name))
    chat = pair.post("/v1/chat/completions", model=name, messages=CHAT, **limits).json()
    assert chat["choices"][0]["message"]["content"] == said(name)
    response = pair.post("/v1/responses", model=name, input="x", max_output_tokens=5).json()
    assert response["output"][0]["content"][0]["text"] == said(name)
    message = pair.post("/v1/messages", model=name, messages=CHAT, max_tokens=5).json()
    assert message["content"][0]["text"] == said(name)
    with_adapter = pair.post("/v1/completions", model=f"{name}-lora", prompt="x", **limits).json()
    assert with_adapter["choices"][0]["text"] == said(name)
    assert {request.adapter for request in pair.replicas[name].submitted} == {"", f"{name}-lora"}
    assert pair.grpc.complete("x", model=name)[0].text.startswith(said(name))
    assert pair.grpc.model_info(name).model == name


def test_all_models_and_adapters_are_listed(pair):
    rows = pair.client.get("/v1/models").json()["data"]
    assert {row["id"]: row["parent"] for row in rows} == {
        "one": None,
        "one-lora": "one",
        "two": None,
        "two-lora": "two",
    }
    assert pair.client.get("/v1/models/two-lora").json()["parent"] == "two"


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/v1/embeddings", "/rerank"])
def test_a_request_must_name_one_of_the_models(pair, path):
    bodies = {"/v1/embeddings": {"input": "x"}, "/rerank": {"query": "x", "documents": ["y"]}}
    body = bodies.get(path, {"prompt": "x"})
    unknown = pair.post(path, model="three", **body)
    error = unknown.json()["error"]
    assert (unknown.status_code, error["param"]) == (404, "model")
    assert error["message"] == "model: 'three' is not served here; served here are one, two"
    missing = pair.post(path, **body)
    assert missing.status_code == 400
    assert missing.json()["error"]["message"] == "model: is missing; served here are one, two"


def test_grpc_must_name_one_of_the_models(pair):
    with pytest.raises(ServerError, match="served here are one, two") as unknown:
        pair.grpc.complete("x", model="three")
    assert (unknown.value.status, unknown.value.field) == ("NOT_FOUND", "model")
    with pytest.raises(ServerError, match="is missing; served here are one, two") as missing:
        pair.grpc.tokenize("x")
    assert missing.value.status == "INVALID_ARGUMENT"
    assert pair.grpc.tokenize("x", model="two") == [ord("x")]
    assert pair.grpc.detokenize([ord("x")], model="one") == "x"
    assert pair.grpc.server_info().state == "serving"


def test_a_conversation_goes_on_with_another_model(pair):
    asked = {"input": "x", "store": True, "max_output_tokens": 5}
    first = pair.post("/v1/responses", model="one", **asked).json()
    then = {"input": "y", "previous_response_id": first["id"], "max_output_tokens": 5}
    second = pair.post("/v1/responses", model="two", **then).json()
    assert second["output"][0]["content"][0]["text"] == said("two")
    prompt = bytes(pair.replicas["two"].submitted[-1].prompt.tolist()).decode()
    assert said("one") in prompt, "what the other model said"


def test_an_adapter_is_loaded_for_the_model_that_it_belongs_to(pair):
    load = "/v1/load_lora_adapter"
    missing = pair.post(load, lora_name="new", lora_path="p")
    assert missing.json()["error"]["param"] == "base_model_name"
    taken = pair.post(load, lora_name="one-lora", lora_path="p", base_model_name="two")
    assert taken.status_code == 409 and "'one'" in taken.json()["error"]["message"]
    assert pair.post(load, lora_name="new", lora_path="p", base_model_name="two").is_success
    answer = pair.post("/v1/completions", model="new", prompt="x", max_tokens=5).json()
    assert answer["choices"][0]["text"] == said("two")
    assert pair.post("/v1/unload_lora_adapter", lora_name="new").is_success
    assert pair.post("/v1/completions", model="new", prompt="x").status_code == 404


def test_metrics_and_usage_are_by_model(pair):
    pair.post("/v1/completions", model="two", prompt="x", max_tokens=5)
    text = pair.client.get("/metrics").text
    for name in ("jaxserve:num_requests_running", "vllm:num_requests_running"):
        lines = [line for line in text.splitlines() if line.startswith(name + "{")]
        assert [line.split("model_name=")[1].split('"')[1] for line in lines] == [*NAMES]
        assert text.count(f"# TYPE {name} ") == 1
    assert "model_name" not in next(
        line for line in text.splitlines() if line.startswith("jaxserve:event_loop_lag")
    )
    usage = pair.admin.get("/admin/usage").json()["usage"]
    assert {"two"} <= {row["model"] for row in usage}
    assert set(pair.admin.get("/admin/config").json()["engines"]) == {*NAMES}


def test_collectors_may_be_an_abstract_class():
    """As in prometheus-client before 0.23, where no Protocol may inherit from them."""
    code = """
import abc
import prometheus_client.registry as registry

registry.Collector = abc.ABCMeta("Collector", (), {"collect": lambda self: ()})
import jaxserve.server.model_metrics
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_overload_of_one_model_refuses_no_requests_for_another(pair):
    """Before a call is read nobody knows which model it is for."""
    full = RequestError("", "the queue is full", "RESOURCE_EXHAUSTED")
    pair.replicas["two"].fault = full
    try:
        for _ in range(60):
            assert pair.post("/v1/completions", model="two", prompt="x").status_code == 429
        for _ in range(40):
            assert pair.post("/v1/completions", model="one", prompt="x", max_tokens=1).is_success
            assert pair.grpc.complete("x", SamplingParams(max_tokens=1), model="one")
    finally:
        pair.replicas["two"].fault = None


def test_one_that_is_gone_is_named_and_the_other_goes_on(pair):
    assert pair.post("/v1/completions", model="two-lora", prompt="x", max_tokens=5).is_success
    pair.replicas["two"].available = False
    try:
        eventually(lambda: pair.client.get("/ready").status_code == 503)
        assert pair.client.get("/ready").text.startswith("the model 'two' is waiting for its")
        assert pair.client.get("/health").text == "ok", "it comes back without the other's restart"
        assert not pair.grpc.healthy()
        for name in ("two", "two-lora"):
            refused = pair.post("/v1/completions", model=name, prompt="x")
            assert refused.status_code == 503
            assert refused.json()["error"]["message"].startswith("the model 'two' is waiting")
        assert pair.post("/v1/completions", model="one", prompt="x", max_tokens=5).is_success
        assert len(pair.client.get("/v1/models").json()["data"]) == 4
    finally:
        pair.replicas["two"].available = True
    eventually(lambda: pair.client.get("/ready").text == "ok")


def test_faults_of_probes_name_the_model(pair, monkeypatch):
    two = pair.replicas["two"]
    monkeypatch.setattr(readiness, "FRESH_SECONDS", 0.0)
    two.fault = RequestError("", "it hangs", "INTERNAL")
    try:
        assert pair.client.get("/ready").text == "the model 'two': no token came: it hangs"
        two.overdue_seconds = 1.0
        eventually(lambda: pair.client.get("/health").status_code == 503)
        assert pair.client.get("/health").text == "the model 'two': the devices do not answer"
    finally:
        two.fault = two.overdue_seconds = None
    eventually(lambda: pair.client.get("/ready").text == "ok")


def test_a_model_that_does_not_answer_keeps_no_metrics_of_others_back(pair, monkeypatch):
    monkeypatch.setattr(model_metrics, "ANSWER_SECONDS", 2.0)
    go_on = threading.Event()

    class Hanging(CollectorRegistry):
        def collect(self):
            go_on.wait(60)
            return iter(())

    replicas = pair.background.server.models.all
    monkeypatch.setattr(replicas[0].replica.metrics, "registry", Hanging())
    try:
        text = pair.client.get("/metrics").text
    finally:
        go_on.set()
    assert 'model_name="two"' in text and 'model_name="one"' not in text


@pytest.mark.parametrize(
    "flags",
    [
        ["--find", "--prompt=x"],
        ["--lease=9", "--prompt=x"],
        ["--leases"],
        ["--release=x"],
        ["--replicate=x", "--prompt=x"],
        ["--get=x", "--prompt=x"],
    ],
)
def test_the_command_for_cached_blocks_names_the_model(pair, flags, capsys):
    asked = ["kv", f"--url={pair.admin.base_url}", *flags]
    assert cli.main(asked) and "model: is missing" in capsys.readouterr().err
    assert cli.main([*asked, "--model=two"]) and "model" not in capsys.readouterr().err


def test_operators_drain_all_and_ask_one(pair):
    assert pair.admin.post("/admin/drain").json()["state"] == "draining"
    refused = pair.post("/v1/completions", model="two", prompt="x")
    assert (refused.status_code, "draining" in refused.text) == (503, True)
    assert pair.admin.post("/admin/resume").json()["state"] == "serving"
    assert "model" in pair.admin.get("/is_paused").json()["error"]["message"]
    assert pair.admin.get("/is_paused?model=two").json() == {"is_paused": False}


def test_the_live_page_shows_each(pair):
    first = pair.client.get("/page/data").json()
    assert first["models"] == [*NAMES]
    assert pair.client.get("/page/data?model=nobody").status_code == 404


class HalfBuilt:
    """A server of two models; the second one is built when `go_on` is set."""

    def __init__(self, stack: contextlib.ExitStack, second: NamedReplica):
        self.go_on = threading.Event()
        stack.callback(self.go_on.set)

        def slow():
            self.go_on.wait(60)
            return second, FakeTokenizer()

        builds = {"one": lambda: (NamedReplica("one"), FakeTokenizer()), "two": slow}
        config = ServerConfig(grpc_port=0, port=0, admin_port=0)
        self.background = stack.enter_context(Background(config, builds))
        new = lambda url: stack.enter_context(httpx.Client(base_url=url, timeout=60, verify=False))
        self.client = new(self.background.url)
        self.admin = new(self.background.server.address("admin"))
        eventually(lambda: self.ask("one").is_success)

    def ask(self, name: str) -> httpx.Response:
        body = {"model": name, "prompt": "x", "max_tokens": 2}
        return self.client.post("/v1/completions", json=body)

    def fault(self, name: str) -> str:
        """Returns why a request is refused with 503."""
        refused = self.ask(name)
        assert refused.status_code == 503, refused.text
        return refused.json()["error"]["message"]


@pytest.fixture
def half_built() -> Iterator[HalfBuilt]:
    with contextlib.ExitStack() as stack:
        yield HalfBuilt(stack, NamedReplica("two", other_names=("zwei",)))


def test_a_model_that_is_built_first_is_served_first(half_built):
    """Requests for the other one are refused meanwhile, by name."""
    assert "the model 'two' is starting" in half_built.fault("two")
    channel = grpc.insecure_channel(half_built.background.target)
    call = channel.unary_unary("/jaxserve.v1.Control/GetLoad")
    with pytest.raises(grpc.RpcError) as error:
        call(pb.GetLoadRequest(model="two").SerializeToString())
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    channel.close()
    half_built.go_on.set()
    eventually(lambda: half_built.ask("two").is_success)


def test_what_lives_long_is_kept_from_the_garbage_collector_once_all_are_built(monkeypatch):
    """What lives before is of requests too."""
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    with contextlib.ExitStack() as stack:
        half_built = HalfBuilt(stack, NamedReplica("two"))
        assert not frozen
        half_built.go_on.set()
        eventually(lambda: half_built.ask("two").is_success)
    assert len(frozen) == 1


def test_names_that_a_model_may_have_are_not_unknown_while_it_is_built(half_built):
    for name in ("zwei", "two-lora", "three"):
        assert "is not known while models start (two)" in half_built.fault(name)
    adapter = {"lora_name": "zwei", "lora_path": "p", "base_model_name": "one"}
    refused = half_built.client.post("/v1/load_lora_adapter", json=adapter)
    assert refused.status_code == 503, "the other model may have this name"
    half_built.go_on.set()
    eventually(lambda: half_built.ask("zwei").is_success)
    assert half_built.ask("two-lora").is_success
    assert half_built.ask("three").status_code == 404


def test_a_model_that_is_built_while_the_server_drains_is_not_served(half_built):
    half_built.admin.post("/admin/drain").raise_for_status()
    half_built.go_on.set()
    eventually(lambda: len(half_built.admin.get("/admin/config").json()["engines"]["two"]) > 0)
    assert half_built.fault("two") == "the server is draining"
    half_built.admin.post("/admin/resume").raise_for_status()
    assert half_built.ask("two").is_success


def serve_all(*replicas: NamedReplica) -> None:
    """Serves models one after the other, until the last one is served."""

    async def main() -> None:
        stop = asyncio.Event()
        built = [threading.Event() for _ in replicas]

        def build(number: int):
            if number:
                built[number - 1].wait(60)
            return replicas[number], FakeTokenizer()

        def listening(server: Server) -> None:
            opened = server.open

            def open(name: str, *rest) -> None:
                opened(name, *rest)
                number = [replica.name for replica in replicas].index(name)
                built[number].set()
                if all(event.is_set() for event in built):
                    stop.set()

            server.open = open

        builds = {one.name: functools.partial(build, n) for n, one in enumerate(replicas)}
        await run(ServerConfig(grpc_port=0), builds, listening, stop)

    asyncio.run(main())


@pytest.mark.parametrize(
    "first, second, name",
    [
        ({"other_names": ("two",)}, {}, "two"),
        ({}, {"other_names": ("one",)}, "one"),
        ({"other_names": ("both",)}, {"other_names": ("both",)}, "both"),
        ({"other_names": ("both",)}, {"adapter": "both"}, "both"),
        ({"adapter": "both"}, {"other_names": ("both",)}, "both"),
        ({"adapter": "both"}, {"adapter": "both"}, "both"),
    ],
)
def test_models_of_one_name_are_refused(first, second, name):
    """A conductor learns names beside the first from the replicas."""
    with pytest.raises(ConfigError, match=f"'{name}' is a name of"):
        serve_all(NamedReplica("one", **first), NamedReplica("two", **second))
    serve_all(NamedReplica("one"), NamedReplica("two"))


def test_no_model_is_served_once_the_build_of_another_has_failed(monkeypatch):
    go_on = threading.Event()
    opened = []

    def slow():
        go_on.wait(60)
        return NamedReplica("two"), FakeTokenizer()

    def failing():
        raise ConfigError("model", "is nowhere")

    async def drain(server: Server) -> None:
        go_on.set()
        await asyncio.sleep(0.5)

    monkeypatch.setattr(Server, "drain", drain)
    monkeypatch.setattr(Server, "open", lambda server, name, *rest: opened.append(name))
    builds = {"one": failing, "two": slow}
    serving = run(ServerConfig(grpc_port=0), builds, lambda server: None, asyncio.Event())
    with pytest.raises(ConfigError, match="is nowhere"):
        asyncio.run(serving)
    assert opened == []


def test_an_adapter_that_is_asked_for_twice_is_loaded_for_one_model(pair):
    def load(base: str) -> int:
        body = {"lora_name": "both", "lora_path": "p", "base_model_name": base}
        return pair.post("/v1/load_lora_adapter", **body).status_code

    with ThreadPoolExecutor() as pool:
        assert sorted(pool.map(load, NAMES)) == [200, 409]
    assert pair.post("/v1/unload_lora_adapter", lora_name="both").is_success


def test_the_only_model_is_not_taken_for_another_one():
    config = ServerConfig(grpc_port=0, port=0, admin_port=0)
    build = lambda: (NamedReplica("one"), FakeTokenizer())
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Background(config, build))
        server.wait_ready()
        admin = stack.enter_context(httpx.Client(base_url=server.server.address("admin")))
        users = stack.enter_context(httpx.Client(base_url=server.url))
        for client, path in (
            (admin, "/is_paused"),
            (admin, "/weight_version"),
            (users, "/tokenizer_info"),
            (users, "/page/data"),
        ):
            assert client.get(path, params={"model": "two"}).status_code == 404, path
            assert client.get(path, params={"model": "one"}).is_success, path
            assert client.get(path).is_success, path
        assert admin.post("/admin/flush_cache?model=two").status_code == 404
