"""`jaxserve doctor`: whether `jaxserve serve` with the same flags would work here, and how fast.
Nothing is loaded or compiled."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxserve.cli import serve
from jaxserve.cli.devices import Devices, NoDevices, look
from jaxserve.cli.display import table
from jaxserve.cli.doctor import checks, forecast
from jaxserve.cli.doctor.checks import FAULT, OK, WARNING, Check
from jaxserve.cli.engine_flags import engine_config, server_config
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option, options_of
from jaxserve.settings.schema import ConfigError, EngineConfig, ServerConfig

ABOUT = """\
Takes the flags of `jaxserve serve`, and looks at what these need: settings, versions, devices,
memory, model files, ports, folders. The exit code is 1 where something is at fault, else 0.
Devices are asked in a process of its own, which may take --patience seconds.

  jaxserve doctor --model=smollm2-135m --mesh=tp=3
"""
DOCTOR = [
    Option("json", bool, False, "print one object of JSON"),
    Option("patience", float, 60.0, "seconds for the devices to answer", 1.0),
]
SETTINGS = options_of(EngineConfig).keys() | options_of(ServerConfig).keys()
FULL = 0.9  # of memory: what takes more is warned of
NVIDIA = Path("/dev/nvidiactl")  # there where its driver is
GRAPHS_DRIVER = 545  # first version of the driver whose graphs may have kernels of libraries
_CUDA_JAX = "pip install --upgrade 'jax[cuda12]' (or cuda13)"
NO_ROOM = "fewer --pages (or --kv_memory_gib), --dtype=bfloat16, or more ranks or stages in --mesh"


@dataclasses.dataclass
class Patient:
    """Facts known so far; None: not checked, or at fault."""

    engine: EngineConfig | None = None
    server: ServerConfig | None = None
    devices: Devices | None = None
    checkpoint: Any = None
    plan: Any = None
    max_len: int = 0
    forecast: forecast.Forecast | None = None


def run(values: dict[str, Any]) -> int:
    patient = Patient()
    findings = list(_all(patient, values))
    healthy = all(check.state != FAULT for check in findings)
    if values["json"]:
        print(_json(patient, findings, healthy))
    else:
        print(_text(patient, findings))
    return int(not healthy)


def _all(patient: Patient, values: dict[str, Any]) -> Iterator[Check]:
    yield checks.python()
    yield from checks.libraries()
    yield from _settings(patient, values)
    if patient.server is not None:
        yield from checks.ports(patient.server)
        yield from _security(patient.server)
    yield checks.descriptors()
    if patient.engine is None:
        return
    yield from checks.folders(patient.engine)
    try:
        import jax
    except Exception as error:  # whatever is wrong with the installation
        yield Check(
            "jax",
            FAULT,
            f"cannot be imported: {type(error).__name__}: {error}"[:300],
            "install it again",
        )
        return
    jax.config.update("jax_platforms", "cpu")  # this process leaves the devices alone
    yield from _guarded("devices", _devices(patient, values["patience"]))
    yield from _guarded("model", _model(patient))
    if patient.plan is not None:
        yield from _guarded("memory", _memory(patient))
        yield from _guarded("profile", _profile(patient))


def _guarded(name: str, findings: Iterable[Check]) -> Iterator[Check]:
    """Runs a check; an error in it becomes a finding."""
    try:
        yield from findings
    except ConfigError as error:
        yield Check(
            name if error.field == "model" else error.field,
            FAULT,
            error.message,
            f"see --{error.field}",
        )
    except Exception as error:
        yield Check(
            name,
            FAULT,
            f"could not be looked at: {type(error).__name__}: {error}"[:300],
            "see the message",
        )


def _settings(patient: Patient, values: dict[str, Any]) -> Iterator[Check]:
    from jaxserve.server.supervisor import check_host

    def server() -> None:
        patient.server = server_config(values)
        check_host(patient.server)

    def engine() -> None:
        patient.engine = engine_config(values)

    faults = [
        Check("settings", FAULT, str(error), f"see `jaxserve serve --help` on --{error.field}")
        for error in map(_error_of, (server, engine))
        if error is not None
    ]
    changed = len(getattr(values, "origins", {}).keys() & SETTINGS)
    text = f"{changed} differ from the defaults" if changed else "all are the defaults"
    yield from faults or [Check("settings", OK, text)]


def _security(config: ServerConfig) -> Iterator[Check]:
    """The files of keys and certificates, where there are any, read as the server reads them."""
    from jaxserve.server.auth.access import Authenticator
    from jaxserve.server.auth.tls import Tls

    def certificate() -> None:
        if tls := Tls.from_config(config):
            tls.context()

    for name, asked, read in (
        ("api_keys", config.api_keys, lambda: Authenticator(config)),
        ("certificate", config.tls_cert or config.tls_key or config.tls_client_ca, certificate),
    ):
        if asked is None:
            continue
        error = _error_of(read)
        if error is None:
            yield Check(name, OK, asked)
        else:
            yield Check(error.field, FAULT, str(error.args[0]), f"see --{error.field}")


def _error_of(make: Callable[[], object]) -> ConfigError | None:
    try:
        make()
    except ConfigError as error:
        return error
    return None


def _devices(patient: Patient, limit: float) -> Iterator[Check]:
    assert patient.engine is not None
    mesh = patient.engine.mesh
    try:
        devices = look(mesh.devices, limit, patient.engine.cache.gpu_memory_utilization)
    except NoDevices as error:
        yield Check("devices", FAULT, str(error), "nvidia-smi, and JAX_PLATFORMS=cpu to do without")
        return
    patient.devices = devices
    memory = "" if devices.memory is None else f", {forecast.gib(devices.memory)} each"
    yield Check("devices", OK, f"{devices.count} x {devices.kind} ({devices.platform}{memory})")
    if devices.platform == "cpu" and NVIDIA.exists():
        yield Check(
            "GPU",
            WARNING,
            "there is one of NVIDIA's, and JAX does not see it",
            f"{_CUDA_JAX}, and leave LD_LIBRARY_PATH unset",
        )
    if devices.platform == "gpu":
        yield _graphs(devices)
        yield _kernels(devices)
    else:
        yield _cpu_kernels(devices)
    yield Check.of(
        "mesh",
        checks.state_of(devices.count, mesh.devices, mesh.devices),
        f"{mesh} needs {mesh.devices} of {devices.count}",
        "choose smaller degrees with --mesh",
    )


def _cpu_kernels(devices: Devices) -> Check:
    if devices.lacks is None:
        return Check("kernels", OK, f"compiled for CPUs ({devices.instruction_set})")
    return Check(
        "kernels",
        WARNING,
        f"not those compiled for CPUs: {devices.lacks}. Prompts take about 1.3 times as long, "
        "several sequences at once twice as long, and bfloat16 ten times",
        "install g++, then jaxserve again: pip install --force-reinstall --no-deps",
    )


def _kernels(devices: Devices) -> Check:
    lacks = devices.lacks
    if lacks is None:
        return Check("kernels", OK, "those for Hopper")
    newer = "jax" in lacks  # it is a Hopper GPU
    advice = f"{_CUDA_JAX}, in an environment of Python 3.12 or later"
    if devices.lacks_triton is None:
        found = "those compiled by Triton, for any NVIDIA GPU since Ampere"
        if newer:
            return Check("kernels", WARNING, f"{found}, not those for Hopper: {lacks}", advice)
        return Check("kernels", OK, found)
    return Check(
        "kernels",
        WARNING,
        f"neither those for Hopper: {lacks}, nor those compiled by Triton: {devices.lacks_triton}. "
        "XLA's form of attention moves about four times the bytes of KV, over as many tokens in "
        "all rows as in the longest",
        advice if newer else "long contexts and batches want an NVIDIA GPU of Ampere or later",
    )


def _graphs(devices: Devices) -> Check:
    """Checks whether a step is one CUDA graph."""
    driver = devices.driver
    versions = f"driver {driver or 'unknown'}, runtime {devices.runtime or 'unknown'}"
    if driver is None or int(driver.partition(".")[0]) >= GRAPHS_DRIVER:
        return Check("CUDA graphs", OK, versions)
    return Check(
        "CUDA graphs",
        WARNING,
        f"{versions}: products and attention are no part of them, so that each layer of a step is "
        "launched by itself, some 20 launches of 1.5 us and more where the host is busy",
        f"a driver of version {GRAPHS_DRIVER} or later (CUDA 12.3)",
    )


def _model(patient: Patient) -> Iterator[Check]:
    from jaxserve.checkpoint.model_paths import model_file, resolve
    from jaxserve.engine.sizing import kept_weights, make_plan, max_length, split_model
    from jaxserve.weights import open_checkpoint
    from jaxserve.weights.checkpoint import check

    assert patient.engine is not None
    source = patient.engine.source.model
    revision = patient.engine.source.revision
    if not source.startswith("random:"):
        file = model_file(
            resolve(source, revision)
        )  # before it is opened, which would fetch a hub id
        yield from _hash(source, file)
    patient.checkpoint = checkpoint = open_checkpoint(source, revision)
    check(checkpoint, checkpoint.config)
    yield from _chosen(patient)
    model = split_model(patient.engine, checkpoint.config)
    yield Check(
        "model",
        OK,
        f"{model.name}: {checkpoint.config.parameters / 1e6:.0f} M weights in {model.layers} "
        "layers, all there; "
        f"contexts up to {forecast.shown(model.max_len)}",
    )
    yield _tokenizer(patient)
    kept = kept_weights(patient.engine, checkpoint, _room(patient))
    patient.plan, patient.max_len = (
        make_plan(patient.engine, model, _room(patient), kept),
        max_length(patient.engine, model),
    )


def _chosen(patient: Patient) -> Iterator[Check]:
    """Settings that were not given, as a start on these devices would choose them."""
    from jaxserve.engine.machine import fitted
    from jaxserve.engine.sizing import kv_tokens

    assert patient.engine is not None
    model, room = patient.checkpoint.config, _room(patient)
    count = patient.devices.count if patient.devices else 1
    patient.engine, choices = fitted(patient.engine, model, room, count, kv_tokens(model, room))
    for choice in choices:
        yield Check("chosen", OK, str(choice))


def _room(patient: Patient) -> Any:
    """Returns the memory of the devices that another process has found."""
    from jaxserve.engine.memory import DeviceRoom

    devices = patient.devices
    return (
        DeviceRoom("cpu", None) if devices is None else DeviceRoom(devices.platform, devices.memory)
    )


def _hash(source: str, file: Path) -> Iterator[Check]:
    """Checks the file of a model whose hash is known."""
    from jaxserve.checkpoint.fetch import FILES

    if source not in FILES or not file.is_file():
        return
    with open(file, "rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest == FILES[source].sha256:
        yield Check("model hash", OK, "as published")
        return
    text = f"{file} is not the file that was published"
    yield Check("model hash", FAULT, text, f"remove {file.parent}, then `jaxserve fetch {source}`")


def _tokenizer(patient: Patient) -> Check:
    from jaxserve.text import Tokenizer

    if patient.checkpoint.tokenizer is None:
        return Check(
            "tokenizer",
            WARNING,
            "there is none: prompts must be token ids",
            "put tokenizer.json beside the weights",
        )
    tokenizer = Tokenizer.load(patient.checkpoint.tokenizer)
    if tokenizer.vocab > patient.checkpoint.config.vocab:
        text = f"has {tokenizer.vocab} ids, the model knows {patient.checkpoint.config.vocab}"
        advice = "prompts with the others are refused: is it the tokenizer of this model?"
        return Check("tokenizer", WARNING, text, advice)
    if tokenizer.template is None:
        return Check(
            "tokenizer",
            WARNING,
            f"{tokenizer.vocab} ids; no chat template: chats are refused",
            "add chat_template.jinja",
        )
    ids = tokenizer.chat([{"role": "user", "content": "Hello"}])
    return Check(
        "tokenizer",
        OK,
        f"{tokenizer.vocab} ids; the chat template makes {len(ids)} of a short question",
    )


def _memory(patient: Patient) -> Iterator[Check]:
    from jaxserve.cache.page_needs import PageNeeds
    from jaxserve.engine.memory import sizes

    assert patient.engine is not None
    plan = patient.plan
    mesh = patient.engine.mesh
    needed = sizes(patient.plan)
    size = needed.total
    room = patient.devices.memory if patient.devices else None
    where = "each device"
    if room is None:  # devices of the CPU
        size *= mesh.devices
        room = checks.memory_available()
        where = f"RAM for all {mesh.devices} devices" if mesh.devices > 1 else "RAM"
    yield Check.of(
        "memory",
        checks.state_of(room, size / FULL, size),
        f"{forecast.gib(size)} of {forecast.gib(room)} in {where}; a device holds "
        f"{forecast.memory(needed)}",
        NO_ROOM,
    )
    needs = PageNeeds(plan.block_size, plan.windows)
    tokens = needs.longest(needs.usable(plan.pages, mesh.kvp))
    yield Check.of(
        "capacity",
        checks.state_of(tokens, patient.max_len, 0),
        f"{tokens} tokens of KV, {plan.slots} sequences at once, {patient.max_len} tokens in "
        "each at most",
        "longer requests are refused: more --kv_memory_gib or --pages",
    )


def _profile(patient: Patient) -> Iterator[Check]:
    """Predictions, from the profile that the server would use."""
    from jaxserve.engine.profiling import profile_file as profile

    assert patient.engine is not None
    named = patient.engine.profile
    plan = patient.plan
    if named == "none":
        yield Check("profile", WARNING, "none is asked for: nothing is predicted", "--profile=auto")
        return
    if patient.devices is None:
        return
    devices = patient.devices
    identity = profile.identity(plan, patient.max_len, devices.kind, devices.instruction_set)
    file = profile.kept_file(identity) if named == "auto" else Path(named)
    if named == "auto" and not file.exists():
        yield Check(
            "profile",
            WARNING,
            "nothing was measured here with these flags yet: nothing is predicted",
            "`jaxserve profile` with the same flags; else the first start measures",
        )
        return
    kept = profile.read(file, identity)
    patient.forecast = forecast.forecast(_scheduler(patient, kept.costs))
    if kept.doubt:
        yield Check(
            "profile",
            WARNING,
            f"predictions cannot be trusted: {kept.doubt} ({file})",
            "`jaxserve profile` with the same flags while nothing else runs; a server of one "
            "process and one lane measures again while no request runs",
        )
    else:
        yield Check("profile", OK, f"predicts by {file}")
    yield from _objective(patient)


def _objective(patient: Patient) -> Iterator[Check]:
    """The time per token that requests are to have, against that of one which decodes alone."""
    assert patient.engine is not None
    if patient.forecast is None:
        return
    alone = {length: time for (batch, length), time in patient.forecast.tpot.items() if batch == 1}
    if not alone:
        return
    shortest = min(alone)
    target = patient.engine.scheduler.tpot
    said = (
        f"{forecast.seconds(alone[shortest])} predicted for one request of "
        f"{forecast.shown(shortest)} tokens alone; the objective is {forecast.seconds(target)}"
    )
    state = WARNING if alone[shortest] > target else OK
    yield Check.of("time per token", state, said, "a longer --tpot, or a faster machine or mesh")


def _scheduler(patient: Patient, costs: Any) -> Any:
    from jaxserve.cache import CacheManager
    from jaxserve.scheduling import Scheduler

    config = patient.engine
    plan = patient.plan
    assert config is not None
    cache = CacheManager(
        dataclasses.replace(config.cache, pages=plan.pages), config.mesh.kvp, plan.slots
    )
    return Scheduler(config.scheduler, cache, config.mesh, patient.max_len, costs=costs)


def _text(patient: Patient, findings: list[Check]) -> str:
    width = max(len(check.name) for check in findings)
    lines = []
    for check in findings:
        lines.append(f"{check.state:8} {check.name:{width}}  {check.said}")
        if check.advice:
            lines.append(f"{'':8} {'':{width}}  -> {check.advice}")
    if patient.forecast is not None:
        headers = ["tokens", "TTFT", *(f"TPOT of {batch}" for batch in patient.forecast.batches)]
        lines += [
            "",
            "predicted, with nothing else running:",
            table(headers, patient.forecast.rows()),
        ]
    faults, warnings = (
        sum(check.state == state for check in findings) for state in (FAULT, WARNING)
    )
    summary = "all is well"
    if faults or warnings:
        summary = f"{faults} at fault, {warnings} to look at"
    return "\n".join([*lines, "", summary])


def _json(patient: Patient, findings: list[Check], healthy: bool) -> str:
    expected = patient.forecast
    predicted = None
    if expected is not None:
        predicted = {
            "ttft": [{"prompt": length, "seconds": time} for length, time in expected.ttft.items()],
            "tpot": [
                {"sequences": batch, "context": length, "seconds": time}
                for (batch, length), time in expected.tpot.items()
            ],
        }
    return json.dumps(
        {
            "ok": healthy,
            "checks": [dataclasses.asdict(check) for check in findings],
            "predicted": predicted,
        }
    )


COMMAND = Command({"doctor": DOCTOR, **serve.COMMAND.groups}, run, ABOUT, argument="[MODEL]")
