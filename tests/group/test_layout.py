"""Which process has which devices of the mesh."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from jaxserve.group.layout import described, devices_each, layout
from jaxserve.settings.schema import ConfigError, MeshConfig
from tests.examples import examples

meshes = st.builds(MeshConfig, st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
few = [HealthCheck.filter_too_much]  # numbers of processes that a mesh can be dealt out to
anything = settings(max_examples=examples(500), deadline=None, suppress_health_check=few)


def fits(mesh, processes, ranks_across):
    try:
        devices_each(mesh, processes, ranks_across)
    except ConfigError:
        return False
    return True


@anything
@given(meshes, st.integers(1, 40), st.booleans())
def test_every_device_has_one_place_and_every_process_a_part_that_fits(mesh, processes, across):
    assume(fits(mesh, processes, across))
    each = devices_each(mesh, processes, across)
    places = layout(mesh, processes)
    assert places.shape == (mesh.spp, mesh.kvp, mesh.tp)
    assert sorted(places.ravel().tolist()) == list(range(each * processes))
    owner = places // each
    assert owner[-1, 0, 0] == 0, "the last stage begins on worker 0"
    if not across:
        assert (owner == owner[:, :, :1]).all(), "the ranks of a lane are in one process"
    for process in range(processes):
        stages, lanes, ranks = (set(axis.tolist()) for axis in np.nonzero(owner == process))
        assert len(stages) * len(lanes) * len(ranks) == each, "no part has a ragged edge"
        assert len(stages) == 1 or (len(lanes) == mesh.kvp and len(ranks) == mesh.tp)
        assert len(lanes) == 1 or len(ranks) == mesh.tp
        for numbers in (stages, lanes, ranks):
            assert sorted(numbers) == list(range(min(numbers), max(numbers) + 1))


@anything
@given(meshes, st.integers(1, 300), st.booleans())
def test_what_is_refused_names_the_counts_that_would_do(mesh, processes, across):
    assume(not fits(mesh, processes, across))
    with pytest.raises(ConfigError) as error:
        devices_each(mesh, processes, across)
    assert error.value.field == "mesh"
    text = str(error.value)
    assert f"{mesh} cannot be dealt out to {processes} processes" in text
    would_do = [int(count) for count in text.rpartition("it can to ")[2].split(", ")]
    assert would_do == [n for n in range(1, mesh.devices + 1) if fits(mesh, n, across)]


@pytest.mark.parametrize(
    "mesh, processes, across, reason",
    [
        ("spp=2,kvp=2,tp=3", 5, False, "12 devices are not a multiple of them"),
        ("tp=2", 3, True, "2 devices are not a multiple of them"),
        ("kvp=2,tp=4", 4, False, "each would have 2 devices, so the 4 ranks of a lane"),
        ("kvp=2,tp=4", 4, False, "--ranks_across_hosts permits that"),
        ("spp=2,kvp=3", 3, False, "each would have 2 devices, neither whole stages of 3 nor a"),
        ("kvp=3,tp=2", 2, True, "each would have 3 devices, neither whole lanes of 2 nor a share"),
    ],
)
def test_the_reason_is_told(mesh, processes, across, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        devices_each(MeshConfig.parse(mesh), processes, across)


def test_ranks_cross_processes_only_where_that_is_asked_for():
    mesh = MeshConfig(1, 2, 4)
    assert devices_each(mesh, 4, ranks_across=True) == 2
    assert (
        described(mesh, 4)[1] == "worker 1: 2 devices, stages 0 of 1, lanes 0 of 2, ranks 2-3 of 4"
    )


@anything
@given(meshes)
def test_one_process_keeps_the_order_of_the_mesh(mesh):
    assert layout(mesh, 1).ravel().tolist() == list(range(mesh.devices))


def test_each_process_is_described_by_what_it_has():
    assert described(MeshConfig.parse("spp=2,kvp=2,tp=3"), 4) == [
        "worker 0: 3 devices, stages 1 of 2, lanes 0 of 2, ranks 0-2 of 3",
        "worker 1: 3 devices, stages 1 of 2, lanes 1 of 2, ranks 0-2 of 3",
        "worker 2: 3 devices, stages 0 of 2, lanes 0 of 2, ranks 0-2 of 3",
        "worker 3: 3 devices, stages 0 of 2, lanes 1 of 2, ranks 0-2 of 3",
    ]
    assert described(MeshConfig.parse("spp=4,kvp=2"), 2) == [
        "worker 0: 4 devices, stages 2-3 of 4, lanes 0-1 of 2, ranks 0 of 1",
        "worker 1: 4 devices, stages 0-1 of 4, lanes 0-1 of 2, ranks 0 of 1",
    ]


@anything
@given(meshes, st.integers(1, 40), st.booleans())
def test_the_description_is_the_layout(mesh, processes, across):
    assume(fits(mesh, processes, across))
    owner = np.full((mesh.spp, mesh.kvp, mesh.tp), -1)
    for line in described(mesh, processes):
        match = re.fullmatch(
            r"worker (\d+): \d+ devices, stages (\S+) of \d+, lanes (\S+) of \d+, "
            r"ranks (\S+) of \d+",
            line,
        )
        assert match is not None
        spans = []
        for span in match.groups()[1:]:
            first, _, last = span.partition("-")
            spans.append(range(int(first), int(last or first) + 1))
        for place in itertools.product(*spans):
            assert owner[place] == -1, "two processes claim a device"
            owner[place] = int(match[1])
    assert (owner == layout(mesh, processes) // devices_each(mesh, processes, across)).all()
