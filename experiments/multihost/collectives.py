"""Finds which collectives of a step cross hosts and how many bytes they send, without a GPU.

    python -m experiments.multihost.collectives --mesh=spp=2,tp=8 --hosts=2 --model=llama3.1-8b

Compiles the programs of a replica for GPUs that are not there (H200s, which compile as H100s do),
or only lowers them where the compiler was not fetched (`python -m experiments.gpu_targets.compiler`
does that), and reads the collectives out of them. Nothing is allocated: weights and pages are
shapes. What passes between stages is no collective of a program; its bytes follow from the same
shapes.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.gpu_targets import compiler
from experiments.gpu_targets.lowering import abstract_stages, as_on_a_gpu, as_on_hopper
from experiments.gpu_targets.sheets import TARGETS
from experiments.multihost.hlo import Collective, collectives
from experiments.script import command_line, keep
from jaxserve.checkpoint.model import ModelConfig, layers_of
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.cli.display import table
from jaxserve.engine.sampling_rows import VARIANTS
from jaxserve.engine.sizing import make_plan
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.step_shapes import StepShape
from jaxserve.group.layout import described, devices_each, layout
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
from jaxserve.sharding.mesh import ensure_devices

OPTIONS = {
    "collectives": [
        Option("mesh", str, "spp=2,tp=8", MeshConfig.HELP),
        Option("hosts", int, 2, "hosts, each with an equal share of the devices", 1, 1024),
        Option("model", str, "llama3.1-8b", "a name of jaxserve/checkpoint/zoo.py"),
        Option("max_seqs", int, 64, "sequences that decode at once, per lane", 1),
        Option("chunk_tokens", int, 2048, "most prefill tokens of a step, per lane", 1),
        Option("min_chunk", int, 128, "tokens of a prefill row where prompts share a step", 1),
        Option("max_model_len", int, None, "longest sequence; default: the model's limit", 2),
        Option("only", str, "", "steps to look at, by name, separated by commas; default: all"),
        Option("lowered", bool, False, "do not compile, even where that is possible"),
        Option("whole", bool, False, "compile all layers of a stage, not one and two of them"),
        Option("json", str, None, "file for all figures"),
    ]
}
DTYPE = "bfloat16"
POOL_GIB = 16.0  # of KV pages; no collective depends on it
COMPILE_SECONDS = 3600
COMPILED = "compiled programs"
LOWERED = "lowered programs"
ACTIVATIONS = "activations"
TOKENS = "sampled tokens"


@dataclasses.dataclass(frozen=True)
class Replica:
    """Replica that is asked about."""

    mesh: MeshConfig
    hosts: int
    model: str
    max_seqs: int
    chunk_tokens: int
    min_chunk: int
    max_model_len: int | None = None
    whole: bool = False
    only: str = ""

    def wants(self, step: str) -> bool:
        """Returns true if a step is asked about."""
        return not self.only or step in self.only.split(",")

    @property
    def config(self) -> ModelConfig:
        """Returns the model. Errors: ConfigError for a name that is not known."""
        if self.model not in MODELS:
            raise ConfigError("model", f"{self.model!r} is none of {', '.join(MODELS)}")
        return MODELS[self.model].with_tp(self.mesh.tp)

    @property
    def owners(self) -> np.ndarray:
        """Host of each device [spp, kvp, tp]. Errors: ConfigError where hosts do not fit."""
        each = devices_each(self.mesh, self.hosts)
        return layout(self.mesh, self.hosts) // each

    def plan(self, layers: int | None = None) -> StagePlan:
        """Returns the plan as the engine makes it; layers: of each stage, where not the model's."""
        several = self.mesh.kvp > 1
        config = EngineConfig(
            source=ModelSource(
                f"random:{self.model}", dtype=DTYPE, max_model_len=self.max_model_len
            ),
            mesh=self.mesh,
            cache=CacheConfig(kv_memory_gib=POOL_GIB),
            scheduler=SchedulerConfig(
                max_seqs=self.max_seqs,
                chunk_tokens=self.chunk_tokens,
                min_chunk=self.min_chunk,
                exchange="auto" if several else "gather",
            ),
        )
        model = self.config
        if layers is not None:
            model = dataclasses.replace(
                model, layers=layers * self.mesh.spp, windows=model.windows[:1]
            )
        return make_plan(config, model)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of a replica, or what passes between its stages. stage: where it runs. per_chunk:
    run once for each chunk of KV that goes round the ring."""

    step: str
    stage: int
    operation: str
    axis: str
    bytes: int
    times: int
    per_chunk: bool
    crosses: bool
    across: dict[int, float]  # bytes that leave each host when it runs once
    within: float  # bytes that the busiest device sends within its host when it runs once


# --- the programs, as shapes


def steps_of(replica: Replica, plan: StagePlan) -> dict[str, StepShape]:
    """Steps of each kind among those that the engine compiles."""
    shapes = [shape for shape in plan.shapes if not shape.moves]
    local = [shape for shape in shapes if not shape.spread]
    most = plan.slots
    found = {
        "decode": next(s for s in local if s.local == ((most, 1),)),
        "prefill": [s for s in local if s.prefill.rows and not s.decode.rows][-1],
        "decode + prefill": [s for s in local if s.decode.rows and s.prefill.rows][-1],
    }
    for shape in shapes:
        if not shape.spread or shape.prefill.rows:
            continue
        if shape.decode_exchange not in ("gather", shape.exchange):
            continue
        name = f"spread prefill {shape.exchange}" if shape.spread_prefill.rows else "spread decode"
        found.setdefault(name, shape)
    return {name: shape for name, shape in found.items() if replica.wants(name)}


def read_programs(replica: Replica, devices: Sequence[Any], compiles: bool) -> list[Program]:
    """The collectives of all programs of all steps. compiles: or only lowers."""
    text: Callable[[Any], str] = (
        (lambda lowered: lowered.compile().as_text())
        if compiles
        else (lambda lowered: lowered.compiler_ir("hlo").as_hlo_text())
    )
    depths: tuple[int | None, ...] = (1, 2) if compiles and not replica.whole else (None,)
    built = [abstract_stages(replica.plan(n), devices, replica.hosts) for n in depths]
    lengths = [len(part) for part in layers_of(replica.config, replica.mesh.spp)]
    size = replica.mesh.kvp * replica.mesh.tp
    out: list[Program] = []
    # those for Hopper cannot be lowered for a CPU
    kernels = as_on_hopper(built[0].plan) if compiles else as_on_a_gpu()
    with kernels:
        for name, shape in steps_of(replica, built[0].plan).items():
            for first in {0, replica.mesh.spp - 1}:  # those between are like the last
                found = []
                for stages in built:
                    (stage,) = (each for each in stages.stages if each.index == first)
                    _, lower = stages.programs.layers(stage, shape)
                    found.append(collectives(text(lower()), size))
                alike = [
                    at
                    for at in range(replica.mesh.spp)
                    if (at == 0) == (first == 0) or replica.mesh.spp == 1
                ]
                for at in alike:
                    out += _programs(replica, name, at, _whole(found, lengths[at]))
                print(f"{name}, stage {first}", file=sys.stderr, flush=True)
        last = replica.mesh.spp - 1
        for variant in VARIANTS:
            if not replica.wants(f"sampling {variant}"):
                continue
            _, lower = built[0].programs.head(variant, built[0].plan.samples[-1])
            one = collectives(text(lower()), size)
            out += _programs(replica, f"sampling {variant}", last, one)
    return out


def _whole(found: Sequence[list[Collective]], layers: int) -> list[Collective]:
    """Returns the collectives of a stage of `layers` layers, from those of all of them, or from
    those of one layer and of two: each further layer adds what the second did."""
    if len(found) == 1:
        return found[0]
    one, two = ({dataclasses.replace(c, times=1): c.times for c in part} for part in found)
    times = {c: one.get(c, 0) + (layers - 1) * (two.get(c, 0) - one.get(c, 0)) for c in one | two}
    return [dataclasses.replace(c, times=count) for c, count in times.items() if count]


def _programs(
    replica: Replica, step: str, stage: int, found: list[Collective]
) -> Iterator[Program]:
    hosts = replica.owners[stage].reshape(-1).tolist()
    for each in found:
        sent = each.sent(hosts)
        across: Counter[int] = Counter()
        for (source, target), count in sent.items():
            if source != target:
                across[source] += count  # type: ignore[assignment]
        lanes = {device // replica.mesh.tp for device in each.groups[0]}
        within = max((n / hosts.count(s) for (s, t), n in sent.items() if s == t), default=0.0)
        yield Program(
            step,
            stage,
            each.operation,
            "lanes" if len(lanes) > 1 else "ranks",
            each.bytes,
            each.times,
            each.looped,
            each.crosses(hosts),
            dict(across),
            within,
        )


# --- between stages


def hand_overs(replica: Replica) -> list[Program]:
    """Lists what `stages.hand_over` sends: each device of a stage to the same one of the next."""
    plan = replica.plan()
    itemsize = np.dtype(plan.dtype).itemsize
    out = []
    for name, shape in steps_of(replica, plan).items():
        activations = shape.tokens * plan.model.d_model * itemsize
        for stage in range(1, replica.mesh.spp):
            out.append(_hand_over(replica, name, stage - 1, stage, ACTIVATIONS, activations))
        if replica.mesh.spp > 1:
            last = replica.mesh.spp - 1
            out.append(_hand_over(replica, name, last, 0, TOKENS, plan.slots * 4))
    return out


def _hand_over(
    replica: Replica, step: str, source: int, target: int, what: str, size: int
) -> Program:
    across: Counter[int] = Counter()
    pairs = zip(replica.owners[source].flat, replica.owners[target].flat)
    for here, there in pairs:
        if here != there:
            across[int(here)] += size
    within = 0.0 if across else float(size)
    return Program(step, source, what, "stages", size, 1, False, bool(across), dict(across), within)


# --- compiling, in a process of its own


def measured(replica: Replica, lowered: bool) -> tuple[str, list[Program]]:
    """Returns the origin of the figures, and all programs. Errors: ConfigError, CompilerError."""
    _ = replica.owners
    if lowered or compiler.lacking() is not None:
        ensure_devices(replica.mesh.devices)
        devices = jax.devices("cpu")
        if len(devices) < replica.mesh.devices:
            raise ConfigError(
                "mesh", f"needs {replica.mesh.devices} devices; CPU has {len(devices)}"
            )
        found = read_programs(replica, devices[: replica.mesh.devices], compiles=False)
        return LOWERED, found + hand_overs(replica)
    with tempfile.TemporaryDirectory() as work:
        file = Path(work, "result.json")
        job = json.dumps(dataclasses.asdict(replica) | {"mesh": str(replica.mesh)})
        ended = compiler.run(
            "experiments.multihost.collectives:child", job, str(file), seconds=COMPILE_SECONDS
        )
        if ended.returncode:
            raise compiler.CompilerError(
                f"the compiler ended with exit code {ended.returncode}: {ended.stdout[-4000:]}"
            )
        rows = json.loads(file.read_text())
    found = [
        Program(**{**row, "across": {int(host): n for host, n in row["across"].items()}})
        for row in rows
    ]
    return COMPILED, found + hand_overs(replica)


def child(job: str, result: str) -> None:
    """Compiles, in a process of `compiler.run`."""
    values = json.loads(job)
    replica = Replica(**{**values, "mesh": MeshConfig.parse(values["mesh"])})
    devices = compiler.topology(
        TARGETS["h200"], replica.hosts, replica.mesh.devices // replica.hosts
    )
    found = read_programs(replica, devices, compiles=True)
    Path(result).write_text(json.dumps([dataclasses.asdict(one) for one in found]))


# --- what is shown


def shown(programs: Sequence[Program]) -> str:
    """For each step: its collectives, all stages together."""
    headers = ["step", "what", "among", "runs", "bytes each", "out of a host"]
    kinds: dict[tuple[Any, ...], list[Program]] = {}
    for one in programs:
        key = (one.step, one.operation, one.axis, one.bytes, one.per_chunk, one.crosses)
        kinds.setdefault(key, []).append(one)
    order = list(dict.fromkeys(one.step for one in programs))
    rows = []
    for (step, operation, axis, size, per_chunk, crosses), ones in sorted(
        kinds.items(), key=lambda kind: order.index(kind[0][0])
    ):
        per = " a chunk" if per_chunk else ""
        out = _size(_most(ones)) + per if crosses else "-"
        runs = f"{sum(one.times for one in ones)}{per}"
        rows.append([step, operation, axis, runs, _size(size), out])
    return table(headers, rows)


def summary(programs: Sequence[Program]) -> str:
    """For each step: what leaves the busiest host, by what it is, and what a device sends to others
    of its host."""
    headers = ["step", "lanes", "a chunk of KV", "activations", "tokens", "ranks", "in a host"]
    rows = []
    for step in dict.fromkeys(one.step for one in programs):
        mine = [one for one in programs if one.step == step]
        parts = [
            [one for one in mine if one.axis == "lanes" and not one.per_chunk],
            [one for one in mine if one.axis == "lanes" and one.per_chunk],
            [one for one in mine if one.operation == ACTIVATIONS],
            [one for one in mine if one.operation == TOKENS],
            [one for one in mine if one.axis == "ranks"],
        ]
        within: Counter[int] = Counter()
        for one in mine:
            within[one.stage] += 0 if one.per_chunk else one.times * one.within  # type: ignore
        sent = [*map(_most, parts), max(within.values())]
        rows.append([step, *(_size(count) if count else "-" for count in sent)])
    return table(headers, rows)


def _size(count: float) -> str:
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return (
                f"{count / size:.3g} {unit}"
                if count < 1000 * size
                else f"{count / size:.0f} {unit}"
            )
    return f"{count:.0f} B"


def _most(programs: Sequence[Program]) -> float:
    """Bytes out of the busiest host."""
    return max(_leaving(programs).values(), default=0.0)


def _leaving(programs: Sequence[Program]) -> Counter[int]:
    """Bytes that leave each host in a step."""
    out: Counter[int] = Counter()
    for one in programs:
        for host, count in one.across.items():
            out[host] += one.times * count  # type: ignore[assignment]
    return out


def run(values: dict[str, Any]) -> int:
    names = [field.name for field in dataclasses.fields(Replica)]
    mesh = MeshConfig.parse(values["mesh"])
    replica = Replica(**{**{name: values[name] for name in names}, "mesh": mesh})
    source, programs = measured(replica, values["lowered"])
    plan = replica.plan()
    print(f"{replica.model}, {replica.mesh}, {replica.hosts} hosts, {DTYPE}; from {source}")
    for line in described(replica.mesh, replica.hosts):
        print(f"  {line}")
    for name, shape in steps_of(replica, plan).items():
        print(f"  {name}: {shape}, {shape.tokens} tokens a lane")
    print(f"\n{shown(programs)}")
    print("\nOut of the busiest host in a step; last, from each device to others of its host\n")
    print(summary(programs))
    keep(
        values,
        source=source,
        jax=jax.__version__,
        programs=[dataclasses.asdict(one) for one in programs],
    )
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    return command_line(
        "collectives",
        "which collectives of a step cross hosts, and their bytes, without a GPU",
        Command(OPTIONS, run),
        given,
        compiler.CompilerError,
    )


if __name__ == "__main__":
    sys.exit(main())
