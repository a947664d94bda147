"""`jaxserve serve MODEL MODEL ...`: a replica of each model in a process of its own, and one more
that has the ports, as processes of this machine."""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.checkpoint.fetch import check_there, local_files
from jaxserve.cli.cluster import (
    KEYS,
    OF_REPLICA,
    OF_SERVER,
    SECRET_VARIABLE,
    fixed_ports,
    in_own_folder,
    own_key,
    replica_ports,
    setting_flags,
    users_keys,
)
from jaxserve.cli.conductor import COMMAND as CONDUCTOR
from jaxserve.cli.engine_flags import ALL, engine_config, server_config
from jaxserve.cli.gpus import Wanted, shares, visible_gpus
from jaxserve.group.cluster import ProcessSet, Task
from jaxserve.group.member import this_member
from jaxserve.group.own_code import own_command
from jaxserve.settings.flags import Command, Values, parse
from jaxserve.settings.schema import ConfigError, EngineConfig, ModelSource
from jaxserve.settings.sources import FILE_ENDS, OTHER_VARIABLES, PREFIX

MAX_MODELS = 64
RANDOM = "random:"  # begins the name of a model without files
# what only a replica has that is a process and a model by itself
ALONE = {"registry", "advertise_address", "kv_port", "transfer", "cluster_ca"}
ALONE |= {"replica_port", "role", "kv_lease"}
ALONE |= {name for name in OF_SERVER if name.startswith("kv_events")}
# what is of one model, and may stand in its settings file
OF_ONE_MODEL = {"revision", "lora_modules"}


@dataclasses.dataclass(frozen=True)
class OneModel:
    """A model that is to be served. argument: as it was given. values: its settings, whose origins
    are those of this command line, the environment and its own file."""

    argument: str
    values: Values
    config: EngineConfig

    @property
    def wanted(self) -> Wanted:
        """The GPUs that it asks for."""
        given = self.values.origins
        return Wanted(
            self.config.mesh.devices if "mesh" in given else None,
            self.config.cache.gpu_memory_utilization if "gpu_memory_utilization" in given else None,
        )

    @property
    def names(self) -> tuple[str, ...]:
        return self.config.source.served_model_name or (self.config.source.model,)


def run(values: Values, command: Command) -> int:
    """Serves the models of `values["models"]` until a signal. command: `jaxserve serve`. Errors:
    ConfigError."""
    if this_member() is not None:
        raise ConfigError("model", "`jaxserve launch` serves one model, which runs on all hosts")
    from jaxserve.server.supervisor import check_host

    server = server_config(values)
    check_host(server)
    return ProcessSet(tasks(values, command), environment(), server.drain_timeout, _say).run()


def tasks(values: Values, command: Command) -> list[Task]:
    """Returns the processes: the replicas, and what has the ports. Arguments and errors as of
    `run`."""
    models = read_models(values, command)
    sources = [model.config.source for model in models]
    for act in (_check_there, _fetch):  # nothing is downloaded where one cannot be had
        for source in sources:
            if not source.model.startswith(RANDOM):
                act(source)
    variables = shares([model.wanted for model in models], visible_gpus())
    front = fixed_ports(values)
    ports = replica_ports(len(models), front)
    parts = zip(models, ports, variables)
    replicas = [_replica(command, number, *part) for number, part in enumerate(parts)]
    return [*replicas, _front(front, values.origins, models, ports)]


def _check_there(source: ModelSource) -> None:
    """Refuses a model that cannot be found. Errors: ConfigError."""
    check_there(source.model, source.revision)


def _fetch(source: ModelSource) -> None:
    """Downloads a model that is not here, before any process starts. Errors: ConfigError."""
    local_files(source.model, sys.stderr.isatty(), source.revision)


def _say(text: str) -> None:
    print(f"serve: {text}", file=sys.stderr, flush=True)


def environment() -> dict[str, str]:
    """This process's variables without those of settings, by whatever name, which processes get as
    flags."""
    others = OTHER_VARIABLES - {"JAXSERVE_CONFIG"}
    variables = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(PREFIX) or name in others
    }
    variables.setdefault(SECRET_VARIABLE, secrets.token_hex(32))
    return variables


# --- settings of each model


def read_models(values: Values, command: Command) -> list[OneModel]:
    """Reads the settings of each model. Arguments and errors as of `run`."""
    arguments = values["models"]
    if len(arguments) > MAX_MODELS:
        raise ConfigError("model", f"{len(arguments)} are given; the limit is {MAX_MODELS}")
    for name in sorted(values.origins.keys() & (ALONE | OF_ONE_MODEL)):
        where = "in its settings file" if name in OF_ONE_MODEL else "where one model is served"
        raise ConfigError(name, f"cannot be of several models; give it {where}")
    files = [argument for argument in arguments if argument.endswith(FILE_ENDS)]
    if files and values["config"] is not None:
        raise ConfigError("config", f"give either it or settings files of models, as {files[0]} is")
    names: Sequence[str | None] = [None] * len(arguments)
    if "served_model_name" in values.origins:
        names = values["served_model_name"]
    if len(names) != len(arguments):
        fault = f"{len(names)} for {len(arguments)} models; give one for each, in their order"
        raise ConfigError("served_model_name", fault)
    models = [_model(*one, values, command) for one in zip(arguments, names)]
    _check_names(models)
    return models


def _model(argument: str, name: str | None, values: Values, command: Command) -> OneModel:
    """Reads the settings of a model: those of all, and of its own file. Errors: ConfigError."""
    is_file = argument.endswith(FILE_ENDS)
    common = (values.origins.keys() & (ALL.keys() | OF_REPLICA)) - {"model", "served_model_name"}
    flags = setting_flags(command, values, common)
    if name is not None:
        flags.append(f"--served_model_name={name}")
    flags.append(f"--config={argument}" if is_file else f"--model={argument}")
    own = parse(command, flags, environment={})  # what that gives is among the flags
    if is_file:
        mine = {name for name, origin in own.origins.items() if origin.startswith(argument)}
        for name in sorted(mine & (ALONE | OF_SERVER)):
            raise ConfigError(name, f"{argument}: a model of several has no such setting")
        if "model" not in mine:
            raise ConfigError("model", f"{argument} names none")
    return OneModel(argument, own, engine_config(own))


def _check_names(models: Sequence[OneModel]) -> None:
    """Refuses names that stand for two models, or for an adapter too. Errors: ConfigError."""
    taken: dict[str, str] = {}
    for model in models:
        for name in (*model.names, *(name for name, _ in model.config.adapters.named)):
            if name in taken:
                said = f"{name!r} would be a name of {taken[name]} and of {model.argument}"
                raise ConfigError("served_model_name", f"{said}; give one for each")
            taken[name] = model.argument


# --- processes


def _replica(
    command: Command, number: int, model: OneModel, port: int, variables: Mapping[str, str]
) -> Task:
    values = in_own_folder(number, model.values)
    given = model.values.origins.keys() & (ALL.keys() | OF_REPLICA)
    flags = setting_flags(command, values, given)
    fixed = ["--grpc_port=0", "--port=0", f"--replica_port={port}"]
    process = own_command("jaxserve", "serve", *fixed, *flags)
    variables = {**variables, **own_key()}
    return Task(f"the replica of {model.names[0]!r}", process, 1, variables, independent=True)


def _front(
    values: Mapping[str, Any],
    origins: Mapping[str, str],
    models: Sequence[OneModel],
    ports: Sequence[int],
) -> Task:
    """The process that has the ports. origins: of the values that were given."""
    given = (origins.keys() | {"port", "grpc_port"}) & (OF_SERVER | OF_REPLICA)
    flags = setting_flags(CONDUCTOR, values, given - {KEYS})
    for model, port in zip(models, ports):
        flags.append(f"--models={model.names[0]}=127.0.0.1:{port}")
    process = own_command("jaxserve", "conductor", *flags)
    return Task("the server", process, 0, users_keys(values))
