"""The GPUs of this machine, and which of them processes of different models are given."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.settings.schema import CacheConfig, ConfigError

CPU = "cpu"  # in JAX_PLATFORMS
DEVICES = "CUDA_VISIBLE_DEVICES"
MEMORY = "XLA_CLIENT_MEM_FRACTION"  # goes before gpu_memory_utilization
LEAST_MEMORY = 0.05  # of a GPU, for a model


class Wanted(NamedTuple):
    """The GPUs that a model's settings ask for. gpus: how many its mesh has; None: as many as there
    are. memory: its share of each; None: not given."""

    gpus: int | None
    memory: float | None


def visible_gpus() -> list[str]:
    """Returns the numbers or names of NVIDIA's GPUs that this process may use, without asking
    them."""
    if os.environ.get("JAX_PLATFORMS", "").split(",")[0] == CPU:
        return []
    shown = os.environ.get(DEVICES)
    if shown is not None:
        return [gpu.strip() for gpu in shown.split(",") if gpu.strip()]
    matches = (re.fullmatch(r"nvidia([0-9]+)", name) for name in os.listdir("/dev"))
    return [str(number) for number in sorted(int(match[1]) for match in matches if match)]


def shares(wanted: Sequence[Wanted], gpus: Sequence[str]) -> list[dict[str, str]]:
    """Returns the variables that give each model its GPUs; none where there are no GPUs.

    Where there are enough, each model has its own, and those that take as many as there are get
    equal parts of what the others leave. Where there are fewer, each model has one, which models
    may share, with equal parts of the memory that is left to those that ask for no share. Errors:
    ConfigError.
    """
    if not gpus:
        return [{} for _ in wanted]
    counts = _counts(wanted, len(gpus))
    if sum(counts) <= len(gpus):
        ends = [sum(counts[: number + 1]) for number in range(len(counts))]
        parts = (gpus[end - count : end] for end, count in zip(ends, counts))
        return [{DEVICES: ",".join(part)} for part in parts]
    if max(counts) > 1:
        summed = " + ".join(map(str, counts))
        raise ConfigError("mesh", f"the models need {summed} GPUs; there are {len(gpus)}")
    found: list[dict[str, str]] = [{} for _ in wanted]
    for place, gpu in enumerate(gpus):
        there = range(place, len(wanted), len(gpus))
        memory = _memory([wanted[number].memory for number in there])
        for number, share in zip(there, memory):
            found[number] = {DEVICES: gpu}
            if MEMORY not in os.environ:
                found[number][MEMORY] = f"{share:g}"
    return found


def _counts(wanted: Sequence[Wanted], gpus: int) -> list[int]:
    """Returns how many GPUs each model needs, at least."""
    given = [one.gpus for one in wanted if one.gpus is not None]
    others = len(wanted) - len(given)
    each = max(1, (gpus - sum(given)) // others) if others else 0
    return [each if one.gpus is None else one.gpus for one in wanted]


def _memory(given: Sequence[float | None]) -> list[float]:
    """Returns the share of one GPU's memory that each of its models takes. Errors: ConfigError."""
    if len(given) == 1:
        return [CacheConfig.gpu_memory_utilization if given[0] is None else given[0]]
    stated = [share for share in given if share is not None]
    others = len(given) - len(stated)
    left = 1 - sum(stated)
    each = left * CacheConfig.gpu_memory_utilization / max(others, 1)
    if left < 0 or (others and each < LEAST_MEMORY):
        summed = " + ".join(f"{share:g}" for share in stated)
        fault = f"{summed} of a GPU that {len(given)} models share leaves too little for all"
        raise ConfigError("gpu_memory_utilization", fault)
    return [each if share is None else share for share in given]
