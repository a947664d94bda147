"""Every setting of jaxserve: frozen dataclasses, one file for each group, whose fields declare
type, limits and help. The command line's flags are made from them."""

from jaxserve.api.errors import ConfigError
from jaxserve.settings.schema.adapters import AdapterConfig
from jaxserve.settings.schema.cache import CacheConfig
from jaxserve.settings.schema.drafts import DraftConfig
from jaxserve.settings.schema.engine import EngineConfig, check_lanes
from jaxserve.settings.schema.mesh import MeshConfig
from jaxserve.settings.schema.model import ModelSource
from jaxserve.settings.schema.objectives import DEFAULT_CLASS, Objectives
from jaxserve.settings.schema.scheduler import SchedulerConfig
from jaxserve.settings.schema.server import ServerConfig

__all__ = [
    "DEFAULT_CLASS",
    "AdapterConfig",
    "CacheConfig",
    "ConfigError",
    "DraftConfig",
    "EngineConfig",
    "MeshConfig",
    "ModelSource",
    "Objectives",
    "SchedulerConfig",
    "ServerConfig",
    "check_lanes",
]
