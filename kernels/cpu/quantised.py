"""Products with weights that stay quantised, by the C++ kernel for CPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels.cpu import library
from jaxserve.kernels.quantised import Quantised


def unsupported(x: jax.Array) -> str | None:
    """Returns why the kernel cannot multiply these rows by a quantised matrix; None if it can."""
    if reason := library.unsupported():
        return reason
    if x.dtype not in library.FLOATS:
        return f"it has no product of {x.dtype}"
    return None


def linear(x: jax.Array, w: Quantised, positions: jax.Array | None = None) -> jax.Array:
    """x [T, K] @ w, summed in f32, in the dtype of x. positions: as of `cpu.linear.linear`. Errors:
    NotImplementedError, with the reason, for types that the kernel does not have."""
    one = jax.tree.map(lambda array: array[None], w.flat())
    return _call(x, one, jnp.zeros(0, jnp.int32) if positions is None else positions, False)


def grouped(x: jax.Array, w: Quantised, counts: jax.Array) -> jax.Array:
    """Rows of x [T, K] @ the matrix of their group, as of `ops.grouped`. Errors:
    NotImplementedError, with the reason, for types that the kernel does not have."""
    return _call(x, w.flat(experts=True), counts, True)


def _call(x: jax.Array, w: Quantised, rows: jax.Array, by_group: bool) -> jax.Array:
    if reason := unsupported(x):
        raise NotImplementedError(reason)
    none = jnp.zeros(0, jnp.float16)
    result = jax.ShapeDtypeStruct((x.shape[0], w.outputs), x.dtype)
    return jax.ffi.ffi_call("jaxserve_quantised", result)(
        x,
        w.codes,
        w.scales,
        none if w.offsets is None else w.offsets,
        none if w.supers is None else w.supers,
        rows,
        grouped=by_group,
        zero=np.int64(w.form.zero),
        mantissa=np.int64(w.form.mantissa),
    )
