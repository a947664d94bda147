"""Steps of the whole engine: decodes that are greedy, sampled and guided, prefills, chunks and
decodes at long contexts, and the host's time beside them.

The kernels that a guided step samples by are measured, and the copy of its mask to the device; not
the work of a grammar on the host.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax

from experiments.benchmarks.gpu.attention import kilo
from experiments.benchmarks.gpu.pools import analysed, peak
from experiments.benchmarks.gpu.replica import Replica, Size, pace
from experiments.benchmarks.gpu.timing import faster, in_turns
from experiments.benchmarks.gpu.worker import Case, Row, Run
from experiments.benchmarks.gpu_programs import Step
from jaxserve.kernels.kv_pages import KVPages
from jaxserve.lab.cli.bench.host_time import Crowd, host_time

K = 2**10
M = 2**20
WHOLE = Size(136 * K, 8 * K, 64)
EIGHT = Size(M + 8 * K, 2 * K, 64, 32, "fp8")
SLICE = Size(10 * M + 8 * K, 2 * K, 2, 32, layers=2)
Pairs = tuple[tuple[int, int], ...]
# sequences, and tokens of each
DECODES: Pairs = ((1, K), (1, 32 * K), (1, 128 * K), (8, 8 * K), (8, 32 * K), (64, K), (64, 4 * K))
SAMPLED: Pairs = ((1, K), (64, K))
VARIANTS = {"drawn": "sampled", "guided": "guided"}
CHUNKS: Pairs = ((512, 128 * K), (2 * K, 128 * K))  # tokens, and those before them
PROMPTS: Pairs = ((8 * K, 512), (8 * K, 2 * K), (8 * K, 8 * K), (32 * K, 2 * K), (32 * K, 8 * K))


def named(step: Step) -> str:
    """Names a step of decodes, or of a chunk."""
    if step.chunk:
        return f"chunk {step.chunk} after {kilo(step.cached)}"
    kind = f", {VARIANTS[step.variant]}" if step.variant in VARIANTS else ""
    return f"decode {step.decodes} x {kilo(step.context)}{kind}"


def chunk(tokens: int, cached: int) -> Step:
    """A chunk in the middle of a prompt, which samples nothing."""
    return Step(chunk=tokens, cached=cached, variant="")


def prompt(length: int, each: int) -> list[Step]:
    """A prompt in chunks; a token is sampled after the last."""
    steps = [chunk(each, at) for at in range(0, length, each)]
    return [*steps[:-1], dataclasses.replace(steps[-1], variant="greedy")]


def engine(run: Run) -> Iterator[Case]:
    replica = Replica(run, WHOLE)
    decodes = DECODES
    sampled = SAMPLED
    chunks = CHUNKS
    prompts = PROMPTS
    if run.rehearse:
        decodes = ((1, 32), (4, 32), (4, 300))
        sampled = ((4, 32),)
        chunks = ((16, 300),)
        prompts = ((64, 16), (64, 64))
    greedy = [Step(*decode) for decode in decodes]
    unlike = [Step(*decode, variant=variant) for decode in sampled for variant in VARIANTS]
    deep = [chunk(*each) for each in chunks]
    whole = {f"prefill {kilo(length)} by {each}": prompt(length, each) for length, each in prompts}
    ends = [steps[-1] for steps in whole.values()]
    yield "build", replica.built
    yield "compile", functools.partial(replica.compiled, [*greedy, *unlike, *deep, *ends])
    for step in [*greedy, *deep]:
        yield named(step), functools.partial(measured, replica, step)
    for step in unlike:
        yield named(step), functools.partial(_beside_greedy, replica, step)
    for name, steps in whole.items():
        yield name, functools.partial(measured, replica, *steps)
    yield "memory of steps", functools.partial(_memory_of_steps, replica)
    yield "host time", functools.partial(_host_time, replica)


def measured(replica: Replica, *steps: Step) -> Row:
    """Steps in a row, beside their ideal; a row that says so where KV of one does not fit."""
    keys = max(step.keys for step in steps)
    if keys > replica.tokens:
        why = f"KV of {keys:,} tokens; pages hold {replica.tokens:,}"
        return {"status": "left out", "why": why}
    timed = replica.timed(*steps)
    tokens = sum(step.tokens for step in steps)
    return {
        "ms": timed.spread(1e3),
        "tokens/s": tokens / timed.median,
        **replica.beside_ideal(steps, timed.median),
    }


def _beside_greedy(replica: Replica, step: Step) -> Row:
    """A decode step that samples in another way, in turns with the greedy one."""
    launches = {
        variant: replica.launches(dataclasses.replace(step, variant=variant))
        for variant in ("greedy", step.variant)
    }
    for launch in launches.values():
        launch(1)
    timed, faults = in_turns(launches, pace(replica.run, launches[step.variant](1)))
    if faults:
        raise RuntimeError("; ".join(faults.values()))
    mine = timed[step.variant]
    return {
        "ms": mine.spread(1e3),
        "time / that of greedy": faster(timed["greedy"], mine),
        "tokens/s": step.tokens / mine.median,
        **replica.beside_ideal([step], mine.median),
    }


def _memory_of_steps(replica: Replica) -> list[Row]:
    """Memory of each program of layers; of all, what is beyond weights and pools at most."""
    stages = replica.stages
    (stage,) = stages.stages
    head = stages.head
    assert head is not None
    size = lambda arrays: sum(array.nbytes for array in jax.tree.leaves(arrays))
    pool = size(stage.caches)
    pages = stage.caches[0]
    assert isinstance(pages, KVPages)
    one = pages.kv
    shapes = tuple(f"bf16[{','.join(map(str, extent))}]" for extent in (one.shape, one.shape[1:]))
    rows = [
        analysed(name, program, pool, shapes)
        for name, program in stages.programs.compiled.items()
        if name.startswith("layers")
    ]
    beyond = peak() - size([stage.values, head.values]) - pool
    row = {"pool GiB": pool / 2**30, "peak - weights - pool GiB": beyond / 2**30}
    return [*rows, {"case": "all steps", **row}]


def _host_time(replica: Replica) -> list[Row]:
    """The host's microseconds per decode step: medians, and of the total the 90th of a hundred."""
    crowds = [Crowd(1, K, 60), Crowd(64, K, 60)]
    if replica.run.rehearse:
        crowds = [Crowd(4, 32, 8)]
    rows = []
    for crowd in crowds:
        figures = host_time(replica.engine, crowd, lambda name: None).record()
        micros = {f"{part} us": x["p50"] for part, x in figures["micros"].items()}
        rows.append(
            {
                "case": f"host time {crowd.sequences} x {kilo(crowd.context)}",
                **micros,
                "total p90 us": figures["micros"]["total"]["p90"],
                "bytes": figures["bytes_per_step"]["p50"],
            }
        )
    return rows


# --- long contexts


def engine_1m(run: Run) -> Iterator[Case]:
    """Up to a million tokens, in KV of 8 bits beside all weights."""
    yield from long(Replica(run, EIGHT), (128 * K, M), (1, 8))


def engine_10m(run: Run) -> Iterator[Case]:
    """Up to ten million tokens, in as many layers as there is memory for."""
    yield from long(Replica(run, SLICE), (M, 10 * M), (1,))


def long(replica: Replica, contexts: tuple[int, ...], batches: tuple[int, ...]) -> Iterator[Case]:
    """Decodes and chunks after these contexts, or after what pages hold if that is less."""
    news: tuple[int, ...] = (32, 512, 2 * K)
    unit = K
    if replica.run.rehearse:
        contexts = (300, M)
        news = (16, 64)
        unit = 16
    most = (min(replica.size.longest, replica.tokens) - news[-1]) // unit * unit
    ends = {min(context, most): context for context in contexts}
    steps = []
    for end in ends:
        steps += [chunk(new, end) for new in news]
        steps += [Step(batch, end) for batch in batches]
    yield "build", functools.partial(_built, replica, ends)
    yield "compile", functools.partial(replica.compiled, steps)
    for step in steps:
        yield named(step), functools.partial(measured, replica, step)


def _built(replica: Replica, ends: dict[int, int]) -> list[Row]:
    """Builds the engine; a row for each context that is cut."""
    cut = [
        {
            "case": kilo(wanted),
            "status": "cut",
            "why": f"{end:,} tokens instead: pages hold {replica.tokens:,}",
        }
        for end, wanted in ends.items()
        if end != wanted
    ]
    return [{"case": "build", **replica.built()}, *cut]
