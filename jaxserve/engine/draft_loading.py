"""From settings to a draft model that proposes: checks, sizes, weights, programs, costs."""

from __future__ import annotations

import logging

from jaxserve.checkpoint.fetch import local_files
from jaxserve.costs.coefficients import NOMINAL
from jaxserve.costs.predictor import Predictor
from jaxserve.engine.draft_model import DraftModel
from jaxserve.engine.draft_sizing import draft_replica, draft_source
from jaxserve.engine.draft_steps import DraftSteps
from jaxserve.engine.loading import make_worker
from jaxserve.engine.profiling.profile_file import profile_for
from jaxserve.engine.sampling_rows import VARIANTS
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.step_shapes import StepShape, first_shapes
from jaxserve.group.member import this_member
from jaxserve.progress import progress_bar
from jaxserve.settings.schema import ConfigError, EngineConfig
from jaxserve.text import Tokenizer
from jaxserve.weights import open_checkpoint

log = logging.getLogger(__name__)
SAMPLING = VARIANTS[:2]  # what its tokens are sampled by: greedily, or drawn


def open_draft_model(
    config: EngineConfig,
    progress: bool = True,
    warm_up: bool = True,
    profiled: bool = True,
) -> DraftModel:
    """Loads the draft model that the settings name, before the replica's own model is loaded: pages
    of that take what memory is left. warm_up, profiled: as of `build`. Errors: ConfigError for one
    that does not go with the model, CheckpointError for one that cannot be read."""
    if this_member() is not None:
        raise ConfigError("draft_model", "a replica of several processes has none")
    source = draft_source(config)
    checkpoint = open_checkpoint(source.model, source.revision)
    if not any(name.startswith("random:") for name in (config.source.model, source.model)):
        ours = local_files(config.source.model, progress, config.source.revision)
        theirs = local_files(source.model, progress, source.revision)
        check_tokenizers(Tokenizer.load(ours), Tokenizer.load(theirs))
    replica = draft_replica(config, checkpoint.config)
    worker, load = make_worker(replica, checkpoint, progress)
    shapes: list[StepShape] = []
    if warm_up:
        shapes = _used(worker.plan)
    count = len(worker.programs(shapes, SAMPLING))
    with progress_bar("compiling the draft model", count, progress and warm_up) as step:
        worker.start(load, shapes, step, SAMPLING)
    capacity = worker.plan.model.max_len
    costs = NOMINAL
    if profiled:
        profile = profile_for(replica, worker, capacity, progress)
        if profile is not None:
            costs = profile.costs
            if profile.doubt:
                log.warning("times of the draft model cannot be trusted: %s", profile.doubt)
    return DraftModel(
        worker,
        DraftSteps(worker, -(-capacity // replica.cache.block_size)),
        Predictor(costs, replica.mesh),
        capacity,
        open_checkpoint(config.source.model, config.source.revision).config.vocab,
        config.scheduler.draft_tokens,
    )


def _used(plan: StagePlan) -> list[StepShape]:
    """Picks the shapes that steps of a draft model have, rows of single tokens or one long row, and
    those that are measured beside them."""
    chosen = {*first_shapes(plan.shapes)}
    chosen.update(shape for shape in plan.shapes if not (shape.decode.rows and shape.prefill.rows))
    return [shape for shape in plan.shapes if shape in chosen]


def check_tokenizers(ours: Tokenizer, theirs: Tokenizer) -> None:
    """Compares a model's tokenizer with that of its draft model: ids that both have must stand for
    the same. Errors: ConfigError that names the first that does not."""
    by_id = {number: text for text, number in ours.ids.items()}
    for text, number in sorted(theirs.ids.items(), key=lambda pair: pair[1]):
        if by_id.get(number, text) != text:
            raise ConfigError(
                "draft_model",
                f"its tokenizer is another one: {number} is {text!a:.40} there and "
                f"{by_id[number]!a:.40} here",
            )
