"""Describes the device and its software, checks every kernel against f64, and measures the device's
ceilings."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from experiments.benchmarks.gpu import cases
from experiments.benchmarks.gpu.timing import in_turns, launches, said
from experiments.benchmarks.gpu.worker import OPTIONAL, Case, Row, Run, is_there
from jaxserve.kernels.kv_pages import KVPages

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
# of queries and pages: a type of 16 bits, and whether pages are of 8
DTYPES = {"bf16": (BF16, False), "f16": (F16, False), "fp8": (BF16, True)}
# of out and lse: two roundings and some sums
TOLERANCE = {"bf16": 2.0**-6, "f16": 2.0**-9, "fp8": 2.0**-6}
OURS = ("mosaic", "two hops")
AGAIN = 3  # runs on the same inputs, which must agree in every bit


# --- what is here


def environment(run: Run) -> Iterator[Case]:
    yield "device", _device
    yield "software", _software
    yield (
        "modules",
        lambda: {
            "value": "absent: "
            + (", ".join(name for name in OPTIONAL if not is_there(name)) or "none")
        },
    )


def _device() -> list[Row]:
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    rows = [
        {"case": "device", "value": device.device_kind},
        {"case": "cores", "value": str(getattr(device, "core_count", "unknown"))},
        {"case": "memory for JAX", "value": f"{stats.get('bytes_limit', 0) / 2**30:.1f} GiB"},
    ]
    asked = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
    try:
        found = subprocess.run(
            ["nvidia-smi", f"--query-gpu={asked}", "--format=csv"],
            capture_output=True,
            text=True,
            timeout=20,
        )
        rows += [{"case": "nvidia-smi", "value": line} for line in found.stdout.splitlines()]
    except (OSError, subprocess.TimeoutExpired) as error:
        rows.append({"case": "nvidia-smi", "status": "absent", "why": said(error)})
    return rows


def _software() -> list[Row]:
    names = (
        "jax",
        "jaxlib",
        "jax-cuda13-plugin",
        "jax-cuda12-plugin",
        "nvidia-cudnn-cu13",
        "nvidia-cudnn-cu12",
        "torch",
        "flax",
        "numpy",
    )
    rows = []
    for name in names:
        try:
            rows.append({"case": name, "value": importlib.metadata.version(name)})
        except importlib.metadata.PackageNotFoundError:
            rows.append({"case": name, "status": "absent"})
    return [*rows, {"case": "XLA_FLAGS", "value": os.environ.get("XLA_FLAGS", "")}]


# --- correctness


@dataclass(frozen=True)
class Shape:
    """R rows of T query tokens, K kv heads, G query heads of each, H head dim, C tokens a page, W
    table entries; `vectors` of a token and kv head on a page, and numbers of a value (None: H)."""

    T: int
    G: int = 4
    H: int = 128
    C: int = 64
    W: int = 16
    dtype: str = "bf16"
    window: int | None = None
    first: int = 0  # block of the first position
    K: int = 2
    R: int = 4
    vectors: int = 2
    value_dim: int | None = None

    def __str__(self) -> str:
        rest = "".join(
            f" {name} {value}"
            for name, value in (
                ("window", self.window),
                ("from", self.first * self.C),
                ("value dim", self.value_dim),
            )
            if value
        )
        return (
            f"T {self.T} G {self.G} H {self.H} page {self.C} "
            f"context {self.W * self.C} {self.dtype}{rest}"
        )


FIXED = (
    Shape(1),
    Shape(512, W=24),
    Shape(64, W=32),
    Shape(1, G=1, H=64, C=16, W=60),
    Shape(1, G=16, H=256, C=32, dtype="f16"),
    Shape(5, G=7),
    Shape(1, G=8, C=16, W=200),
    Shape(1, C=256, W=8, dtype="f16"),
    Shape(1, C=128, window=100),
    Shape(32, C=16, W=120),
    Shape(64, G=1, H=64, C=16, W=80),
    Shape(128, G=8, dtype="f16"),
    Shape(256, C=128, W=12, dtype="f16"),
    Shape(256, H=256, C=256, W=6),
    Shape(256, G=16),
    Shape(200, G=2, C=32, W=40, window=300),
    Shape(200, G=3, H=64, C=32, W=40),
    Shape(512, G=8, W=24, window=256),
    Shape(32, W=2048, R=2),
    Shape(1, W=4096, R=3),
    Shape(128, first=156_000),
    Shape(1, first=156_000, window=500),
    Shape(1, dtype="fp8", W=64),
    Shape(512, dtype="fp8", W=24),
    Shape(40, G=3, H=64, C=16, W=80, dtype="fp8", window=300),
    Shape(1, G=8, H=256, C=16, W=100, dtype="fp8"),
)
TINY = (
    Shape(1, H=64, C=16, W=6, K=1, R=2),
    Shape(40, G=2, H=64, C=32, W=4, K=1, R=2, dtype="f16", window=50),
    Shape(1, H=64, C=16, W=6, K=1, R=2, dtype="fp8"),
)


def drawn(rng: np.random.Generator) -> Shape:
    """A shape like any other that may come."""
    pick = lambda *values: values[rng.integers(len(values))]
    C = pick(16, 32, 64, 128, 256)
    T = pick(1, 1, 2, 8, 32, 48, 64, 100, 128, 384)
    G = pick(1, 2, 3, 4, 5, 7, 8, 12, 16)
    H = pick(64, 128, 256)
    return Shape(
        T,
        G,
        H,
        C,
        -(-pick(512, 1024, 3000) // C),
        pick("bf16", "f16", "fp8"),
        pick(None, None, 33, 400),
        pick(0, 0, 5000),
        pick(1, 2, 3),
        pick(1, 3, 5),
    )


def make(shape: Shape, rng: np.random.Generator) -> cases.Case:
    """Rows of random lengths and contexts over most of their blocks. The last of several rows is
    empty; the first fills its table."""

    def span(row: int) -> tuple[int, int]:
        if row == 0:
            return shape.T, shape.W * shape.C
        length = 0
        if row < shape.R - 1:
            length = int(rng.integers(1, shape.T + 1))
        return length, int(rng.integers(length, shape.W * shape.C + 1))

    return cases.draw(shape, rng, span, lambda row: row == 0 or rng.random() < 0.9, shape.first)


def implementations(rehearse: bool) -> dict[str, Callable]:
    """All implementations of `ops`, and the Hopper kernel in two hops of a ring, each over half of
    the keys. rehearse: kernels for GPUs in their interpreters."""
    from jaxserve.kernels import ops, triton

    found = {name: functools.partial(ops.attend, implementation=name) for name in ops.ATTEND}
    if rehearse:
        small = triton.Tiles(rows=16, keys=64, warps=4, stages=2, blocks=3)
        found["triton"] = functools.partial(triton.attend, tiles=small, interpret=True)
    return {
        "mosaic": hopper(rehearse),
        "two hops": functools.partial(_hops, hopper(rehearse, whole=True)),
        **{name: attend for name, attend in found.items() if name != "mosaic"},
    }


def hopper(rehearse: bool, tiles: Any = None, whole: bool = False) -> Callable:
    """The Hopper kernel as `ops` calls it, with other tiles, or (rehearse) in the interpreter with
    small ones. whole: `mosaic.attend` itself, with all of its arguments."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jaxserve.kernels import mosaic, ops

    if rehearse:
        small = lambda pages: (
            tiles
            or mosaic.Tiles(
                keys=64, warpgroups=1, stages=2, blocks=2, narrow=0 if pages.scales is None else 2
            )
        )
        interpreted = functools.partial(mosaic.attend, interpret=plgpu.InterpretGPUParams())
        return lambda q, q_pos, pages, *rest, **settings: interpreted(
            q, q_pos, pages, *rest, tiles=small(pages), **settings
        )
    return (
        functools.partial(mosaic.attend, tiles=tiles)
        if tiles or whole
        else functools.partial(ops.attend, implementation="mosaic")
    )


def _hops(
    attend: Callable,
    q: jax.Array,
    q_pos: jax.Array,
    pages: KVPages,
    table: jax.Array,
    slot: jax.Array,
    entries: jax.Array,
    **settings: Any,
) -> tuple[jax.Array, jax.Array]:
    """Attends over the first half of each row's entries, then continues over the second."""
    half = entries // 2
    before = attend(q, q_pos, pages, table, slot, half, **settings)
    at = jnp.minimum(half[:, None] + jnp.arange(table.shape[2]), table.shape[2] - 1)
    rest = jnp.take_along_axis(table[:, slot], jnp.broadcast_to(at, (2, *at.shape)), 2)
    return attend(
        q,
        q_pos,
        pages,
        rest,
        jnp.arange(len(slot)),
        entries - half,
        before=before,
        **settings,
    )


def kernels(run: Run) -> Iterator[Case]:
    rng = np.random.default_rng(run.seed)
    for shape in TINY if run.rehearse else FIXED:
        yield str(shape), functools.partial(_checked, shape, rng, run)
    yield "merge", functools.partial(_merge, rng)
    for number in range(0 if run.rehearse else 1000):
        if run.left < 5:
            return
        shape = drawn(rng)
        yield f"drawn {number}: {shape}", functools.partial(_checked, shape, rng, run)


def _checked(shape: Shape, rng: np.random.Generator, run: Run) -> Row:
    inputs = make(shape, rng)
    scale = shape.H**-0.5
    real = inputs.q_pos >= 0  # what padding gets means nothing
    right = cases.truth(inputs.rounded(*DTYPES[shape.dtype]), scale, shape.window)
    right_out, right_lse = (x[real] for x in right)
    tolerance = TOLERANCE[shape.dtype]
    wrong = []
    row: Row = {"tolerance": tolerance}
    placed = jax.tree.map(jnp.asarray, inputs.arguments(*DTYPES[shape.dtype]))
    for name, attend in implementations(run.rehearse).items():
        if name == "reference" and shape.W * shape.C * shape.T > 2**19:  # dense in memory
            continue
        f = jax.jit(
            functools.partial(attend, scale=scale, window=shape.window, value_dim=shape.value_dim)
        )
        try:
            found = [
                [np.asarray(x)[real] for x in f(*placed)]
                for _ in range(1 if run.rehearse else AGAIN)
            ]
        except NotImplementedError as error:
            row[f"{name} out"] = "refused"
            row[f"{name} refusal"] = [said(error)]
            continue
        except Exception as error:
            row[f"{name} out"] = "failed"
            wrong.append(f"{name}: {said(error)}")
            continue
        row[f"{name} out"], row[f"{name} lse"] = errors(
            found[0][0], found[0][1], right_out, right_lse
        )
        if not (row[f"{name} out"] <= tolerance and row[f"{name} lse"] <= tolerance):
            wrong.append(f"{name}: beyond tolerance")
        same = all(
            np.array_equal(a, b, equal_nan=True)
            for other in found[1:]
            for a, b in zip(found[0], other)
        )
        if name in OURS and not same:
            wrong.append(f"{name}: differs from run to run")
    return {**row, "status": "wrong", "why": "; ".join(wrong)} if wrong else row


def errors(
    out: np.ndarray, lse: np.ndarray, right_out: np.ndarray, right_lse: np.ndarray
) -> tuple[float, float]:
    """Largest differences; NaN if there is any, or where one has -inf and the other has not."""
    if not np.array_equal(np.isneginf(lse), np.isneginf(right_lse)):
        return float(np.abs(out - right_out).max()), float("nan")
    some = ~np.isneginf(right_lse)
    return float(np.abs(out - right_out).max()), float(
        np.abs(lse[some] - right_lse[some]).max(initial=0.0)
    )


def _merge(rng: np.random.Generator) -> Row:
    from jaxserve.kernels.merge import merge

    outs = rng.standard_normal((5, 7, 4, 64))
    lses = rng.standard_normal((5, 7, 4)) * 20
    lses[rng.random(lses.shape) < 0.4] = -np.inf
    lses[:, 0] = -np.inf
    outs = outs.astype(np.float32)
    lses = lses.astype(np.float32)
    top = np.maximum(lses.max(0).astype(np.float64), -1e300)
    weights = np.exp(lses - top)
    total = weights.sum(0)
    safe = np.where(total > 0, total, 1)
    right_out = (outs * weights[..., None]).sum(0) / safe[..., None]
    right_lse = np.where(total > 0, top + np.log(safe), -np.inf)
    found_out, found_lse = map(np.asarray, merge(jnp.asarray(outs), jnp.asarray(lses)))
    out, lse = errors(found_out, found_lse, right_out, right_lse)
    ok = max(out, lse) < 2e-5
    return {"tolerance": 2e-5, "merge out": out, "merge lse": lse} | (
        {} if ok else {"status": "wrong", "why": "beyond tolerance"}
    )


# --- ceilings


def ceilings(run: Run) -> Iterator[Case]:
    sizes = (
        ((256, 256, 256),)
        if run.rehearse
        else ((8192, 8192, 8192), (2048, 4096, 28672), (16384, 16384, 16384))
    )
    for m, k, n in sizes:
        yield f"matrix product {m}x{k}x{n}", functools.partial(_product, m, k, n, run)
    yield "copy", functools.partial(_memory, run, True)
    yield "read", functools.partial(_memory, run, False)


def product(m: int, k: int, n: int) -> tuple[Callable, tuple[jax.Array, jax.Array]]:
    keys = jax.random.split(jax.random.key(0))
    return jax.jit(jnp.matmul), (
        jax.random.normal(keys[0], (m, k), jnp.bfloat16),
        jax.random.normal(keys[1], (k, n), jnp.bfloat16),
    )


def _product(m: int, k: int, n: int, run: Run) -> Row:
    f, arguments = product(m, k, n)
    timed = in_turns({"it": launches(f, arguments)}, run.pace)[0]["it"]
    return {
        "ms": timed.spread(1e3),
        "TF/s": 2 * m * k * n / timed.median / 1e12,
        "launches": [timed.launches],
    }


def _memory(run: Run, copy: bool) -> Row:
    """A copy moves its bytes twice, a sum once."""
    x = jax.random.bits(jax.random.key(1), (2**20 if run.rehearse else 2**29,), jnp.uint32)
    f = jax.jit(
        (lambda x: x + jnp.uint32(1))
        if copy
        else (lambda x: x.reshape(-1, 2**16).sum(1, dtype=jnp.uint32))
    )
    timed = in_turns({"it": launches(f, (x,))}, run.pace)[0]["it"]
    return {
        "ms": timed.spread(1e3),
        "GB/s": x.nbytes * (1 + copy) / timed.median / 1e9,
        "launches": [timed.launches],
    }
