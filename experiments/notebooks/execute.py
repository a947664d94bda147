"""Executes a notebook with the Python of this process, which needs no kernel to be installed, and
reads its pictures.

The values of its cell that is tagged `parameters` can be replaced, as papermill does it: by a cell
after that one. A picture is named by its notebook and the id of the cell that draws it.
"""

from __future__ import annotations

import ast
import base64
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import nbformat
import zmq
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from traitlets import default

from jaxserve.settings.schema import ConfigError

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
DEVICES = 8  # that JAX shows on a CPU, where the environment does not say
CELL_SECONDS = 600
FAILURES = (CellExecutionError, CellTimeoutError, DeadKernelError)
PARAMETERS = "parameters"  # tag of the cell whose values may be replaced


class ThisPython(AsyncKernelManager):
    """Starts kernels with the Python of this process, whatever kernels are installed, and talks to
    them encrypted where the library can."""

    @default("kernel_spec_manager")
    def _no_installed_kernels(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])

    @default("transport_encryption")
    def _encrypted(self) -> str:
        return "auto" if zmq.has("curve") else "disabled"


def names() -> list[str]:
    """All notebooks, without their endings."""
    return sorted(file.stem for file in FOLDER.glob("*.ipynb"))


def read(name: str) -> NotebookNode:
    """Reads a notebook. Errors: ConfigError without one of that name."""
    if name not in names():
        raise ConfigError("only", f"{name!r} is not one of {', '.join(names())}")
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def with_values(notebook: NotebookNode, values: Mapping[str, Any]) -> NotebookNode:
    """Sets parameters of a notebook. Errors: ConfigError for what is none of them."""
    place, cell = next(
        (place, cell)
        for place, cell in enumerate(notebook.cells)
        if PARAMETERS in cell.metadata.get("tags", ())
    )
    known = {
        target.id
        for node in ast.parse(cell.source).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if unknown := set(values) - known:
        raise ConfigError(
            PARAMETERS, f"{', '.join(sorted(unknown))}: known are {', '.join(sorted(known))}"
        )
    if not values:
        return notebook
    lines = [f"{parameter} = {value!r}" for parameter, value in values.items()]
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell("\n".join(lines)))
    return notebook


def execute(notebook: NotebookNode) -> NotebookNode:
    """Executes a notebook in a process of its own, which has ended when this returns; returns it
    with its outputs. Errors: nbclient's, see FAILURES."""
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        kernel_manager_class=ThisPython,
        resources={"metadata": {"path": str(ROOT)}},
    )
    with tempfile.TemporaryDirectory() as profile:
        return client.execute(env=_environment() | {"IPYTHONDIR": profile})


def _environment() -> dict[str, str]:
    """Returns the environment of this process, with several devices on a CPU unless it sets
    them."""
    said = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    devices = {} if said else {"JAX_NUM_CPU_DEVICES": str(DEVICES)}
    return {"JAX_PLATFORMS": "cpu", **devices, **os.environ}


def pictures(name: str, executed: NotebookNode) -> Iterator[tuple[str, bytes]]:
    """The PNGs that a notebook's cells drew, with their names."""
    for cell in executed.cells:
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                yield f"{name}-{cell.id}.png", base64.b64decode(output.data["image/png"])
