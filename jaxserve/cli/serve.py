"""`jaxserve serve`: an engine behind gRPC and HTTP until SIGTERM or Ctrl-C."""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

from jaxserve.cli.doctor.forecast import launch_lines
from jaxserve.cli.engine_flags import SERVER, engine_config, engine_groups, server_config
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError, ServerConfig
from jaxserve.settings.schema.engine import SERVED

log = logging.getLogger(__name__)
ANY_HOST = ("", "0.0.0.0", "::")

ABOUT = """\
The server listens at once and takes requests when the model is loaded and compiled;
grpc.health.v1 and /ready tell when. It prints its addresses, each on a line: gRPC, HTTP (the
OpenAI protocol, /metrics, the live page at /), and the operators' port, if there is one. SIGTERM
and Ctrl-C let running requests finish.

  jaxserve serve --model=smollm2-135m --mesh=spp=2,tp=3 --dtype=bfloat16
"""


REGISTRY = Option(
    "registry",
    str,
    None,
    "registry in which conductors find this replica by its --replica_port, "
    "etcd://HOST:PORT[/PREFIX]; default: none",
)


def run(values: dict[str, Any]) -> int:
    from jaxserve.llm import open_engine
    from jaxserve.server import logs
    from jaxserve.server.supervisor import Server, check_host, serve

    engine = engine_config(values)
    server = server_config(values)
    logs.setup(server.log_format, server.log_level)
    check_host(server)
    registry = _registry(values["registry"], server)
    peers = _peers(server) if server.replica_port is not None else None
    registrations = []

    def listening(started: Server) -> None:
        for name in started.ports:
            print(started.address(name), flush=True)
        if registry is not None:
            registrations.append(_registration(registry, started))
        log.info("loading %s on %s", engine.source.model, engine.mesh)

    def build() -> tuple[Any, Any]:
        built, tokenizer = open_engine(engine, sys.stderr.isatty(), warm_up=True, peers=peers)
        for line in launch_lines(built):
            log.info(line)
        return built, tokenizer

    closed = serve(server, build, listening, peers)
    for registration in registrations:
        registration.close()
    if not closed:  # stopped while it was building: compiling cannot be interrupted
        os._exit(0)
    return 0


def _registry(text: str | None, config: ServerConfig) -> Any:
    """Returns the address of the registry; None without one. Errors: ConfigError."""
    from jaxserve.server.etcd import EtcdUrl

    if text is None:
        return None
    if config.replica_port is None:
        raise ConfigError("registry", "needs --replica_port, on which conductors reach a replica")
    return EtcdUrl.parse(text, "registry")


def _registration(registry: Any, started: Any) -> Any:
    """Puts the address by which others reach this replica into the registry."""
    from jaxserve.server.registry import Registration

    host, port = started.config.host, started.ports["replica"]
    if host in ANY_HOST:
        return Registration(registry, f"{socket.getfqdn()}:{port}")
    return Registration(registry, started.address("replica"))


def _peers(config: ServerConfig) -> Any:
    """Returns the client by which this replica fetches blocks of others, and sends its own. Errors:
    ConfigError."""
    import grpc

    from jaxserve.group.handshake import Certificate
    from jaxserve.server.peer_blocks import PeerReplicas
    from jaxserve.server.replica_auth import cluster_secret

    tls = credentials = None
    if config.tls_cert is not None and config.tls_key is not None:
        tls = Certificate.given(config.tls_cert, config.tls_key)
        credentials = grpc.ssl_channel_credentials(Path(config.tls_cert).read_bytes())
    anywhere = config.host in ANY_HOST
    return PeerReplicas(
        cluster_secret(),
        config.host,
        peer_host=socket.getfqdn() if anywhere else "",
        tls=tls,
        credentials=credentials,
    )


COMMAND = Command(
    {**SERVER, "cluster": [REGISTRY], **engine_groups(**SERVED)}, run, ABOUT, argument="[MODEL]"
)
