"""Latency objectives of requests, as the replicas of a cluster are configured to give them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from jaxserve.api.request import Request
from jaxserve.replica.info import ReplicaInfo
from jaxserve.settings.schema.objectives import Objectives, objectives_by_class


class ClusterObjectives:
    """The objectives of each class of requests, from what the replicas say of their settings."""

    def __init__(self, info: ReplicaInfo):
        self._by_class = _by_class(info)

    @property
    def usual_ttft(self) -> float:
        """Of requests that name no class; infinite where nobody says."""
        return self._by_class[None].ttft if self._by_class else math.inf

    @property
    def usual_tpot(self) -> float:
        """Of requests that name no class; infinite where nobody says."""
        return self._by_class[None].tpot if self._by_class else math.inf

    def ttft(self, request: Request, prefill: float) -> float:
        """Seconds that a request gives to its first token; infinite where nobody says. prefill:
        seconds in which its whole prompt is computed."""
        if request.slo.ttft is not None:
            return request.slo.ttft
        given = self._by_class.get(request.slo.class_name)
        if given is None:
            return math.inf
        return max(given.ttft, given.ttft_stretch * prefill) * 2.0**request.priority

    def tpot(self, request: Request) -> float:
        """Seconds per output token that a request gives; infinite where nobody says."""
        if request.slo.tpot is not None:
            return request.slo.tpot
        given = self._by_class.get(request.slo.class_name)
        return math.inf if given is None else given.tpot


def _by_class(info: ReplicaInfo) -> Mapping[str | None, Objectives]:
    settings = info.settings.get("scheduler", {})
    names = ("ttft", "ttft_stretch", "tpot")
    if not all(name in settings for name in names):
        return {}
    defaults = Objectives(**{name: settings[name] for name in names})
    return objectives_by_class(settings.get("classes", ""), defaults)
