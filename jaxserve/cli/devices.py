"""Finds the devices that JAX sees, in a process of its own, so that a driver that hangs or a
library that crashes can be reported."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from jaxserve.cli.answers import NoAnswer, answer_of
from jaxserve.group.own_code import own_command

DRIVER = Path("/proc/driver/nvidia/version")


@dataclasses.dataclass(frozen=True)
class Devices:
    """kind: as JAX names it. memory: bytes that JAX may take on each, None where it does not say,
    as for CPUs. lacks: why the kernels for such devices (CPUs, Hopper GPUs) cannot run, None where
    they can. instruction_set: of the kernels for CPUs. driver, runtime: of GPUs, as their makers
    number them, where they can be found. lacks_triton: why the kernels for NVIDIA GPUs since Ampere
    cannot run, None where they can."""

    platform: str
    kind: str
    count: int
    memory: int | None
    lacks: str | None
    instruction_set: str | None = None
    driver: str | None = None
    runtime: str | None = None
    lacks_triton: str | None = None


class NoDevices(Exception):
    """The devices could not be found; the message says why."""


def look(count: int, limit: float, share: float) -> Devices:
    """Finds the devices for a replica that needs `count` and takes a share of their memory, within
    `limit` seconds. Errors: NoDevices."""
    command = own_command("jaxserve.cli.devices", str(count), str(share))
    environment = {
        **os.environ,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    try:
        return Devices(**answer_of(command, limit, environment=environment))
    except TimeoutError:
        raise NoDevices(
            f"JAX did not answer for {limit:g} s: the driver, or another process on the devices, "
            "may hang"
        ) from None
    except NoAnswer as error:
        raise NoDevices(
            f"JAX cannot use the devices here (exit code {error.code}): {error}"
        ) from None


def driver_version(file: Path = DRIVER) -> str | None:
    """Reads the version of NVIDIA's driver, if it is loaded."""
    try:
        found = re.search(r"\b\d{3}\.\d+(\.\d+)*\b", file.read_text())
    except OSError:
        return None
    return found and found[0]


def main(count: int, share: float) -> None:
    """Prints the devices as JSON: what the process of `look` runs."""
    import jax

    from jaxserve.engine.memory import claim
    from jaxserve.kernels.cpu import library
    from jaxserve.kernels.ops import hopper_unsupported, triton_unavailable
    from jaxserve.sharding.mesh import ensure_devices

    claim(share, count)
    ensure_devices(count)
    devices = jax.devices()
    on_cpu = devices[0].platform == "cpu"
    stats: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # not every platform tells
        stats = devices[0].memory_stats() or {}
    print(
        json.dumps(
            dataclasses.asdict(
                Devices(
                    devices[0].platform,
                    devices[0].device_kind,
                    len(devices),
                    stats.get("bytes_limit"),
                    library.unsupported() if on_cpu else hopper_unsupported(),
                    library.instruction_set(),
                    driver_version(),
                    None if on_cpu else devices[0].client.platform_version,
                    triton_unavailable(),
                )
            )
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
