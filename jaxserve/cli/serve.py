"""`jaxserve serve`: an engine behind gRPC and HTTP until SIGTERM or Ctrl-C."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

from jaxserve.cli.cluster_flags import ADVERTISE_ADDRESS, CLUSTER_CA, KV_PORT, REGISTRY, TRANSFER
from jaxserve.cli.doctor.forecast import launch_lines
from jaxserve.cli.engine_flags import SERVER, engine_config, engine_groups, server_config
from jaxserve.settings.flags import Command
from jaxserve.settings.schema import ConfigError, ServerConfig
from jaxserve.settings.schema.engine import SERVED
from jaxserve.transfer.plane import TCP

log = logging.getLogger(__name__)

ABOUT = """\
The server listens at once and takes requests when the model is loaded and compiled;
grpc.health.v1 and /ready tell when. It prints its addresses, each on a line: gRPC, HTTP (the
OpenAI protocol, /metrics, the live page at /), and the operators' port, if there is one. SIGTERM
and Ctrl-C let running requests finish.

  jaxserve serve --model=smollm2-135m --mesh=spp=2,tp=3 --dtype=bfloat16
"""


def run(values: dict[str, Any]) -> int:
    from jaxserve.llm import open_engine
    from jaxserve.server import logs
    from jaxserve.server.own_address import OwnAddress
    from jaxserve.server.registry import Registration
    from jaxserve.server.supervisor import Server, check_host, serve

    engine = engine_config(values)
    server = server_config(values)
    logs.setup(server.log_format, server.log_level)
    check_host(server)
    registry = _registry(values["registry"], server)
    _check_replica_flags(values, server)
    peers = own_address = None
    if server.replica_port is not None:
        own_address = OwnAddress.of(values["advertise_address"], server.host)
        peers = _peers(server, own_address, values)
    registrations = []

    def listening(started: Server) -> None:
        for name in started.ports:
            print(started.address(name), flush=True)
        if registry is not None and own_address is not None:
            registered = own_address.at(started.ports["replica"])
            registrations.append(Registration(registry, registered))
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


def _check_replica_flags(values: dict[str, Any], config: ServerConfig) -> None:
    """Refuses flags that have no effect. Errors: ConfigError."""
    if config.replica_port is None and values["advertise_address"] is not None:
        raise ConfigError("advertise_address", "needs --replica_port, which others reach by it")
    if config.replica_port is None and values["kv_port"]:
        raise ConfigError("kv_port", "needs --replica_port, by which others find it")
    if config.replica_port is None and values["transfer"] != TCP:
        raise ConfigError("transfer", "needs --replica_port, by which others find this replica")
    if values["transfer"] != TCP and not config.insecure:
        raise ConfigError(
            "transfer",
            f"{values['transfer']} needs --insecure: it listens on all interfaces, encrypts "
            "nothing and asks for no secret, so that no stranger may reach the network",
        )
    if config.tls_cert is None and values["cluster_ca"] is not None:
        raise ConfigError("cluster_ca", "needs --tls_cert: all replicas have TLS, or none")


def _faster(transfer: str) -> Any:
    """Returns what makes the plane of --transfer, of memory and a host; None for tcp."""
    from jaxserve.transfer.mooncake import MooncakePlane, own_protocol

    if transfer == TCP:
        return None
    return lambda memory, host: MooncakePlane(memory, host, own_protocol())


def _peers(config: ServerConfig, own_address: Any, values: dict[str, Any]) -> Any:
    """Returns the client by which this replica fetches blocks of others, and sends its own. Errors:
    ConfigError."""
    from jaxserve.group.handshake import Certificate
    from jaxserve.server.auth.tls import Authorities
    from jaxserve.server.peer_blocks import PeerReplicas
    from jaxserve.server.replica_auth import cluster_secret
    from jaxserve.transfer import TransferError

    kv_port, cluster_ca = values["kv_port"], values["cluster_ca"]
    tls = authorities = None
    if config.tls_cert is not None and config.tls_key is not None:
        tls = Certificate.given(config.tls_cert, config.tls_key)
        trusted = (
            ("tls_cert", config.tls_cert) if cluster_ca is None else ("cluster_ca", cluster_ca)
        )
        authorities = Authorities(trusted[0], Path(trusted[1]))
    secret = cluster_secret()
    try:
        return PeerReplicas(
            secret,
            config.host,
            kv_port,
            own_address=own_address,
            tls=tls,
            authorities=authorities,
            faster=_faster(values["transfer"]),
        )
    except TransferError as error:
        raise ConfigError("transfer", str(error)) from None
    except OSError as error:
        fault = f"cannot listen on {config.host}:{kv_port}: {error.strerror}"
        raise ConfigError("kv_port", fault) from None


CLUSTER = [REGISTRY, ADVERTISE_ADDRESS, KV_PORT, TRANSFER, CLUSTER_CA]
COMMAND = Command(
    {**SERVER, "cluster": CLUSTER, **engine_groups(**SERVED)}, run, ABOUT, argument="[MODEL]"
)
