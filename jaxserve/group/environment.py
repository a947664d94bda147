"""The place of this process in its job, by the variables of Slurm, mpirun or Kubernetes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxserve.settings.schema import ConfigError

PORT = 7713  # where the leader listens for workers of other hosts
NUMBER = re.compile(r"[0-9]+")
# of a list of hosts: what stands before brackets, the brackets, what stands behind
HOSTS = re.compile(r"(?:[^,\[\]]|\[[^\[\]]+\])+")


@dataclass(frozen=True)
class Place:
    """One of `count` calls of `jaxserve launch` that make a group. leader: host of number 0.
    local: its number among those on this machine. job: a name that all of them know, '' if
    there is none. source: where this is from."""

    index: int
    count: int
    leader: str
    local: int = 0
    job: str = ""
    source: str = ""


def place_of(environment: Mapping[str, str]) -> Place | None:
    """The place that the environment tells; None where this call is alone. Errors: ConfigError."""
    # mpirun before Slurm, by which it starts its own daemons; MPICH's after, whose variables srun
    # sets too
    for read in (_leader_worker_set, _open_mpi, _slurm, _mpich):
        place = read(environment)
        if place is None or place.count < 2:
            continue
        if place.index >= place.count:
            raise ConfigError(
                "group",
                f"{place.source} tells number {place.index} of {place.count}; they begin with 0",
            )
        return place
    return None


def _leader_worker_set(environment: Mapping[str, str]) -> Place | None:
    """A pod of a Kubernetes LeaderWorkerSet."""
    if "LWS_LEADER_ADDRESS" not in environment:
        return None
    return Place(
        _number(environment, "LWS_WORKER_INDEX"),
        _number(environment, "LWS_GROUP_SIZE"),
        environment["LWS_LEADER_ADDRESS"],
        source="LeaderWorkerSet",
    )


def _slurm(environment: Mapping[str, str]) -> Place | None:
    """A task of srun, one on each node."""
    if "SLURM_PROCID" not in environment or "SLURM_STEP_NODELIST" not in environment:
        return None
    hosts = expand(environment["SLURM_STEP_NODELIST"])
    job = f"slurm-{environment.get('SLURM_JOB_ID', '')}.{environment.get('SLURM_STEP_ID', '')}"
    return Place(
        _number(environment, "SLURM_PROCID"),
        _number(environment, "SLURM_NTASKS"),
        hosts[0],
        _number(environment, "SLURM_LOCALID"),
        job,
        "Slurm",
    )


def _open_mpi(environment: Mapping[str, str]) -> Place | None:
    """A rank of Open MPI's mpirun. Version 4 tells the address of its launcher, which is that of
    rank 0 as long as mpirun is called on the first host; version 5 does not."""
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    count = _number(environment, "OMPI_COMM_WORLD_SIZE")
    is_local = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE") == count
    address = re.search(r"tcp[46]?://([0-9.]+)", environment.get("OMPI_MCA_orte_hnp_uri", ""))
    leader = address[1] if address else ""
    if is_local:
        leader = "127.0.0.1"
    elif leader.startswith("127."):  # of another host
        leader = ""
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid")
    return Place(
        _number(environment, "OMPI_COMM_WORLD_RANK"),
        count,
        leader,
        _number(environment, "OMPI_COMM_WORLD_LOCAL_RANK"),
        f"mpi-{job}" if job else "",
        "Open MPI",
    )


def _mpich(environment: Mapping[str, str]) -> Place | None:
    """A rank of MPICH's or Intel's mpirun, on one machine: they do not tell where rank 0 is."""
    if "PMI_RANK" not in environment:
        return None
    count = _number(environment, "PMI_SIZE")
    is_local = environment.get("MPI_LOCALNRANKS", "") == str(count)
    return Place(
        _number(environment, "PMI_RANK"),
        count,
        "127.0.0.1" if is_local else "",
        _number({"MPI_LOCALRANKID": "0", **environment}, "MPI_LOCALRANKID"),
        source="MPICH",
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not NUMBER.fullmatch(text):
        raise ConfigError("group", f"{name} is {text!r}, not a number")
    return int(text)


def expand(hosts: str) -> list[str]:
    """Slurm's lists of hosts: 'a[01-03,7],b' -> a01, a02, a03, a7, b. Errors: ConfigError."""
    names = []
    text = hosts + ","
    while text:
        match = HOSTS.match(text)
        if match is None or text[match.end()] != ",":
            raise ConfigError("group", f"{hosts!r} is not a list of hosts")
        pieces = re.split(r"\[(.*?)\]", match[0])  # every second one stood in brackets
        choices = [
            list(_range(piece)) if number % 2 else [piece] for number, piece in enumerate(pieces)
        ]
        names += ["".join(chosen) for chosen in itertools.product(*choices)]
        text = text[match.end() + 1 :]
    return names


def _range(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        numbers = NUMBER.fullmatch(first) and NUMBER.fullmatch(last)
        if not numbers or int(first) > int(last):
            raise ConfigError("group", f"{text!r} is not a range of hosts")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))
