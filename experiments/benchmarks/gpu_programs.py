"""Shows what the compiled programs of a step launch, move and compute, on GPUs that are not there.

    python -m experiments.benchmarks.gpu_programs --targets=h100 --models=qwen3-8b

Nothing runs on a GPU: programs are compiled ahead of time, by a compiler that
`python -m experiments.gpu_targets.compiler` fetches, and their text is read. A step is a program of
all layers and one that samples. Compiled programs are kept in the cache folder.

estimate: every byte of weights and KV once at `BANDWIDTH` of the data sheet's rate, or the
products of the program at `PRODUCTS` of its peak, whichever takes longer; all other bytes at the
rate of the L2 cache, or at that of memory where an array is larger than the cache; and `LAUNCH`
seconds for each launch. ideal: what a step needs at the data sheet's rates. Between ranks, nothing
is counted for the links.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments.gpu_targets import compiler
from experiments.gpu_targets.hlo import ATTENTION, Classes, Program, Sizes, Traffic, added
from experiments.gpu_targets.programs import (
    BLOCK,
    DTYPE,
    Compiled,
    Replica,
    compiled,
    head_program,
    layers_program,
)
from experiments.gpu_targets.sheets import TARGETS, Rates
from experiments.gpu_targets.thunks import Pieces
from experiments.script import command_line, keep
from jaxserve.checkpoint.model import declare
from jaxserve.checkpoint.specs import Declared, ExpertsSpec
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.cli.display import table
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.step_shapes import StepShape
from jaxserve.kernels import xla
from jaxserve.kernels.kv_pages import pool_shapes
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError
from jaxserve.sharding.mesh import KVP, TP
from jaxserve.sharding.rules import devices

PLAIN_MODELS = ("llama3.1-8b", "qwen3-8b", "qwen3-30b-a3b")
BANDWIDTH = 0.90  # of the data sheet's, for weights and KV
PRODUCTS = 0.70  # of the data sheet's dense peak
LAUNCH = 1.5e-6  # seconds from the end of a kernel to the start of the next
L2_BYTES = 21.0  # of intermediates, for each multiprocessor and clock: 5.5 TB/s on an H100
DEPTHS = (2, 3)  # layers that are compiled: the last one differs from those before it


@dataclasses.dataclass(frozen=True)
class Step:
    """A step: decodes of sequences with `context` tokens each, and a chunk of a prompt after
    `cached` tokens. variant: of the sampling program; '': nothing is sampled."""

    decodes: int = 0
    context: int = 1024
    chunk: int = 0
    cached: int = 0
    variant: str = "greedy"

    @property
    def tokens(self) -> int:
        return self.decodes + self.chunk

    @property
    def samples(self) -> int:
        """Tokens that it samples."""
        return (self.decodes + (self.chunk > 0)) * bool(self.variant)

    @property
    def keys(self) -> int:
        """Tokens whose KV it reads."""
        return self.decodes * self.context + self.cached + self.chunk

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key that it sees."""
        return self.decodes * self.context + self.chunk * (self.cached + (self.chunk + 1) / 2)


STEPS = {
    "decode 64 x 1K": Step(64),
    "decode 64 x 1K, sampled": Step(64, variant="drawn"),
    "decode 256 x 1K": Step(256),
    "decode 256 x 1K, sampled": Step(256, variant="drawn"),
    "decode 256 x 1K, penalties": Step(256, variant="full"),
    "decode 256 x 1K, guided": Step(256, variant="guided"),
    "decode 8 x 128K": Step(8, context=2**17),
    "prefill 2048": Step(chunk=2048),
    "8 decodes + 2048": Step(8, chunk=2048),
}


def shape_of(plan: StagePlan, step: Step) -> StepShape:
    """Finds the cheapest shape that holds a step."""
    return next(
        shape
        for shape in plan.shapes
        if shape.decode.rows >= step.decodes and shape.prefill.width >= step.chunk
    )


# --- what a step needs


@dataclasses.dataclass(frozen=True)
class Needs:
    """Bytes of weights and of KV that a step must read on each device, and its operations."""

    weights: float
    kv: float
    flops: float
    attention: float  # is in `flops` too

    def seconds(self, rates: Rates) -> float:
        """Returns the time that it takes at these rates."""
        return max((self.weights + self.kv) / rates.bandwidth, self.flops / rates.flops)


def needs(plan: StagePlan, step: Step) -> Needs:
    """Counts what a step needs: each matrix once, of experts those that are expected to have a
    token where tokens choose at random."""
    model = plan.model
    tp = plan.mesh.tp
    weights = flops = 0.0
    for path, declared in declare(model, range(model.layers), tp).items():
        if path == "embed" or (path == "head" and not step.samples):  # some rows, or none
            continue
        size = _elements(declared, plan)
        item = declared.dtype(np.dtype(plan.dtype)).itemsize
        tokens = float(step.samples if path == "head" else step.tokens)
        read = 1.0
        if declared.axes[0] == "experts":
            spec = next(mlp for mlp in model.mlps if isinstance(mlp, ExpertsSpec))
            share = spec.active / spec.count
            read = 1 - (1 - share) ** tokens
            tokens *= share
        weights += read * size * item
        flops += 2 * tokens * size * (declared.inputs > 0)
    vectors, numbers = model.page
    heads = vectors, max(model.kv_heads // tp, 1)
    token = jax.tree.leaves(pool_shapes((*heads, 1, numbers), plan.kv_dtype))
    kv = float(step.keys * model.layers * sum(x.size * x.dtype.itemsize for x in token))
    attention = 4.0 * step.pairs * model.heads * model.head_dim * model.layers / tp
    return Needs(weights, kv, flops + attention, attention)


def _elements(declared: Declared, plan: StagePlan) -> int:
    """Elements of a parameter on a device."""
    degrees = {TP: plan.mesh.tp, KVP: 1}
    return declared.size // math.prod(devices(axis, degrees) for axis in declared.axes)


# --- rows


@dataclasses.dataclass(frozen=True)
class Counts:
    """Launches of a program by class, its parts as the host sees them, and its temporary bytes."""

    classes: Classes
    pieces: Pieces
    temp: float

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            added(self.classes, other.classes),
            self.pieces + other.pieces,
            max(self.temp, other.temp),
        )

    def deeper(self, one_more: Counts, further: int) -> Counts:
        """Counts a program with `further` layers beyond those of `one_more`, which has one more
        than this: each adds what that one did."""
        return Counts(
            added(added({}, one_more.classes, 1 + further), self.classes, -further),
            one_more.pieces * (1 + further) + self.pieces * -further,
            one_more.temp,
        )


@dataclasses.dataclass(frozen=True)
class Row:
    """A step on a target. beyond: bytes that are moved beside weights and KV. seconds: estimated,
    and ideal. reason: why there are no figures, or ''; note: what to know of them."""

    target: str
    model: str
    tp: int
    step: str
    launches: float = 0.0
    pieces: Pieces = dataclasses.field(default_factory=Pieces)
    beyond: float = 0.0
    temp: float = 0.0
    seconds: float = 0.0
    ideal: float = 0.0
    classes: Classes = dataclasses.field(default_factory=dict)
    reason: str = ""
    note: str = ""


def _rows_of(replica: Replica, steps: Mapping[str, Step], whole: bool) -> list[Row]:
    """Compiles the programs of steps and counts each. Errors: CompilerError."""
    of = functools.partial(Row, replica.target, replica.model, replica.tp)
    try:
        plan = replica.plan()
    except ConfigError as error:
        return [of(name, reason=str(error)) for name in steps]
    depths = (plan.model.layers,) if whole else DEPTHS
    programs = {
        name: [
            *(layers_program(shape_of(plan, step), depth) for depth in depths),
            head_program(shape_of(plan, step), step.variant),
        ]
        for name, step in steps.items()
    }
    found = compiled(replica, dict.fromkeys(one for each in programs.values() for one in each))
    out = []
    for name, step in steps.items():
        ones = [found[program] for program in programs[name]]
        reason = next((one.reason for one in ones if one.reason), "")
        out.append(of(name, reason=reason) if reason else _row(replica, plan, name, step, ones))
    return out


def _row(
    replica: Replica, plan: StagePlan, name: str, step: Step, programs: Sequence[Compiled]
) -> Row:
    gpu = replica.gpu
    sizes = _sizes(plan, step, int(gpu.number("l2_cache_size")))
    *layers, head = (
        Counts(Program(one.hlo, sizes).traffic(), Pieces.parse(one.thunks), one.temp)
        for one in programs
    )
    total = layers[0] + head
    if len(layers) == 2:
        total = layers[0].deeper(layers[1], plan.model.layers - DEPTHS[1]) + head
    needed = needs(plan, step)
    launched = functools.reduce(Traffic.__add__, total.classes.values())
    streamed = launched.streamed + max(0.0, launched.pool - needed.kv)
    flops = launched.flops + needed.attention * (ATTENTION in total.classes)
    bandwidth = BANDWIDTH * gpu.bandwidth
    cache = L2_BYTES * gpu.number("core_count") * gpu.number("clock_rate_ghz") * 1e9
    seconds = max((needed.weights + needed.kv) / bandwidth, flops / (PRODUCTS * gpu.flops))
    seconds += launched.cached / cache + streamed / bandwidth + launched.launches * LAUNCH
    pool = plan.pages * plan.block_size
    return Row(
        replica.target,
        replica.model,
        replica.tp,
        name,
        launched.launches,
        total.pieces,
        launched.cached + streamed,
        total.temp,
        seconds,
        needed.seconds(gpu),
        total.classes,
        note=f"pages hold {pool:,} tokens" if pool < step.keys else "",
    )


def _sizes(plan: StagePlan, step: Step, cache: int) -> Sizes:
    """Sizes of arrays, and rounds of XLA's loops over keys: of decodes, and of the tiles of a
    chunk, which see a half of it on average."""
    shape = shape_of(plan, step)
    rows = shape.decode.rows
    span = lambda rows: max(1, min(xla.KEY_TILE, xla.KEY_TILE_ALL_ROWS // rows) // BLOCK) * BLOCK
    tiles = step.chunk / xla.QUERY_TILE
    chunk = (tiles + 1) / 2 * xla.QUERY_TILE / span(1)
    weights = declare(plan.model, range(plan.model.layers), plan.mesh.tp).values()
    item = lambda one: one.dtype(np.dtype(plan.dtype)).itemsize
    return Sizes(
        pool=math.prod(plan.pool().kv.shape) // plan.mesh.tp,
        weights=frozenset(_elements(one, plan) * item(one) for one in weights if one.inputs),
        cache=cache,
        loop=math.ceil(step.context / span(rows)) if rows else chunk,
        inner_loop=chunk,
    )


# --- the command

OPTIONS = {
    "gpu_programs": [
        Option("targets", str, ",".join(TARGETS), "GPUs, comma-separated"),
        Option("models", str, ",".join(PLAIN_MODELS), "names of jaxserve/checkpoint/zoo.py"),
        Option("steps", str, "", f"some of: {'; '.join(STEPS)}; separated by semicolons"),
        Option("tp", str, "1", "ranks, comma-separated"),
        Option("whole", bool, False, "compile all layers, not one and two of them"),
        Option("json", str, None, "file for all figures"),
    ]
}


def shown(rows: Sequence[Row]) -> str:
    """Formats rows as a table, with reasons and notes below it."""
    headers = ["target, model, tp: step", "launches", "graphs", "loops", "alone"]
    headers += ["beyond GB", "temp MB", "estimate ms", "ideal ms", "ratio"]
    lines = []
    remarks = []
    for row in rows:
        name = f"{row.target}, {row.model}, {row.tp}: {row.step}"
        if row.reason or row.note:
            remarks.append(f"{name}: {row.reason or row.note}")
        if row.reason:
            lines.append([name, *["-"] * (len(headers) - 1)])
            continue
        lines.append(
            [
                name,
                f"{row.launches:.0f}",
                f"{row.pieces.graphs:.0f}",
                f"{row.pieces.loops:.0f}",
                f"{row.pieces.alone:.0f}",
                f"{row.beyond / 1e9:.2f}",
                f"{row.temp / 1e6:.0f}",
                f"{row.seconds * 1e3:.2f}",
                f"{row.ideal * 1e3:.2f}",
                f"{row.seconds / row.ideal:.2f}",
            ]
        )
    return "\n".join([table(headers, lines), "", *remarks]).rstrip()


def run(values: dict[str, Any]) -> int:
    chosen = [name.strip() for name in values["steps"].split(";") if name.strip()] or list(STEPS)
    _check("steps", chosen, STEPS)
    targets = values["targets"].split(",")
    models = values["models"].split(",")
    _check("targets", targets, TARGETS)
    _check("models", models, MODELS)
    rows = []
    for target in targets:
        for model in models:
            for tp in map(int, values["tp"].split(",")):
                rows += rows_of(target, model, tp, chosen, values["whole"])
                print(f"{target}, {model}, tp={tp}", file=sys.stderr, flush=True)
    how = "all layers" if values["whole"] else f"each layer beyond {DEPTHS[1]} as the one before"
    print(f"Compiled, not run: jax {jax.__version__}, {DTYPE}, {how}\n")
    print(shown(rows))
    keep(values, jax=jax.__version__, rows=[dataclasses.asdict(row) for row in rows])
    return 0


def rows_of(
    target: str, model: str, tp: int = 1, names: Sequence[str] = tuple(STEPS), whole: bool = False
) -> list[Row]:
    """Compiles the programs of steps, given by names, and counts each; those with contexts beyond
    the model's limit on a replica with a higher one. Errors: CompilerError."""
    limit = MODELS[model].max_len
    short = {name: STEPS[name] for name in names if STEPS[name].context <= limit}
    long = {name: STEPS[name] for name in names if STEPS[name].context > limit}
    out = _rows_of(Replica(target, model, tp), short, whole) if short else []
    longest = max((step.context for step in long.values()), default=0)
    out += _rows_of(Replica(target, model, tp, longest), long, whole) if long else []
    return sorted(out, key=lambda row: names.index(row.step))


def _check(field: str, names: Sequence[str], known: Iterable[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(field, f"{unknown[0]!r} is none of {', '.join(known)}")


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    return command_line(
        "gpu_programs",
        "what the compiled programs of a step launch and move, on GPUs that are not there",
        Command(OPTIONS, run),
        given,
        compiler.CompilerError,
    )


if __name__ == "__main__":
    sys.exit(main())
