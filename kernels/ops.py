"""The one place that chooses an implementation, by platform, dtype and shape. The choice is logged once per shape."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import jax

from jaxserve.kernels import reference, xla

log = logging.getLogger(__name__)

ATTEND: dict[str, Callable] = {"reference": reference.attend, "xla": xla.attend}


def attend(q: jax.Array, q_pos: jax.Array, pages: jax.Array, table: jax.Array, rows: jax.Array, count: jax.Array,
           *, scale: float, window: int | None = None, implementation: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Attention over pages; arguments and results as `reference.attend`.

    implementation: a name in `ATTEND`; None chooses. Errors: NotImplementedError, with the reason, where the named one lacks the shape.
    """
    name = implementation or choose(jax.default_backend(), q.shape[1])
    return ATTEND[name](q, q_pos, pages, table, rows, count, scale=scale, window=window)


@functools.lru_cache
def choose(platform: str, tokens: int) -> str:
    """XLA's form everywhere, until a platform has its own kernels."""
    log.info("attention over pages on %s, rows of %d tokens: xla", platform, tokens)
    return "xla"
