"""Flags of replicas and conductors that make a cluster."""

from __future__ import annotations

from jaxserve.settings.options import Option

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
    "registry and for KV; default: --host, or where that is 0.0.0.0 this machine's name or address",
)
KV_PORT = Option(
    "kv_port",
    int,
    0,
    "port of --host on which this replica receives KV of others; needs --replica_port; 0: any that "
    "is free",
    low=0,
    high=65535,
)
CLUSTER_CA = Option(
    "cluster_ca",
    str,
    None,
    "PEM file of the authorities of the replicas' certificates, read again when it changes; "
    "default: of a conductor no TLS to replicas, of a replica its own certificate",
)
