"""Checks attention, and the write of keys and values before it, on the devices of this process
before a replica depends on it: a kernel that was never run on a GPU of this kind, or with this
driver, may be wrong there."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from concurrent.futures import Future
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.api.errors import ConfigError
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.kernels import ops
from jaxserve.kernels.kv_pages import FP8, KVPages, quantize
from jaxserve.kernels.qkv import Projected
from jaxserve.models.attention import Attention
from jaxserve.models.decoder import Block, stage_modules
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
    results: ClassVar[tuple[str, ...]] = ("outputs", "log-sums")

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

    def compute(self, name: str | None, *arguments: Any) -> tuple[jax.Array, ...]:
        """Computes the results by an implementation."""
        attend = self.attend
        return ops.attend(
            *arguments,
            scale=attend.scale,
            softcap=attend.softcap,
            window=attend.window,
            value_dim=attend.value_dim,
            dtype=jnp.float32,
            implementation=name,
        )


@dataclasses.dataclass(frozen=True)
class WriteCase:
    """The write before attention in some layer, of `width` tokens, as one rank does it. rows: heads
    of a kv head, as in `Projected`, with its group and epsilon. rotated: numbers of a head that
    RoPE rotates. normed: queries and keys have norms. page: shape of a page, [K, 2, C, H]."""

    width: int
    rows: int
    group: int
    rotated: int
    normed: bool
    eps: float
    page: tuple[int, ...]
    dtype: np.dtype
    kv_dtype: np.dtype
    results: ClassVar[tuple[str, ...]] = ("queries", "pages")

    @property
    def name(self) -> str:
        heads, _, tokens, numbers = self.page
        return (
            f"the write of {self.width} tokens, {heads} x {self.rows} heads of {numbers}, to pages "
            f"of {tokens} in {self.kv_dtype}"
        )

    def arguments(self) -> tuple[Any, ...]:
        """Makes random heads, weights and tables, pages, and places in them, of which some are none
        and no two are the same."""
        random = np.random.default_rng(0)
        heads, vectors, tokens, numbers = self.page
        normal = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)
        count = max(ROWS, -(-self.width // tokens))
        projected = normal(self.width, heads, self.rows, numbers).astype(self.dtype)
        norms = (normal(numbers), normal(numbers)) if self.normed else None
        angles = normal(self.width, 1, 1, self.rotated // 2)
        cos_sin = (jnp.cos(angles), jnp.sin(angles)) if self.rotated else None
        kv = normal(1, count, heads, vectors, tokens, numbers)
        pages = quantize(kv) if self.kv_dtype == FP8 else KVPages(kv.astype(self.kv_dtype))
        places = random.permutation(count * tokens)[: self.width].astype(np.int32)
        page = np.where(random.random(self.width) < 0.1, count, places // tokens)
        return projected, norms, cos_sin, pages, page.astype(np.int32), places % tokens

    def compute(
        self, name: str | None, heads: Any, norms: Any, cos_sin: Any, *places: Any
    ) -> tuple[jax.Array, ...]:
        """Computes the results by an implementation."""
        projected = Projected(heads, self.group, norms, self.eps, cos_sin)
        pages, page, offset = places
        q, pages = ops.write_qkv(projected, pages, page, offset, implementation=name)
        return q.astype(jnp.float32), pages.dequantize(jnp.float32).astype(jnp.float32)


Case = AttentionCase | WriteCase


def cases(plan: StagePlan) -> list[AttentionCase]:
    """Lists the attention that steps of this plan compute, each kind once."""
    model = plan.model
    module, _ = stage_modules(model, range(model.layers), plan.mesh.tp)
    mixers = [(layer.attention, model.at(number)) for number, layer in enumerate(module.layers)]
    kinds = {
        (mixer.attend, sizes.heads // sizes.kv_heads, _page(plan, sizes))
        for mixer, sizes in mixers
        if hasattr(mixer, "attend")
    }
    rows = [group for shape in plan.shapes for group in shape.local if group.rows]
    widths = {min(group.width, WIDEST) for group in rows}
    return [
        AttentionCase(
            attend,
            width,
            group,
            page,
            np.dtype(plan.dtype),
            np.dtype(plan.kv_dtype),
        )
        for attend, group, page in sorted(kinds, key=str)
        for width in sorted({min(widths), max(widths)})
    ]


def writes(plan: StagePlan) -> list[WriteCase]:
    """Lists the writes before attention that steps of this plan do, each kind once."""
    model = plan.model
    module, _ = stage_modules(model, range(model.layers), plan.mesh.tp)
    tokens = {sum(group.rows * group.width for group in shape.local) for shape in plan.shapes}

    def case(block: Block, sizes: ModelConfig, width: int) -> WriteCase:
        assert isinstance(block.attention, Attention)
        spec = block.attention.spec
        group = sizes.heads // sizes.kv_heads
        return WriteCase(
            width,
            group * spec.query_rows + 2,
            group,
            block.rope.dims(sizes.head_dim) if block.rope else 0,
            spec.qk_norm == "head",
            block.norms.eps,
            _page(plan, sizes),
            np.dtype(plan.dtype),
            np.dtype(plan.kv_dtype),
        )

    blocks = [
        (block, model.at(number))
        for number, block in enumerate(module.layers)
        if isinstance(block.attention, Attention) and block.attention.spec.stores
    ]
    widths = {min(count, WIDEST) for count in tokens if count}
    few_and_many = sorted({min(widths), max(widths)})
    return list(dict.fromkeys(case(*block, width) for block in blocks for width in few_and_many))


def _page(plan: StagePlan, sizes: ModelConfig) -> tuple[int, ...]:
    """Returns the shape of a page of a layer that sees a model of this size, on one rank."""
    vectors, numbers = sizes.page
    return sizes.kv_heads // plan.mesh.tp, vectors, plan.block_size, numbers


def checked(plan: StagePlan, fails_over: bool) -> StagePlan:
    """Returns the plan with attention that gives what the reference does: that which the plan has,
    or where a kernel differs, with a warning that says how, one of `SLOWER`. fails_over: False for
    processes that must all run the same program. Errors: ConfigError where the kernel is one that
    cannot have these shapes, where it differs and was asked for by name or may not be replaced, and
    where it does not end."""
    began = time.monotonic()
    attends = cases(plan)
    for case in attends:
        _check_supported(plan.attention, case)
    every: list[Case] = [*attends, *writes(plan)]
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


def find_fault(name: str | None, case: Case) -> str | None:
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
    for what, ours, theirs in zip(case.results, found, wanted):
        largest = np.abs(ours - theirs).max()
        if not largest <= LARGEST_ERROR:
            return f"{case.name}: {what} differ by up to {largest:.3g}"
    return None


def _result(name: str | None, case: Case, arguments: tuple[Any, ...]) -> list[np.ndarray]:
    """Computes a case. Errors: ConfigError where that does not end; those of the kernel."""
    program = jax.jit(functools.partial(case.compute, name)).lower(*arguments).compile()
    result: Future[list[np.ndarray]] = Future()

    def run() -> None:
        try:
            result.set_result([np.asarray(array) for array in program(*arguments)])
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # which a kernel that hangs keeps
    try:
        return result.result(HANG_SECONDS)
    except TimeoutError:
        slower = f"start with --attention={SLOWER[0]}"
        raise ConfigError(
            "attention", f"{case.name} did not end in {HANG_SECONDS:g} s: {slower}"
        ) from None
