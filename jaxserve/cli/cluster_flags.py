"""Flags of replicas and conductors that make a cluster."""

from __future__ import annotations

from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError, ServerConfig
from jaxserve.transfer.plane import TCP, TRANSFERS

REGISTRY = Option(
    "registry",
    str,
    None,
    "registry in which conductors find this replica by its --replica_port, "
    "etcd://HOST:PORT[/PREFIX]; default: none",
)
ADVERTISE_ADDRESS = Option(
    "advertise_address",
    str,
    None,
    "HOST or HOST:PORT by which conductors and other replicas reach --replica_port, for the "
    "registry and for KV; several, apart by commas, for KV side by side, of which the first is the "
    "one for conductors; default: --host, or where that is 0.0.0.0 this machine's name or address",
)
KV_PORT = Option(
    "kv_port",
    int,
    0,
    "port of --host on which this replica receives KV of others; needs --replica_port; 0: any that "
    "is free. Under `jaxserve launch`: the first of two ports for each worker of a machine",
    low=0,
    high=65535,
)
TRANSFER = Option(
    "transfer",
    str,
    TCP,
    "how KV comes from other replicas and goes to them: over TCP, with the cluster's secret and "
    "the encryption of --tls_cert (tcp); between replicas that have it, by the Mooncake Transfer "
    "Engine (mooncake) or NIXL (nixl), over RDMA if the machine has it; these have neither, and "
    "need --insecure",
    choices=TRANSFERS,
)
CLUSTER_CA = Option(
    "cluster_ca",
    str,
    None,
    "PEM file of the authorities of the replicas' certificates, read again when it changes; "
    "default: of a conductor no TLS to replicas, of a replica its own certificate",
)


def check_transfer(transfer: str, config: ServerConfig) -> None:
    """Refuses what strangers could reach, unless --insecure is set. Errors: ConfigError."""
    if transfer != TCP and not config.insecure:
        raise ConfigError(
            "transfer",
            f"{transfer} needs --insecure: it listens on all interfaces, encrypts nothing and asks "
            "for no secret, so that no stranger may reach the network",
        )
