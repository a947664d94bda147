"""`jaxserve serve`: an engine behind gRPC and HTTP until SIGTERM or Ctrl-C."""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

from jaxserve.cli.doctor.forecast import launch_lines
from jaxserve.cli.engine_flags import SERVED, SERVER, engine_config, engine_groups, server_config
from jaxserve.settings.flags import Command
from jaxserve.settings.schema import ServerConfig

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
    from jaxserve.server.supervisor import Server, check_host, serve

    engine = engine_config(values)
    server = server_config(values)
    logs.setup(server.log_format, server.log_level)
    if sys.stderr.isatty():  # a bar shows what is compiled
        logging.getLogger("jaxserve.engine.programs").setLevel(logging.WARNING)
    check_host(server)
    peers = _peers(server) if server.replica_port is not None else None

    def listening(started: Server) -> None:
        for name in started.ports:
            print(started.address(name), flush=True)
        log.info("loading %s on %s", engine.source.model, engine.mesh)

    def build() -> tuple[Any, Any]:
        built, tokenizer = open_engine(engine, sys.stderr.isatty(), warm_up=True, peers=peers)
        for line in launch_lines(built):
            log.info(line)
        return built, tokenizer

    # stopped while it was building: compiling cannot be interrupted
    if not serve(server, build, listening, peers):
        os._exit(0)
    return 0


def _peers(config: ServerConfig) -> Any:
    """By what this replica asks others for blocks, and sends its own. Errors: ConfigError."""
    import grpc

    from jaxserve.group.handshake import Certificate
    from jaxserve.server.peer_blocks import PeerReplicas
    from jaxserve.server.replica_auth import cluster_secret

    tls = credentials = None
    if config.tls_cert is not None and config.tls_key is not None:
        tls = Certificate.given(config.tls_cert, config.tls_key)
        credentials = grpc.ssl_channel_credentials(Path(config.tls_cert).read_bytes())
    anywhere = config.host in ("", "0.0.0.0", "::")
    return PeerReplicas(
        cluster_secret(),
        config.host,
        peer_host=socket.getfqdn() if anywhere else "",
        tls=tls,
        credentials=credentials,
    )


COMMAND = Command({**SERVER, **engine_groups(**SERVED)}, run, ABOUT)
