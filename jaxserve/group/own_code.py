"""Starts Python processes that run the code of this one, in whichever folder they are started:
`python -m jaxserve` alone would prefer a package of that name in the current folder."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def own_command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module of jaxserve, as `python -m` would."""
    return [sys.executable, "-P", __file__, module, *arguments]


def _run(module: str) -> None:
    """Runs a module of the package that this file belongs to."""
    spec = importlib.util.find_spec("jaxserve")
    ours = ROOT / "jaxserve" / "__init__.py"
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != ours:
        sys.path.insert(0, str(ROOT))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run(sys.argv.pop(1))
