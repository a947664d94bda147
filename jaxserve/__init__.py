"""jaxserve: exact serving of language models in JAX, with latency objectives for short and
very long requests.

The host tower (api, settings, lanes, cache, scheduling) decides, in plain ints, and imports no
JAX; the device tower (kernels, sharding, models, weights, engine) executes; `server` and `llm`
stand on both. See docs/architecture.md.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.2.0"
__all__ = ["LLM", "Request", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that `import jaxserve` stays light and free of
    JAX."""
    if name == "LLM":
        from jaxserve.llm import LLM

        return LLM
    if name == "Request":
        from jaxserve.api.request import Request

        return Request
    if name == "SamplingParams":
        from jaxserve.api.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
