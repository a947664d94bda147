"""The extras that the README and the docs name are enough for the commands that they show: every
extra, in an environment of its own, as a stranger would make it."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from jaxserve.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
# what else brings a package, and rooms of commands that need an extra or another engine
BROUGHT = {"pydantic_core": "pydantic"}
APART = (Path("jaxserve/lab/research"), Path("jaxserve/integrations"))
TINY = ["--model=random:tiny", "--max_model_len=256", "--max_seqs=2", "--profile=none"]
BENCHMARKS = ["fidelity", "front", "guided", "h200", "load", "overload", "sharing", "store"]
PEERED = ["mixed_load", "side_by_side"]
TRACES = (
    "from jaxserve.server.tracing import EXPORTERS; import importlib\n"
    "for name in EXPORTERS.values(): importlib.import_module(name)"
)
KV_EVENTS = (
    "from jaxserve.observe.kv_event_publisher import KvEventPublisher\n"
    "KvEventPublisher('tcp://127.0.0.1:0').close()"
)
# by extra: commands after `python`
RUNS: dict[str, list[list[str]]] = {
    "": [
        *(["-m", "jaxserve", *name.split(), "--help"] for name in COMMANDS),
        ["-m", "jaxserve", "serve", "--print_config"],
        ["-m", "jaxserve", "generate", "--input={prompts}", *TINY],
        ["-m", "jaxserve", "simulate", "--qps=1", "--requests=2"],
        ["-m", "jaxserve", "doctor", *TINY],
        ["-c", "import jaxserve.server.supervisor, jaxserve.cluster.conductor"],
        *(["-m", f"experiments.benchmarks.{name}", "--help"] for name in BENCHMARKS + PEERED),
        ["-m", "experiments.examples.offline", "--help"],
        ["-m", "experiments.examples.structured_output", "--help"],
    ],
    "mooncake": [["-c", "import google_crc32c, jaxserve.store.mooncake"]],
    "cluster": [["-c", KV_EVENTS]],
    **{
        cuda: [["-c", f"import jax_plugins.xla_{cuda}"], ["-m", "jaxserve", "doctor", *TINY]]
        for cuda in ("cuda12", "cuda13")
    },
    "docs": [["-m", "experiments.documentation", "--out={folder}"]],
    "traces": [["-c", TRACES]],
    "examples": [["-m", "experiments.examples.client", "--help"]],
    "deploy": [["-c", "import kubernetes_validate"], ["-m", "tests.deploy.helm"]],
    "experiments": [
        [
            "-m",
            "experiments.benchmarks.side_by_side",
            *("--model=random:tiny", "--peers=", "--prefill=16", "--decode="),
            *("--rounds=1", "--seconds=0", "--patience=0", "--foreign=100"),
        ],
        ["-m", "experiments.profiles.fit", "--help"],
        ["-m", "experiments.medha", "--help"],
        ["-m", "experiments.tetris", "--help"],
        ["-m", "experiments.context_parallel.table6", "--out={folder}"],
        ["-m", "experiments.live_page", "--help"],
        ["-c", "import selenium.webdriver"],
    ],
    "research": [
        [
            *("-m", "jaxserve", "bench", "sweep", "--run=simulated", "--gpu=h100"),
            *("--base=model=llama3-8b;qps=1;requests=2", "--axes=mesh=tp=4|tp=8"),
            *("--out={folder}.jsonl", "--html={folder}.html"),
        ],
        ["-m", "experiments.notebooks", "--size=small"],
    ],
    "test": [["-m", "pytest", "--collect-only", "-qq"]],
    "dev": [["-m", "mypy", "--version"], ["-m", "ruff", "--version"]],
}


def test_every_extra_is_tried():
    text = (ROOT / "setup.py").read_text()
    extras = set(re.findall(r'^        "(\w+)": ', text.partition("extras_require")[2], re.M))
    assert extras | {""} == set(RUNS)


def test_every_extra_that_is_named_exists():
    """In the README, the docs and the errors of the code."""
    files = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *(
            file
            for folder in ("jaxserve", "experiments")
            for file in ROOT.glob(f"{folder}/**/*.md")
        ),
        *ROOT.glob("jaxserve/**/*.py"),
        *ROOT.glob("server/**/*.py"),
        *ROOT.glob("experiments/**/*.py"),
    ]
    named = {
        extra
        for file in files
        for extra in re.findall(r"pip install[^\n]*(?:jaxserve|\.)\[(\w+)\]", file.read_text())
    }
    assert named and named <= set(RUNS)


def distributions(requirements: Iterable[str]) -> set[str]:
    names = (re.match(r"[\w.-]+", requirement) for requirement in requirements)
    return {re.sub(r"[-_.]+", "-", name[0]).lower() for name in names if name}


def test_what_modules_import_as_they_load_is_installed_without_extras():
    """What an extra brings is imported where it is used, but for the room of its commands."""
    known = importlib.metadata.requires("jaxserve") or []
    required = distributions(line for line in known if "extra ==" not in line)
    of_module = importlib.metadata.packages_distributions()
    missing = set()
    for folder in ("jaxserve", "server", "kernels", "sharding"):
        for file in (ROOT / folder).rglob("*.py"):
            path = file.relative_to(ROOT)
            if any(path.is_relative_to(room) for room in APART):
                continue
            for name in loaded(ast.parse(file.read_text())) - sys.stdlib_module_names:
                brings = distributions([*of_module.get(name, [name]), BROUGHT.get(name, name)])
                if not brings & {*required, "jaxserve"}:
                    missing.add(f"{path}: {name}")
    assert not missing


def loaded(tree: ast.Module) -> set[str]:
    """Returns the packages that a module imports as it loads."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


@pytest.mark.matrix
@pytest.mark.parametrize("extra", RUNS)
def test_an_extra_installs_what_its_commands_need(extra, tmp_path):
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "JAX_PLATFORMS": "cpu",
        "JAXSERVE_CACHE": str(tmp_path / "cache"),
    }
    (tmp_path / "prompts").write_text('{"prompt_ids": [1, 2, 3], "max_tokens": 2}\n')
    places = {"folder": str(tmp_path / "out"), "prompts": str(tmp_path / "prompts")}
    python = tmp_path / "venv" / "bin" / "python"

    def run(*command: str, seconds: float) -> None:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds
        )
        assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"

    run(sys.executable, "-m", "venv", str(python.parents[1]), seconds=120)
    what = f".[{extra}]" if extra else "."
    run(str(python), "-m", "pip", "install", "--quiet", "--editable", what, seconds=1800)
    for command in RUNS[extra]:
        filled = [re.sub(r"\{(folder|prompts)\}", lambda m: places[m[1]], part) for part in command]
        run(str(python), *filled, seconds=600)
