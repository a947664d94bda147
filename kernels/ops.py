"""The one place that chooses an implementation, by platform, type and shape. The choice is logged
once per shape, with what others lack."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.kernels import reference, xla
from jaxserve.kernels.kv_pages import KVPages
from jaxserve.kernels.merge import merge

log = logging.getLogger(__name__)
HOPPER = "9.0"  # compute capability of H100, H200 and GH200


def attend(
    q: jax.Array,
    q_pos: jax.Array,
    pages: KVPages,
    table: jax.Array,
    rows: jax.Array,
    count: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    dtype: Any = jnp.float32,
    before: tuple[jax.Array, jax.Array] | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention over pages; arguments and results as `reference.attend`, but for `out`, which is of
    type `dtype`; merged with `before`, an (out, lse) over other keys, where there is one: a hop of
    a ring.

    implementation: a name in `ATTEND`; None chooses. Errors: NotImplementedError, with the reason,
    where the named one lacks the shape.
    """
    name = implementation or choose(
        jax.default_backend(), q.shape[1], jax.ShapeDtypeStruct(pages.kv.shape, pages.kv.dtype)
    )
    return ATTEND[name](
        q, q_pos, pages, table, rows, count, scale=scale, window=window, dtype=dtype, before=before
    )


@functools.lru_cache
def choose(platform: str, tokens: int, kv: jax.ShapeDtypeStruct) -> str:
    """The kernel of the platform where there is one for these pages, else XLA's form."""
    lacks = {"mosaic": _mosaic_lacks(kv)}
    name = next((name for name, reason in lacks.items() if reason is None), "xla")
    reasons = "".join(
        f"; not {other}: {reason}" for other, reason in lacks.items() if reason is not None
    )
    log.info("attention over pages on %s, rows of %d tokens: %s%s", platform, tokens, name, reasons)
    return name


def hopper_lacks() -> str | None:
    """Why kernels for Hopper cannot run here; None where they can."""
    if (
        jax.default_backend() not in ("gpu", "cuda")
        or getattr(jax.devices()[0], "compute_capability", "") != HOPPER
    ):
        return "it needs a Hopper GPU"
    if jax.__version_info__ < (0, 11, 2):
        return f"it needs jax 0.11.2, and this is {jax.__version__}"
    return None


def _mosaic_lacks(kv: jax.ShapeDtypeStruct) -> str | None:
    """Why the kernel for Hopper cannot be had for these pages; None where it can."""
    if reason := hopper_lacks():
        return reason
    from jaxserve.kernels import mosaic

    try:
        mosaic.check(kv)
    except NotImplementedError as error:
        return str(error)
    return None


def _mosaic(
    q: jax.Array, q_pos: jax.Array, pages: KVPages, *arguments: jax.Array, **settings: Any
) -> tuple[jax.Array, jax.Array]:
    from jaxserve.kernels import mosaic  # not to be had with older versions of jax

    device = jax.devices()[0]
    tiles = mosaic.tiles_for(
        device.device_kind, device.core_count, q.shape[1] * q.shape[3], q.shape[4], pages.kv.dtype
    )
    return mosaic.attend(q, q_pos, pages, *arguments, tiles=tiles, **settings)


def _in_f32(attend: Callable) -> Callable:
    def cast(
        *arguments: jax.Array,
        dtype: Any,
        before: tuple[jax.Array, jax.Array] | None,
        **settings: Any,
    ) -> tuple[jax.Array, jax.Array]:
        out, lse = attend(*arguments, **settings)
        if before is not None:
            out, lse = merge(*(jnp.stack(both) for both in zip(before, (out, lse))))
        return out.astype(dtype), lse

    return cast


ATTEND: dict[str, Callable] = {
    "reference": _in_f32(reference.attend),
    "xla": _in_f32(xla.attend),
    "mosaic": _mosaic,
}
