"""What the Helm chart makes is what Kubernetes takes, fits together, and keeps the promises of
docs/deploy.md. Needs helm (`python -m tests.deploy.helm`) and the extra `deploy`."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import yaml

import jaxserve
from jaxserve.cli.main import load
from jaxserve.observe.metric_rows import PREFIX, READ
from tests.deploy import helm
from tests.deploy.variants import VARIANTS

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="the extra `deploy`")
pytestmark = pytest.mark.skipif(helm.helm() is None, reason=f"no helm: `{helm.COMMAND}`")

DEFAULTS = load("serve").options
KUBERNETES = "1.36"
CUSTOM = {"LeaderWorkerSet", "ScaledObject", "PodMonitor", "InferencePool"}
PAUSE = 5  # seconds before SIGTERM, so that routes are gone


@cache
def objects(name: str) -> list[dict[str, Any]]:
    return helm.render(VARIANTS[name])


def of_kind(name: str, *kinds: str) -> list[dict[str, Any]]:
    return [found for found in objects(name) if found["kind"] in kinds]


def pods(name: str) -> list[dict[str, Any]]:
    """The templates of pods."""
    found = [
        workload["spec"]["template"] for workload in of_kind(name, "StatefulSet", "Deployment")
    ]
    for workload in of_kind(name, "LeaderWorkerSet"):
        group = workload["spec"]["leaderWorkerTemplate"]
        leader, worker = group["leaderTemplate"], group["workerTemplate"]
        # as the controller labels them
        leader["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/worker-index"] = "0"
        worker["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/worker-index"] = "1"
        found += [leader, worker]
    return found


def selected(name: str, labels: dict[str, str]) -> list[dict[str, Any]]:
    return [pod for pod in pods(name) if labels.items() <= pod["metadata"]["labels"].items()]


variants = pytest.mark.parametrize("name", VARIANTS)


def test_helm_finds_no_fault():
    assert "0 chart(s) failed" in helm.lint()


def test_the_chart_is_of_this_version():
    chart = yaml.safe_load((helm.CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == jaxserve.__version__


@variants
def test_kubernetes_takes_every_object(name):
    """Kinds that others define have their schemas elsewhere: only their shape is looked at."""
    for found in objects(name):
        if found["kind"] in CUSTOM:
            assert set(found) == {"apiVersion", "kind", "metadata", "spec"}
        else:
            kubernetes_validate.validate(found, KUBERNETES, strict=True)


@variants
def test_every_selector_finds_a_pod(name):
    for service in of_kind(name, "Service"):
        found = selected(name, service["spec"]["selector"])
        assert found
        for port in service["spec"]["ports"]:
            for pod in found:
                (container,) = pod["spec"]["containers"]
                assert port["targetPort"] in [named["name"] for named in container["ports"]]
    for kind in ("PodDisruptionBudget", "PodMonitor", "StatefulSet", "Deployment", "InferencePool"):
        for found in of_kind(name, kind):
            assert selected(name, found["spec"]["selector"]["matchLabels"])
    (policy,) = of_kind(name, "NetworkPolicy")
    assert selected(name, policy["spec"]["podSelector"]["matchLabels"]) == pods(name)


@variants
def test_pods_are_restricted(name):
    """Pods meet Kubernetes' Pod Security Standard `restricted`, and have a read-only root."""
    for pod in pods(name):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@variants
def test_volumes_that_are_mounted_exist(name):
    claims = {"cache"}
    for pod in pods(name):
        there = claims | {volume["name"] for volume in pod["spec"]["volumes"]}
        for container in pod["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == there


@variants
def test_a_pod_has_time_to_drain(name):
    for pod in pods(name):
        (container,) = pod["spec"]["containers"]
        drain = next(
            int(argument.partition("=")[2])
            for argument in container["args"]
            if argument.startswith("--drain_timeout=")
        )
        pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        serves = "ports" in container
        assert pause == (PAUSE if serves else PAUSE + drain)
        assert pod["spec"]["terminationGracePeriodSeconds"] > PAUSE + drain


@variants
def test_probes_go_where_the_server_answers(name):
    for pod in pods(name):
        (container,) = pod["spec"]["containers"]
        probes = {key: probe for key, probe in container.items() if key.endswith("Probe")}
        if "ports" not in container:
            assert not probes  # a worker: its supervisor watches it
            continue
        assert {key: probe["httpGet"]["path"] for key, probe in probes.items()} == {
            "startupProbe": "/ready",
            "livenessProbe": "/health",
            "readinessProbe": "/ready",
        }
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports == {"http": DEFAULTS["port"].default, "grpc": DEFAULTS["grpc_port"].default}
        tls = any(argument.startswith("--tls_cert") for argument in container["args"])
        assert {probe["httpGet"]["scheme"] for probe in probes.values()} == {
            "HTTPS" if tls else "HTTP"
        }
        # a token of our own may take five seconds
        assert probes["startupProbe"]["timeoutSeconds"] > 5
        assert probes["readinessProbe"]["timeoutSeconds"] > 5
        budget = (
            probes["startupProbe"]["periodSeconds"] * probes["startupProbe"]["failureThreshold"]
        )
        assert budget == 30 * 60


def test_a_conductor_is_told_every_replica():
    name = "prefill and decode apart"
    (settings,) = of_kind(name, "ConfigMap")
    domain = f"jaxserve-replicas.{helm.NAMESPACE}.svc:8480"
    assert settings["data"]["replicas"].split() == [
        f"jaxserve-decode-0.{domain}",
        f"jaxserve-decode-1.{domain}",
        f"jaxserve-prefill-0.{domain}",
    ]
    assert {workload["spec"]["serviceName"] for workload in of_kind(name, "StatefulSet")} == {
        "jaxserve-replicas"
    }


SEVERAL_HOSTS = ["several hosts", "prefill and decode apart, on several hosts each"]


@pytest.mark.parametrize("name", SEVERAL_HOSTS)
def test_hosts_find_their_leader(name):
    """By a Service that the controller of a LeaderWorkerSet makes of its name, if there is none."""
    services = {service["metadata"]["name"] for service in of_kind(name, "Service")}
    groups = {group["metadata"]["name"] for group in of_kind(name, "LeaderWorkerSet")}
    assert services and groups and not groups & services


def test_a_conductor_is_given_the_leaders_of_replicas_over_several_hosts():
    name = "prefill and decode apart, on several hosts each"
    (settings,) = of_kind(name, "ConfigMap")
    assert settings["data"]["replicas"].split() == [
        f"jaxserve-{leader}.{helm.NAMESPACE}.svc:8480"
        for leader in (
            "group-0.jaxserve-group",
            "decode-0.jaxserve-decode",
            "decode-1.jaxserve-decode",
            "prefill-0.jaxserve-prefill",
        )
    ]
    for group in of_kind(name, "LeaderWorkerSet"):
        role = group["metadata"]["name"].partition("-")[2]
        templates = group["spec"]["leaderWorkerTemplate"]
        for pod in (templates["leaderTemplate"], templates["workerTemplate"]):
            (container,) = pod["spec"]["containers"]
            assert "--replica_port=8480" in container["args"]
            assert (f"--role={role}" in container["args"]) == (role != "group")
            secrets = {"JAXSERVE_CLUSTER_SECRET", "JAXSERVE_GROUP_SECRET"}
            assert secrets <= {variable["name"] for variable in container["env"]}


@pytest.mark.parametrize("name", [*SEVERAL_HOSTS, "prefill and decode apart"])
def test_the_longest_name_of_a_release_fits(name):
    """53 characters, as Helm says; Kubernetes puts up to eleven behind those of sets of pods."""
    for found in helm.render(VARIANTS[name], release="r" * 53):
        limit = 63 if found["kind"] in ("Service", "Deployment") else 52
        assert len(found["metadata"]["name"]) <= limit


def test_gpus_are_asked_for():
    (pod,) = pods("GPUs")
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert pod["spec"]["runtimeClassName"] == "nvidia"


def test_scaling_asks_for_metrics_that_there_are():
    gauges = {PREFIX + gauge for gauge in READ}
    for name in ("several replicas", "several hosts"):
        (scaled,) = of_kind(name, "ScaledObject")
        queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
        asked = [re.search(rf"{PREFIX}\w+", query)[0] for query in queries]
        assert len(asked) == 2 and set(asked) <= gauges
        target = scaled["spec"]["scaleTargetRef"]
        (workload,) = of_kind(name, target["kind"])
        assert workload["metadata"]["name"] == target["name"]
        assert all(f'pod=~"{target["name"]}-[0-9]+"' in query for query in queries)
        assert "replicas" not in workload["spec"]


def test_an_endpoint_picker_finds_ports_and_metrics():
    (pool,) = of_kind("behind an endpoint picker", "InferencePool")
    assert pool["spec"]["targetPorts"] == [{"number": 8000}]
    (pod,) = pods("behind an endpoint picker")
    assert pod["metadata"]["labels"]["llm-d.ai/engine-type"] == "vllm"
    assert "--metrics_aliases=vllm" in pod["spec"]["containers"][0]["args"]


GROUP = {"groupSecret": "group"}


@pytest.mark.parametrize(
    "values, word",
    [
        ({"apiKeysSecret": ""}, "apiKeysSecret"),
        ({"hosts": 2}, "groupSecret"),
        ({"hosts": 0}, "hosts"),
        ({"conductor": {"enabled": True}}, "groupSecret"),
        ({"conductor": {"enabled": True}, **GROUP}, "tlsSecret"),
        ({"conductor": {"enabled": True}, **GROUP, "insecure": True, "replicas": 0}, "replicas"),
        ({"conductor": {"prefill": 1}}, "conductor.enabled"),
        (
            {
                "conductor": {"enabled": True},
                **GROUP,
                "insecure": True,
                "autoscaling": {"enabled": True},
            },
            "autoscaling.enabled",
        ),
        ({"podMonitor": {"enabled": True}}, "podMonitor.keySecret"),
        ({"inferencePool": {"enabled": True}}, "inferencePool.enabled"),
        ({"settings": {"host": "::"}}, "'host'"),
        ({"settings": {"classes": ["chat"]}}, "classes"),
        ({"gpu": 1}, "gpu"),
        ({"cache": {"size": "much"}}, "size"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(values, word):
    with pytest.raises(helm.ChartError) as refused:
        helm.render(values)
    assert word in str(refused.value)
