"""The metrics of a server and of the models that it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from jaxserve.observe.metric_aliases import VllmAliases
from jaxserve.server.frontend import Frontend
from jaxserve.server.models import Models

MODEL = "model_name"  # the label, as vLLM has it
Registry = CollectorRegistry | VllmAliases


class ByModel(Collector):
    """The metrics of several models as one collector: samples have a label for the model."""

    def __init__(self, collectors: Mapping[str, Sequence[Collector]]):
        self._collectors = collectors

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for model, collectors in self._collectors.items():
            for metric in (metric for one in collectors for metric in one.collect()):
                empty = Metric(metric.name, metric.documentation, metric.type, metric.unit)
                family = families.setdefault(metric.name, empty)
                family.samples += [
                    sample._replace(labels={**sample.labels, MODEL: model})
                    for sample in metric.samples
                ]
        yield from families.values()


def model_metrics(models: Models, names: Sequence[str] = ()) -> list[Collector]:
    """Returns what collects the server's own metrics and those of its models; the replica's are
    missing while it is built. names: of those to collect; empty: all."""

    def chosen(registry: Registry) -> Collector:
        return registry.restricted_registry(names) if names else registry

    own = chosen(models.metrics.registry)
    of_models = {
        frontend.name: [chosen(registry) for registry in _registries(frontend)]
        for frontend in models.all
    }
    if models.several:
        return [own, ByModel(of_models)]
    return [own, *of_models[models.all[0].name]]


def _registries(frontend: Frontend) -> list[Registry]:
    replica = frontend.replica
    if replica is None:
        return []
    registries: list[Registry] = [replica.metrics_registry]
    if frontend.config.metrics_aliases == "vllm":
        registries.append(VllmAliases(replica.metrics_registry, replica.info.served_name))
    return registries
