"""What the doctor finds: on a healthy machine nothing, else each fault under its name with what to
do; and that it predicts what the engine would, without loading or compiling anything."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import trustme

from jaxserve.cli import devices
from jaxserve.cli import main as cli
from jaxserve.cli.devices import Devices, NoDevices, driver_version, look
from jaxserve.cli.doctor import checks
from jaxserve.cli.doctor import command as doctor
from jaxserve.cli.doctor.forecast import forecast, launch_lines, seconds, shown
from jaxserve.costs.coefficients import Costs
from jaxserve.engine.build import build
from jaxserve.engine.engine import Engine
from jaxserve.engine.memory import sizes
from jaxserve.engine.profiling import profile_file as profile
from jaxserve.kernels.cpu import library
from jaxserve.scheduling.assembly import ReplicaProfile
from jaxserve.settings.options import make
from jaxserve.settings.schema import EngineConfig, ServerConfig
from tests.engine.harness import fresh
from tests.waiting import eventually

TINY = {
    "model": "random:tiny",
    "max_model_len": 4096,
    "pages": 512,
    "max_seqs": 8,
    "chunk_tokens": 64,
    "policy": "slack",
    "chunking": "adaptive",
}
FLAGS = [f"--{name}={value}" for name, value in TINY.items()]
CPU = Devices("cpu", "cpu", 12, None, None, library.instruction_set())
H200 = Devices("gpu", "NVIDIA H200", 1, 100 * 2**30, None)
OLD_DRIVER = dataclasses.replace(H200, driver="535.183.01", runtime="CUDA 12.2")
A100 = dataclasses.replace(H200, kind="NVIDIA A100", lacks="it needs a Hopper GPU")
T4 = dataclasses.replace(A100, kind="Tesla T4", lacks_triton="it needs an NVIDIA GPU of Ampere")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def seen(monkeypatch):
    """Sets what the doctor finds of devices, in place of a process that looks."""

    def see(found: Devices | NoDevices) -> None:
        def answer(count: int, limit: float, share: float) -> Devices:
            if isinstance(found, NoDevices):
                raise found
            return found

        monkeypatch.setattr(doctor, "look", answer)

    see(CPU)
    return see


def examined(capsys, *flags: str) -> tuple[int, dict, dict]:
    """(exit code, checks by name, the whole answer)"""
    code = cli.main(["doctor", "--json", "--grpc_port=0", "--port=0", *flags])
    out, err = capsys.readouterr()
    assert not err, err
    answer = json.loads(out)
    return code, {check["name"]: check for check in answer["checks"]}, answer


def test_a_healthy_machine_is_told_in_one_table(capsys, own_cache):
    # with a process that really looks at the devices
    assert cli.main(["doctor", *FLAGS, "--grpc_port=0", "--port=0"]) == 0
    out = capsys.readouterr().out
    rows = {
        line.split()[1]: line.split()[0]
        for line in out.split("\n\n")[0].splitlines()
        if "->" not in line
    }
    assert {
        "python",
        "jax",
        "jaxlib",
        "settings",
        "devices",
        "mesh",
        "model",
        "tokenizer",
        "memory",
        "capacity",
        "port",
        "disk",
        "models",
        "profiles",
        "compile",
        "open",
        "profile",
    } <= rows.keys()
    assert "fault" not in rows.values() and out.rstrip().endswith("0 at fault, 2 to look at")
    assert not own_cache.exists(), "it has loaded, compiled or kept something"


def test_a_setting_at_fault_is_one_row_and_what_can_be_looked_at_is(capsys, seen):
    code, found, answer = examined(
        capsys, "--model=random:tiny", "--classes=chat:ttft=x", "--host=0.0.0.0"
    )
    assert code == 1 and answer["ok"] is False
    said = [check["said"] for check in answer["checks"] if check["name"] == "settings"]
    assert len(said) == 2 and "classes: chat: ttft" in said[1] and "host: " in said[0]
    assert (
        found["python"]["state"] == "ok" and found["port"]["state"] == "ok" and "model" not in found
    )


def test_a_port_that_is_taken_is_a_fault_with_the_flag_to_change(capsys, seen):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        code, found, _ = examined(capsys, *FLAGS, f"--grpc_port={number}", f"--admin_port={number}")
    assert code == 1
    for name in ("grpc_port", "admin_port"):
        assert (
            found[name]["state"] == "fault"
            and f"127.0.0.1:{number}" in found[name]["said"]
            and f"--{name}" in found[name]["advice"]
        )


@pytest.mark.parametrize(
    "source, name, said, advice",
    [
        ("nothing-here", "model", "is neither a path nor in the cache folder", "--model"),
        ("some/hub-id", "model", "is neither a path nor, whole, in the hub's cache", "--model"),
        ("random:huge", "model", "is not one of", "--model"),
    ],
)
def test_a_model_that_is_not_there_is_not_fetched(
    capsys, seen, own_cache, source, name, said, advice
):
    code, found, _ = examined(capsys, f"--model={source}")
    assert (
        code == 1
        and found[name]["state"] == "fault"
        and said in found[name]["said"]
        and advice in found[name]["advice"]
    )
    assert not own_cache.exists() and "memory" not in found


def test_damaged_files_of_a_model_are_a_fault(capsys, seen, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    code, found, _ = examined(capsys, f"--model={tmp_path}")
    assert code == 1 and found["model"]["state"] == "fault"


def test_a_published_file_must_have_its_hash(capsys, seen, own_cache):
    folder = own_cache / "models" / "smollm2-135m"
    folder.mkdir(parents=True)
    (folder / "model.gguf").write_bytes(b"GGUF")
    code, found, _ = examined(capsys)
    assert (
        code == 1
        and found["model hash"]["state"] == "fault"
        and "jaxserve fetch smollm2-135m" in found["model hash"]["advice"]
    )


def test_the_real_model_is_well(capsys, seen, smollm2_gguf, monkeypatch):
    code, found, _ = examined(capsys, f"--model={smollm2_gguf}")
    assert (
        code == 0
        and "30 layers" in found["model"]["said"]
        and "chat template" in found["tokenizer"]["said"]
    )


@pytest.mark.parametrize(
    "flags, found, name, state, said",
    [
        (["--mesh=tp=2"], H200, "mesh", "fault", "needs 2 of 1"),
        (["--mesh=tp=3"], CPU, "mesh", "fault", "tp=3 cannot split"),
        (["--mesh=spp=3"], CPU, "mesh", "fault", "spp=3 must be from 1 to 2"),
        ([], H200, "memory", "ok", "in each device"),
        ([], dataclasses.replace(H200, memory=2**20), "memory", "fault", "of 1 MiB in each device"),
        ([], H200, "kernels", "ok", "Hopper"),
        ([], H200, "CUDA graphs", "ok", "driver unknown"),
        ([], OLD_DRIVER, "CUDA graphs", "warning", "driver 535.183.01, runtime CUDA 12.2"),
        ([], A100, "kernels", "ok", "compiled by Triton"),
        ([], T4, "kernels", "warning", "four times the bytes"),
        (
            [],
            dataclasses.replace(H200, lacks="it needs jax 0.11.2, and this is 0.10.2"),
            "kernels",
            "warning",
            "not those for Hopper: it needs jax 0.11.2",
        ),
        ([], CPU, "kernels", "ok", "compiled for CPUs"),
        (
            [],
            dataclasses.replace(CPU, lacks="it was not compiled at installation"),
            "kernels",
            "warning",
            "not compiled at installation",
        ),
        (["--pages=20"], CPU, "capacity", "warning", "320 tokens of KV"),
        (["--pages=1000000000"], CPU, "memory", "fault", "in RAM"),
        (["--profile=none"], CPU, "profile", "warning", "nothing is predicted"),
        (["--profile=/no/such/file"], CPU, "profile", "fault", "No such file"),
        (["--max_model_len=32M"], CPU, "max_model_len", "fault", "above the model's limit"),
        ([], NoDevices("JAX did not answer for 60 s"), "devices", "fault", "did not answer"),
    ],
)
def test_what_does_not_fit_is_told(capsys, seen, flags, found, name, state, said):
    seen(found)
    code, rows, _ = examined(capsys, *FLAGS, *flags)
    assert rows[name]["state"] == state and said in rows[name]["said"], rows[name]
    assert code == any(row["state"] == "fault" for row in rows.values())
    assert state == "ok" or rows[name]["advice"]


def test_a_gpu_that_jax_does_not_see_is_warned_of(capsys, seen, tmp_path, monkeypatch):
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path / "nvidiactl")
    assert "jax[cuda" in examined(capsys, *FLAGS)[1]["GPU"]["advice"]


@pytest.fixture
def interpreter(tmp_path, monkeypatch):
    """Something else in place of Python."""

    def replace(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)
        monkeypatch.setattr(devices.sys, "executable", str(path))

    return replace


def test_a_driver_that_hangs_is_reported_in_time(interpreter, tmp_path):
    interpreter(f"echo $$ > {tmp_path}/pid; exec sleep 600")
    began = time.monotonic()
    with pytest.raises(NoDevices, match="did not answer for 3 s"):
        look(1, 3, 0.9)
    assert time.monotonic() - began < 60
    status = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    eventually(lambda: not status.exists() or status.read_text().split()[2] == "Z")


def test_a_library_that_crashes_is_quoted(interpreter):
    interpreter("echo 'RuntimeError: no driver' >&2; exit 3")
    with pytest.raises(NoDevices, match=r"exit code 3.*no driver"):
        look(1, 10.0, 0.9)


# --- files, folders, ports


def test_folders_that_cannot_be_used_are_faults(tmp_path, monkeypatch, own_cache):
    config = make(EngineConfig, {"compile_cache": str(tmp_path / "xla")})
    shared = tmp_path / "xla"
    states = lambda config: {
        check.name: check.state for check in checks.folders(config) if check.name != "disk"
    }
    assert (
        states(config)
        == states(EngineConfig())
        == {"models": "ok", "profiles": "ok", "compile cache": "ok"}
        and not own_cache.exists()
    )
    shared.mkdir()
    shared.chmod(0o777)
    assert states(config) == {"models": "ok", "profiles": "ok", "compile cache": "fault"}
    (own_cache / "models").mkdir(parents=True)
    own_cache.chmod(0o770)
    assert states(EngineConfig()) == {
        "models": "fault",
        "profiles": "fault",
        "compile cache": "fault",
    }
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "file" / "inside"))
    assert set(states(make(EngineConfig, {"compile_cache": ""})).values()) == {"fault"}


@pytest.mark.parametrize("free, state", [(3 * 2**30, "ok"), (2**30, "warning"), (2**20, "fault")])
def test_a_full_disk_shows(monkeypatch, free, state):
    usage = type(checks.shutil.disk_usage("/"))
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: usage(2**40, 0, free))
    assert {check.name: check.state for check in checks.folders(EngineConfig())}["disk"] == state


def test_few_descriptors_are_warned_of(monkeypatch):
    for limit, state in ((1024, "warning"), (65536, "ok"), (-1, "ok")):
        monkeypatch.setattr(checks.resource, "getrlimit", lambda kind, limit=limit: (limit, 65536))
        assert checks.descriptors().state == state


def test_versions_that_are_too_old_are_faults(monkeypatch):
    monkeypatch.setattr(
        checks.metadata, "version", lambda name: {"jax": "0.9.9", "jaxlib": "0.11.0.dev1"}[name]
    )
    assert [check.state for check in checks.libraries()] == ["fault", "ok"]


def test_every_port_is_tried_on_the_servers_address():
    config = dataclasses.make_dataclass(
        "Config", [("host", str), ("grpc_port", int), ("port", int), ("admin_port", int)]
    )
    assert [(check.name, check.state) for check in checks.ports(config("[::1]", 0, 0, None))] == [
        ("grpc_port", "ok"),
        ("port", "ok"),
    ]
    assert {check.state for check in checks.ports(config("no-such-host.invalid", 1, 2, 3))} == {
        "fault"
    }
    assert [check.name for check in checks.ports(ServerConfig(admin_port=0))] == [
        "port",
        "grpc_port",
        "admin_port",
    ]


def test_keys_and_certificates_are_read_as_the_server_reads_them(capsys, seen, tmp_path):
    authority = trustme.CA()
    pair = authority.issue_cert("localhost")
    other = authority.issue_cert("localhost")
    for name, blob in (
        ("cert", pair.cert_chain_pems[0]),
        ("key", pair.private_key_pem),
        ("other", other.private_key_pem),
    ):
        blob.write_to_path(tmp_path / name)
        os.chmod(tmp_path / name, 0o600)
    (tmp_path / "keys").write_text("keys: []\n")
    os.chmod(tmp_path / "keys", 0o600)
    at = lambda **files: examined(
        capsys, *FLAGS, *(f"--{flag}={tmp_path / file}" for flag, file in files.items())
    )[:2]
    code, found = at(tls_cert="cert", tls_key="key", api_keys="keys")
    assert code == 0 and found["certificate"]["state"] == found["api_keys"]["state"] == "ok"
    code, found = at(tls_cert="cert", tls_key="other")
    assert (
        code == 1
        and found["tls_key"]["state"] == "fault"
        and "is not the key of" in found["tls_key"]["said"]
    )
    os.chmod(tmp_path / "keys", 0o644)
    code, found = at(tls_cert="none", tls_key="key", api_keys="keys")
    assert (
        code == 1
        and "No such file" in found["tls_cert"]["said"]
        and "can be read" in found["api_keys"]["said"]
    )
    assert "certificate" not in examined(capsys, *FLAGS)[1]


# --- what is predicted is what the engine would


@pytest.mark.parametrize("mesh", ["", "spp=2", "spp=2,kvp=2,tp=2"])
def test_sizes_are_those_of_the_arrays_of_an_engine(mesh):
    engine = build(
        make(EngineConfig, {**TINY, "mesh": mesh}), progress=False, warm_up=False, profiled=False
    )
    stages = engine.worker.stages
    held = {}
    kinds = {
        "weights": [[stage.values for stage in stages.stages], stages.head.values],
        "kv": [stage.caches for stage in stages.stages],
        "tables": [[stage.table for stage in stages.stages], stages.sampling_state],
    }
    for kind, arrays in kinds.items():
        by_device: dict = {}
        for array in jax.tree.leaves(arrays):
            for part in array.addressable_shards:
                by_device[part.device] = by_device.get(part.device, 0) + part.data.nbytes
        held[kind] = max(by_device.values())
    found = sizes(stages.plan)
    assert (
        {kind: getattr(found, kind) for kind in held} == held
        and found.work > 0
        and found.total > sum(held.values())
    )


@pytest.fixture(scope="module")
def engine():
    return build(make(EngineConfig, TINY), progress=False, warm_up=False, profiled=False)


COSTS = Costs(
    layers=2,
    launch=0.001,
    linear_floor=0.002,
    linear_token=1e-4,
    pair=1e-8,
    decode_kv=1e-7,
    head=0.003,
    head_token=1e-4,
)


def write_profile(file: Path, engine: Engine) -> None:
    """A profile of this engine that says COSTS."""
    identity = profile.identity_of(engine.worker, engine.info.max_model_len)
    profile.write(file, identity, profile.MeasuredProfile(ReplicaProfile(COSTS, {})))


def test_the_doctor_predicts_what_the_engine_does(capsys, seen, engine):
    file = profile.kept_file(profile.identity_of(engine.worker, engine.info.max_model_len))
    write_profile(file, engine)
    seen(dataclasses.replace(CPU, kind=jax.devices()[0].device_kind))
    code, found, answer = examined(capsys, *FLAGS)
    assert code == 0 and str(file) in found["profile"]["said"]
    engine = fresh(engine, "grow", costs=COSTS)
    expected = forecast(engine.scheduler)
    assert [(row["prompt"], row["seconds"]) for row in answer["predicted"]["ttft"]] == list(
        expected.ttft.items()
    )
    assert expected.ttft == {
        length: engine.scheduler.times.alone(length) for length in (128, 2048, 4095)
    }
    assert {
        (row["sequences"], row["context"]): row["seconds"] for row in answer["predicted"]["tpot"]
    } == expected.tpot
    assert cli.main(["doctor", "--grpc_port=0", "--port=0", *FLAGS]) == 0
    table = capsys.readouterr().out
    assert (
        "TTFT  TPOT of 1  TPOT of 4  TPOT of 8" in table
        and "\n2K " in table
        and seconds(expected.tpot[8, 128]) in table
    )


def test_a_doubtful_profile_and_an_objective_that_it_misses_are_warned_of(capsys, seen, engine):
    """A profile that was measured beside other work, and by which one decode alone takes 8 ms."""
    seen(dataclasses.replace(CPU, kind=jax.devices()[0].device_kind))
    identity = profile.identity_of(engine.worker, engine.info.max_model_len)
    file = profile.kept_file(identity)
    write_profile(file, engine)
    _, found, _ = examined(capsys, *FLAGS)
    assert found["profile"]["state"] == found["time per token"]["state"] == "ok"
    busy = ReplicaProfile(COSTS, {}, doubt="other processes kept 1.0 of 2 cores busy")
    profile.write(file, identity, profile.MeasuredProfile(busy))
    code, found, _ = examined(capsys, *FLAGS, "--tpot=0.004")
    assert code == 0
    assert found["profile"]["state"] == found["time per token"]["state"] == "warning"
    assert "cannot be trusted: other processes kept 1.0 of 2" in found["profile"]["said"]
    assert "8.13 ms predicted for one request" in found["time per token"]["said"]
    assert "the objective is 4 ms" in found["time per token"]["said"]


def test_a_profile_of_something_else_is_a_fault(capsys, seen, engine, tmp_path):
    write_profile(tmp_path / "other.json", engine)
    code, found, _ = examined(
        capsys, *FLAGS, "--max_seqs=4", f"--profile={tmp_path / 'other.json'}"
    )
    assert code == 1 and "was measured with" in found["profile"]["said"]


def test_predictions_are_of_what_fits_and_grow_with_it(engine):
    engine = fresh(engine, "grow", costs=COSTS)
    found = forecast(engine.scheduler)
    lengths = sorted(found.ttft)
    batches = found.batches
    assert all(np.diff([found.ttft[length] for length in lengths]) > 0) and batches == [1, 4, 8]
    assert (4, 2048) not in found.tpot and (4, 128) in found.tpot and (1, 4095) in found.tpot, (
        "512 pages hold 8192 tokens"
    )
    for length in (128, 4095):
        times = [found.tpot[batch, length] for batch in batches if (batch, length) in found.tpot]
        assert times == sorted(times) and found.tpot[1, 4095] > found.tpot[1, 128]


def test_before_it_serves_a_server_tells_what_it_will_do_and_needs(engine):
    engine = fresh(engine, "grow", costs=COSTS)
    ends, sampling, memory, capacity, predicted = launch_lines(engine)
    assert ends == "completions end at token 2" and sampling.endswith("as their protocol says")
    info = engine.info
    engine.info = dataclasses.replace(info, eos_ids=(), sampling_defaults={"top_p": 0.9})
    ends, sampling, *_ = launch_lines(engine)
    assert "no token that ends" in ends and "top_p 0.9, as the model recommends" in sampling
    assert (
        "weights" in memory
        and "(cpu)" in memory
        and "8192 tokens of KV" in capacity
        and "4096 tokens in each" in capacity
    )
    assert (
        "predicted TTFT" in predicted
        and f"2K: {seconds(engine.scheduler.times.alone(2048))}" in predicted
        and "\n" not in predicted
    )
    plain = build(make(EngineConfig, {**TINY, "profile": "none"}), progress=False, warm_up=False)
    assert "jaxserve profile" in launch_lines(plain)[-1]


@pytest.mark.parametrize(
    "count, text",
    [(128, "128"), (2048, "2K"), (4095, "4095"), (10 * 2**20, "10M"), (2**20 + 2**10, "1025K")],
)
def test_counts_are_short(count, text):
    assert shown(count) == text


@pytest.mark.parametrize(
    "said",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Thu Jul 24 UTC 2026\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n",
    ],
)
def test_the_version_of_the_driver_is_read_where_it_is_loaded(tmp_path, said):
    file = tmp_path / "version"
    assert driver_version(file) is None
    file.write_text(said)
    assert driver_version(file) == "580.65.06"
