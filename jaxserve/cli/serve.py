"""`jaxserve serve`: an engine behind gRPC and HTTP until SIGTERM or Ctrl-C."""

from __future__ import annotations

import functools
import logging
import os
import sys
from pathlib import Path
from typing import Any

from jaxserve.cli.cluster_flags import (
    ADVERTISE_ADDRESS,
    CLUSTER_CA,
    KV_PORT,
    REGISTRY,
    TRANSFER,
    check_transfer,
)
from jaxserve.cli.doctor.forecast import launch_lines
from jaxserve.cli.engine_flags import SERVER, engine_config, engine_groups, server_config
from jaxserve.group.member import Member, this_member
from jaxserve.settings.flags import Command, Values
from jaxserve.settings.schema import ConfigError, ServerConfig
from jaxserve.settings.schema.engine import SERVED
from jaxserve.settings.sources import FILE_ENDS
from jaxserve.transfer.plane import MOONCAKE, NIXL, TCP

log = logging.getLogger(__name__)

ABOUT = """\
The server listens at once and takes requests when the model is loaded and compiled;
grpc.health.v1 and /ready tell when. It prints its addresses, each on a line: gRPC, HTTP (the
OpenAI protocol, /metrics, the live page at /), and the operators' port, if there is one. SIGTERM
and Ctrl-C let running requests finish.

With several models there is a process for each, and one more that has the ports and passes each
request to its model. Flags are for all of them; a model may also be a settings file (.yaml) that
names it and has settings of its own. Each model has GPUs of its own, as many as its --mesh has;
where there are too few, models share them and their memory (--gpu_memory_utilization).

  jaxserve serve --model=smollm2-135m --mesh=spp=2,tp=3 --dtype=bfloat16

  jaxserve serve ./model-a ./model-b --served_model_name a b --port=8000
"""


def run(values: Values) -> int:
    if len(values["models"]) > 1:
        from jaxserve.cli import serve_models

        return serve_models.run(values, COMMAND)
    for argument in values["models"]:
        if argument.endswith(FILE_ENDS):
            raise ConfigError("model", f"{argument} is a settings file; give --config={argument}")
    from jaxserve.llm import open_engine
    from jaxserve.server import logs
    from jaxserve.server.own_address import OwnAddress
    from jaxserve.server.peer_blocks import PeerReplicas
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
        peers = _peers(values, server, own_address)
    registrations = []

    def listening(started: Server) -> None:
        for name in started.ports:
            print(started.address(name), flush=True)
        if registry is not None and own_address is not None:
            registered = own_address.at(started.ports["replica"])
            registrations.append(Registration(registry, registered))
        log.info("loading %s on %s", engine.source.model, engine.mesh)

    def build() -> tuple[Any, Any]:
        # the workers of a leader have their own
        asked = peers if isinstance(peers, PeerReplicas) else None
        built, tokenizer = open_engine(engine, sys.stderr.isatty(), warm_up=True, peers=asked)
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
    check_transfer(values["transfer"], config)
    if config.tls_cert is None and values["cluster_ca"] is not None:
        raise ConfigError("cluster_ca", "needs --tls_cert: all replicas have TLS, or none")


def _faster(transfer: str) -> Any:
    """Returns what makes the plane of --transfer, of memory and a host; None for tcp."""
    from jaxserve.transfer.mooncake import MooncakePlane, own_protocol
    from jaxserve.transfer.nixl import NixlPlane

    mooncake = functools.partial(MooncakePlane, protocol=own_protocol())
    return {MOONCAKE: mooncake, NIXL: NixlPlane}.get(transfer)


def worker_port(values: dict[str, Any], member: Member, own_host: str) -> Any:
    """Opens the port for other replicas' blocks of a worker of a group; None without
    --replica_port. own_host: of this machine in the group. Errors: ConfigError."""
    from jaxserve.server.worker_port import BlocksPort, worker_address

    server = server_config(values)
    if server.replica_port is None:
        return None
    host, own_address = worker_address(server.host, values["advertise_address"], own_host)
    ports = (0, 0)
    if values["kv_port"]:
        first = values["kv_port"] + 2 * member.local
        ports = (first, first + 1)
    peers = _peer_replicas(values, server, host, own_address, ports[0])
    return BlocksPort(server, peers, host, ports[1])


def _peers(values: dict[str, Any], server: ServerConfig, own_address: Any) -> Any:
    """Returns the client by which this replica fetches blocks of others, and sends its own; of a
    leader what stands for it. Errors: ConfigError."""
    from jaxserve.server.peer_blocks import LeaderSide
    from jaxserve.server.replica_auth import cluster_secret

    if this_member() is not None:
        return LeaderSide(cluster_secret(), own_address)
    return _peer_replicas(values, server, server.host, own_address, values["kv_port"])


def _peer_replicas(
    values: dict[str, Any], server: ServerConfig, host: str, own_address: Any, port: int
) -> Any:
    """Makes a `PeerReplicas` that listens on this host and port. Errors: ConfigError."""
    from jaxserve.group.handshake import Certificate
    from jaxserve.server.auth.tls import Authorities
    from jaxserve.server.peer_blocks import PeerReplicas
    from jaxserve.server.replica_auth import cluster_secret
    from jaxserve.transfer import TransferError

    tls = authorities = None
    if server.tls_cert is not None and server.tls_key is not None:
        tls = Certificate.given(server.tls_cert, server.tls_key)
        given = values["cluster_ca"]
        trusted = ("tls_cert", server.tls_cert) if given is None else ("cluster_ca", given)
        authorities = Authorities(trusted[0], Path(trusted[1]))
    secret = cluster_secret()
    try:
        return PeerReplicas(
            secret,
            host,
            port,
            own_address=own_address,
            tls=tls,
            authorities=authorities,
            faster=_faster(values["transfer"]),
        )
    except TransferError as error:
        raise ConfigError("transfer", str(error)) from None
    except OSError as error:
        fault = f"cannot listen on {host}:{port}: {error.strerror}"
        raise ConfigError("kv_port", fault) from None


CLUSTER = [REGISTRY, ADVERTISE_ADDRESS, KV_PORT, TRANSFER, CLUSTER_CA]
COMMAND = Command(
    {**SERVER, "cluster": CLUSTER, **engine_groups(**SERVED)},
    run,
    ABOUT,
    argument="[MODEL ...]",
    worker_port=worker_port,
)
