"""The sizes with which tests run the notebooks: other values of their parameters."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, dict[str, Any]] = {
    "quickstart": {
        "model": "random:tiny",
        "mesh": "kvp=2,tp=2",
        "prompts": [[5, 6, 7, 8] * 20, [9, 10, 11]],
        "settings": {"max_model_len": 256, "pages": 64, "chunk_tokens": 64, "max_seqs": 2},
    },
    "sweep": {
        "live_meshes": ["tp=1", "kvp=2"],
        "devices": 4,
        "load": {"prompt": "2000", "output": "4", "requests": 8},
        "concurrency": [2],
    },
    "exchange": {"points": 12, "rules": ["gather", "pass_kv"]},
    "slack": {"long": 60_000, "seconds": 4},
    "degree": {"points": 4, "draws": 4},
    "pool": {"requests": 12},
    "deployment": {"requests": 12, "counts": [1, 2]},
}
