"""Values with which the chart is tested: each way to deploy that docs/deploy.md names."""

from __future__ import annotations

from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "GPUs": {
        "gpus": 8,
        "settings": {"model": "meta-llama/Llama-3.1-70B", "mesh": "tp=8", "max_model_len": 131072},
        "runtimeClassName": "nvidia",
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "cache": {"size": "500Gi", "storageClass": "fast"},
        "imagePullSecrets": [{"name": "registry"}],
        "env": [
            {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
        ],
    },
    "several replicas": {
        "replicas": 3,
        "tlsSecret": "jaxserve-tls",
        "autoscaling": {"enabled": True, "minReplicas": 3},
        "podMonitor": {"enabled": True, "keySecret": {"name": "monitoring", "key": "key"}},
    },
    "several hosts": {
        "replicas": 2,
        "hosts": 2,
        "gpus": 8,
        "groupSecret": "jaxserve-group",
        "settings": {"model": "meta-llama/Llama-3.1-70B", "mesh": "spp=2,tp=8"},
        "autoscaling": {"enabled": True},
        "podMonitor": {"enabled": True, "keySecret": {"name": "monitoring", "key": "key"}},
    },
    "a conductor": {
        "replicas": 2,
        "conductor": {"enabled": True},
        "groupSecret": "jaxserve-group",
        "tlsSecret": "jaxserve-tls",
    },
    "prefill and decode apart": {
        "replicas": 0,
        "conductor": {"enabled": True, "prefill": 1, "decode": 2},
        "groupSecret": "jaxserve-group",
        "insecure": True,
    },
    "prefill and decode apart, on several hosts each": {
        "replicas": 1,
        "hosts": 2,
        "gpus": 8,
        "conductor": {"enabled": True, "prefill": 1, "decode": 2},
        "groupSecret": "jaxserve-group",
        "tlsSecret": "jaxserve-tls",
        "settings": {"model": "meta-llama/Llama-3.1-70B", "mesh": "spp=2,tp=8"},
    },
    "behind an endpoint picker": {
        "replicas": 2,
        "apiKeysSecret": "",
        "insecure": True,
        "inferencePool": {"enabled": True},
    },
}
