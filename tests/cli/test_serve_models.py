"""`jaxserve serve A B`: two real models behind one port, each in a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from jaxserve.api.sampling import SamplingParams
from jaxserve.cli import cluster, gpus, serve_models
from jaxserve.cli import main as cli
from jaxserve.cli.gpus import DEVICES, MEMORY, Wanted
from jaxserve.cli.serve import COMMAND
from jaxserve.cli.serve_models import environment, read_models, tasks
from jaxserve.llm import LLM
from jaxserve.server.client import Client
from jaxserve.settings.flags import parse
from tests.engine.adapters import write_adapter
from tests.server.test_families import SETTINGS, write_model
from tests.waiting import eventually

MARK = f"MODELS_OF_TEST={os.getpid()}"  # tells our processes from others on this machine
ENVIRONMENT = {**os.environ, **dict([MARK.split("=")])}
QUICK = ["--profile=none", "--policy=fcfs", "--chunking=static", "--admission=queue"]
START_SECONDS = 400.0
PROMPT = "Once upon a time"
CHAT = [{"role": "user", "content": "hello"}]
GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


def processes(*words: str) -> list[int]:
    """Returns our processes with all of these words on their command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ours = MARK.encode() in (folder / "environ").read_bytes().split(b"\0")
            line = (folder / "cmdline").read_bytes().decode().split("\0")
            if ours and all(word in line for word in words):
                found.append(int(folder.name))
    return found


@dataclasses.dataclass
class Pair:
    """A running `jaxserve serve one two.yaml`. folder: where it runs. client: of its HTTP port;
    grpc: its gRPC address."""

    folder: Path
    process: subprocess.Popen[str]
    client: httpx.Client
    grpc: str

    def post(self, path: str, **body) -> httpx.Response:
        return self.client.post(path, json=body)

    def complete(self, model: str) -> str:
        answer = self.post("/v1/completions", model=model, prompt=PROMPT, **GREEDY)
        assert answer.is_success, answer.text
        assert answer.json()["model"] == model
        return answer.json()["choices"][0]["text"]

    @property
    def ready(self) -> bool:
        return self.client.get("/ready").status_code == 200


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Pair]:
    """Two models: a folder, and a settings file with an adapter and a shorter context."""
    folder = tmp_path_factory.mktemp("pair")
    write_model(folder / "one", "granite")
    write_adapter(folder / "lora", write_model(folder / "second", "phi3"), seed=1)
    own = {
        "model": "second",
        "served_model_name": ["two", "zwei"],
        "max_model_len": 128,
        "max_loras": 1,
        "max_lora_rank": 8,
        "lora_modules": ["two-lora=lora"],
    }
    (folder / "two.yaml").write_text(json.dumps(own))
    sizes = SETTINGS | {"pages": 40}
    del sizes["max_model_len"]
    flags = [*QUICK, "--port=0", "--grpc_port=0", *(f"--{k}={v}" for k, v in sizes.items())]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxserve", "serve", "one", "two.yaml", *flags],
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
        cwd=folder,
        text=True,
    )
    try:
        assert process.stdout is not None
        grpc, url = (process.stdout.readline().strip() for _ in range(2))
        with httpx.Client(base_url=url, timeout=60, verify=False) as client:
            pair = Pair(folder, process, client, grpc)
            eventually(lambda: pair.ready or process.poll() is not None, START_SECONDS)
            assert process.poll() is None
            yield pair
    finally:
        process.kill()
        process.wait()
    eventually(lambda: not processes())


def offline(folder: Path, **settings) -> str:
    with LLM(str(folder), progress=False, **SETTINGS | settings) as llm:
        return llm.generate([PROMPT], SamplingParams(**GREEDY))[0].text


def test_each_model_says_what_it_says_alone(pair):
    one, two = (offline(pair.folder / name) for name in ("one", "second"))
    assert one != two
    assert pair.complete("one") == one
    assert pair.complete("two") == pair.complete("zwei") == two
    with Client(pair.grpc) as client:
        assert client.healthy()
        ask = lambda name: client.complete(PROMPT, SamplingParams(**GREEDY), model=name)[0].text
        assert [ask("one"), ask("two")] == [one, two]


def test_an_adapter_is_a_model_beside_both(pair):
    rows = {row["id"]: row for row in pair.client.get("/v1/models").json()["data"]}
    parents = {name: row["parent"] for name, row in rows.items()}
    assert parents == {"one": None, "two": None, "zwei": None, "two-lora": "two"}
    assert (rows["one"]["max_model_len"], rows["two"]["max_model_len"]) == (1024, 128)
    assert pair.complete("two-lora") != pair.complete("two")


def test_chats_are_written_as_each_model_was_trained(pair):
    texts = {}
    for name in ("one", "two"):
        tokens = pair.post("/tokenize", model=name, messages=CHAT).json()["tokens"]
        texts[name] = pair.post("/detokenize", model=name, tokens=tokens).json()["prompt"]
        answer = pair.post("/v1/chat/completions", model=name, messages=CHAT, max_tokens=4).json()
        assert answer["usage"]["prompt_tokens"] == len(tokens)
    assert "<|start_of_role|>user" in texts["one"] and "<|user|>" in texts["two"]


def test_a_request_for_no_or_an_unknown_model_is_refused(pair):
    unknown = pair.post("/v1/chat/completions", model="three", messages=CHAT)
    error = unknown.json()["error"]
    assert (unknown.status_code, error["code"]) == (404, "model_not_found")
    assert error["message"].endswith("served here are one, two")
    missing = pair.post("/v1/chat/completions", messages=CHAT)
    assert missing.status_code == 400 and "served here are one, two" in missing.text


def test_metrics_have_a_label_for_the_model(pair):
    pair.complete("one")
    text = pair.client.get("/metrics").text
    for name in ("one", "two"):
        (line,) = (
            line
            for line in text.splitlines()
            if line.startswith("jaxserve:prompt_tokens_total{") and f'"{name}"' in line
        )
        assert float(line.split()[-1]) > 0


def test_one_that_is_killed_is_refused_and_comes_back_and_the_other_goes_on(pair):
    said = pair.complete("two")
    (victim,) = processes("serve", "--model=second")
    os.kill(victim, signal.SIGKILL)
    refused = pair.post("/v1/completions", model="two", prompt=PROMPT)
    assert refused.status_code == 503
    assert pair.complete("one")
    eventually(lambda: "the model 'two' is waiting" in pair.client.get("/ready").text)
    assert pair.client.get("/health").text == "ok"
    for name in ("two", "two-lora"):
        refused = pair.post("/v1/completions", model=name, prompt=PROMPT)
        assert refused.status_code == 503
        assert "the model 'two' is waiting for its processes" in refused.text
    assert pair.complete("one")
    eventually(lambda: pair.ready, START_SECONDS)
    assert pair.client.get("/health").text == "ok"
    assert pair.complete("two") == said
    assert processes("serve", "--model=second") not in ([], [victim])


def test_what_runs_is_finished_and_nothing_is_left(pair):
    """The last test of the pair: SIGTERM ends it."""
    begun = threading.Event()
    lines = []

    def read() -> None:
        body = {"model": "two", "prompt": "x", "max_tokens": 100, "stream": True}
        body |= {"ignore_eos": True, "temperature": 0}
        with pair.client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    pair.process.send_signal(signal.SIGTERM)
    reader.join(60)
    assert [line for line in lines if line][-1] == "data: [DONE]"
    assert pair.process.wait(60) == 0
    assert not processes()


def test_nothing_outlives_a_parent_that_is_killed():
    command = [sys.executable, "-m", "jaxserve", "serve", "random:tiny", "random:tiny"]
    ports = ["--served_model_name", "a", "b", "--port=0", "--grpc_port=0"]
    process = subprocess.Popen([*command, *ports], env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    try:
        eventually(lambda: len(processes("--model=random:tiny")) == 2 and processes("conductor"))
    finally:
        process.kill()
        process.wait()
    eventually(lambda: not processes())


# --- what is refused at the door


@pytest.mark.parametrize(
    "arguments, fault",
    [
        (["random:tiny", "random:tiny"], "served_model_name: 'random:tiny' would be a name of"),
        (["a", "b", "--served_model_name=a"], "--served_model_name: 1 for 2 models; give one for"),
        (["a", "b", "--served_model_name", "c", "c"], "'c' would be a name of a and of b"),
        (["a", "b", "--model=c"], "give MODEL or --model, not both"),
        (["a", "b", "--replica_port=1"], "--replica_port: cannot be of several models"),
        (["a", "b", "--role=prefill"], "--role: cannot be of several models"),
        (["a", "b", "--kv_events=tcp://127.0.0.1:1"], "--kv_events: cannot be of several models"),
        (["a", "b", "--lora_modules", "x=y"], "--lora_modules: cannot be of several models; give"),
        (["a", "b", "--max_seqs=0"], "max_seqs"),
        (["a", "port.yaml"], "port: port.yaml: a model of several has no such setting"),
        (["a", "nameless.yaml"], "model: nameless.yaml names none"),
        (["a", "absent.yaml"], "absent.yaml"),
        (["a", "port.yaml", "--config=port.yaml"], "config: give either it or settings files"),
        (["a", "lora.yaml"], "'a' would be a name of a and of lora.yaml"),
        (["a", "b", "--served_model_name", "c", ""], "--served_model_name: a name is empty"),
        (["a", "port=8000"], "'port=8000' is not a flag; flags begin with --"),
        (["port.yaml"], "--model: port.yaml is a settings file; give --config=port.yaml"),
        (["smollm2-135m", "b", "--host=0.0.0.0"], "--host: '0.0.0.0' is not a loopback address"),
        (["smollm2-135m", "absent"], "'absent' is neither a path nor in the cache folder"),
        (["smollm2-135m", "./absent"], "absent: no such file or folder"),
    ],
)
def test_settings_that_make_no_sense_for_several_models(
    arguments, fault, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("port.yaml").write_text("model: b\nport: 1\n")
    Path("nameless.yaml").write_text("max_seqs: 1\n")
    Path("lora.yaml").write_text("model: b\nmax_loras: 1\nlora_modules: [a=folder]\n")
    fetched = []
    monkeypatch.setattr(serve_models, "local_files", lambda model, *rest: fetched.append(model))
    assert cli.main(["serve", *arguments]) == cli.USAGE
    assert fault in capsys.readouterr().err
    assert not fetched


def test_flags_go_before_a_models_own_file(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("model: b\nmax_seqs: 3\nmax_model_len: 64\n")
    first, second = read_models(parse(COMMAND, ["a", str(own), "--max_seqs=5"]), COMMAND)
    assert (first.names, second.names) == (("a",), ("b",))
    assert [one.config.scheduler.max_seqs for one in (first, second)] == [5, 5]
    assert [one.config.source.max_model_len for one in (first, second)] == [None, 64]
    assert "chunk_tokens" in first.config.automatic, "what was not given is left to the machine"


def test_replicas_get_settings_of_models_and_the_front_those_of_the_server(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSERVE_API_KEY", "key of a user")
    monkeypatch.setenv("JAXSERVE_MAX_SEQS", "3")
    monkeypatch.setenv("JAXSERVE_CACHE", "elsewhere")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    given = ["random:tiny", "random:tiny", "--served_model_name", "a", "b", "--strict_fields"]
    given += ["--port=0", f"--disk_cache={tmp_path}:1", "--host_cache_gib=1", "--log_level=warning"]
    first, second, front = tasks(parse(COMMAND, given), COMMAND)
    for task, name in ((first, "a"), (second, "b")):
        assert {"--max_seqs=3", f"--served_model_name={name}"} < {*task.command}
        assert "--strict_fields" not in task.command
    assert f"--disk_cache={tmp_path}/replica-0:1" in first.command, "a folder of its own"
    assert f"--disk_cache={tmp_path}/replica-1:1" in second.command
    assert [task.independent for task in (first, second, front)] == [True, True, False]
    assert "--strict_fields" in front.command and "--max_seqs=3" not in front.command
    assert "--port=0" not in front.command, "a server that restarts has the same port"
    for task in (first, second, front):
        assert "--log_level=warning" in task.command
    variables = environment()
    assert variables["JAXSERVE_CACHE"] == "elsewhere" and "JAXSERVE_API_KEY" not in variables
    check_keys([first, second], front, "key of a user")


def check_keys(replicas, front, key: str) -> None:
    """Checks that the front takes the users' key, and each replica a key that no user has."""
    assert json.loads(front.environment["JAXSERVE_API_KEY"]) == [key]
    own = {task.environment["JAXSERVE_API_KEY"] for task in replicas}
    assert len(own) == len(replicas) and key not in own
    for task in (*replicas, front):
        assert not any(one in word for word in task.command for one in (key, *own))


def test_a_cluster_keeps_keys_from_its_replicas_and_from_command_lines(monkeypatch):
    started = []

    class Processes:
        def __init__(self, tasks, *rest):
            started.extend(tasks)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(cluster, "ProcessSet", Processes)
    assert cli.main(["cluster", "--model=random:tiny", "--api_key=key of a user", "--port=0"]) == 0
    check_keys(started[:2], started[2], "key of a user")


def test_no_variable_of_a_setting_gets_to_the_processes(monkeypatch):
    for name in [name for name in os.environ if name.startswith("JAXSERVE_")]:
        monkeypatch.delenv(name)  # those of the machine that runs the tests
    for name in ("SSL_CERTFILE", "SSL_KEYFILE", "REPLICAS", "CONFIG", "MAX_SEQS", "TP"):
        monkeypatch.setenv(f"JAXSERVE_{name}", "x")
    kept = {"JAXSERVE_CACHE": "c", "JAXSERVE_CLUSTER_SECRET": "s" * 32}
    for name, text in kept.items():
        monkeypatch.setenv(name, text)
    variables = environment()
    assert {name: variables[name] for name in variables if name.startswith("JAXSERVE_")} == kept


def test_degrees_of_variables_and_files_are_those_of_the_mesh(tmp_path, monkeypatch):
    own = tmp_path / "own.yaml"
    own.write_text("model: b\ntensor_parallel_size: 4\n")

    def meshes(*flags: str) -> list[str]:
        models = read_models(parse(COMMAND, ["a", str(own), *flags]), COMMAND)
        return [str(one.config.mesh) for one in models]

    assert meshes() == ["spp=1,kvp=1,tp=1", "spp=1,kvp=1,tp=4"]
    assert meshes("--mesh=tp=3") == ["spp=1,kvp=1,tp=3"] * 2, "flags go before a file"
    monkeypatch.setenv("JAXSERVE_TP", "2")
    assert meshes() == ["spp=1,kvp=1,tp=2"] * 2
    assert meshes("--mesh=tp=3") == ["spp=1,kvp=1,tp=3"] * 2, "and before variables"


def test_a_variable_names_no_model_of_several(tmp_path, monkeypatch):
    own = tmp_path / "own.yaml"
    own.write_text("model: b\n")
    monkeypatch.setenv("JAXSERVE_MODEL", "c")
    models = read_models(parse(COMMAND, ["a", str(own)]), COMMAND)
    assert [model.names for model in models] == [("a",), ("b",)]


@pytest.mark.parametrize(
    "flags, fault",
    [
        (["--models=a=h:1"], "names one; give --replicas and --model instead"),
        (["--models=a=h:1", "--models=a=h:2"], "'a' is given more than once"),
        (["--models=h:1", "--models=b=h:2"], "'h:1' is not NAME=HOST:PORT"),
        (["--models=a=h:1", "--models=b=h:2", "--model=x"], "--model: cannot be given beside"),
        (["--models=a=h:1", "--models=b=h:2", "--replica_port=0"], "--replica_port: cannot be"),
    ],
)
def test_a_conductor_says_what_it_lacks_of_several_models(flags, fault, monkeypatch, capsys):
    monkeypatch.setenv("JAXSERVE_CLUSTER_SECRET", "a secret of this test")
    assert cli.main(["conductor", *flags]) == cli.USAGE
    assert fault in capsys.readouterr().err


@pytest.mark.parametrize(
    "wanted, count, parts",
    [
        ([(None, None), (None, None)], 4, ["0,1", "2,3"]),
        ([(1, None), (None, None)], 4, ["0", "1,2,3"]),
        ([(2, None), (1, None)], 3, ["0,1", "2"]),
        ([(None, None), (None, None), (None, None)], 2, ["0", "1", "0"]),
    ],
)
def test_gpus_are_given_to_models(wanted, count, parts, monkeypatch):
    monkeypatch.delenv(MEMORY, raising=False)
    given = gpus.shares([Wanted(*one) for one in wanted], [str(n) for n in range(count)])
    assert [one[DEVICES] for one in given] == parts


def test_models_on_one_gpu_share_its_memory(monkeypatch):
    monkeypatch.delenv(MEMORY, raising=False)
    given = gpus.shares([Wanted(None, None), Wanted(1, None)], ["0"])
    assert [one[MEMORY] for one in given] == ["0.46", "0.46"]
    given = gpus.shares([Wanted(None, 0.5), Wanted(1, None)], ["0"])
    assert [one[MEMORY] for one in given] == ["0.5", "0.46"]
    monkeypatch.setenv(MEMORY, "0.3")
    given = gpus.shares([Wanted(None, None), Wanted(1, None)], ["0"])
    assert given == [{DEVICES: "0"}] * 2, "what the environment says stays"


def test_gpus_that_are_too_few_or_too_small_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv(DEVICES, "0")
    names = ["random:tiny", "random:tiny", "--served_model_name", "a", "b"]
    assert cli.main(["serve", *names, "--mesh=tp=2"]) == cli.USAGE
    assert "--mesh: the models need 2 + 2 GPUs; there are 1" in capsys.readouterr().err
    assert cli.main(["serve", *names, "--gpu_memory_utilization=0.9"]) == cli.USAGE
    fault = "--gpu_memory_utilization: 0.9 + 0.9 of a GPU that 2 models share leaves too little"
    assert fault in capsys.readouterr().err
