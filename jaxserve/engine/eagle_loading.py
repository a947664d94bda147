"""From settings to an EAGLE-3 draft head that proposes: checks, weights, programs, times."""

from __future__ import annotations

from jaxserve.checkpoint.fetch import local_files
from jaxserve.engine.eagle_device import EagleDevice
from jaxserve.engine.eagle_head import EagleHead
from jaxserve.engine.eagle_programs import EaglePrograms
from jaxserve.engine.eagle_sizing import eagle_sizes
from jaxserve.engine.eagle_times import EagleTimes
from jaxserve.engine.programs import keep_compiled
from jaxserve.engine.sizing import DTYPES, max_length, weights_dtype
from jaxserve.group.member import this_member
from jaxserve.progress import progress_bar
from jaxserve.settings.schema import ConfigError, EngineConfig
from jaxserve.weights import open_checkpoint
from jaxserve.weights.eagle import eagle_weights, read_eagle_config


def open_eagle_head(
    config: EngineConfig,
    progress: bool = True,
    warm_up: bool = True,
    profiled: bool = True,
) -> EagleHead:
    """Loads the draft head that the settings name, before the model is loaded: pages of that take
    what memory is left. warm_up: compiles its programs. profiled: measures them, if times are
    needed. Errors: ConfigError where it cannot be used, CheckpointError for one that cannot be
    read, or is of another model."""
    if this_member() is not None:
        raise ConfigError("draft_model", "a replica of several processes has none")
    assert config.draft.draft_model is not None
    folder = local_files(config.draft.draft_model, progress, config.draft.draft_revision)
    head = read_eagle_config(folder)
    model = open_checkpoint(config.source.model, config.source.revision)
    head.layers_of(model.config)
    keep_compiled(config.compile_cache)
    dtype = DTYPES[weights_dtype(config, model.config)]
    sizes = eagle_sizes(config, head, max_length(config, model.config), dtype)
    weights = eagle_weights(folder, head, model)
    programs = EaglePrograms(head, sizes, config.mesh, weights)
    device = EagleDevice(programs, weights)
    if warm_up:
        named = programs.all()
        with progress_bar("compiling the draft head", len(named), progress) as step:
            programs.warm_up(named, step)
    times = None
    if profiled and config.timed:
        times = EagleTimes.measured(device)
    return EagleHead(device, times)
