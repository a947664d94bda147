"""`jaxserve conductor`: users' gRPC and HTTP over the replicas of a cluster, without devices."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.cli.cluster_flags import CLUSTER_CA
from jaxserve.cli.engine_flags import CONFIG, SERVER, server_config
from jaxserve.cluster.dispatcher import MIGRATIONS
from jaxserve.cluster.routing import KV_BANDWIDTH, ROUTING
from jaxserve.settings.flags import Command, Values
from jaxserve.settings.options import Option, options_of
from jaxserve.settings.schema import ConfigError, ModelSource

log = logging.getLogger(__name__)

ROUTING_DEFAULT = "local_cache_aware"
SETTINGS = (
    "routing",
    "kv_bandwidth",
    "overload",
    "change_roles",
    "migrations",
)  # of `ConductorSettings`
ABOUT = """\
Requests go to the replicas that --replicas names, each a `jaxserve serve --replica_port=PORT` of
the same model. The conductor loads the model's tokenizer and no weights. It listens at once, and
takes requests while at least one replica can serve them; grpc.health.v1 and /ready tell when.
Replicas that are lost are tried again until they answer.

All processes of a cluster must have the same JAXSERVE_CLUSTER_SECRET. Sessions with replicas on
other hosts need TLS: give the replicas --tls_cert and --tls_key, and the conductor --cluster_ca.

  jaxserve conductor --replicas=10.0.0.1:8480,10.0.0.2:8480 --cluster_ca=ca.pem
"""
OPTIONS = [
    Option(
        "replicas",
        str,
        None,
        "replicas' addresses, HOST:PORT,HOST:PORT,..., or the registry where `jaxserve serve "
        "--registry` puts them, etcd://HOST:PORT[/PREFIX]",
    ),
    Option(
        "replicas_file",
        str,
        None,
        "file with replicas' addresses, a line each, read again when it changes; else --replicas",
    ),
    Option(
        "models",
        tuple,
        (),
        "one of several models, NAME=HOST:PORT,HOST:PORT,...: its requests go to these replicas, "
        "and its tokenizer is that of the model that they name; in place of --replicas and --model",
    ),
    CLUSTER_CA,
    Option(
        "routing",
        str,
        ROUTING_DEFAULT,
        "which replica computes a prompt: that with the earliest first token, by what it has "
        "cached (local_cache_aware), or by what it can fetch from others too (cache_aware); "
        "baselines: that with the fewest requests (load_balanced), any (random)",
        choices=tuple(ROUTING),
    ),
    Option(
        "kv_bandwidth",
        float,
        KV_BANDWIDTH,
        "GB/s at which KV goes from one replica to another, as routing expects until it was "
        "measured between the two",
        low=0.001,
    ),
    Option(
        "overload",
        str,
        "none",
        "who is refused on arrival: no request here, replicas refuse for themselves (none); who "
        "would have the first token too late, or tokens too slowly with the load of now (early) or "
        "with that when the prompt will have been computed (predicted)",
        choices=("none", "early", "predicted"),
    ),
    Option(
        "change_roles",
        bool,
        False,
        "has replicas that prefill decode, and the other way round, where one side is more loaded",
    ),
    Option(
        "migrations",
        int,
        MIGRATIONS,
        "times that a streamed request goes on at another replica when that with its tokens is "
        "lost; 0 ends it with an error. Requests whose callers have no token are always sent again",
        low=0,
    ),
    options_of(ModelSource)["model"],
    options_of(ModelSource)["revision"],
]


def run(values: Values) -> int:
    from jaxserve.cluster.conductor import ConductorSettings
    from jaxserve.server import logs
    from jaxserve.server.supervisor import Server, check_host, serve

    server = server_config(values)
    logs.setup(server.log_format, server.log_level)
    check_host(server)
    members = _all_members(values)
    settings = ConductorSettings(**{name: values[name] for name in SETTINGS})

    def listening(started: Server) -> None:
        for name in started.ports:
            print(started.address(name), flush=True)
        log.info("waiting for a replica that answers")

    def build(name: str) -> tuple[Any, Any]:
        conductor = members[name].conductor(settings)
        if not name:
            return conductor, _tokenizer(values["model"], values["revision"])
        served = conductor.info.served_name
        if served != name:
            raise ConfigError("models", f"the replicas of {name!r} serve {served!r}")
        source = conductor.info.settings["source"]
        return conductor, _tokenizer(source["model"], source["revision"])

    if not serve(server, {name: functools.partial(build, name) for name in members}, listening):
        os._exit(0)  # stopped while it waited for a first replica
    for some in members.values():
        some.close()
    return 0


def _all_members(values: Values) -> dict[str, Any]:
    """Returns the members of each model by its name, which is '' if it is the only one. Errors:
    ConfigError."""
    if not values["models"]:
        return {"": _members(values)}
    for name in ("replicas", "replicas_file", "model", "revision", "replica_port", "kv_events"):
        if name in values.origins:
            raise ConfigError(name, "cannot be given beside --models")
    texts: dict[str, str] = {}
    for text in values["models"]:
        name, _, replicas = text.rpartition("=")
        if not name:
            raise ConfigError("models", f"{text[:100]!r} is not NAME=HOST:PORT,...")
        if name in texts:
            raise ConfigError("models", f"{name[:100]!r} is given more than once")
        texts[name] = replicas
    if len(texts) < 2:
        raise ConfigError("models", "names one; give --replicas and --model instead")
    return {name: _members({**values, "replicas": text}) for name, text in texts.items()}


def _members(values: Mapping[str, Any]) -> Any:
    """Returns the members of the settings. Errors: ConfigError."""
    from jaxserve.server.auth.tls import Authorities
    from jaxserve.server.etcd import EtcdUrl
    from jaxserve.server.members import Members, addresses
    from jaxserve.server.registry import Registry
    from jaxserve.server.replica_auth import cluster_secret

    given, file = values["replicas"], values["replicas_file"]
    if (given is None) == (file is None):
        raise ConfigError("replicas", "give either --replicas or --replicas_file")
    registry = None
    if given is not None and given.startswith(("etcd://", "etcds://")):
        registry = Registry(EtcdUrl.parse(given, "replicas"))
        given = None
    targets = addresses(given or "", "replicas")
    if given is not None and not targets:
        raise ConfigError("replicas", "names no replica")
    authorities = None
    if values["cluster_ca"] is not None:
        authorities = Authorities("cluster_ca", Path(values["cluster_ca"]))
    return Members(targets, cluster_secret(), authorities, Path(file) if file else None, registry)


def _tokenizer(model: str, revision: str | None) -> Any:
    """The tokenizer of a model; None for a random one. Errors: ConfigError."""
    from jaxserve.checkpoint.fetch import local_files
    from jaxserve.text import Tokenizer

    if model.startswith("random:"):
        return None
    return Tokenizer.load(local_files(model, progress=False, revision=revision))


COMMAND = Command({"cluster": OPTIONS, **SERVER, **CONFIG}, run, ABOUT)
