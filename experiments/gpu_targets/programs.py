"""The programs of a replica on GPUs that are not there, compiled ahead of time in a process of its
own and kept in the cache folder.

Of a model with many layers some are compiled, on a GPU described with the memory that the others
leave.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import signal
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from experiments.gpu_targets import compiler
from experiments.gpu_targets.lowering import abstract_stages, as_on
from experiments.gpu_targets.sheets import TARGETS, Target
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.engine.memory import DeviceRoom, sizes
from jaxserve.engine.sizing import make_plan
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.stage_programs import graph_options
from jaxserve.engine.stages import Stages
from jaxserve.engine.step_shapes import StepShape
from jaxserve.files import write_whole
from jaxserve.folders import cache_folder
from jaxserve.settings.schema import (
    CacheConfig,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)

MEMORY = 0.9  # of the card's, about what JAX has in a plain start
# XLA computes values again where programs would need more memory: than JAX has, where it runs on a
# GPU; than this share of the described one, where it does not.
LIMIT = 0.8
DTYPE = "bfloat16"
BLOCK = 64  # tokens of a page
SEQUENCES = 256
CHUNK = 2048
COMPILE_SECONDS = 3600
ABORTS = (-signal.SIGABRT, -signal.SIGSEGV)  # how the compiler ends where it refuses a program
SOURCES = ("jaxserve", "kernels", "sharding", "experiments/gpu_targets")


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
        ended = compiler.run("experiments.gpu_targets.programs:child", job, seconds=COMPILE_SECONDS)
        begun = [line.split("\t")[1:] for line in ended.stdout.splitlines() if line[:1] == "\t"]
        places |= {name: Path(place) for name, place in begun}
        if ended.returncode:
            last = ended.stdout[-2000:]
            refused = bool(begun) and not places[begun[-1][0]].exists()
            if not refused or ended.returncode not in ABORTS:
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
                name = file.relative_to(compiler.ROOT)
                digest.update(f"{name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def child(job: str) -> None:
    """Compiles programs in a process of `compiler.run`; prints the name and the file of each before
    it is compiled."""
    values = json.loads(job)
    replica = Replica(**values["replica"])
    plan = replica.plan()
    with as_on(replica.gpu, plan):
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
    """Bytes that a GPU is described with for programs of some layers, so that XLA has as much for
    temporary arrays as it has for those of all layers on such a GPU."""
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
    options = json.dumps(graph_options())  # which lowered texts do not have
    for part in (jax.__version__, *compiler.WHEELS, options, *parts):
        digest.update(f"{part}\0".encode())
    return cache_folder() / "gpu_programs" / f"{digest.hexdigest()}.json"


def _keep(place: Path, program: Compiled) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    write_whole(place, json.dumps(dataclasses.asdict(program)))
