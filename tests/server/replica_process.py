"""A process that offers the tests' fake replica to conductors: `python -m
tests.server.replica_process PORT STEP_SECONDS [ROLE]`. It ends when its stdin does."""

import sys

from jaxserve.server.replica_auth import cluster_secret
from jaxserve.server.replica_service import ReplicaService
from tests.cluster.fakes import RoleReplica

if __name__ == "__main__":
    port, step_seconds, *role = sys.argv[1:]
    replica = RoleReplica(*role, step_seconds=float(step_seconds))
    replica.start()
    service = ReplicaService(cluster_secret())
    service.start(f"127.0.0.1:{port}")
    service.open(replica)
    sys.stdin.read()
