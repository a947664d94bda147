"""Checks attention on the devices of this process before a replica depends on it: a kernel that was
never run on a GPU of this kind, or with this driver, may be wrong there."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.api.errors import ConfigError
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.kernels import ops
from jaxserve.kernels.kv_pages import FP8, KVPages, quantize
from jaxserve.models.decoder import stage_modules
from jaxserve.sharding.attend import Attend

ROWS = 4
TOKENS = 2048  # on all pages, at least one for each row: what the reference makes grows with them
WIDEST = 256  # tokens of a row, alike
LARGEST_ERROR = 0.03  # of outputs whose keys and values are normal: bfloat16 rounds to 0.004 of 1
HANG_SECONDS = 60.0  # that a kernel may take; compiling does not count
SLOWER = ("xla", "reference")  # what is left where a kernel is wrong, in this order
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """Attention of rows of `width` queries in some layer, as one rank computes it. page: shape of a
    page, [K, 1 or 2, C, H]."""

    attend: Attend
    width: int
    queries: int  # heads of queries for each of keys
    page: tuple[int, ...]
    dtype: np.dtype
    kv_dtype: np.dtype

    @property
    def name(self) -> str:
        heads, _, tokens, numbers = self.page
        window = "" if self.attend.window is None else f", window {self.attend.window}"
        return (
            f"rows of {self.width} tokens, {heads} x {self.queries} heads of {numbers}, pages of "
            f"{tokens} in {self.kv_dtype}{window}"
        )

    def arguments(self) -> tuple[Any, ...]:
        """Makes random queries and pages, of sequences of several lengths whose pages lie anywhere:
        what `ops.attend` takes."""
        random = np.random.default_rng(0)
        heads, vectors, tokens, numbers = self.page
        width = self.width
        count = max(ROWS, TOKENS // tokens)
        rows = min(ROWS, max(1, count * tokens // (width + tokens)))
        normal = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)
        q = normal(rows, width, heads, self.queries, numbers).astype(self.dtype)
        room = count // rows
        ends = np.linspace(width, max(width, room * tokens - 1), rows).astype(np.int32)
        positions = ends[:, None] - width + np.arange(width, dtype=np.int32)
        kv = normal(count, heads, vectors, tokens, numbers)
        pages = quantize(kv) if self.kv_dtype == FP8 else KVPages(kv.astype(self.kv_dtype))
        page = random.permutation(count)[: rows * room].reshape(rows, room).astype(np.int32)
        block = np.broadcast_to(np.arange(room, dtype=np.int32), page.shape)
        entries = (ends - 1) // tokens + 1
        return (
            q,
            positions,
            pages,
            np.stack([page, block]),
            np.arange(rows, dtype=np.int32),
            entries,
        )

    @property
    def options(self) -> dict[str, Any]:
        attend = self.attend
        return {
            "scale": attend.scale,
            "softcap": attend.softcap,
            "window": attend.window,
            "value_dim": attend.value_dim,
            "dtype": jnp.float32,
        }


def cases(plan: StagePlan) -> list[AttentionCase]:
    """Lists the attention that steps of this plan compute, each kind once."""
    model = plan.model
    _, _, _, *page = plan.pool().kv.shape
    module, _ = stage_modules(model, range(model.layers), plan.mesh.tp)
    mixers = [layer.attention for layer in module.layers]
    kinds = {mixer.attend for mixer in mixers if hasattr(mixer, "attend")}
    rows = [group for shape in plan.shapes for group in shape.local if group.rows]
    widths = {min(group.width, WIDEST) for group in rows}
    return [
        AttentionCase(
            attend,
            width,
            model.heads // model.kv_heads,
            (model.kv_heads // plan.mesh.tp, *page),
            np.dtype(plan.dtype),
            np.dtype(plan.kv_dtype),
        )
        for attend in sorted(kinds, key=str)
        for width in sorted({min(widths), max(widths)})
    ]


def checked(plan: StagePlan, fails_over: bool) -> StagePlan:
    """Returns the plan with attention that gives what the reference does: that which the plan has,
    or where a kernel differs, with a warning that says how, one of `SLOWER`. fails_over: False for
    processes that must all run the same program. Errors: ConfigError where the kernel is one that
    cannot have these shapes, where it differs and was asked for by name or may not be replaced, and
    where it does not end."""
    began = time.monotonic()
    every = cases(plan)
    for case in every:
        _check_supported(plan.attention, case)
    asked = plan.attention
    for name in dict.fromkeys((asked, *SLOWER)):
        faults = [fault for case in every if (fault := find_fault(name, case))]
        if not faults:
            log.info("attention was checked in %.1f s", time.monotonic() - began)
            return dataclasses.replace(plan, attention=name)
        said = f"{name or 'the fastest kernel'} is wrong on this device: {faults[0]}"
        if asked is not None or not fails_over:
            raise ConfigError("attention", said)
        log.warning("attention: %s; a slower one takes its place", said)
    raise ConfigError("attention", "no attention gives what the reference does on this device")


def _check_supported(name: str | None, case: AttentionCase) -> None:
    """Refuses an implementation that cannot have these shapes. Errors: ConfigError."""
    q, _, pages, *_ = case.arguments()
    reason = ops.unsupported(q, pages.kv, case.attend.value_dim).get(name or "")
    if reason is not None:
        raise ConfigError("attention", f"{name} is not possible here: {reason}")


def find_fault(name: str | None, case: AttentionCase) -> str | None:
    """Compares an implementation (None: the fastest) with the reference; returns what is wrong with
    it, None if nothing is. Errors: ConfigError where it does not end."""
    arguments = case.arguments()
    wanted = _result("reference", case, arguments)
    try:
        found = _result(name, case, arguments)
    except ConfigError:
        raise
    except Exception as error:  # whatever a kernel can fail with, where it is compiled or runs
        return f"{case.name}: {type(error).__name__}: {error}"[:500]
    for what, ours, theirs in zip(("outputs", "log-sums"), found, wanted):
        largest = np.abs(ours - theirs).max()
        if not largest <= LARGEST_ERROR:
            return f"{case.name}: {what} differ by up to {largest:.3g}"
    return None


def _result(
    name: str | None, case: AttentionCase, arguments: tuple[Any, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Computes out and lse. Errors: ConfigError where that does not end; those of the kernel."""
    attend = lambda *arguments: ops.attend(*arguments, implementation=name, **case.options)
    program = jax.jit(attend).lower(*arguments).compile()
    result: Future[list[np.ndarray]] = Future()

    def run() -> None:
        try:
            result.set_result([np.asarray(array) for array in program(*arguments)])
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # which a kernel that hangs keeps
    try:
        out, lse = result.result(HANG_SECONDS)
    except TimeoutError:
        slower = f"start with --attention={SLOWER[0]}"
        raise ConfigError(
            "attention", f"{case.name} did not end in {HANG_SECONDS:g} s: {slower}"
        ) from None
    return out, lse
