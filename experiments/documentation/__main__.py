"""Builds the site of the documentation; any warning is an error.

python -m experiments.documentation --out=DIR
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.script import command_line
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / ".mkdocs.yml"
OPTIONS = {
    "what is made": [
        Option("out", str, str(ROOT / "build" / "site"), "folder of the pages"),
        Option(
            "repository",
            str,
            "",
            "address of the repository, which links to files lead to; default: their names alone",
        ),
    ]
}


def build(out: str, repository: str = "", config: Path = CONFIG) -> int:
    """Writes the site; returns mkdocs' exit code, and tells its warnings where that is not 0.
    Errors: ModuleNotFoundError without mkdocs."""
    if importlib.util.find_spec("material") is None:
        raise ModuleNotFoundError("No module named 'material'", name="mkdocs-material")
    # not --quiet: what that does not tell of, --strict does not count
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(
        [*command, f"--config-file={config}", f"--site-dir={Path(out).absolute()}"],
        cwd=ROOT,  # `python -m` finds `experiments` here
        env={**os.environ, "DOCS_REPOSITORY": repository, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        told = [line for line in done.stderr.splitlines() if not line.startswith("INFO")]
        print(*told, sep="\n", file=sys.stderr)
    return done.returncode


def main(arguments: Sequence[str]) -> int:
    def run(values: dict[str, Any]) -> int:
        return build(values["out"], values["repository"])

    command = Command(OPTIONS, run)
    return command_line("documentation", "the documentation as a site", command, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
