"""A replica's metrics under vLLM's names as well, for pickers and dashboards that read those
(`--metrics_aliases=vllm`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import RestrictedRegistry

from jaxserve.observe.metric_rows import PREFIX

VLLM_PREFIX = "vllm:"
# what both count alike; vLLM gives all of them the label model_name
VLLM_NAMES = frozenset(
    {
        "cache_config",
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "lora_requests_info",
        "num_preemptions",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
    }
)


class VllmAliases:
    """Collects those metrics of a replica's registry that vLLM has, under its names. model: the
    name by which requests ask for the model."""

    def __init__(self, registry: CollectorRegistry | RestrictedRegistry, model: str):
        self._registry = registry
        self._model = model

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            if metric.name.removeprefix(PREFIX) in VLLM_NAMES:
                yield self._renamed(metric)

    def restricted_registry(self, names: Iterable[str]) -> VllmAliases:
        """Only the metrics of these names, as `CollectorRegistry` has it."""
        assert isinstance(self._registry, CollectorRegistry)
        ours = [
            PREFIX + name.removeprefix(VLLM_PREFIX)
            for name in names
            if name.startswith(VLLM_PREFIX)
        ]
        return VllmAliases(self._registry.restricted_registry(ours), self._model)

    def _renamed(self, metric: Metric) -> Metric:
        alias = Metric(_alias(metric.name), metric.documentation, metric.type, metric.unit)
        alias.samples = [
            sample._replace(
                name=_alias(sample.name), labels={**sample.labels, "model_name": self._model}
            )
            for sample in metric.samples
        ]
        return alias


def _alias(name: str) -> str:
    return VLLM_PREFIX + name.removeprefix(PREFIX)
