"""The port of a worker, one of a replica's several processes, for blocks of KV alone: other
replicas ask there for the parts that it has. Its leader's port has all else."""

from __future__ import annotations

import dataclasses
import threading

from jaxserve.server import replica_pb2_grpc as rpc
from jaxserve.server.auth.tls import Tls
from jaxserve.server.block_service import MAX_STREAMS, BlockService
from jaxserve.server.cluster_port import ClusterPort, check_replica_port
from jaxserve.server.own_address import ANY_HOST, OwnAddress, is_loopback
from jaxserve.server.peer_blocks import PeerReplicas
from jaxserve.settings.schema import ServerConfig
from jaxserve.store.peers import BlockExporter

FILES_SECONDS = 0.25  # between looks at the files of the certificate


class BlocksPort:
    """Implements `WorkerPort`. config: of the replica's server. peers: by which blocks are asked
    for and sent, at the address of this worker. host, port: on which it listens, port 0 for any
    that is free. Errors: ConfigError where it cannot listen, or others could read what is sent."""

    def __init__(self, config: ServerConfig, peers: PeerReplicas, host: str, port: int = 0):
        self.peers = peers
        self._blocks = BlockService(peers.planes)
        self._port = ClusterPort(peers.secret, MAX_STREAMS, config.max_message_mib << 20)
        rpc.add_BlocksServicer_to_server(self._blocks, self._port.server)
        self._closed = threading.Event()
        tls = Tls.from_config(dataclasses.replace(config, tls_client_ca=None))
        check_replica_port(dataclasses.replace(config, host=host))
        host = f"[{host}]" if ":" in host else host
        number = self._port.start(
            f"{host}:{port}", None if tls is None else tls.credentials(clients=False)
        )
        self.address = peers.own_address.at(number)
        if tls is not None:
            threading.Thread(
                target=self._keep_current, args=(tls,), name="certificate", daemon=True
            ).start()

    def open(self, exporter: BlockExporter) -> None:
        self._blocks.open(exporter)

    def close(self) -> None:
        self._closed.set()
        self._port.stop()

    def _keep_current(self, tls: Tls) -> None:
        """Reads the certificate again when its files change."""
        while not self._closed.wait(FILES_SECONDS):
            tls.refresh()


def worker_address(host: str, advertised: str | None, own_host: str) -> tuple[str, OwnAddress]:
    """Returns the host on which a worker listens, and that by which others reach it. host,
    advertised: the server's settings, which are the same for all hosts of a group. own_host: of
    this machine in its group. Errors: ConfigError."""
    if is_loopback(own_host):  # the group is on one machine, as its leader
        return host, OwnAddress(OwnAddress.of(advertised, host).host)
    if host in ANY_HOST:
        return host, OwnAddress.of(None, host)
    return own_host, OwnAddress(own_host)
