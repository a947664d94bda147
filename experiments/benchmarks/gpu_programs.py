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
import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.gpu_targets import compiler
from experiments.gpu_targets.hlo import ATTENTION, Classes, Program, Sizes, Traffic, added
from experiments.gpu_targets.lowering import abstract_stages, as_on_a_gpu, as_on_hopper
from experiments.gpu_targets.sheets import TARGETS, Target
from experiments.gpu_targets.thunks import Pieces
from experiments.script import command_line, keep
from jaxserve.checkpoint.model import declare
from jaxserve.checkpoint.specs import Declared, ExpertsSpec
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.cli.display import table
from jaxserve.engine.memory import DeviceRoom, sizes
from jaxserve.engine.sizing import make_plan
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.stage_programs import graph_options
from jaxserve.engine.stages import Stages
from jaxserve.engine.step_shapes import StepShape
from jaxserve.files import write_whole
from jaxserve.folders import cache_folder
from jaxserve.kernels import xla
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)
from jaxserve.sharding.mesh import KVP, TP
from jaxserve.sharding.rules import devices

MODEL_NAMES = ("llama3.1-8b", "qwen3-8b", "qwen3-30b-a3b")
BANDWIDTH = 0.90  # of the data sheet's, for weights and KV
PRODUCTS = 0.70  # of the data sheet's dense peak
LAUNCH = 1.5e-6  # seconds from the end of a kernel to the start of the next
L2_BYTES = 21.0  # of intermediates, for each multiprocessor and clock: 5.5 TB/s on an H100
MEMORY = 0.9  # of the card's, as JAX has in a plain start
DTYPE = "bfloat16"
BLOCK = 64
SEQUENCES = 256
CHUNK = 2048
COMPILE_SECONDS = 3600
SOURCES = ("jaxserve", "kernels", "sharding", "experiments/gpu_targets", "experiments/benchmarks")
DEPTHS = (2, 3)  # layers of what is compiled: the last layer differs from those before it
# of a described GPU's memory: beyond it XLA computes values again to save memory. Where there is a
# GPU the limit is what JAX has of its memory.
LIMIT = 0.8


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step computes: decodes of sequences with `context` tokens each, and one chunk of a
    prompt that begins there. variant: of the sampling program."""

    decodes: int = 0
    context: int = 1024
    chunk: int = 0
    variant: str = "greedy"

    @property
    def tokens(self) -> int:
        return self.decodes + self.chunk

    @property
    def samples(self) -> int:
        """Tokens that it samples."""
        return self.decodes + (self.chunk > 0)

    @property
    def keys(self) -> int:
        """Tokens whose KV it reads."""
        return self.decodes * self.context + self.chunk

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key that it sees."""
        return self.decodes * self.context + self.chunk * (self.chunk + 1) / 2


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


@dataclasses.dataclass(frozen=True)
class Replica:
    """A model on the GPUs of a target. max_len: longest sequence, where not the model's own."""

    target: str
    model: str
    tp: int
    max_len: int | None = None

    @property
    def gpu(self) -> Target:
        return TARGETS[self.target]

    def plan(self) -> StagePlan:
        """Returns the plan of a plain start. Errors: ConfigError where weights leave no room."""
        model = MODELS[self.model].with_tp(self.tp)
        model = dataclasses.replace(model, max_len=self.max_len or model.max_len)
        config = EngineConfig(
            source=ModelSource(f"random:{self.model}", dtype=DTYPE),
            mesh=MeshConfig(tp=self.tp),
            cache=CacheConfig(block_size=BLOCK),
            scheduler=SchedulerConfig(max_seqs=SEQUENCES, chunk_tokens=CHUNK),
        )
        return make_plan(config, model, DeviceRoom("gpu", int(MEMORY * self.gpu.memory)))


def of_layers(plan: StagePlan, layers: int) -> StagePlan:
    """Returns a plan with fewer layers, and the sizes of all."""
    model = dataclasses.replace(plan.model, layers=layers, windows=plan.model.windows[:1])
    return dataclasses.replace(plan, model=model)


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
    """What a step must read and compute on each device. Bytes of weights and of KV; products."""

    weights: float
    kv: float
    flops: float
    attention: float  # operations of it, in `flops` too

    def seconds(self, gpu: Target) -> float:
        """Returns the time that it takes at the rates of the data sheet."""
        return max((self.weights + self.kv) / gpu.bandwidth, self.flops / gpu.flops)


def needs(plan: StagePlan, step: Step) -> Needs:
    """Counts what a step needs: each matrix once, of experts those that are expected to have a
    token where tokens choose at random."""
    model = plan.model
    tp = plan.mesh.tp
    weights = flops = 0.0
    for path, declared in declare(model, range(model.layers), tp).items():
        if path == "embed":  # some rows
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
    numbers *= vectors * max(model.kv_heads // tp, 1) * model.layers
    kv = step.keys * numbers * np.dtype(plan.kv_dtype).itemsize
    attention = 4.0 * step.pairs * model.heads * model.head_dim * model.layers / tp
    return Needs(weights, kv, flops + attention, attention)


def _elements(declared: Declared, plan: StagePlan) -> int:
    """Elements of a parameter on a device."""
    degrees = {TP: plan.mesh.tp, KVP: 1}
    return declared.size // math.prod(devices(axis, degrees) for axis in declared.axes)


# --- compiling, in a process of its own


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program in machine code. hlo, thunks: texts. temp: bytes of its temporary arrays. reason:
    why it is none, or ''."""

    hlo: str = ""
    thunks: str = ""
    temp: int = 0
    reason: str = ""


def layers_program(shape: StepShape, layers: int) -> str:
    """Names the program of some layers."""
    return f"layers {shape} {layers}"


def head_program(shape: StepShape, variant: str) -> str:
    """Names the program that samples."""
    return f"head {variant} {shape.samples}"


def compiled(replica: Replica, names: Iterable[str]) -> dict[str, Compiled]:
    """Compiles the programs with these names, or finds what is kept. Errors: CompilerError."""
    sources = _sources()
    # of these sources; a program that is lowered to what others were is not compiled again
    known = {name: _place("known", sources, repr(replica), name) for name in names}
    places = {
        name: Path(json.loads(known[name].read_text())) for name in known if known[name].exists()
    }
    while left := [name for name in known if name not in places]:
        job = json.dumps({"replica": dataclasses.asdict(replica), "names": left})
        ended = compiler.run(
            "experiments.benchmarks.gpu_programs:child", job, seconds=COMPILE_SECONDS
        )
        begun = [line.split("\t")[1:] for line in ended.stdout.splitlines() if line[:1] == "\t"]
        places |= {name: Path(place) for name, place in begun}
        if ended.returncode:
            last = ended.stdout[-2000:]
            if not begun or places[begun[-1][0]].exists():
                raise compiler.CompilerError(f"exit code {ended.returncode}: {last}")
            fault = f"the compiler ended with exit code {ended.returncode}: {last}"
            _keep(places[begun[-1][0]], Compiled(reason=fault))
        for name, place in begun:
            write_whole(known[name], json.dumps(place))
    return {name: Compiled(**json.loads(place.read_text())) for name, place in places.items()}


def _sources() -> str:
    """Digest of everything that programs are lowered by."""
    digest = hashlib.blake2b(digest_size=16)
    for room in SOURCES:
        for file in sorted(path for path in (compiler.ROOT / room).rglob("*") if path.is_file()):
            if file.suffix in (".py", ".json", ".txtpb"):
                digest.update(f"{file}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def child(job: str) -> None:
    """Compiles programs in a process of `compiler.run`; prints the name and the file of each before
    it is compiled."""
    values = json.loads(job)
    replica = Replica(**values["replica"])
    plan = replica.plan()
    kernels = as_on_hopper(plan) if replica.gpu.is_hopper else as_on_a_gpu()
    with kernels:
        for name in values["names"]:
            kind, what, number = name.split(" ")
            depth, held = (1, plan.model.layers) if kind == "head" else (int(number), int(number))
            memory = _memory(replica.gpu, plan, held)
            mesh = compiler.topology(replica.gpu, 1, replica.tp, memory)
            try:
                stages = abstract_stages(of_layers(plan, depth), mesh, 1)
                lowered = _lowered(stages, kind, what, int(number))
            except NotImplementedError as error:
                place = _place("refused", repr(replica), name)
                _keep(place, Compiled(reason=str(error)))
                print(f"\t{name}\t{place}", flush=True)
                continue
            place = _place(replica.gpu.text(memory), lowered.as_text())
            print(f"\t{name}\t{place}", flush=True)
            if not place.exists():
                _keep(place, _compile(lowered))


def _memory(gpu: Target, plan: StagePlan, layers: int) -> int:
    """Bytes that a GPU is described with for programs of some layers: XLA then has as much for
    temporary arrays as for the whole model where there is such a GPU."""
    left_out = sizes(plan).total - sizes(of_layers(plan, layers)).total
    return int((MEMORY * gpu.memory - left_out) / LIMIT)


def _lowered(stages: Stages, kind: str, what: str, number: int) -> Any:
    """Lowers the program with this name."""
    if kind == "head":
        _, lower = stages.programs.head(what, number)
    else:
        shape = next(shape for shape in stages.plan.shapes if str(shape) == what)
        _, lower = stages.programs.layers(stages.stages[0], shape)
    return lower()


def _compile(lowered: Any) -> Compiled:
    with tempfile.TemporaryDirectory() as work:
        try:
            program = lowered.compile(compiler_options={"xla_dump_to": work})
        except jax.errors.JaxRuntimeError as error:
            return Compiled(reason=str(error))
        (thunks,) = Path(work).glob("*thunk_sequence_after_thunk_passes.txt")
        temp = program.memory_analysis().temp_size_in_bytes
        return Compiled(program.as_text(), thunks.read_text(), temp)


def _place(*parts: str) -> Path:
    """File of what these texts stand for, with this compiler."""
    digest = hashlib.blake2b(digest_size=16)
    options = json.dumps(graph_options())
    for part in (jax.__version__, *compiler.WHEELS, options, *parts):
        digest.update(f"{part}\0".encode())
    return cache_folder() / "gpu_programs" / f"{digest.hexdigest()}.json"


def _keep(place: Path, program: Compiled) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    write_whole(place, json.dumps(dataclasses.asdict(program)))


# --- rows


@dataclasses.dataclass(frozen=True)
class Counts:
    """What a program launches, by class and by graphs, and its temporary bytes."""

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
        Option("models", str, ",".join(MODEL_NAMES), "names of jaxserve/checkpoint/zoo.py"),
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
