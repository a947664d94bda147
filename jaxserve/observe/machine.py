"""Describes what was measured on: machine, versions, git commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import jaxserve

_ROOT = Path(jaxserve.__file__).parent


def machine() -> dict[str, Any]:
    """CPU, cores this process may use, memory, system, versions, git commit ('' outside of a
    checkout, '+' for changed files)."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_memory() / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "jax": metadata.version("jax"),
        "jaxlib": metadata.version("jaxlib"),
        "jaxserve": jaxserve.__version__,
        "git": _commit(),
    }


def described(machine: dict[str, Any]) -> str:
    """Formats `machine()` as one line."""
    commit = f" (git {machine['git']})" if machine["git"] else ""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; "
        f"{machine['system']}; Python {machine['python']}, "
        f"jax {machine['jax']}, jaxserve {machine['jaxserve']}{commit}"
    )


def _cpu() -> str:
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    return (
        f"{fields['model name']} (family {fields.get('cpu family', '?')}, model "
        f"{fields.get('model', '?')})"
    )


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        # installed inside of some other repository
        if not Path(git("rev-parse", "--show-toplevel"), "jaxserve").samefile(_ROOT):
            return ""
        commit = git("rev-parse", "--short=12", "HEAD")
        if git("status", "--porcelain", "--untracked-files=no"):
            return f"{commit}+"
        return commit
    except (OSError, subprocess.CalledProcessError):
        return ""
