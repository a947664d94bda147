"""The speed of attention over pages on its own, beside its peers and the machine's ceilings.

Our kernel is timed in programs of several layers, each with pages of its own and the queries that
the one before returned, as in the engine: what is prepared for the kernel is the same in all
layers, and the compiler does it once. `alone` is a program of one layer.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.gpu.checks import hopper, product
from experiments.benchmarks.gpu.timing import Launches, Timed, faster, in_turns, launches
from experiments.benchmarks.gpu.torch_peer import BACKENDS, TorchPeer
from experiments.benchmarks.gpu.worker import Case, Row, Run
from jaxserve.kernels.kv_pages import FP8, KVPages, quantize

LAYERS = 4  # of a program
PAGE = 64  # tokens of a page, unless said otherwise
OURS = f"pages of {PAGE}"
ALONE = "alone"
L2 = 400e6  # bytes that successive launches should differ in, so that no cache serves them


@dataclasses.dataclass(frozen=True)
class Heads:
    """K kv heads of G query heads each, of dimension H."""

    K: int = 8
    G: int = 4
    H: int = 128

    @property
    def N(self) -> int:
        return self.K * self.G

    @property
    def token(self) -> int:
        """KV elements of a token."""
        return self.K * 2 * self.H

    def flops(self, pairs: float) -> float:
        return 4.0 * self.N * self.H * pairs

    def paged(self, flat: KVPages, size: int) -> KVPages:
        """Cuts flat arrays into pages of `size` tokens."""
        vectors = -1, self.K, 2, size
        return KVPages(
            flat.kv.reshape(*vectors, self.H),
            None if flat.scales is None else flat.scales.reshape(vectors),
        )

    @classmethod
    def of(cls, run: Run, G: int = 4) -> Heads:
        return cls(1, min(G, 2), 64) if run.rehearse else cls(G=G)


def attend(heads: Heads, size: int, run: Run, tiles: Any = None) -> Any:
    """A program that runs our kernel layer by layer, over flat pools of pages of `size` tokens."""
    kernel = hopper(run.rehearse, tiles)

    @jax.jit  # traced once for all layers
    def layer(flat: KVPages, q: jax.Array, *rest: jax.Array) -> jax.Array:
        q_pos, table, rows, count = rest
        return kernel(
            q,
            q_pos,
            heads.paged(flat, size),
            table,
            rows,
            count,
            scale=heads.H**-0.5,
            dtype=q.dtype,
        )[0]

    def f(flats: list[KVPages], q: jax.Array, *rest: jax.Array) -> jax.Array:
        for flat in flats:
            q = layer(flat, q, *rest)
        return q

    return jax.jit(f)


def layers(run: Run) -> int:
    return 1 if run.rehearse else LAYERS


def made(shape: tuple[int, ...], seed: int) -> jax.Array:
    return jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))(jax.random.key(seed))


def cudnn(heads: Heads, B: int, T: int, S: int, causal: bool) -> Launches:
    q, k, v = (
        made((B, length, n, heads.H), 7 + i)
        for i, (length, n) in enumerate(((T, heads.N), (S, heads.K), (S, heads.K)))
    )
    return launches(
        jax.jit(
            functools.partial(
                jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn"
            )
        ),
        (q, k, v),
    )


class Peers:
    """Launches of all peers that are there, and why others are not."""

    def __init__(self, run: Run):
        self.torch = TorchPeer(run.torch_python)

    def entries(
        self, heads: Heads, B: int, T: int, S: int, causal: bool, faults: dict[str, str]
    ) -> dict[str, Launches]:
        """B rows of T queries over S keys. faults: is given why some are absent."""
        found = {"cudnn by jax": cudnn(heads, B, T, S, causal)}
        self.torch.forget()
        for backend in BACKENDS:
            try:
                shape = dict(B=B, T=T, S=S, N=heads.N, K=heads.K, H=heads.H, causal=causal)
                found[f"{backend} by torch"] = self.torch.prepare(backend, backend, **shape)
            except RuntimeError as error:
                faults[f"{backend} by torch"] = str(error)
        return found


def absent(case: str, faults: dict[str, str]) -> list[Row]:
    return [
        {"case": f"{case}, {name}", "status": "absent" if " by " in name else "failed", "why": why}
        for name, why in faults.items()
    ]


# --- prefill


def prefill(run: Run) -> Iterator[Case]:
    peers = Peers(run)
    for length, G in itertools.product(
        (128,) if run.rehearse else (8192, 32768), (2,) if run.rehearse else (4, 8)
    ):
        yield (
            f"{length} causal, GQA {G}",
            functools.partial(_prefill, length, Heads.of(run, G), run, peers),
        )


def _prefill(length: int, heads: Heads, run: Run, peers: Peers) -> list[Row]:
    case = f"{length} causal, GQA {heads.G}"
    faults = dict[str, str]()
    entries = {
        f"pages of {size}": _pages_of(size, length, heads, run)
        for size in ((32, PAGE) if run.rehearse else (16, PAGE, 128, 256))
    }
    entries |= peers.entries(heads, 1, length, length, True, faults)
    f, arguments = product(*[256 if run.rehearse else 8192] * 3)
    timed, more = in_turns(entries | {"matrix product": launches(f, arguments)}, run.pace)
    rows = []
    for name, one in timed.items():
        flops = (
            2.0 * arguments[0].shape[0] ** 3
            if name == "matrix product"
            else heads.flops(length * (length + 1) / 2)
        )
        row: Row = {
            "case": f"{case}, {name}",
            "ms": one.spread(1e3),
            "TF/s": flops / one.median / 1e12,
        }
        if OURS in timed and name != OURS:
            row["speed of ours / it"] = faster(
                timed[OURS], one, heads.flops(length * (length + 1) / 2) / flops
            )
        rows.append(row)
    return rows + absent(case, faults | more)


def _pages_of(size: int, length: int, heads: Heads, run: Run) -> Launches:
    count = -(-length // size)
    flat = KVPages(made((count * size * heads.token,), 1))
    q = made((1, length, heads.K, heads.G, heads.H), 2)
    table = np.stack([np.random.default_rng(run.seed).permutation(count), np.arange(count)]).astype(
        np.int32
    )[:, None]
    rest = (
        jnp.arange(length)[None],
        jnp.asarray(table),
        jnp.zeros(1, jnp.int32),
        jnp.full(1, count, jnp.int32),
    )
    return launches(attend(heads, size, run), ([flat] * layers(run), q, *rest), each=layers(run))


# --- over a large pool


class Filled:
    """KV pages of several layers with (repeating) random numbers, and page tables that point all
    over them. Sequences longer than the pool share pages, far apart in time. quantized: to FP8."""

    def __init__(self, heads: Heads, tokens: int, run: Run, quantized: bool):
        self.heads = heads
        self.run = run
        self.pages = tokens // PAGE
        tape = min(tokens, 2**17)

        @jax.jit
        def fill(x: jax.Array) -> KVPages:
            one = quantize(x.reshape(-1, heads.H)) if quantized else KVPages(x)
            return jax.tree.map(lambda x: jnp.tile(x.reshape(-1), tokens // tape), one)

        self.flats = [fill(made((tape * heads.token,), layer)) for layer in range(layers(run))]
        self.dtype = self.flats[0].kv.dtype

    def arguments(self, contexts: list[int], T: int) -> list[tuple[Any, ...]]:
        """Arguments of `attend` for the last T tokens of each context; several sets over different
        pages, so that no cache serves successive launches."""
        count = np.array([-(-context // PAGE) for context in contexts], np.int32)
        last = np.array(contexts, np.int32)
        q_pos = last[:, None] - T + np.arange(T, dtype=np.int32)
        q = made((len(contexts), T, self.heads.K, self.heads.G, self.heads.H), 4)
        copies = (
            1
            if self.run.rehearse
            else int(np.clip(np.ceil(L2 / self.bytes(contexts) / LAYERS), 1, 16))
        )
        rest = (jnp.arange(len(contexts), dtype=jnp.int32), jnp.asarray(count))
        dice = np.random.default_rng(self.run.seed)
        out = []
        for _ in range(copies):
            laps = -(-int(count.sum()) // self.pages)
            order = np.concatenate([dice.permutation(self.pages) for _ in range(laps)]).astype(
                np.int32
            )
            table = np.zeros((2, len(contexts), count.max()), np.int32)
            table[0, np.arange(count.max()) < count[:, None]] = order[: count.sum()]
            table[1] = np.arange(count.max())
            out.append((self.flats, q, jnp.asarray(q_pos), jnp.asarray(table), *rest))
        return out

    def bytes(self, contexts: list[int]) -> float:
        return (
            float(sum(contexts))
            * self.heads.token
            / self.heads.H
            * (2 + self.heads.H if self.dtype == FP8 else 2 * self.heads.H)
        )

    def launches(self, contexts: list[int], T: int) -> dict[str, Launches]:
        """All layers, and one of them alone."""
        f = attend(self.heads, PAGE, self.run)
        arguments = self.arguments(contexts, T)
        alone = [(flats[:1], *rest) for flats, *rest in arguments]
        return {OURS: launches(f, *arguments, each=layers(self.run)), ALONE: launches(f, *alone)}


class Lazily:
    """A pool that is made when it is first used."""

    def __init__(self, run: Run, tokens: int, quantized: bool = False):
        self._run = run
        self._tokens = 512 if run.rehearse else tokens
        self.quantized = quantized

    def named(self, case: str) -> str:
        return f"{case}, fp8" if self.quantized else case

    @functools.cached_property
    def pool(self) -> Filled:
        return Filled(Heads.of(self._run), self._tokens, self._run, self.quantized)


def kilo(tokens: int) -> str:
    for unit, name in ((2**20, "M"), (2**10, "K")):
        if tokens >= unit and tokens % unit == 0:
            return f"{tokens // unit}{name}"
    return str(tokens)


def chunks(run: Run) -> Iterator[Case]:
    news = (8, 64) if run.rehearse else (32, 128, 512, 2048)
    for lazily in (Lazily(run, 2**21), Lazily(run, 2**21, quantized=True)):
        for cached in (128,) if run.rehearse else (2**17, 2**20):
            yield (
                lazily.named(f"after {kilo(cached)}"),
                functools.partial(_chunks, lazily, cached, news, run),
            )


def _chunks(lazily: Lazily, cached: int, news: tuple[int, ...], run: Run) -> list[Row]:
    pool = lazily.pool
    entries = {f"{new} new": pool.launches([cached + new], new)[OURS] for new in news}
    if cached <= 2**17 and not lazily.quantized:  # the nearest thing that others have
        entries |= {
            f"{new} new, cudnn by jax, no mask": cudnn(pool.heads, 1, new, cached, False)
            for new in (news[0], news[-1])
        }
    timed, faults = in_turns(entries, run.pace)
    base = timed.get(f"{news[-1]} new")
    rows = []
    for name, one in timed.items():
        new = int(name.split()[0])
        pairs = new * cached + (0 if "mask" in name else new * (new + 1) / 2)
        row: Row = {
            "case": lazily.named(f"{name} after {kilo(cached)}"),
            "ms": one.spread(1e3),
            "us/token": one.median / new * 1e6,
            "TF/s": pool.heads.flops(pairs) / one.median / 1e12,
            "KV GB/s": pool.bytes([cached + new]) / one.median / 1e9,
        }
        if base is not None:
            row[f"time per token / that of {news[-1]}"] = faster(base, one, news[-1] / new)
        rows.append(row)
    return rows + absent(lazily.named(f"after {kilo(cached)}"), faults)


# --- decode


def decode(run: Run) -> Iterator[Case]:
    wide = Lazily(run, 2**21)
    eight = Lazily(run, 2**21, quantized=True)
    peers = Peers(run)
    K = 2**10
    if run.rehearse:
        plan = {"1 x 256": [256], "4 x 20 to 130": [20, 47, 90, 130]}
        quantized = ["4 x 20 to 130"]
    else:
        each = {
            1: (K, 8 * K, 64 * K, 256 * K, K * K),
            8: (K, 8 * K, 64 * K, 512 * K),
            64: (K, 8 * K, 64 * K),
            256: (K, 8 * K, 32 * K),
        }
        plan = {
            f"{batch} x {kilo(context)}": [context] * batch
            for batch, contexts in each.items()
            for context in contexts
        }
        ragged = np.random.default_rng(run.seed)
        plan["64 x 1K to 256K"] = (K * 256 ** ragged.random(64)).astype(int).tolist()
        plan["256 x 1K to 8K, one 1M"] = [K * K, *ragged.integers(K, 8 * K, 255).tolist()]
        quantized = ["1 x 1M", "8 x 64K", "64 x 8K", "64 x 1K to 256K"]
    for name, contexts in plan.items():
        yield name, functools.partial(_decode, name, contexts, wide, peers, run)
    for name in quantized:
        yield (
            eight.named(name),
            functools.partial(_decode, eight.named(name), plan[name], eight, peers, run),
        )


BESIDE = ("1 x 256", "1 x 64K", "8 x 64K", "64 x 8K")  # decodes that are measured beside peers


def _decode(name: str, contexts: list[int], lazily: Lazily, peers: Peers, run: Run) -> list[Row]:
    pool = lazily.pool
    faults = dict[str, str]()
    entries = pool.launches(contexts, 1)
    if name in BESIDE:
        entries |= peers.entries(pool.heads, len(contexts), 1, contexts[0], False, faults)
    timed, more = in_turns(entries, run.pace)
    copy = run.figure("ceilings", "copy", "GB/s")
    rows = []
    alone = timed.pop(ALONE, None)
    for which, one in timed.items():
        speed = pool.bytes(contexts) / one.median / 1e9
        row: Row = {
            "case": name if which == OURS else f"{name}, {which}",
            "us": one.spread(1e6),
            "KV GB/s": speed,
        }
        row |= {"of copy": speed / copy} if copy else {}
        row |= {"alone us": alone.median * 1e6} if alone and which == OURS else {}
        if which != OURS and OURS in timed:
            row["speed of ours / it"] = faster(timed[OURS], one)
        rows.append(row)
    return rows + absent(name, faults | more)


# --- block shapes


def tiles(run: Run) -> Iterator[Case]:
    wide = Lazily(run, 2**21)
    eight = Lazily(run, 2**21, quantized=True)
    if run.rehearse:
        plan: dict[str, tuple[int, list[int]]] = {"chunk 8 after 128": (8, [136])}
        quantized = list(plan)
    else:
        K = 2**10
        plan = {
            "chunk 8K after 0": (8 * K, [8 * K]),
            "decode 64 x 8K": (1, [8 * K] * 64),
            "chunk 32 after 128K": (32, [128 * K + 32]),
            "decode 1 x 1M": (1, [K * K]),
            "chunk 512 after 128K": (512, [128 * K + 512]),
            "decode 1 x 8K": (1, [8 * K]),
        }
        quantized = ["chunk 512 after 128K", "decode 64 x 8K"]
    for name, (T, contexts) in plan.items():
        yield name, functools.partial(_tiles, T, contexts, wide, run)
    for name in quantized:
        yield eight.named(name), functools.partial(_tiles, *plan[name], eight, run)


def shapes_to_try(rows: int, head_dim: int, dtype: Any, rehearse: bool) -> dict[str, Any]:
    """Block shapes by name, for a number of query rows of a kv head and pages of a type; the first
    is the default."""
    from jaxserve.kernels import mosaic
    from jaxserve.kernels.mosaic.tiles import SHARED_BYTES

    cores = getattr(jax.devices()[0], "core_count", None) or 132
    base = mosaic.default_tiles(rows, head_dim, dtype, 2 if rehearse else cores)
    found: dict[str, Any] = {"default": base}
    all_keys, all_stages, all_narrow = (
        ((64,), (2,), (2,)) if rehearse else ((64, 128), (2, 3, 4), (1, 2, 4))
    )
    for warpgroups, keys, stages, narrow in itertools.product(
        (1, 2), all_keys, all_stages, all_narrow if base.narrow else (0,)
    ):
        one = dataclasses.replace(
            base, keys=keys, warpgroups=warpgroups, stages=stages, narrow=narrow
        )
        blocks_per_core = SHARED_BYTES // one.shared_bytes(head_dim)  # that fit shared memory
        name = f"keys {keys} warpgroups {warpgroups} stages {stages}" + (
            f" narrow {narrow}" if narrow else ""
        )
        if blocks_per_core:
            found[name] = one
        if blocks_per_core > 1 and warpgroups == 1 and not rehearse:
            found[f"{name}, twice the blocks"] = dataclasses.replace(one, blocks=2 * base.blocks)
    return found


def _tiles(T: int, contexts: list[int], lazily: Lazily, run: Run) -> Row:
    pool = lazily.pool
    shapes = shapes_to_try(T * pool.heads.G, pool.heads.H, pool.dtype, run.rehearse)
    pace = dataclasses.replace(
        run.pace, rounds=min(3, run.pace.rounds), seconds=run.pace.seconds / 2
    )
    arguments = pool.arguments(contexts, T)
    timed: dict[str, Timed] = {}
    faults: dict[str, str] = {}
    names = iter(shapes)
    while batch := list(itertools.islice(names, 4)):  # some at a time, for time may run out
        if run.left < 0:
            faults |= dict.fromkeys([*batch, *names], "out of time")
            break
        entries = {
            name: launches(
                attend(pool.heads, PAGE, run, shapes[name]), *arguments, each=layers(run)
            )
            for name in batch
        }
        more, why = in_turns(entries, pace)
        timed = timed | more
        faults = faults | why
    if not timed:
        raise RuntimeError("; ".join(dict.fromkeys(faults.values())))
    best = min(timed, key=lambda name: timed[name].median)
    row: Row = {"best": best, "best us": timed[best].median * 1e6}
    if "default" in timed:
        row |= {
            "default us": timed["default"].median * 1e6,
            "default / best": timed["default"].median / timed[best].median,
        }
    every = {name: one.spread(1e6) for name, one in timed.items()}
    shape = {"rows": T * pool.heads.G, "head_dim": pool.heads.H, "dtype": str(pool.dtype)}
    return {
        **row,
        "tried": len(timed),
        "every": [every],
        "faults": [faults],
        "shape": [shape],
        "tiles": [{name: dataclasses.asdict(one) for name, one in shapes.items()}],
    }
