"""What tests of conductors share."""

import pytest

from tests.cluster.fakes import RoleCluster, RoleReplica


@pytest.fixture
def cluster():
    """Makes started clusters that are closed at the end."""
    made = []

    def start(*fakes: RoleReplica, **settings) -> RoleCluster:
        made.append(RoleCluster(*fakes, **settings))
        made[-1].conductor.start()
        return made[-1]

    yield start
    for one in made:
        one.conductor.close()
