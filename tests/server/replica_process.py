"""A process that offers the tests' fake replica to conductors: `python -m
tests.server.replica_process PORT STEP_SECONDS`. It ends when its stdin does."""

import sys

from jaxserve.server.replica_auth import cluster_secret
from jaxserve.server.replica_service import ReplicaService
from tests.server.fakes import FakeReplica

if __name__ == "__main__":
    replica = FakeReplica(step_seconds=float(sys.argv[2]))
    replica.start()
    service = ReplicaService(cluster_secret())
    service.start(f"127.0.0.1:{sys.argv[1]}")
    service.open(replica)
    sys.stdin.read()
