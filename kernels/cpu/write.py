"""Writes tokens and whole pages to pools of small floats, in place, by the C++ kernel for CPUs."""

from __future__ import annotations

import jax

from jaxserve.kernels.cpu import library


def unsupported(pool: jax.Array) -> str | None:
    """Returns why XLA's scatter is to be used for this pool; None if the kernel is. XLA's CPU
    compiler widens a whole pool of small floats to f32 for a scatter, and narrows it again; f32 it
    writes in place."""
    if reason := unsupported_pages(pool):
        return reason
    if pool.shape[3] != 2:
        return "pages have one vector per token"
    return None


def unsupported_pages(pool: jax.Array) -> str | None:
    """Returns why XLA's scatter is to be used for whole pages of this pool; None if the kernel is:
    see `unsupported`."""
    if reason := library.unsupported():
        return reason
    if pool.dtype.itemsize >= 4:
        return f"XLA writes {pool.dtype} in place"
    return None


def write(pool: jax.Array, page: jax.Array, offset: jax.Array, values: jax.Array) -> jax.Array:
    """pool [1, P, K, 2, C, ...] with values [T, K, 2, ...] of its dtype at tokens offset [T] of
    pages page [T] (int32; pages out of range are skipped). In place, if the pool is donated."""
    same = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    call = jax.ffi.ffi_call("jaxserve_write", same, input_output_aliases={0: 0})
    return call(pool, page, offset, values)


def write_pages(pool: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    """pool [1, P, ...] with values [n, ...] of the size of its numbers at pages ids [n] (int32;
    those out of range are skipped), bit by bit. In place, if the pool is donated."""
    same = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    call = jax.ffi.ffi_call("jaxserve_write_pages", same, input_output_aliases={0: 0})
    return call(pool, ids, values)
