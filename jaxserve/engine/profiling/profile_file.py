"""Costs of steps on this engine, read from a file, or measured once and kept.

A profile belongs to one model, type, mesh, kind of device and list of compiled shapes; its file's
name says which.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.costs.coefficients import SpreadShape
from jaxserve.costs.fit import (
    Extent,
    SpreadSample,
    StepSample,
    fit_costs,
    fit_decodes,
    fit_spread,
    from_json,
    to_json,
)
from jaxserve.costs.heads import heads_of
from jaxserve.costs.move_fit import MoveSample, fit_moves
from jaxserve.engine.executor import CommandExecutor
from jaxserve.engine.memory import sizes as memory_sizes
from jaxserve.engine.profiling.measure import (
    MeasuredStep,
    MeasurePoint,
    grid,
    move_grid,
    spread_decode_grid,
    spread_grid,
)
from jaxserve.engine.profiling.repeats import ROUNDS, Measured, measure
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.step_shapes import StepShape
from jaxserve.files import write_whole
from jaxserve.folders import cache_folder, private_folder
from jaxserve.kernels.cpu import library
from jaxserve.kernels.kv_pages import FP8
from jaxserve.lanes.choice import Correction, MoveTimes
from jaxserve.lanes.rates import GroupLinks, links_from_json, links_to_json
from jaxserve.progress import progress_bar
from jaxserve.scheduling.assembly import ReplicaProfile, ReplicaSizes
from jaxserve.settings.schema import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    MeshConfig,
    SchedulerConfig,
)

log = logging.getLogger(__name__)
FORMAT = 10  # of the file
Search = Callable[["ReplicaProfile"], dict[str, dict[float, float]]]
QUICK = 2**20  # most pairs of a step that is measured without being asked for


def replica_sizes(
    plan: StagePlan, cache: CacheConfig, scheduler: SchedulerConfig, max_len: int
) -> ReplicaSizes:
    """Returns the sizes of a replica whose stages follow a plan. max_len: tokens of a sequence."""
    item = np.dtype(plan.dtype).itemsize
    return ReplicaSizes(
        plan.mesh,
        dataclasses.replace(cache, pages=plan.pages, block_size=plan.block_size),
        scheduler,
        heads_of(plan.model, plan.mesh.tp, item, plan.kv_dtype == FP8),
        max_len,
        min(max_len, plan.width * plan.block_size * plan.mesh.kvp),
        plan.layer_groups,
        plan.windows,
    )


@dataclasses.dataclass(frozen=True)
class MeasuredProfile:
    """A profile and the points that it was fitted to, with the errors of its fit: of local steps as
    in `CostsFit`, of those with spread chunks as in `SpreadFit`, of those whose decodes alone are
    spread as in `DecodeFit`, of those that move pages as in `MoveFit`."""

    profile: ReplicaProfile
    points: list[MeasuredStep] = dataclasses.field(default_factory=list)
    fitted: float = 0.0
    held_out: float = 0.0
    spread_held_out: dict[tuple[str, int], float] = dataclasses.field(default_factory=dict)
    decode_held_out: dict[tuple[str, int], float] = dataclasses.field(default_factory=dict)
    move_held_out: dict[tuple[str, int], float] = dataclasses.field(default_factory=dict)


def profile_for(
    config: EngineConfig, worker: CommandExecutor, max_len: int, progress: bool
) -> ReplicaProfile | None:
    """The profile that the settings ask for; None where the scheduler does without. max_len: tokens
    of the longest sequence. Errors: ConfigError."""
    if not config.timed:
        return None
    identity = identity_of(worker, max_len)
    file = Path(config.profile) if config.profile != "auto" else safe_file(identity)
    if config.profile != "auto" or file.exists():
        return read(file, identity)
    return write(file, identity, measure_costs(worker, max_len, ROUNDS, progress, QUICK))


def points_of(
    worker: CommandExecutor, longest: int, pairs: float = float("inf")
) -> list[MeasurePoint]:
    """Lists the points that tell the costs of a worker's steps: sequences of up to `longest`
    tokens, and steps of up to `pairs` pairs of tokens that attend and are attended to."""
    plan = worker.plan
    longest = min(longest, plan.width * plan.block_size)
    shapes = [shape for shape in plan.shapes if shape not in worker.uncompiled]
    slots = max(1, plan.slots // plan.mesh.kvp)
    return [
        *grid(shapes, longest, slots, pairs),
        *spread_grid(shapes, plan.mesh.kvp, longest, slots, pairs),
        *spread_decode_grid(shapes, longest, slots, pairs),
        *move_grid(shapes, longest, slots, plan.pages, pairs),
    ]


def measure_costs(
    worker: CommandExecutor, longest: int, repeats: int, progress: bool, pairs: float = float("inf")
) -> MeasuredProfile:
    """Measures `points_of` a worker that serves no requests, and links between lanes; fits what
    steps cost."""
    points = points_of(worker, longest, pairs)
    with progress_bar("measuring steps", repeats * len(points), progress) as done:
        measured = measure(worker, points, done, repeats)
    return fitted(worker.plan, worker.measure_links(), measured, worker.platform == "cpu")


def fitted(
    plan: StagePlan, links: GroupLinks, measured_steps: Measured, on_cpu: bool
) -> MeasuredProfile:
    """Fits a profile to measured steps: to local ones, then to those with spread chunks, those with
    spread decodes and those that move pages."""
    steps = measured_steps.steps
    local = [sample_of(one) for one in steps if one.point.group_size == 1]
    shapes = [_extent(shape) for shape in plan.shapes if not shape.spread]
    fit = fit_costs(local, plan.model.layers, plan.mesh, on_cpu, shapes)
    profile = ReplicaProfile(fit.costs, links, doubt=measured_steps.doubt)
    measured = MeasuredProfile(profile, steps, fit.fitted, fit.held_out)
    longest = plan.width * plan.block_size
    sizes = replica_sizes(plan, CacheConfig(), SchedulerConfig(exchange="auto"), longest)
    chooser = sizes.chooser(profile)
    if chooser is None:
        return measured
    spread = [one for one in steps if one.point.group_size > 1 and not one.point.moves]
    chunks = [SpreadSample(one.batch, one.seconds) for one in spread if one.point.chunks]
    decodes = [SpreadSample(one.batch, one.seconds) for one in spread if not one.point.chunks]
    if decodes:
        of_decodes = fit_decodes(fit.costs, plan.mesh, chooser, decodes)
        profile = dataclasses.replace(profile, decode_corrections=of_decodes.corrections)
        measured = dataclasses.replace(measured, decode_held_out=of_decodes.held_out)
    if chunks:
        costs = dataclasses.replace(fit.costs, spread_shapes=_spread_shapes(plan.shapes))
        of_chunks = fit_spread(costs, plan.mesh, chooser, chunks)
        profile = dataclasses.replace(
            profile, costs=of_chunks.costs, corrections=of_chunks.corrections
        )
        measured = dataclasses.replace(measured, spread_held_out=of_chunks.held_out)
    moves = [MoveSample(one.batch, one.seconds, one.unmoved) for one in steps if one.point.moves]
    if moves:
        chooser = dataclasses.replace(chooser, moves=plan.moves)
        of_moves = fit_moves(fit.costs, plan.mesh, chooser, moves)
        profile = dataclasses.replace(profile, move_times=of_moves.times)
        measured = dataclasses.replace(measured, move_held_out=of_moves.held_out)
    return dataclasses.replace(measured, profile=profile)


def _spread_shapes(shapes: list[StepShape]) -> tuple[SpreadShape, ...]:
    """Describes for the predictor the shapes that steps with spread chunks run in."""
    of_chunks = [shape for shape in shapes if shape.spread_prefill.rows and shape.room == 1]
    described = [
        SpreadShape(
            shape.group_size,
            shape.exchange,
            shape.decode.rows,
            shape.prefill.rows + shape.spread_prefill.rows,
            shape.tokens,
        )
        for shape in of_chunks
    ]
    return tuple(dict.fromkeys(described))  # programs differ in the exchange of decodes


def sample_of(one: MeasuredStep) -> StepSample:
    """Describes a measured step of local sequences as costs are fitted to it."""
    point = one.point
    samples = point.decodes + point.chunks if point.sample else 0
    return StepSample(
        point.decodes,
        point.context,
        point.chunks,
        point.cached,
        point.new,
        samples,
        _extent(one.shape),
        one.seconds,
    )


def _extent(shape: StepShape) -> Extent:
    return shape.decode.rows, *shape.prefill


def identity_of(worker: CommandExecutor, max_len: int) -> dict[str, Any]:
    """Names what the profile of this worker belongs to."""
    return identity(worker.plan, max_len, worker.device_kind, library.instruction_set())


def identity(
    plan: StagePlan, max_len: int, device_kind: str, instruction_set: str | None
) -> dict[str, Any]:
    """Names what a profile belongs to; no engine is needed. instruction_set: of the kernels for
    CPUs; None where they do not run."""
    shapes = hashlib.sha256(" ".join(map(str, plan.shapes)).encode()).hexdigest()[:8]
    return {
        "format": FORMAT,
        "model": plan.model.name,
        "dtype": str(np.dtype(plan.dtype)),
        "weight_bytes": memory_sizes(plan).weights,
        "kv_dtype": str(np.dtype(plan.kv_dtype)),
        "mesh": str(plan.mesh),
        "device": device_kind,
        "instruction_set": instruction_set,
        "cores": os.cpu_count(),
        "block_size": plan.block_size,
        "max_len": max_len,
        "shapes": shapes,
        **({"layer_groups": plan.layer_groups} if plan.layer_groups > 1 else {}),
    }


def kept_file(identity: dict[str, Any]) -> Path:
    """Path of the profile that belongs to this."""
    text = json.dumps(identity, sort_keys=True)
    name = re.sub(r"[\W_]", "-", identity["model"])
    return (
        cache_folder()
        / "profiles"
        / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
    )


def safe_file(identity: dict[str, Any]) -> Path:
    """`kept_file`, in a folder that is there. Errors: ConfigError where others could write
    there."""
    file = kept_file(identity)
    private_folder(file.parent, "profile")
    return file


def write(
    file: Path,
    identity: dict[str, Any],
    measured: MeasuredProfile,
    search: Search | None = None,
) -> ReplicaProfile:
    """Writes a profile, whole or not at all. search: finds improvement rates by planner, given the
    profile without them. Errors: ConfigError where it cannot be written."""
    profile = measured.profile
    if search is not None:
        profile = dataclasses.replace(profile, improvement=search(profile))
    rows = [
        {
            **dataclasses.asdict(one.point),
            "shape": str(one.shape),
            "seconds": one.seconds,
            "unmoved": one.unmoved,
        }
        for one in measured.points
    ]
    text = json.dumps(
        {
            **identity,
            "fitted_error": measured.fitted,
            "held_out_error": measured.held_out,
            "spread_held_out_error": _by_name(measured.spread_held_out),
            "decode_held_out_error": _by_name(measured.decode_held_out),
            "move_held_out_error": _by_name(measured.move_held_out),
            "doubt": profile.doubt,
            "costs": to_json(profile.costs),
            "links": links_to_json(profile.links),
            "corrections": _corrections_to_json(profile.corrections),
            "decode_corrections": _corrections_to_json(profile.decode_corrections),
            "move_times": _move_times_to_json(profile.move_times),
            "improvement": {
                name: {str(load): rate for load, rate in rates.items()}
                for name, rates in profile.improvement.items()
            },
            "points": rows,
        },
        indent=1,
    )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, text + "\n")
    except OSError as error:
        raise ConfigError("profile", f"{file}: {error.strerror}") from None
    return profile


def read(file: Path, identity: dict[str, Any]) -> ReplicaProfile:
    """A profile that was kept. Errors: ConfigError where it cannot be read or belongs to something
    else."""
    try:
        content = json.loads(file.read_text())
        _check_identity(file, identity, {name: content[name] for name in identity})
        costs = from_json(content["costs"])
        links = links_from_json(content["links"], MeshConfig.parse(identity["mesh"]).kvp)
        corrections, of_decodes = (
            {name: Correction(*map(float, values)) for name, values in content[field].items()}
            for field in ("corrections", "decode_corrections")
        )
        improvement = {
            name: {float(load): float(rate) for load, rate in rates.items()}
            for name, rates in content["improvement"].items()
        }
        move_times = _move_times_from_json(content["move_times"])
        doubt = str(content.get("doubt", ""))  # earlier files do not say
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError("profile", f"{file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("profile", f"{file} is not a profile: {error!r}") from None
    return ReplicaProfile(costs, links, improvement, corrections, of_decodes, move_times, doubt)


def _check_identity(file: Path, identity: dict[str, Any], given: dict[str, Any]) -> None:
    """Compares what a profile belongs to, `given`, with this. Errors: ConfigError that names the
    first difference."""
    for name, value in identity.items():
        if given[name] != value:
            raise ConfigError(
                "profile", f"{file} was measured with {name} {given[name]!r}; here it is {value!r}"
            )


def _by_name(errors: Mapping[tuple[str, int], float]) -> dict[str, float]:
    """Returns errors by exchange and size of group as JSON has them."""
    return {f"{exchange} on {size}": error for (exchange, size), error in errors.items()}


def _corrections_to_json(corrections: Mapping[str, Correction]) -> dict[str, tuple[float, float]]:
    """Returns corrections as JSON has them."""
    return {name: (each.seconds, each.factor) for name, each in corrections.items()}


def _move_times_to_json(times: MoveTimes | None) -> dict[str, float] | None:
    """Returns times of moves as JSON has them."""
    if times is None:
        return None
    correction = times.correction
    return {"seconds": correction.seconds, "factor": correction.factor, "hidden": times.hidden}


def _move_times_from_json(fields: Mapping[str, float] | None) -> MoveTimes | None:
    """Reads what `_move_times_to_json` gave. Errors: KeyError, TypeError and ValueError for
    anything else; ConfigError for a share beyond 1."""
    if fields is None:
        return None
    correction = Correction(float(fields["seconds"]), float(fields["factor"]))
    return MoveTimes(correction, float(fields["hidden"]))
