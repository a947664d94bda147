"""The examples for autoscalers ask for signals that conductors have, of roles that there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxserve.cluster.member_table import MemberTable
from jaxserve.cluster.role_loads import RoleSignals
from jaxserve.cluster.roles import Role
from tests.cluster.fakes import RoleCluster, RoleReplica

FOLDER = Path(__file__).parents[2] / "docs/deploy/autoscaling"
KUBERNETES = "1.36"
QUERY = re.compile(r'max\((?P<name>jaxserve:\w+)\{role="(?P<role>\w+)"\}\)')


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def signals() -> dict[tuple[str, str], float]:
    """Returns what a conductor tells of its roles, by name and role."""
    cluster = RoleCluster(*(RoleReplica(role.value) for role in Role))
    table: MemberTable = cluster.conductor.table
    return {
        (sample.name, sample.labels["role"]): sample.value
        for family in RoleSignals(table, cluster.conductor.now).collect()
        for sample in family.samples
    }


def adapted() -> dict[str, str]:
    """Returns the metrics of Prometheus by the names that the adapter gives them."""
    (values,) = documents("prometheus-adapter.yaml")
    rules = values["rules"]["external"]
    assert all(rule["metricsQuery"] == "max(<<.Series>>{<<.LabelMatchers>>})" for rule in rules)
    return {rule["name"]["as"]: rule["seriesQuery"] for rule in rules}


def test_keda_asks_for_signals_that_conductors_have():
    found = documents("keda.yaml")
    assert {one["kind"] for one in found} == {"ScaledObject"}
    for one in found:
        spec = one["spec"]
        assert one["apiVersion"] == "keda.sh/v1alpha1"
        assert spec["scaleTargetRef"]["name"] == one["metadata"]["name"]
        assert 0 < spec["minReplicaCount"] <= spec["maxReplicaCount"]
        for trigger in spec["triggers"]:
            asked = QUERY.fullmatch(trigger["metadata"]["query"])
            assert (asked["name"], asked["role"]) in signals()
            assert one["metadata"]["name"] == f"jaxserve-{asked['role']}"
            assert trigger["type"] == "prometheus" and trigger["metricType"] == "Value"
            assert float(trigger["metadata"]["threshold"]) > 0


def test_kubernetes_takes_the_autoscalers():
    validate = pytest.importorskip("kubernetes_validate", reason="the extra `deploy`").validate
    for one in documents("hpa.yaml"):
        validate(one, KUBERNETES, strict=True)


def test_autoscalers_ask_for_what_the_adapter_gives_of_conductors():
    series = adapted()
    found = documents("hpa.yaml")
    assert {one["kind"] for one in found} == {"HorizontalPodAutoscaler"}
    for one in found:
        spec = one["spec"]
        assert one["apiVersion"] == "autoscaling/v2"
        assert 0 < spec["minReplicas"] <= spec["maxReplicas"]
        for metric in spec["metrics"]:
            asked = metric["external"]["metric"]
            role = asked["selector"]["matchLabels"]["role"]
            assert (series[asked["name"]], role) in signals()
            assert one["metadata"]["name"] == f"jaxserve-{role}"
            assert metric["external"]["target"]["type"] == "Value"


@pytest.mark.parametrize("name", ["keda.yaml", "hpa.yaml"])
def test_each_role_is_scaled_once_and_both_ways_agree(name):
    assert [one["metadata"]["name"] for one in documents(name)] == [
        "jaxserve-prefill",
        "jaxserve-decode",
    ]
