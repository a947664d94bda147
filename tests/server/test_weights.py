"""Weights that change over HTTP, through processes, and over a cluster."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from safetensors.numpy import save_file

from jaxserve.api.sampling import SamplingParams
from jaxserve.cluster.conductor import Conductor
from jaxserve.cluster.member import Member
from jaxserve.engine.build import build
from jaxserve.llm import LLM, open_engine
from jaxserve.server.client import Client
from jaxserve.server.remote_replica import RemoteReplica
from jaxserve.server.replica_service import ReplicaService
from jaxserve.server.supervisor import Background
from jaxserve.settings.options import make
from jaxserve.settings.schema import EngineConfig, ServerConfig
from tests.engine.weights import FILE, further
from tests.server.test_families import SETTINGS, write_model
from tests.waiting import SOON, eventually

SECRET = b"a secret of the cluster"
PROMPT = "Once upon a time"
TOKENS = 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Folders of one model with weights a and b."""
    folder = tmp_path_factory.mktemp("served")
    base = write_model(folder / "a", "granite")
    other = shutil.copytree(base, folder / "b")
    save_file(further(base, 1), other / FILE)
    return {"a": base, "b": other}


def config(folder: Path) -> EngineConfig:
    return make(EngineConfig, SETTINGS | {"model": str(folder), "served_model_name": ("base",)})


@pytest.fixture
def served(folders) -> Iterator[Background]:
    ports = ServerConfig(grpc_port=0, port=0, admin_port=0)
    engine = config(folders["a"])
    with Background(ports, lambda: open_engine(engine, False, warm_up=False)) as background:
        background.wait_ready()
        yield background


def complete(url: str, **fields) -> dict:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **fields}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def admin(served: Background) -> str:
    return f"http://127.0.0.1:{served.server.ports['admin']}"


def post(served: Background, path: str, **body) -> httpx.Response:
    return httpx.post(f"{admin(served)}{path}", json=body or None, timeout=60)


def get(served: Background, path: str) -> dict:
    return httpx.get(f"{admin(served)}{path}", timeout=SOON).json()


def text_of(answer: dict) -> tuple[str, str]:
    return answer["choices"][0]["text"], answer["system_fingerprint"]


def test_answers_say_of_which_weights_they_are(served, folders):
    old, version = text_of(complete(served.url))
    assert version == "1"
    body = {"model_path": str(folders["b"]), "weight_version": "step-2"}
    answer = post(served, "/update_weights_from_disk", **body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["success"] is True
    assert answer.json()["weight_version"] == "step-2"
    new, version = text_of(complete(served.url))
    assert (new != old, version) == (True, "step-2")
    assert get(served, "/weight_version") == {"weight_version": "step-2"}
    models = httpx.get(f"{served.url}/v1/models", timeout=SOON).json()["data"]
    assert [model["weight_version"] for model in models] == ["step-2"]
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=chat, timeout=SOON).json()
    assert answer["system_fingerprint"] == "step-2"
    with httpx.stream(
        "POST", f"{served.url}/v1/chat/completions", json={**chat, "stream": True}
    ) as s:
        assert '"system_fingerprint":"step-2"' in s.read().decode().replace(": ", ":")
    with Client(served.target) as grpc:
        greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        (one,) = grpc.complete(PROMPT, greedy)
        assert (one.text, one.weight_version) == (new, "step-2")


def test_a_pause_holds_requests_and_the_readiness(served):
    right = text_of(complete(served.url))
    assert get(served, "/is_paused") == {"is_paused": False}
    assert post(served, "/pause?mode=wait").json()["state"] == "paused"
    assert get(served, "/is_paused") == {"is_paused": True}
    ready = httpx.get(f"{served.url}/ready", timeout=SOON)
    assert (ready.status_code, ready.text) == (503, "the replica is paused")
    assert httpx.get(f"{served.url}/health", timeout=SOON).status_code == 200
    found: list[dict] = []
    thread = threading.Thread(target=lambda: found.append(complete(served.url)))
    thread.start()
    eventually(lambda: len(get(served, "/admin/requests")) == 1)
    assert not found
    assert post(served, "/resume").json()["state"] == "running"
    thread.join()
    assert text_of(found[0]) == right


def test_a_server_sleeps_and_wakes(served, folders):
    right = text_of(complete(served.url))
    assert post(served, "/sleep?level=1").json()["state"] == "asleep"
    assert get(served, "/is_sleeping") == {"is_sleeping": True}
    assert post(served, "/resume").status_code == 400
    assert post(served, "/wake_up?tags=weights").json()["state"] == "asleep"
    assert post(served, "/wake_up?tags=kv_cache").json()["state"] == "running"
    assert text_of(complete(served.url)) == right
    assert post(served, "/sleep?level=2").status_code == 200
    answer = post(served, "/wake_up")
    assert (answer.status_code, "update them" in answer.text) == (400, True)
    body = {"model_path": str(folders["b"]), "abort_all_requests": True}
    assert post(served, "/update_weights_from_disk", **body).json()["state"] == "asleep"
    assert post(served, "/wake_up").json()["state"] == "running"
    assert text_of(complete(served.url))[1] == "2"


REFUSALS = [
    ("/update_weights_from_disk", {"model_path": "/nowhere"}, 404, "there is no '/nowhere'"),
    ("/update_weights_from_disk", {"model_path": "/tmp\0"}, 400, "NUL"),
    ("/update_weights_from_disk", {"model_path": "/tmp", "mode": "keep"}, 400, "keep"),
    ("/update_weights_from_disk", {"model_path": "/tmp", "mode": "now"}, 400, "mode"),
    ("/update_weights_from_disk", {"model_path": "/tmp", "flush": True}, 400, "flush"),
    ("/update_weights_from_disk", {"weight_version": "5"}, 400, "model_path"),
    ("/pause?mode=now", {}, 400, "mode"),
    ("/sleep?level=3", {}, 400, "level"),
    ("/wake_up?tags=all", {}, 400, "tags"),
]


def test_what_cannot_be_done_is_refused(served):
    right = text_of(complete(served.url))
    for path, body, status, fault in REFUSALS:
        answer = post(served, path, **body)
        assert (answer.status_code, fault in answer.text) == (status, True), answer.text
    for path in ("/update_weights_from_disk", "/sleep", "/pause"):  # not on the users' port
        assert httpx.post(f"{served.url}{path}", json={}, timeout=SOON).status_code == 404
    assert text_of(complete(served.url)) == right


def test_a_cluster_of_other_processes_changes_its_weights(folders):
    """Over border A between processes; each replica has its own."""
    engines = [build(config(folders["a"]), progress=False, warm_up=False) for _ in range(2)]
    services = [ReplicaService(SECRET) for _ in engines]
    remotes = []
    try:
        for engine, service in zip(engines, services):
            engine.start()
            port = service.start("127.0.0.1:0")
            service.open(engine)
            remotes.append(RemoteReplica(f"127.0.0.1:{port}", SECRET))
            assert remotes[-1].wait_connected(60)
        conductor = Conductor([Member(name, one) for name, one in zip("xy", remotes)])
        conductor.start()
        assert (conductor.weights.version, conductor.weights.state) == ("1", "running")
        engines[0].weights.update(str(folders["b"]))
        eventually(lambda: remotes[0].weights.version == "2")
        assert conductor.weights.update(str(folders["b"])) == "3"
        assert [engine.weights.version for engine in engines] == ["3", "3"]
        eventually(lambda: {remote.weights.version for remote in remotes} == {"3"})
        updated = engines[0].info.cache_fingerprint
        eventually(lambda: {remote.info.cache_fingerprint for remote in remotes} == {updated})
        conductor.weights.sleep(1)
        assert {engine.weights.state for engine in engines} == {"asleep"}
        conductor.weights.wake_up()
        with pytest.raises(Exception, match=r"2 of 2 refused\): there is no"):
            conductor.weights.update("/nowhere")
        with pytest.raises(Exception, match="give a path"):
            remotes[0].weights.update({})
        conductor.close()
    finally:
        for service in services:
            service.stop()
        for each in [*remotes, *engines]:
            each.close()


def test_offline_inference_changes_its_weights(folders):
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(str(folders["a"]), progress=False, **SETTINGS) as llm:
        (before,) = llm.generate(PROMPT, greedy)
        assert llm.update_weights(str(folders["b"])) == "2"
        (after,) = llm.generate(PROMPT, greedy)
        assert (before.weight_version, after.weight_version) == ("1", "2")
        assert before.ids != after.ids
        llm.sleep()
        llm.wake_up()
        assert list(llm.generate(PROMPT, greedy)[0].ids) == list(after.ids)
