"""Attention over pages, and products with weights: chooses an implementation by platform, dtype and
shape. Those of attention and of products of groups are logged once per shape, with the reasons
against the others."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.kernels import quantised, reference, xla
from jaxserve.kernels.cpu import attention as cpu_attention
from jaxserve.kernels.cpu import library
from jaxserve.kernels.cpu import linear as cpu_linear
from jaxserve.kernels.cpu import quantised as cpu_quantised
from jaxserve.kernels.cpu import write as cpu_write
from jaxserve.kernels.kv_pages import KVPages, quantize
from jaxserve.kernels.merge import merge
from jaxserve.kernels.qkv import Projected
from jaxserve.kernels.quantised import Quantised

log = logging.getLogger(__name__)
HOPPER = "9.0"  # compute capability of H100, H200 and GH200
AMPERE = 8  # major number of the first compute capability that the Triton kernels compile for
MOSAIC_JAX = (0, 11, 2)  # first version of jax with what the Mosaic GPU kernels use


def attend(
    q: jax.Array,
    q_pos: jax.Array,
    pages: KVPages,
    table: jax.Array,
    slot: jax.Array,
    entries: jax.Array,
    *,
    scale: float,
    softcap: float = 0,
    window: int | None = None,
    value_dim: int | None = None,
    dtype: Any = jnp.float32,
    before: tuple[jax.Array, jax.Array] | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention over pages. Arguments and results are those of `reference.attend`, and:

    dtype: of `out`. before: (out, lse) of the same queries over other keys, to merge with, as in a
    hop of ring attention. implementation: a name in `ATTEND`; None chooses one. Errors:
    NotImplementedError, with the reason, if the named implementation does not support the shape.
    """
    name = implementation or choose(
        jax.default_backend(),
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct(pages.kv.shape, pages.kv.dtype),
        value_dim,
    )
    return ATTEND[name](
        q,
        q_pos,
        pages,
        table,
        slot,
        entries,
        scale=scale,
        softcap=softcap,
        window=window,
        value_dim=value_dim,
        dtype=dtype,
        before=before,
    )


@functools.lru_cache
def choose(
    platform: str, q: jax.ShapeDtypeStruct, kv: jax.ShapeDtypeStruct, value_dim: int | None = None
) -> str:
    """Name of the fastest implementation that supports these queries, pages and value dim."""
    what = f"attention over pages on {platform}, rows of {q.shape[1]} tokens"
    return _chosen(what, unsupported(q, kv, value_dim))


def unsupported(
    q: jax.ShapeDtypeStruct, kv: jax.ShapeDtypeStruct, value_dim: int | None = None
) -> dict[str, str | None]:
    """Returns why implementations of attention cannot have these queries, pages and value dim, None
    where they can, the fastest first. Those that are left out can have any."""
    return {
        "mosaic": _mosaic_unsupported("check", kv, value_dim),
        "triton": _triton_unsupported(kv, value_dim),
        "cpu": cpu_attention.unsupported(q, kv, value_dim),
    }


def _chosen(what: str, unsupported: Mapping[str, str | None]) -> str:
    """Chooses the first implementation without a reason against it, else "xla", and logs it with
    the reasons against the others."""
    name = next((name for name, reason in unsupported.items() if reason is None), "xla")
    reasons = [f"not {other}: {reason}" for other, reason in unsupported.items() if reason]
    log.info("%s", "; ".join([f"{what}: {name}", *reasons]))
    return name


def linear(x: jax.Array, w: jax.Array | Quantised, positions: jax.Array | None = None) -> jax.Array:
    """Multiplies x [T, K] by w [K, N], in the dtype of x, which is that of w unless w is quantised.
    positions [T] int32: rows with a negative one are padding, whose results mean nothing; None: no
    row is."""
    if isinstance(w, Quantised):
        if cpu_quantised.unsupported(x) is None:
            return cpu_quantised.linear(x, w, positions)
        return x @ quantised.dequantise(w.flat(), x.dtype)
    return x @ w if cpu_linear.unsupported(x, w) else cpu_linear.linear(x, w, positions)


def quantised_unavailable(platform: str) -> str | None:
    """Returns why a platform has no product with quantised weights that is worth its while; None if
    it has. The one of XLA makes floats of the weights in each step."""
    if platform != "cpu":
        return f"there is no product with quantised weights on {platform}"
    return library.unavailable()


def rows(w: jax.Array | Quantised, ids: jax.Array) -> jax.Array:
    """Looks up embeddings ids [T] in a table w [V, D]; of a quantised w, the V are outputs. Returns
    [T, D], in f32 if w is quantised."""
    if isinstance(w, Quantised):
        return quantised.rows(w, ids)
    return w[ids]


def grouped(x: jax.Array, w: jax.Array | Quantised, counts: jax.Array) -> jax.Array:
    """Multiplies rows of x [T, K], sorted by group, by the matrix of their group: the first
    counts[0] by w[0], the next counts[1] by w[1], and so on; w [E, K, N], counts [E] int32 -> [T,
    N], in the dtype of x, which is that of w unless w is quantised. Rows past the last group come
    out zero. Sums are f32."""
    if isinstance(w, Quantised):
        if cpu_quantised.unsupported(x) is None:
            return cpu_quantised.grouped(x, w, counts)
        w = quantised.dequantise(w.flat(experts=True), x.dtype)
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (x, w)]
    return GROUPED[choose_grouped(jax.default_backend(), *shapes)](x, w, counts)


@functools.lru_cache
def choose_grouped(platform: str, x: jax.ShapeDtypeStruct, w: jax.ShapeDtypeStruct) -> str:
    """Name of the fastest implementation of products of groups of these rows and matrices."""
    what = f"products of {x.shape[0]} rows in {w.shape[0]} groups on {platform}"
    name = _chosen(
        what,
        {"mosaic": _mosaic_unsupported("check_grouped", x, w), "cpu": cpu_linear.unsupported(x, w)},
    )
    if name == "xla":
        log.warning("%s: XLA computes all rows with all matrices, which is slow", what)
    return name


def _dense_grouped(x: jax.Array, w: jax.Array, counts: jax.Array) -> jax.Array:
    out = jax.lax.ragged_dot(x, w, counts, preferred_element_type=jnp.float32)
    return out.astype(x.dtype)


def _mosaic_grouped(x: jax.Array, w: jax.Array, counts: jax.Array) -> jax.Array:
    from jaxserve.kernels import mosaic  # cannot be imported with versions of jax before MOSAIC_JAX

    return mosaic.grouped(x, w, counts)


def write(pool: jax.Array, page: jax.Array, offset: jax.Array, values: jax.Array) -> jax.Array:
    """Writes values [T, K, 2, ...] to pool [1, P, K, 2, C, ...], in place if it is donated: to
    tokens offset [T] of pages page [T] int32, of which those of page P are skipped.

    For XLA a lone token is padded with one that is skipped: a scatter of one token would become a
    dynamic-update-slice, which XLA's CPU compiler fuses with its readers, copying the pool.
    """
    if cpu_write.unsupported(pool) is None:
        return cpu_write.write(pool, page, offset, values.astype(pool.dtype))
    if len(page) == 1:
        page = jnp.append(page, pool.shape[1])
        offset = jnp.append(offset, 0)
        values = jnp.concatenate([values, values])
    return pool.at[0, page, :, :, offset].set(values, mode="drop")


def write_kv(pages: KVPages, page: jax.Array, offset: jax.Array, kv: jax.Array) -> KVPages:
    """Writes kv [T, K, 2, H] to the pages, as `write` does; quantises it if they are FP8."""
    stored = KVPages(kv) if pages.scales is None else quantize(kv)
    return jax.tree.map(lambda pool, x: write(pool, page, offset, x), pages, stored)


def write_qkv(
    qkv: Projected,
    pages: KVPages,
    page: jax.Array,
    offset: jax.Array,
    implementation: str | None = None,
) -> tuple[jax.Array, KVPages]:
    """Prepares queries, keys and values, and writes keys and values to pages [1, P, K, 2, C, H] as
    `write` does. implementation: as of `attend`; all but "mosaic" are one here. Returns queries [T,
    K, G, H], and the pages."""
    name = "xla"
    if implementation in (None, "mosaic"):
        heads = jax.ShapeDtypeStruct(qkv.heads.shape, qkv.heads.dtype)
        kv = jax.ShapeDtypeStruct(pages.kv.shape, pages.kv.dtype)
        name = choose_write_qkv(jax.default_backend(), heads, qkv.half, kv)
    return WRITE_QKV[name](qkv, pages, page, offset)


@functools.lru_cache
def choose_write_qkv(
    platform: str, heads: jax.ShapeDtypeStruct, half: int, kv: jax.ShapeDtypeStruct
) -> str:
    """Name of the fastest implementation of `write_qkv` with these heads and pages. half: see
    `Projected`."""
    what = f"norms, RoPE and the write of {heads.shape[0]} tokens on {platform}"
    return _chosen(what, {"mosaic": _mosaic_unsupported("check_write_qkv", heads, half, kv)})


def _plain_write_qkv(
    qkv: Projected, pages: KVPages, page: jax.Array, offset: jax.Array
) -> tuple[jax.Array, KVPages]:
    q, kv = qkv.prepared()
    return q, write_kv(pages, page, offset, kv)


def _mosaic_write_qkv(
    qkv: Projected, pages: KVPages, page: jax.Array, offset: jax.Array
) -> tuple[jax.Array, KVPages]:
    from jaxserve.kernels import mosaic  # cannot be imported with versions of jax before MOSAIC_JAX

    return mosaic.write_qkv(qkv, pages, page, offset, blocks=jax.devices()[0].core_count)


def hopper_unsupported() -> str | None:
    """Returns why kernels for Hopper cannot run in this process; None if they can."""
    if (
        jax.default_backend() not in ("gpu", "cuda")
        or getattr(jax.devices()[0], "compute_capability", "") != HOPPER
    ):
        return "it needs a Hopper GPU"
    if jax.__version_info__ < MOSAIC_JAX:
        return f"it needs jax {'.'.join(map(str, MOSAIC_JAX))}, and this is {jax.__version__}"
    return None


def _mosaic_unsupported(check: str, *arguments: jax.ShapeDtypeStruct | int | None) -> str | None:
    """Returns why a Hopper kernel cannot be used; None if it can. check, arguments: the name of its
    check, and what it checks."""
    if reason := hopper_unsupported():
        return reason
    from jaxserve.kernels import mosaic

    try:
        getattr(mosaic, check)(*arguments)
    except NotImplementedError as error:
        return str(error)
    return None


def triton_unavailable() -> str | None:
    """Returns why the Triton kernels cannot run in this process; None if they can."""
    major, _, minor = getattr(jax.devices()[0], "compute_capability", "").partition(".")
    is_nvidia = jax.default_backend() in ("gpu", "cuda") and (major + minor).isdecimal()
    if not is_nvidia or int(major) < AMPERE:
        return "it needs an NVIDIA GPU of Ampere or later"
    try:
        from jaxserve.kernels import triton  # noqa: F401
    except ImportError as error:
        return f"jax {jax.__version__} has no compiler for Triton: {error}"
    return None


def _triton_unsupported(kv: jax.ShapeDtypeStruct, value_dim: int | None) -> str | None:
    """Returns why the Triton kernels cannot be used; None if they can."""
    if reason := triton_unavailable():
        return reason
    from jaxserve.kernels import triton

    try:
        triton.check(kv, value_dim)
    except NotImplementedError as error:
        return str(error)
    return None


def _triton(
    q: jax.Array, q_pos: jax.Array, pages: KVPages, *arguments: jax.Array, **options: Any
) -> tuple[jax.Array, jax.Array]:
    from jaxserve.kernels import triton  # later versions of jax may have no compiler for it

    device = jax.devices()[0]
    tiles = triton.tiles_for(device.compute_capability, device.core_count, q.shape, pages.kv.dtype)
    return triton.attend(q, q_pos, pages, *arguments, tiles=tiles, **options)


def _mosaic(
    q: jax.Array, q_pos: jax.Array, pages: KVPages, *arguments: jax.Array, **options: Any
) -> tuple[jax.Array, jax.Array]:
    from jaxserve.kernels import mosaic  # cannot be imported with versions of jax before MOSAIC_JAX

    device = jax.devices()[0]
    tiles = mosaic.tiles_for(
        device.device_kind, device.core_count, q.shape[1] * q.shape[3], q.shape[4], pages.kv.dtype
    )
    return mosaic.attend(q, q_pos, pages, *arguments, tiles=tiles, **options)


def _cpu(
    *arguments: Any, dtype: Any, before: tuple[jax.Array, jax.Array] | None, **options: Any
) -> tuple[jax.Array, jax.Array]:
    if before is None:
        return cpu_attention.attend(*arguments, dtype=dtype, **options)
    return _with_merge_and_cast(cpu_attention.attend)(
        *arguments, dtype=dtype, before=before, **options
    )


def _with_merge_and_cast(attend: Callable) -> Callable:
    """Adds `dtype` and `before` to an implementation that has neither."""

    def wrapped(
        *arguments: jax.Array,
        dtype: Any,
        before: tuple[jax.Array, jax.Array] | None,
        **options: Any,
    ) -> tuple[jax.Array, jax.Array]:
        out, lse = attend(*arguments, **options)
        if before is not None:
            out, lse = merge(*(jnp.stack(both) for both in zip(before, (out, lse))))
        return out.astype(dtype), lse

    return wrapped


ATTEND: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
    "reference": _with_merge_and_cast(reference.attend),
    "xla": _with_merge_and_cast(xla.attend),
    "cpu": _cpu,
    "triton": _triton,
    "mosaic": _mosaic,
}
GROUPED: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "xla": _dense_grouped,
    "cpu": cpu_linear.grouped,
    "mosaic": _mosaic_grouped,
}
WRITE_QKV: dict[str, Callable[..., tuple[jax.Array, KVPages]]] = {
    "xla": _plain_write_qkv,
    "mosaic": _mosaic_write_qkv,
}
