"""Places of `jaxserve launch` among its like, by the variables of those that start it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.group.environment import Place, expand, place_of
from jaxserve.settings.schema import ConfigError
from tests.examples import examples

SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "0",
}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "3223322624.0;tcp://10.0.0.5,192.168.7.5:41463",
    "OMPI_MCA_ess_base_jobid": "3223322625",
}
OPEN_MPI_5 = {
    **{name: text for name, text in OPEN_MPI_4.items() if "MCA" not in name},
    # the server of this host, whichever that is
    "PMIX_SERVER_URI41": "prterun-node5-4711@0.0;tcp4://127.0.0.1:38277",
    "PMIX_NAMESPACE": "prterun-node5-4711@1",
}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
}
PODS = {
    "LWS_LEADER_ADDRESS": "vllm-0.vllm.default",
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
}


@pytest.mark.parametrize(
    "environment, place",
    [
        (SLURM, Place(3, 4, "gpu07", 1, "slurm-123.0", "Slurm")),
        (OPEN_MPI_4, Place(1, 2, "10.0.0.5", 0, "mpi-3223322625", "Open MPI")),
        (PODS, Place(1, 2, "vllm-0.vllm.default", source="LeaderWorkerSet")),
        (MPICH, Place(1, 2, "127.0.0.1", 1, source="MPICH")),
        (
            {**OPEN_MPI_5, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            Place(1, 2, "127.0.0.1", 1, "mpi-prterun-node5-4711@1", "Open MPI"),
        ),
        # mpirun in a Slurm job: its ranks count, not the tasks of its daemons
        ({**SLURM, **OPEN_MPI_4}, Place(1, 2, "10.0.0.5", 0, "mpi-3223322625", "Open MPI")),
        # srun, which speaks MPI's PMI too
        ({**SLURM, "PMI_RANK": "3"}, Place(3, 4, "gpu07", 1, "slurm-123.0", "Slurm")),
        ({"PATH": "/bin", "SLURM_JOB_ID": "1", "SLURM_NODELIST": "a[1-2]"}, None),  # no task
        ({}, None),
    ],
)
def test_who_starts_a_group_is_recognised(environment, place):
    assert place_of(environment) == place


@pytest.mark.parametrize(
    "environment",
    [
        {**OPEN_MPI_5},  # on another host that address would be its own
        {**OPEN_MPI_4, "OMPI_MCA_orte_hnp_uri": "1.0;tcp://127.0.0.1:5"},
        {**OPEN_MPI_4, "OMPI_MCA_orte_hnp_uri": ""},
        {**MPICH, "MPI_LOCALNRANKS": "1"},
        {**MPICH, "MPI_LOCALNRANKS": ""},
    ],
)
def test_where_the_first_host_is_not_told_it_is_not_guessed(environment):
    place = place_of(environment)
    assert place is not None and (place.index, place.count, place.leader) == (1, 2, "")


@pytest.mark.parametrize(
    "environment",
    [
        {**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {**OPEN_MPI_4, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {**MPICH, "PMI_RANK": "0", "PMI_SIZE": "1"},
        {**PODS, "LWS_WORKER_INDEX": "0", "LWS_GROUP_SIZE": "1"},
    ],
)
def test_one_alone_is_no_group(environment):
    assert place_of(environment) is None


def test_a_pod_of_one_may_be_a_task_of_many():
    alone = {**PODS, "LWS_WORKER_INDEX": "0", "LWS_GROUP_SIZE": "1"}
    assert place_of({**alone, **SLURM}) == place_of(SLURM)


def test_jobs_that_are_not_named_have_no_common_name():
    """A common name would make the secret of one job that of all others."""
    nameless = {name: text for name, text in OPEN_MPI_4.items() if "jobid" not in name}
    place = place_of(nameless)
    assert place is not None and place.job == ""


@pytest.mark.parametrize(
    "environment, name",
    [(SLURM, name) for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")]
    + [(PODS, "LWS_WORKER_INDEX"), (PODS, "LWS_GROUP_SIZE")]
    + [(OPEN_MPI_4, name) for name in OPEN_MPI_4 if "WORLD" in name]
    + [(MPICH, name) for name in ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")],
)
@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "²"])
def test_a_variable_that_is_no_number_is_named(environment, name, text):
    with pytest.raises(ConfigError, match=f"group: {name} is '{text}', not a number"):
        place_of({**environment, name: text})


@pytest.mark.parametrize("environment, name", [(SLURM, "SLURM_PROCID"), (PODS, "LWS_WORKER_INDEX")])
def test_a_number_beyond_the_group_is_refused(environment, name):
    with pytest.raises(ConfigError, match="number 9 of"):
        place_of({**environment, name: "9"})


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("node", ["node"]),
        ("a,b,c", ["a", "b", "c"]),
        ("a[1-3]", ["a1", "a2", "a3"]),
        ("a[01-03,7],b", ["a01", "a02", "a03", "a7", "b"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("gpu[8-11]", ["gpu8", "gpu9", "gpu10", "gpu11"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("a[5].cluster.org", ["a5.cluster.org"]),
        ("x[7-7]-ib", ["x7-ib"]),
    ],
)
def test_slurms_lists_of_hosts(text, hosts):
    assert expand(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,", "a[", "a[1", "a]", "a[1]]", "a[[1]]", "a[]", "a[x]", "a[1-]", "a[-2]"]
    + ["a[1-x]", "a[3-1]", "a[1,]", "a[1-2-3]", "a[3-1],b", "a[²-3]"],
)
def test_what_is_no_list_of_hosts_is_refused(text):
    with pytest.raises(ConfigError, match="hosts"):
        expand(text)


names = st.from_regex(r"[a-z][a-z0-9-]{0,6}", fullmatch=True)


@settings(max_examples=examples(200), deadline=None)
@given(names, st.integers(0, 120), st.integers(0, 30), st.integers(1, 4), names)
def test_a_range_is_the_hosts_between_its_ends(prefix, first, more, width, other):
    text = f"{prefix}[{first:0{width}}-{first + more:0{width}}],{other}"
    expected = [f"{prefix}{number:0{width}}" for number in range(first, first + more + 1)]
    assert expand(text) == [*expected, other]


@settings(max_examples=examples(500), deadline=None)
@given(st.text(alphabet="ab0129,-[]", max_size=14))
def test_any_text_is_hosts_or_a_config_error(text):
    try:
        found = expand(text)
    except ConfigError:
        return
    assert found and all(found) and not any(set("[],") & set(host) for host in found)
