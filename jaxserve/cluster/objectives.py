"""Latency objectives of requests, as the replicas of a cluster are configured to give them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from jaxserve.replica.info import ReplicaInfo
from jaxserve.settings.schema.objectives import CLASS_FIELDS, Objectives, objectives_by_class

UNKNOWN = Objectives(ttft=math.inf, tpot=math.inf)


class ClusterObjectives:
    """The objectives of each class of requests, from the settings of the replicas."""

    def __init__(self, info: ReplicaInfo):
        self._by_class = _by_class(info)

    def of(self, class_name: str | None = None) -> Objectives:
        """Returns the objectives of a class, or of requests that name none; infinite if unknown."""
        return self._by_class.get(class_name, UNKNOWN)


def _by_class(info: ReplicaInfo) -> Mapping[str | None, Objectives]:
    settings = info.settings.get("scheduler", {})
    names = CLASS_FIELDS.values()
    if not all(name in settings for name in names):
        return {}
    defaults = Objectives(**{name: settings[name] for name in names})
    return objectives_by_class(settings.get("classes", ""), defaults)
