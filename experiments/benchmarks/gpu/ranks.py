"""The engine with its weights split over all GPUs of this machine (tensor parallelism)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from experiments.benchmarks.gpu.replica import Replica, Size
from experiments.benchmarks.gpu.steps import K, chunk, measured, named
from experiments.benchmarks.gpu.timing import in_turns, launches
from experiments.benchmarks.gpu.worker import Case, Row, Run
from experiments.benchmarks.gpu_programs import Step
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.sharding.mesh import TP


def ranks(run: Run) -> Iterator[Case]:
    """Steps on as many ranks as there are GPUs and the model's heads divide into."""
    size = Size(16 * K, 2 * K, 64)
    model = MODELS[Replica(run, size).model]
    count = math.gcd(2 ** int(math.log2(jax.device_count())), model.kv_heads)
    if count == 1:
        yield "ranks", lambda: {"status": "absent", "why": f"{jax.device_count()} device"}
        return
    replica = Replica(run, dataclasses.replace(size, tp=count))
    steps = [Step(1, K), Step(64, K), chunk(2 * K, 0)]
    tokens = (64, 2 * K)
    if run.rehearse:
        steps = [Step(1, 32), Step(4, 32), chunk(64, 0)]
        tokens = (4, 64)
    yield "build", replica.built
    yield "compile", functools.partial(replica.compiled, steps)
    for step in steps:
        yield f"{named(step)}, {count} ranks", functools.partial(measured, replica, step)
    for rows in tokens:
        name = f"all-reduce {rows} x {model.d_model}, {count} ranks"
        yield name, functools.partial(_all_reduce, run, count, rows, model.d_model)


def _all_reduce(run: Run, count: int, rows: int, width: int) -> Row:
    """The sum over ranks that follows attention and MLP in each layer. GB/s: bytes that each rank
    sends, in a ring."""
    mesh = Mesh(jax.devices()[:count], (TP,))
    place = jax.NamedSharding(mesh, PartitionSpec(TP))
    x = jax.device_put(jnp.ones((count, rows, width), jnp.bfloat16), place)
    f = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, TP),
            mesh=mesh,
            in_specs=PartitionSpec(TP),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
    timed, faults = in_turns({"it": launches(f, (x,))}, run.pace)
    if faults:
        raise RuntimeError(faults["it"])
    sent = 2 * (count - 1) / count * rows * width * x.dtype.itemsize
    return {"us": timed["it"].spread(1e6), "GB/s": sent / timed["it"].median / 1e9}
