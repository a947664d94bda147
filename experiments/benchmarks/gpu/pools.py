"""Memory of programs with donated pools, and copies between the device and the host."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.gpu.attention import Heads, attend, made
from experiments.benchmarks.gpu.timing import in_turns, launches
from experiments.benchmarks.gpu.worker import Case, Row, Run
from jaxserve.kernels.kv_pages import KVPages


def peak() -> int:
    return int((jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0))


def analysed(name: str, compiled: Any, pool: int, shapes: tuple[str, ...]) -> Row:
    """Analyses what a compiled program takes; a hidden copy of a pool would be in temp, or be a
    copy of such a shape in its text."""
    found = compiled.memory_analysis()
    text = compiled.as_text()
    copies = [line for line in text.splitlines() if re.search(r"= .*\bcopy(-start)?\(", line)]
    copied = sum(any(shape in line.split("copy")[0] for shape in shapes) for line in copies)
    row: Row = {
        "case": name,
        "pool GiB": pool / 2**30,
        "alias GiB": found.alias_size_in_bytes / 2**30,
        "temp MiB": found.temp_size_in_bytes / 2**20,
        "copies of pools": copied,
    }
    if copied or found.alias_size_in_bytes < pool:
        row |= {
            "status": "wrong",
            "why": "a pool is copied" if copied else "a pool is not reused for the result",
        }
    return row


def pools(run: Run) -> Iterator[Case]:
    yield "donated pools", functools.partial(_donated, run)
    size = 2**22 if run.rehearse else 2**30
    yield "to pinned host memory", functools.partial(_to_host, run, size)
    yield "from pinned host memory", functools.partial(_from_host, run, size)
    yield "pages to pinned host memory", functools.partial(_pages_to_host, run, size)


def append_and_attend(
    f: Any,
    page: tuple[int, ...],
    flats: list[jax.Array],
    q: jax.Array,
    kv: jax.Array,
    *rest: jax.Array,
) -> tuple:
    """kv [T, K, 2, H] of the tokens of q go to the pages of each layer, then q attends over them:
    f, an `attend`. Returns out and pools."""
    at = rest[0][0]
    pages = rest[1][0, 0]
    size = page[2]
    out = []
    for flat in flats:
        flat = (
            flat.reshape(-1, *page)
            .at[pages[at // size], :, :, at % size]
            .set(kv)
            .reshape(flat.shape)
        )
        q = f([KVPages(flat)], q, *rest)
        out.append(flat)
    return q, out


def _donated(run: Run) -> list[Row]:
    """Our kernel alone in a step that appends to donated pools and attends over them, layer by
    layer."""
    heads = Heads.of(run)
    layers = 2 if run.rehearse else 4
    size = 64
    T = 8 if run.rehearse else 512
    tokens, context = (256, 128) if run.rehearse else (2**21, 2**15)
    step = functools.partial(
        append_and_attend, attend(heads, size, run), (heads.K, 2, size, heads.H)
    )
    blocks = context // size
    table = jnp.stack(
        [
            jnp.asarray(
                np.random.default_rng(run.seed).permutation(tokens // size)[:blocks], jnp.int32
            ),
            jnp.arange(blocks),
        ]
    )
    rest = (
        jnp.arange(context - T, context)[None],
        table[:, None],
        jnp.zeros(1, jnp.int32),
        jnp.full(1, blocks),
    )
    flats = [
        made((tokens * heads.token,), i)
        if run.rehearse
        else jnp.zeros(tokens * heads.token, jnp.bfloat16)
        for i in range(layers)
    ]
    q = made((1, T, heads.K, heads.G, heads.H), 1)
    kv = made((T, heads.K, 2, heads.H), 2)
    compiled = jax.jit(step, donate_argnums=0).lower(flats, q, kv, *rest).compile()
    pool = sum(flat.nbytes for flat in flats)
    row = analysed(
        "append and attend",
        compiled,
        pool,
        (f"bf16[{tokens // size},{heads.K},2,{size},{heads.H}]", f"bf16[{flats[0].size}]"),
    )
    before = peak()
    state = {"flats": flats}
    del flats

    def once() -> jax.Array:
        out, state["flats"] = compiled(state["flats"], q, kv, *rest)
        return out

    timed = in_turns({"it": launches(once, ())}, run.pace)[0]["it"]
    return [{**row, "ms": timed.spread(1e3), "peak grew MiB": (peak() - before) / 2**20}]


def _memory(kind: str) -> Any:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)


def _copied(run: Run, x: jax.Array, launch: Any) -> Row:
    timed = in_turns({"it": launch}, run.pace)[0]["it"]
    return {"GiB": x.nbytes / 2**30, "ms": timed.spread(1e3), "GB/s": x.nbytes / timed.median / 1e9}


def _to_host(run: Run, size: int) -> Row:
    x = made((size // 2,), 1)
    return _copied(run, x, launches(lambda x: jax.device_put(x, _memory("pinned_host")), (x,)))


def _from_host(run: Run, size: int) -> Row:
    x = jax.block_until_ready(jax.device_put(made((size // 2,), 1), _memory("pinned_host")))
    return _copied(run, x, launches(lambda x: jax.device_put(x, _memory("device")), (x,)))


def _pages_to_host(run: Run, size: int) -> Row:
    """Pages from all over a pool: gathered on the device, then copied."""
    heads = Heads.of(run)
    count = size // (heads.token * 64 * 2)
    pool = made((4 * count, heads.K, 2, 64, heads.H), 1)
    pages = jnp.asarray(
        np.random.default_rng(run.seed).permutation(4 * count)[:count].astype(np.int32)
    )
    gather = jax.jit(lambda pool, pages: pool[pages])
    x = gather(pool, pages)
    return _copied(
        run, x, launches(lambda: jax.device_put(gather(pool, pages), _memory("pinned_host")), ())
    )
