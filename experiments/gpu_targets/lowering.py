"""Lowers programs in a process without GPUs as one with them would: the stages of a replica as
shapes, on devices that are not there, and the kernels that a GPU would choose."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from experiments.gpu_targets.sheets import Target
from jaxserve.engine import stages as stages_module
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.stages import Stages
from jaxserve.group.layout import layout
from jaxserve.kernels import ops
from jaxserve.kernels.cpu import library
from jaxserve.kernels.kv_pages import KVPages
from jaxserve.kernels.qkv import Projected
from jaxserve.sharding.mesh import KVP, TP


@contextlib.contextmanager
def as_on_a_gpu(
    attend: Callable | None = None,
    grouped: Callable | None = None,
    write_qkv: Callable | None = None,
) -> Iterator[None]:
    """Has programs that are traced on a CPU use none of the kernels for CPUs. attend, grouped,
    write_qkv: attention over pages, products of groups, and the write before attention; None:
    XLA's."""
    attends = attend or ops.ATTEND["xla"]
    groups = grouped or ops.GROUPED["xla"]
    writes = write_qkv or ops.WRITE_QKV["xla"]
    with (
        mock.patch.dict(ops.ATTEND, xla=attends, cpu=attends),
        mock.patch.dict(ops.GROUPED, xla=groups, cpu=groups),
        mock.patch.dict(ops.WRITE_QKV, xla=writes),
        mock.patch.object(library, "unsupported", lambda: "it is compiled for a GPU"),
    ):
        yield


def as_on_hopper(plan: StagePlan) -> contextlib.AbstractContextManager[None]:
    """Has programs use the kernels for Hopper where these support the pages of the plan."""
    pool = plan.pool().kv
    try:
        from jaxserve.kernels import mosaic

        mosaic.check(jax.ShapeDtypeStruct(pool.shape[1:], pool.dtype))
    except (ImportError, AttributeError, NotImplementedError):
        return as_on_a_gpu()
    plain = ops.WRITE_QKV["xla"]

    def write_qkv(qkv: Projected, pages: KVPages, *places: jax.Array) -> tuple[jax.Array, KVPages]:
        try:
            return mosaic.write_qkv(qkv, pages, *places)
        except NotImplementedError:
            return plain(qkv, pages, *places)

    return as_on_a_gpu(mosaic.attend, mosaic.grouped, write_qkv)


def as_on(gpu: Target, plan: StagePlan) -> contextlib.AbstractContextManager[None]:
    """Has programs use the kernels that this GPU would choose for the pages of the plan."""
    if gpu.is_hopper:
        return as_on_hopper(plan)
    pool = plan.pool().kv
    try:
        from jaxserve.kernels import triton

        triton.check(jax.ShapeDtypeStruct(pool.shape[1:], pool.dtype))
    except (ImportError, NotImplementedError):
        return as_on_a_gpu()

    def attend(q: jax.Array, q_pos: jax.Array, pages: KVPages, *rest: Any, **options: Any) -> Any:
        cores = int(gpu.number("core_count"))
        tiles = triton.tiles_for(gpu.capability, cores, q.shape, pages.kv.dtype)
        return triton.attend(q, q_pos, pages, *rest, tiles=tiles, **options)

    return as_on_a_gpu(attend)


def abstract_stages(plan: StagePlan, devices: Sequence[Any], hosts: int) -> Stages:
    """The stages of a plan on these devices, numbered host by host, of which nothing is loaded."""
    grid = np.array(devices)[layout(plan.mesh, hosts)]
    axes = (AxisType.Auto, AxisType.Auto)
    meshes = [Mesh(part, (KVP, TP), axis_types=axes) for part in grid]
    here = property(lambda mesh: list(mesh.devices.flat))  # all devices are this process's
    owner = {device: at // (plan.mesh.devices // hosts) for at, device in enumerate(devices)}
    spans_hosts = property(lambda mesh: len({owner[each] for each in mesh.devices.flat}) > 1)
    with (
        mock.patch.object(stages_module, "stage_meshes", lambda config: meshes),
        mock.patch.object(Mesh, "local_devices", here),
        mock.patch.object(Mesh, "is_multi_process", spans_hosts),
    ):
        return Stages(plan)
