"""`jaxserve conductor`: users' gRPC and HTTP over the replicas of a cluster, without devices."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from jaxserve.cli.engine_flags import CONFIG, SERVER, server_config
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option, options_of
from jaxserve.settings.schema import ConfigError, ModelSource

log = logging.getLogger(__name__)

LEAST_LOADED = "least_loaded"
ABOUT = """\
Requests go to the replicas that --replicas names, each a `jaxserve serve --replica_port=PORT` of
the same model. The conductor loads the model's tokenizer and no weights. It listens at once, and
takes requests while at least one replica can serve them; grpc.health.v1 and /ready tell when.
Replicas that are lost are tried again until they answer.

All processes of a cluster must have the same JAXSERVE_CLUSTER_SECRET. Sessions with replicas on
other hosts need TLS: give the replicas --tls_cert and --tls_key, and the conductor --replicas_ca.

  jaxserve conductor --replicas=10.0.0.1:8480,10.0.0.2:8480 --replicas_ca=ca.pem
"""
OPTIONS = [
    Option("replicas", str, None, "replicas' addresses, HOST:PORT,HOST:PORT,..."),
    Option(
        "replicas_file",
        str,
        None,
        "file with replicas' addresses, a line each, read again when it changes; else --replicas",
    ),
    Option(
        "replicas_ca",
        str,
        None,
        "PEM file of the authorities of the replicas' certificates; default: no TLS to replicas",
    ),
    Option(
        "routing",
        str,
        LEAST_LOADED,
        "which replica gets a request: least_loaded: that with the least to do; the others: as in "
        "Mooncake's comparison, of the replicas that answer at the start",
        choices=(LEAST_LOADED, "local_cache_aware", "load_balanced", "random"),
    ),
    options_of(ModelSource)["model"],
]


def run(values: dict[str, Any]) -> int:
    from jaxserve.server import logs
    from jaxserve.server.supervisor import Server, check_host, serve

    server = server_config(values)
    logs.setup(server.log_format, server.log_level)
    check_host(server)
    members = _members(values)
    routing = values["routing"]
    if routing != LEAST_LOADED and values["replicas_file"] is not None:
        raise ConfigError("routing", f"{routing} needs --replicas, which stay the same")

    def listening(started: Server) -> None:
        for name in started.ports:
            print(started.address(name), flush=True)
        log.info("waiting for a replica that answers")

    def build() -> tuple[Any, Any]:
        return _replica(members, routing), _tokenizer(values["model"])

    if not serve(server, build, listening):
        os._exit(0)  # stopped while it waited for a first replica
    members.close()
    return 0


def _replica(members: Any, routing: str) -> Any:
    """What the server serves with, once replicas answer."""
    from jaxserve.cluster.conductor import Conductor
    from jaxserve.cluster.member import Member
    from jaxserve.server.balancer import Balancer

    if routing == LEAST_LOADED:
        return Balancer(members)
    named = [Member(member.target, member) for member in members.wait_for_all()]
    return Conductor(named, routing=routing)


def _members(values: dict[str, Any]) -> Any:
    """Errors: ConfigError."""
    import grpc

    from jaxserve.server.members import Members, addresses
    from jaxserve.server.replica_auth import cluster_secret

    given, file = values["replicas"], values["replicas_file"]
    if (given is None) == (file is None):
        raise ConfigError("replicas", "give either --replicas or --replicas_file")
    targets = addresses(given or "", "replicas")
    if given is not None and not targets:
        raise ConfigError("replicas", "names no replica")
    credentials = None
    if values["replicas_ca"] is not None:
        try:
            authorities = Path(values["replicas_ca"]).read_bytes()
        except OSError as error:
            raise ConfigError("replicas_ca", f"{values['replicas_ca']}: {error.strerror}") from None
        credentials = grpc.ssl_channel_credentials(authorities)
    return Members(targets, cluster_secret(), credentials, Path(file) if file else None)


def _tokenizer(model: str) -> Any:
    """The tokenizer of a model; None for a random one. Errors: ConfigError."""
    from jaxserve.checkpoint.fetch import local_files
    from jaxserve.text import Tokenizer

    if model.startswith("random:"):
        return None
    return Tokenizer.load(local_files(model, progress=False))


COMMAND = Command({"cluster": OPTIONS, **SERVER, **CONFIG}, run, ABOUT)
