"""The metrics of a server and of the models that it has."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from jaxserve.api.errors import RequestError
from jaxserve.observe.metric_aliases import VllmAliases
from jaxserve.server.frontend import Frontend
from jaxserve.server.frontend_metrics import exposition
from jaxserve.server.models import Models

MODEL = "model_name"  # the label, as vLLM has it
ANSWER_SECONDS = 3.0  # for each of several models; Prometheus waits for 10
Registry = CollectorRegistry | VllmAliases


class ByModel(Collector):
    """The metrics of several models as one collector: samples have a label for the model."""

    def __init__(self, metrics: Mapping[str, Sequence[Metric]]):
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for model, metrics in self._metrics.items():
            for metric in metrics:
                empty = Metric(metric.name, metric.documentation, metric.type, metric.unit)
                family = families.setdefault(metric.name, empty)
                family.samples += [
                    sample._replace(labels={**sample.labels, MODEL: model})
                    for sample in metric.samples
                ]
        yield from families.values()


async def exposed_metrics(models: Models, names: Sequence[str] = ()) -> bytes:
    """Returns the server's own metrics and those of its models, as text; a replica's are missing
    while it is built, and, of several, where it does not answer in time. names: of those to tell;
    empty: all."""

    def chosen(registry: Registry) -> Collector:
        return registry.restricted_registry(names) if names else registry

    own = chosen(models.metrics.registry)
    of_models = [[chosen(one) for one in _registries(frontend)] for frontend in models.all]
    if models.several:
        asked = (_collected(*one) for one in zip(models.all, of_models))
        collected = dict(zip((each.name for each in models.all), await asyncio.gather(*asked)))
        return await asyncio.to_thread(exposition, [own, ByModel(collected)])
    work = functools.partial(exposition, [own, *of_models[0]])
    return await models.all[0].ask_replica(work)


async def _collected(frontend: Frontend, collectors: Sequence[Collector]) -> list[Metric]:
    """Returns the metrics of one of several models; none where it does not answer in time."""

    def collect() -> list[Metric]:
        return [metric for collector in collectors for metric in collector.collect()]

    with contextlib.suppress(TimeoutError, RequestError):
        async with asyncio.timeout(ANSWER_SECONDS):
            return await frontend.ask_replica(collect)
    return []


def _registries(frontend: Frontend) -> list[Registry]:
    replica = frontend.replica
    if replica is None:
        return []
    registries: list[Registry] = [replica.metrics_registry]
    if frontend.config.metrics_aliases == "vllm":
        registries.append(VllmAliases(replica.metrics_registry, replica.info.served_name))
    return registries
