"""The whole engine on one device with random weights, and what its pools cost in memory.

The engine is the project's own (`engine.build`); only its weights are made on the device instead of
on the host, which would take minutes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.gpu.attention import Heads, attend, kilo, made
from experiments.benchmarks.gpu.timing import Pace, Timed, in_turns, launches
from experiments.benchmarks.gpu.worker import Case, Row, Run, stand_in
from jaxserve.kernels.kv_pages import KVPages

# dense bf16 TF/s and GB/s of the data sheet
PEAK = {"NVIDIA H200": (989.4, 4800.0), "NVIDIA H100 80GB HBM3": (989.4, 3350.0)}
PROMPTS = {8192: (512, 2048, 8192), 32768: (512, 2048, 8192), 131072: (2048,)}
TAPE = 2**22 - 3  # odd, so that rows of no width repeat soon
DECODES = {1: (1024, 8192, 32768), 8: (1024, 8192, 32768), 64: (1024, 8192, 32768)}


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a replica: tokens of the longest sequence and of a step, sequences, GiB of KV and
    its type, and layers where not all."""

    longest: int
    chunk: int
    seqs: int
    gib: float
    least: int = 64  # tokens of a row where chunks share a step
    kv: str = "auto"
    layers: int | None = None


WHOLE = Size(2**17, 8192, 64, 48.0)
EIGHT = Size(2**20, 2048, 64, 72.0, 32, "fp8")  # a million tokens of KV beside all weights
# ten million tokens, in as many layers as there is memory for
SLICE = Size(10 * 2**20, 2048, 2, 84.0, 32, layers=2)
TINY = Size(512, 64, 4, 0.01, 16)


class Replica:
    """An engine that was not started, and steps on it. Errors of its making come again whenever it
    is asked for."""

    def __init__(self, run: Run, size: Size = WHOLE):
        self.run = run
        self.size = (
            dataclasses.replace(TINY, kv=size.kv, layers=size.layers and 1)
            if run.rehearse
            else size
        )
        # Llama 3 in shape, with room for long contexts
        self.model = "tiny" if run.rehearse else "llama3.1-8b"

    @functools.cached_property
    def engine(self) -> Any:
        stand_in()
        from jaxserve.checkpoint.zoo import MODELS
        from jaxserve.engine import build, loading
        from jaxserve.settings.schema import CacheConfig, EngineConfig, ModelSource, SchedulerConfig

        cache = Path(self.run.folder) / "xla"
        cache.mkdir(mode=0o700, exist_ok=True)
        tiny = self.run.rehearse
        size = self.size
        whole = MODELS[self.model]
        shape = dataclasses.replace(
            whole, layers=size.layers or whole.layers, max_len=max(whole.max_len, size.longest)
        )
        pages = CacheConfig(
            kv_memory_gib=size.gib, block_size=16 if tiny else 64, kv_cache_dtype=size.kv
        )
        scheduler = SchedulerConfig(
            max_seqs=size.seqs, chunk_tokens=size.chunk, min_chunk=size.least
        )
        source = ModelSource(f"random:{self.model}", dtype="bfloat16", max_model_len=size.longest)
        config = EngineConfig(
            source, cache=pages, scheduler=scheduler, profile="none", compile_cache=str(cache)
        )
        with (
            mock.patch.object(loading, "load", on_device),
            mock.patch.dict(MODELS, {self.model: shape}),
        ):
            return build.build(config, progress=False, warm_up=False)

    @functools.cached_property
    def steps(self) -> Any:
        from jaxserve.engine.profiling.measure import MeasurePoint, StepTimer

        stages = self.engine.worker.stages

        class Steps(StepTimer):
            """Steps by what they hold, ready to be issued."""

            def of(self, **point: Any) -> Any:
                return self.arrays(MeasurePoint(**point))

            def launches(self, arrays: list[Any], sample: bool) -> Any:
                """Launches of these steps in a row; a token is sampled after each, or after the
                last."""

                def run(count: int) -> float:
                    began = time.perf_counter()
                    done = None
                    for _ in range(count):
                        for number, one in enumerate(arrays):
                            hidden = stages.step(one.shape, one.rows, 0)
                            done = hidden.ints
                            if sample or number == len(arrays) - 1:
                                done = stages.sample(hidden, "greedy").tokens
                    jax.block_until_ready(done)
                    return time.perf_counter() - began

                return run

        return Steps(self.engine.worker)

    def flops(self, tokens: int, pairs: float, samples: int) -> float:
        """Counts operations of the products with weights, and of attention; the head is applied
        where a token is sampled."""
        config = self.engine.worker.plan.model
        table = config.vocab * config.d_model
        inner = config.parameters - table * (1 if config.tied else 2)
        return (
            2.0 * (inner * tokens + table * samples)
            + 4.0 * config.layers * config.heads * config.head_dim * pairs
        )

    def bytes(self, tokens: float) -> float:
        """Bytes that a step must read: weights once, and KV of `tokens` tokens."""
        config = self.engine.worker.plan.model
        weights = config.parameters - (0 if config.tied else config.vocab * config.d_model)
        vector = config.head_dim + 2 if self.size.kv == "fp8" else 2 * config.head_dim
        return 2.0 * weights + config.kv_bytes_per_token(vector) // config.head_dim * tokens

    def compile(self, arrays: list[Any]) -> float:
        """Compiles what these steps need, several at a time; returns the seconds."""
        stages = self.engine.worker.stages
        began = time.perf_counter()
        wanted = {f"layers_0_{one.shape}" for one in arrays} | {
            f"head_greedy_{one.shape.samples}" for one in arrays
        }
        programs = dict(stages.programs.all(("greedy",)))
        stages.programs.warm_up(
            {name: programs[name] for name in sorted(wanted)}, lambda name: None
        )
        return time.perf_counter() - began


def on_device(
    checkpoint: Any,
    model: Any,
    declared: Mapping[str, Any],
    shardings: Mapping[str, Any],
    dtype: Any,
    progress: bool = True,
) -> dict[str, jax.Array]:
    """Stands in for `weights.load`: norms are one, all other weights repeat one array of normal
    random numbers with standard deviation 0.02."""
    tape = 0.02 * jax.random.normal(jax.random.key(0), (TAPE,), dtype)

    @functools.cache
    def maker(shape: tuple[int, ...], where: Any, norm: bool) -> Any:
        def f(tape: jax.Array) -> jax.Array:
            size = math.prod(shape)
            return (
                jnp.ones(shape, dtype)
                if norm
                else jnp.tile(tape, -(-size // TAPE))[:size].reshape(shape)
            )

        return jax.jit(f, out_shardings=where)

    return {
        path: maker(one.shape, shardings[path], "norm" in path)(tape)
        for path, one in declared.items()
    }


def engine(run: Run) -> Iterator[Case]:
    replica = Replica(run)
    prompts = {64: (16, 64)} if run.rehearse else PROMPTS
    decodes = {1: (32,), 4: (32, 300)} if run.rehearse else DECODES
    yield "build", functools.partial(_build, replica)
    yield (
        "compile",
        functools.partial(
            _compile,
            replica,
            sorted({chunk for chunks in prompts.values() for chunk in chunks}),
            decodes,
        ),
    )
    for batch, contexts in decodes.items():
        for context in contexts:
            yield (
                f"decode {batch} x {kilo(context)}",
                functools.partial(_decode, replica, batch, context),
            )
    passes = [(length, chunk) for length, chunks in prompts.items() for chunk in chunks]
    case = lambda length, chunk: (
        f"prefill {kilo(length)} by {chunk}",
        functools.partial(_prefill, replica, length, chunk),
    )
    yield from (case(*one) for one in passes if one[0] <= 2**15)
    yield "memory of steps", functools.partial(_memory_of_steps, replica)
    yield "requests", functools.partial(_requests, replica)
    yield "host time", functools.partial(_host_time, replica)
    yield from (case(*one) for one in passes if one[0] > 2**15)


def long(
    run: Run, size: Size, contexts: tuple[int, ...], batches: tuple[int, ...]
) -> Iterator[Case]:
    """Steps of sequences that are as long as `size` allows: chunks of a prompt after a number of
    cached tokens, and decodes."""
    replica = Replica(run, size)
    news = (32, 512, 2048)
    if run.rehearse:
        contexts = (300,)
        news = (16, 64)
        batches = batches[:1]
    yield "build", functools.partial(_build, replica)
    yield "compile", functools.partial(_compile, replica, news, batches)
    for cached in contexts:
        for new in news:
            yield (
                f"chunk {new} after {kilo(cached)}",
                functools.partial(_chunk, replica, cached, new),
            )
        for batch in batches:
            yield (
                f"decode {batch} x {kilo(cached)}",
                functools.partial(_decode, replica, batch, cached),
            )


def engine_1m(run: Run) -> Iterator[Case]:
    yield from long(run, EIGHT, (2**17, 2**19, 2**20 - 2048), (1, 8, 64))


def engine_10m(run: Run) -> Iterator[Case]:
    yield from long(run, SLICE, (2**20, 10 * 2**20 - 2048), (1,))


def _build(replica: Replica) -> Row:
    began = time.perf_counter()
    built = replica.engine
    jax.block_until_ready([stage.values for stage in built.worker.stages.stages])
    seconds = time.perf_counter() - began
    weights = sum(value.nbytes for stage in built.worker.stages.stages for value in stage.values)
    pool = sum(
        array.nbytes
        for stage in built.worker.stages.stages
        for array in jax.tree.leaves(stage.caches)
    )
    return {"s": seconds, "GiB": weights / 2**30, "pool GiB": pool / 2**30, "model": replica.model}


def _compile(replica: Replica, chunks: Iterable[int], batches: Iterable[int]) -> Row:
    steps = replica.steps
    arrays = [steps.of(decodes=batch, context=1) for batch in batches]
    arrays += [steps.of(chunks=1, new=chunk, sample=False) for chunk in chunks]
    seconds = replica.compile(arrays)
    programs = replica.engine.worker.stages.programs.compiled
    ours = sum(
        "mosaic" in program.as_text()
        for name, program in programs.items()
        if name.startswith("layers")
    )
    return {"s": seconds, "programs": len(programs), "with our kernel": ours}


def _pace(run: Run, once: float) -> Pace:
    """Returns the pace of what takes `once` seconds: as many rounds as a third of the time left
    allows; a launch that is long is a round."""
    least, most = 2, 5
    if once > 0.3:
        least, most = 1, 3
    if run.rehearse:
        least, most = 1, 2
    rounds = int(np.clip(run.left / 3 / max(least * once, 1e-9), 1, most))
    return Pace(rounds, 0.1 if once < 0.1 else 0.0, least)


def _timed(replica: Replica, launch: Any) -> Timed:
    launch(1)
    return in_turns({"it": launch}, _pace(replica.run, launch(1)))[0]["it"]


def _shares(replica: Replica, flops: float | None, moved: float | None, seconds: float) -> Row:
    """MFU and MBU: shares of what was measured here, and of the data sheet."""
    run = replica.run
    row = {}
    sheet = PEAK.get(jax.devices()[0].device_kind)
    if flops is not None:
        product = run.figure("ceilings", "matrix product 8192x8192x8192", "TF/s")
        row["TF/s"] = flops / seconds / 1e12
        row |= {"MFU of measured": row["TF/s"] / product} if product else {}
        row |= {"MFU of sheet": row["TF/s"] / sheet[0]} if sheet else {}
    if moved is not None:
        copy = run.figure("ceilings", "copy", "GB/s")
        row["GB/s"] = moved / seconds / 1e9
        row |= {"MBU of copy": row["GB/s"] / copy} if copy else {}
        row |= {"MBU of sheet": row["GB/s"] / sheet[1]} if sheet else {}
    return row


def _decode(replica: Replica, batch: int, context: int) -> Row:
    launch = replica.steps.launches([replica.steps.of(decodes=batch, context=context)], True)
    timed = _timed(replica, launch)
    moved = replica.bytes(batch * context)
    return {
        "ms": timed.spread(1e3),
        "tokens/s": batch / timed.median,
        **_shares(replica, None, moved, timed.median),
    }


def _prefill(replica: Replica, length: int, chunk: int) -> Row:
    steps = replica.steps
    run = replica.run
    arrays = [
        steps.of(chunks=1, cached=at, new=chunk, sample=False) for at in range(0, length, chunk)
    ]
    last = steps.launches([arrays[-1]], False)
    last(1)
    once = last(1) * len(arrays)  # at most
    if once > run.left:
        raise TimeoutError(
            f"the last chunk takes {1e3 * once / len(arrays):.0f} ms; "
            f"{len(arrays)} of them take longer than the time left"
        )
    launch = steps.launches(arrays, False)
    timed = (
        in_turns({"it": launch}, _pace(run, once))[0]["it"]
        if once < run.left / 6
        else Timed((launch(1),), 1)
    )
    flops = replica.flops(length, length * (length + 1) / 2, 1)
    return {
        "ms": timed.spread(1e3),
        "tokens/s": length / timed.median,
        **_shares(replica, flops, None, timed.median),
    }


def _chunk(replica: Replica, cached: int, new: int) -> Row:
    timed = _timed(
        replica,
        replica.steps.launches(
            [replica.steps.of(chunks=1, cached=cached, new=new, sample=False)], False
        ),
    )
    flops = replica.flops(new, new * (cached + new / 2), 0)
    return {
        "ms": timed.spread(1e3),
        "us/token": timed.median / new * 1e6,
        **_shares(replica, flops, replica.bytes(cached + new), timed.median),
    }


def _requests(replica: Replica) -> Row:
    """Two requests, one after the other, through all of the engine but its thread."""
    from jaxserve.api.events import Finished
    from jaxserve.api.request import Request
    from jaxserve.api.sampling import SamplingParams

    built = replica.engine
    ends = list[Any]()
    length, output = (40, 6) if replica.run.rehearse else (2048, 64)
    sampling = SamplingParams.make(temperature=0, max_tokens=output, ignore_eos=True)
    for number in range(2):  # the first one may compile
        prompt = np.random.default_rng(number).integers(0, built.info.vocab, length)
        request = Request.make(
            str(number),
            prompt,
            sampling,
            vocab=built.info.vocab,
            max_len=built.info.max_model_len,
            arrival=built.now(),
        )
        built.submit(
            request,
            lambda events: ends.extend(event for event in events if isinstance(event, Finished)),
        )
        while built.step():
            pass
    end = ends[-1]
    if (end.reason, end.usage.completion) != ("length", output):
        raise RuntimeError(
            f"ended with {end.reason} after {end.usage.completion} tokens of {output}"
        )
    return {
        "prompt": length,
        "ttft ms": 1e3 * end.timing.first_token,
        "tpot ms": 1e3 * end.timing.tpot(output),
    }


def _host_time(replica: Replica) -> list[Row]:
    """The host's microseconds per decode step: medians, and of the total the 90th of a hundred."""
    from jaxserve.lab.cli.bench.host_time import Crowd, host_time

    rows = []
    for crowd in (
        (Crowd(4, 32, 8),) if replica.run.rehearse else (Crowd(1, 1024, 60), Crowd(64, 1024, 60))
    ):
        measured = host_time(replica.engine, crowd, lambda name: None).record()
        micros = {f"{part} us": x["p50"] for part, x in measured["micros"].items()} | {
            "total p90 us": measured["micros"]["total"]["p90"]
        }
        rows.append(
            {
                "case": f"host time {crowd.sequences} x {kilo(crowd.context)}",
                **micros,
                "bytes": measured["bytes_per_step"]["p50"],
            }
        )
    return rows


def command_buffers(run: Run) -> Iterator[Case]:
    """Decode steps and the host's time under the XLA flags that this process was started with."""
    replica = Replica(run)
    for batch, context in ((1, 32),) if run.rehearse else ((1, 1024), (64, 1024)):
        yield (
            f"decode {batch} x {kilo(context)}",
            functools.partial(_decode, replica, batch, context),
        )
    yield "host time", functools.partial(_host_time, replica)


# --- memory


def _peak() -> int:
    return int((jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0))


def _analysed(name: str, compiled: Any, pool: int, shapes: tuple[str, ...]) -> Row:
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


def _memory_of_steps(replica: Replica) -> list[Row]:
    stage = replica.engine.worker.stages.stages[0]
    pool = sum(array.nbytes for array in jax.tree.leaves(stage.caches))
    one = stage.caches[0].kv
    shape = f"bf16[{','.join(map(str, one.shape))}]", f"bf16[{','.join(map(str, one.shape[1:]))}]"
    programs = replica.engine.worker.stages.programs.compiled
    rows = [
        _analysed(name, program, pool, shape)
        for name, program in programs.items()
        if name.startswith("layers")
    ]
    weights = sum(
        value.nbytes for value in [*stage.values, *replica.engine.worker.stages.head.values]
    )
    return [
        *rows,
        {
            "case": "all steps",
            "pool GiB": pool / 2**30,
            "peak - weights - pool GiB": (_peak() - weights - pool) / 2**30,
        },
    ]


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
    row = _analysed(
        "append and attend",
        compiled,
        pool,
        (f"bf16[{tokens // size},{heads.K},2,{size},{heads.H}]", f"bf16[{flats[0].size}]"),
    )
    before = _peak()
    state = {"flats": flats}
    del flats

    def once() -> jax.Array:
        out, state["flats"] = compiled(state["flats"], q, kv, *rest)
        return out

    timed = in_turns({"it": launches(once, ())}, run.pace)[0]["it"]
    return [{**row, "ms": timed.spread(1e3), "peak grew MiB": (_peak() - before) / 2**20}]


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
