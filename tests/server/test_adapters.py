"""Adapters over HTTP and gRPC: as models of their own names, loaded and unloaded while serving."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from jaxserve.api.sampling import SamplingParams
from jaxserve.cluster.conductor import Conductor
from jaxserve.cluster.member import Member
from jaxserve.engine.build import build
from jaxserve.llm import LLM, PromptError, open_engine
from jaxserve.server.client import Client
from jaxserve.server.remote_replica import RemoteReplica
from jaxserve.server.replica_service import ReplicaService
from jaxserve.server.supervisor import Background
from jaxserve.settings.options import make
from jaxserve.settings.schema import ConfigError, EngineConfig, ServerConfig
from tests.engine.adapters import write_adapter
from tests.server.keyed import TWO
from tests.server.test_families import SETTINGS, write_model
from tests.waiting import SOON, eventually

SECRET = b"a secret of the cluster"
PROMPT = "Once upon a time"
LORAS = {"max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 5}
# of an adapter that comes and goes, and of each name beside it: what some seconds hold
CHANGES, ANSWERS = 10, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a model, and adapters a0 to a3 below `adapters`."""
    folder = tmp_path_factory.mktemp("served")
    base = write_model(folder / "model", "granite")
    for i in range(4):
        write_adapter(folder / "adapters" / f"a{i}", base, seed=i)
    return folder


def config(folder: Path, **settings) -> EngineConfig:
    given = SETTINGS | LORAS | {"model": str(folder / "model"), "served_model_name": ("base",)}
    return make(EngineConfig, given | {"lora_root": str(folder / "adapters")} | settings)


@contextlib.contextmanager
def serving(folder: Path, server: dict | None = None, **settings) -> Iterator[Background]:
    ports = ServerConfig(grpc_port=0, port=0, **(server or {}))
    given = config(folder, **settings)
    with Background(ports, lambda: open_engine(given, False, warm_up=False)) as background:
        background.wait_ready()
        yield background


@pytest.fixture(scope="module")
def served(folder) -> Iterator[Background]:
    module = f"start={folder / 'adapters' / 'a0'}"
    with serving(folder, {"admin_port": 0}, lora_modules=(module,)) as background:
        yield background


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def complete(url: str, model: str, tokens: int = 8) -> str:
    answer = client(url).completions.create(
        model=model, prompt=PROMPT, max_tokens=tokens, temperature=0
    )
    assert answer.model == model
    return answer.choices[0].text


def load(url: str, name: str, path: str, **fields) -> httpx.Response:
    body = {"lora_name": name, "lora_path": path, **fields}
    return httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=SOON)


def unload(url: str, name: str) -> httpx.Response:
    body = {"lora_name": name}
    return httpx.post(f"{url}/v1/unload_lora_adapter", json=body, timeout=SOON)


def test_an_adapter_is_a_model_of_its_name(served, folder):
    models = {model.id: model for model in client(served.url).models.list()}
    assert set(models) == {"base", "start"}
    assert models["start"].parent == "base"
    assert models["start"].root == str(folder / "adapters" / "a0")
    assert client(served.url).models.retrieve("start").id == "start"
    plain, adapted = (complete(served.url, name) for name in ("base", "start"))
    assert plain != adapted
    with Client(served.target) as grpc:
        params = SamplingParams(temperature=0, max_tokens=8)
        assert grpc.complete(PROMPT, params, model="start")[0].text == adapted
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        complete(served.url, "other")


def test_adapters_are_loaded_and_unloaded_while_serving(served, folder):
    first = complete(served.url, "start")
    answer = load(served.url, "later", "a1")
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'later' added successfully.",
    )
    second = complete(served.url, "later")
    assert second not in (first, complete(served.url, "base"))
    assert complete(served.url, "start") == first
    assert load(served.url, "later", "a2", load_inplace=True).status_code == 200
    assert complete(served.url, "later") != second
    assert unload(served.url, "later").status_code == 200
    with pytest.raises(openai.NotFoundError):
        complete(served.url, "later")
    assert [model.id for model in client(served.url).models.list()] == ["base", "start"]


@pytest.mark.parametrize(
    "name, path, status, fault",
    [
        ("start", "a1", 400, "'start' has already been loaded"),
        ("base", "a1", 400, "'base' has already been loaded"),
        ("", "a1", 400, "must be 1 to 200 letters"),
        ("a\nb", "a1", 400, "must be 1 to 200 letters"),
        ("new", "../model", 400, "is not below lora_root"),
        ("new", "/etc", 400, "is not below lora_root"),
        ("new", "link", 400, "is not below lora_root"),
        ("new", "none", 404, "there is no folder"),
        ("new", "", 400, "lora_path: String should have at least 1 character"),
        ("new", "a\0b", 400, "is not below lora_root"),
        ("new", ".", 400, "has no adapter_model.safetensors"),
        ("new", "https://example.com/adapter", 404, "there is no folder"),
    ],
)
def test_adapters_that_cannot_be_loaded_are_refused(served, folder, name, path, status, fault):
    with contextlib.suppress(FileExistsError):
        (folder / "adapters" / "link").symlink_to(folder / "model")
    answer = load(served.url, name, path)
    assert answer.status_code == status
    assert fault in answer.json()["error"]["message"]
    assert [model.id for model in client(served.url).models.list()] == ["base", "start"]


def test_more_adapters_than_host_memory_holds_are_served(folder):
    """Some are loaded, and asked for, by several callers at once."""
    with serving(folder, max_loras=1, max_cpu_loras=2) as background:
        url = background.url
        assert [load(url, f"n{i}", f"a{i % 4}").status_code for i in range(4)] == [200] * 4
        right = [complete(url, f"n{i}") for i in range(4)]
        assert len(set(right)) == 4
        faults: list[str] = []

        def use(i: int) -> None:
            if load(url, f"m{i}", f"a{i % 4}").status_code != 200:
                faults.append(f"m{i} was not loaded")
            for name in (f"m{i}", f"n{i % 4}"):
                if complete(url, name) != right[i % 4]:
                    faults.append(f"{name} said something else")

        threads = [threading.Thread(target=use, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not faults
        assert len(client(url).models.list().data) == 11
        assert unload(url, "n0").status_code == 200
        assert unload(url, "n0").status_code == 404


def test_routers_are_told_of_the_adapters_in_use(served):
    text = httpx.get(f"{served.url}/metrics", timeout=SOON).text
    assert 'jaxserve:lora_requests_info{max_lora="2",running_lora_adapters=""' in text
    assert "jaxserve:lora_adapters_loaded 1.0" in text


def test_fields_of_vllms_callers_are_taken(served):
    assert load(served.url, "new", "a1", is_3d_lora_weight=False).status_code == 200
    body = {"lora_name": "new", "lora_int_id": 1}
    answer = httpx.post(f"{served.url}/v1/unload_lora_adapter", json=body, timeout=SOON)
    assert answer.status_code == 200
    assert unload(served.url, "").status_code == 400


def test_nothing_is_lost_while_adapters_come_and_go(served, folder):
    """Requests for adapters that stay get what they get alone; those for one that comes and goes
    get that, or are refused before anything was computed."""
    assert load(served.url, "stays", "a1").status_code == 200
    right = {name: complete(served.url, name, 24) for name in ("base", "start", "stays")}
    assert load(served.url, "goes", "a2").status_code == 200
    right["goes"] = complete(served.url, "goes", 24)
    done: dict[str, int] = dict.fromkeys(right, 0)
    faults: list[str] = []
    over = threading.Event()

    def ask(name: str) -> None:
        while not over.is_set():
            try:
                text = complete(served.url, name, 24)
            except openai.NotFoundError:
                if name != "goes":
                    faults.append(f"{name} was refused")
                continue
            except openai.OpenAIError as error:
                faults.append(f"{name}: {error}")
                continue
            done[name] += 1
            if text != right[name]:
                faults.append(f"{name} said {text!r}")

    threads = [threading.Thread(target=ask, args=(name,)) for name in (*right, "goes")]
    for thread in threads:
        thread.start()
    changes = 0
    until = time.monotonic() + 3 * SOON
    enough = lambda: changes >= CHANGES and min(done.values()) >= ANSWERS
    try:
        while not (enough() or faults) and time.monotonic() < until:
            assert unload(served.url, "goes").status_code == 200
            assert load(served.url, "goes", "a2").status_code == 200
            changes += 1
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not faults
    assert enough(), (done, changes)
    assert unload(served.url, "goes").status_code == unload(served.url, "stays").status_code == 200


def test_users_with_keys_cannot_change_adapters(folder, key_file):
    with serving(folder, {"admin_port": 0, "api_keys": key_file(TWO)}) as background:
        body = {"lora_name": "new", "lora_path": "a1"}
        user = {"authorization": "Bearer a-key"}
        refused = httpx.post(
            f"{background.url}/v1/load_lora_adapter", json=body, headers=user, timeout=SOON
        )
        assert refused.status_code == 403
        admin = f"http://127.0.0.1:{background.server.ports['admin']}"
        key = {"authorization": "Bearer r-key"}
        answer = httpx.post(f"{admin}/v1/load_lora_adapter", json=body, headers=key, timeout=SOON)
        assert answer.status_code == 200
        models = httpx.get(f"{background.url}/v1/models", headers=user, timeout=SOON).json()["data"]
        assert [model["id"] for model in models] == ["base", "new"]


def test_without_a_root_nothing_can_be_loaded(folder):
    with serving(folder, lora_root=None) as background:
        answer = load(background.url, "new", "a1")
        assert answer.status_code == 400 and "without lora_root" in answer.text


def test_replicas_of_a_cluster_have_the_same_adapters(folder):
    """Of two replicas on other connections; one that lacks an adapter gets no request for it."""
    with contextlib.ExitStack() as stack:
        remotes = []
        for _ in range(2):
            engine = build(config(folder), progress=False, warm_up=False)
            stack.callback(engine.close)
            engine.start()
            service = ReplicaService(SECRET)
            stack.callback(service.stop)
            port = service.start("127.0.0.1:0")
            service.open(engine)
            remote = RemoteReplica(f"127.0.0.1:{port}", SECRET)
            stack.callback(remote.close)
            assert remote.wait_connected(30)
            remotes.append(remote)
        members = [Member(str(i), remote) for i, remote in enumerate(remotes)]
        conductor = Conductor(members)
        tokenizer = None
        ports = ServerConfig(grpc_port=0, port=0)
        with Background(ports, lambda: (conductor, tokenizer)) as background:
            background.wait_ready()
            assert load(background.url, "new", "a1").status_code == 200
            eventually(lambda: all("new" in one.adapters.by_name for one in remotes))
            identities = {one.adapters.by_name["new"].identity for one in remotes}
            assert len(identities) == 1
            remotes[0].adapters.unload("new")
            eventually(lambda: "new" not in remotes[0].adapters.by_name)
            body = {"model": "new", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
            answers = [
                httpx.post(f"{background.url}/v1/completions", json=body, timeout=60)
                for _ in range(4)
            ]
            assert [answer.status_code for answer in answers] == [200] * 4
            assert unload(background.url, "new").status_code == 200
            eventually(lambda: "new" not in remotes[1].adapters.by_name)
            refused = httpx.post(f"{background.url}/v1/completions", json=body, timeout=60)
            assert refused.status_code == 404


def test_an_empty_list_of_adapters_is_none(folder):
    assert config(folder, lora_modules=("",)).adapters.named == []


def test_settings_for_adapters_that_cannot_be_served_are_refused(folder, tmp_path):
    for settings, fault in (
        (dict(max_loras=0), "needs places for adapters"),
        (dict(lora_modules=("a1",)), "is not NAME=FOLDER"),
        (dict(lora_modules=('{"name": "a1"}',)), "is not NAME=FOLDER"),
        (dict(lora_modules=('{"name": ',)), "is not NAME=FOLDER"),
        (dict(lora_modules=("a=x", "a=y")), "a is given more than once"),
        (dict(lora_root=str(tmp_path / "none")), "is no folder"),
    ):
        with pytest.raises(ConfigError, match=fault):
            config(folder, **settings)
    shutil.copytree(folder / "adapters" / "a0", tmp_path / "big")
    with pytest.raises(ConfigError, match="rank 4 is greater than max_lora_rank, 2"):
        build(
            config(folder, max_lora_rank=2, lora_modules=(f"big={tmp_path / 'big'}",)),
            progress=False,
            warm_up=False,
        )


def test_offline_prompts_have_each_their_adapter(folder):
    settings = SETTINGS | LORAS | {"lora_modules": (f"a0={folder / 'adapters' / 'a0'}",)}
    greedy = SamplingParams(temperature=0, max_tokens=8)
    with LLM(str(folder / "model"), **settings) as llm:
        llm.load_adapter("a1", str(folder / "adapters" / "a1"))
        names = ["", "a0", "a1"]
        texts = [one.text for one in llm.generate([PROMPT] * 3, greedy, adapter=names)]
        assert len(set(texts)) == 3
        assert llm.generate(PROMPT, greedy, adapter="a1")[0].text == texts[2]
        llm.unload_adapter("a1")
        with pytest.raises(PromptError, match="'a1' is not loaded"):
            llm.generate(PROMPT, greedy, adapter="a1")
